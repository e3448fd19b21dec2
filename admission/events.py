"""The events of a run, and their wire form.

An event says what has happened; it is appended to the run's log and never changed. The log is the control channel
(control events), the gate (an admission can only be appended while its revision is in force) and the ledger (every
attempt and its outcome). Knows the shapes and the JSON. Does not know what may happen (rules.py) nor what it adds up
to (state.py). Times are milliseconds on the store's clock.
"""

from typing import Any

import msgspec

from admission.values import (
    ArtifactRef as ArtifactRef,
)
from admission.values import (
    Checkpoint as Checkpoint,
)
from admission.values import (
    ChildRef as ChildRef,
)
from admission.values import (
    ContractFacts as ContractFacts,
)
from admission.values import (
    EffectRef as EffectRef,
)
from admission.values import (
    Goal as Goal,
)
from admission.values import (
    PendingRef as PendingRef,
)
from admission.values import (
    PlannedAction as PlannedAction,
)
from admission.values import (
    Record as Record,
)
from admission.values import (
    Requirement as Requirement,
)
from admission.values import (
    ScopePlan as ScopePlan,
)
from admission.vocabulary import (
    Basis,
    ChildMode,
    Claim,
    Disposition,
    Finding,
    Method,
    TaskState,
    TryOutcome,
    UpdateKind,
    Verdict,
)


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of all events. `at` is the store's time in ms that the command was decided with; `by` who caused it."""

    at: int
    by: str = ""


# --- control events: they alone count in the control version -------------------------------------------------------


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    """A run exists, with revision 1 in force and its gates open."""

    run: str
    principal: str
    request_id: str
    payload_hash: str
    goal: Goal
    goal_hash: str
    follows: str = ""


class UpdateRecorded(Event, frozen=True, kw_only=True, tag="update_recorded"):
    """What a person asked, in order. The events after it in the same commit are its consequence."""

    seq: int
    kind: UpdateKind
    request_id: str
    payload_hash: str
    text: str = ""
    reason: str = ""
    expected_revision: int | None = None


class RevisionAccepted(Event, frozen=True, kw_only=True, tag="revision_accepted"):
    """Revision n replaces what `affects` names. Folding it closes those gates and revokes what was not yet sent."""

    n: int
    seq: int
    goal: Goal
    goal_hash: str
    affects: tuple[str, ...]
    changed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


class RunHeld(Event, frozen=True, kw_only=True, tag="run_held"):
    """Nothing new is admitted until the hold is released. The revision stays in force."""

    hold: str
    scopes: tuple[str, ...]


class RunReleased(Event, frozen=True, kw_only=True, tag="run_released"):
    """A hold ends; the same revision goes on without reconciliation."""

    hold: str
    scopes: tuple[str, ...]


class RunCancelled(Event, frozen=True, kw_only=True, tag="run_cancelled"):
    """All gates are sealed for ever. What was sent is still followed to its outcome."""

    seq: int


class CheckpointWritten(Event, frozen=True, kw_only=True, tag="checkpoint_written"):
    """The state from which a scope goes on."""

    checkpoint: Checkpoint
    hash: str


class ScopeOpened(Event, frozen=True, kw_only=True, tag="scope_opened"):
    """A scope admits again, under the revision that closed it."""

    scope: str
    revision: int
    checkpoint: str
    epoch: int


class RunFinished(Event, frozen=True, kw_only=True, tag="run_finished"):
    """The run has ended: completed, failed, cancelled (or cancelled with something still unresolved)."""

    phase: str
    summary: str
    epoch: int


# --- children --------------------------------------------------------------------------------------------------------


class ChildPlanned(Event, frozen=True, kw_only=True, tag="child_planned"):
    """A child is going to be launched; written before any message leaves. `follows` is its predecessor's id."""

    child: str
    scope: str
    revision: int
    n: int
    agent: str
    mode: ChildMode
    goal_hash: str
    context: str
    follows: str = ""
    follows_state: str = ""


class AgentSilent(Event, frozen=True, kw_only=True, tag="agent_silent"):
    """A scope is open and its agent has not answered for a while; asking it goes on."""

    scope: str
    revision: int
    agent: str
    detail: str


class LaunchStarted(Event, frozen=True, kw_only=True, tag="launch_started"):
    """The launching message is about to leave (again)."""

    child: str
    n: int


class ChildBound(Event, frozen=True, kw_only=True, tag="child_bound"):
    """The child's A2A task id became known to the courier. The first one wins."""

    child: str
    task: str


class ChildClaimed(Event, frozen=True, kw_only=True, tag="child_claimed"):
    """A worker said that it starts this child in this A2A task. A second task is told DUPLICATE."""

    child: str
    task: str
    answer: Claim


class StopRequested(Event, frozen=True, kw_only=True, tag="stop_requested"):
    """The child will be asked to stop; written before the cancel leaves. Says nothing about whether it stops."""

    child: str
    reason: str
    n: int


class StopAnswered(Event, frozen=True, kw_only=True, tag="stop_answered"):
    """The cancel did not end in a terminal state: refused, or nobody could be reached."""

    child: str
    refused: bool
    detail: str


class ChildSeen(Event, frozen=True, kw_only=True, tag="child_seen"):
    """A child's A2A task was observed in a state. Terminal states are final, whatever is seen later."""

    child: str
    state: TaskState
    detail: str = ""


class ChildLost(Event, frozen=True, kw_only=True, tag="child_lost"):
    """The child's task is gone or has not been reachable for too long. It is no longer current."""

    child: str
    detail: str


class ResultFiled(Event, frozen=True, kw_only=True, tag="result_filed"):
    """A child's result was adopted, parked while held, or dropped (kept as evidence, read by nothing)."""

    result: str
    child: str
    task: str
    scope: str
    revision: int
    disposition: Disposition
    reason: str = ""
    artifacts: tuple[ArtifactRef, ...] = ()
    summary: dict[str, Any] = msgspec.field(default_factory=dict)


# --- attempts ---------------------------------------------------------------------------------------------------------


class ContractNoted(Event, frozen=True, kw_only=True, tag="contract_noted"):
    """An operation's contract, as attempts of this run refer to it by `ref`."""

    ref: str
    facts: ContractFacts


class EffectAdmitted(Event, frozen=True, kw_only=True, tag="effect_admitted"):
    """An attempt exists: slot held, cost reserved, key derived, request bytes frozen (blob `input_ref`)."""

    attempt: str
    scope: str
    revision: int
    child: str
    slot: str
    generation: int
    key: str
    service: str
    operation: str
    target: str
    contract: str
    input_ref: str
    cost: int
    conflict_key: str = ""


class TryGranted(Event, frozen=True, kw_only=True, tag="try_granted"):
    """One send is permitted, to one gateway. The last commit before bytes leave. `not_after` is in store time."""

    attempt: str
    n: int
    gateway: str
    not_after: int = 0


class TryRecorded(Event, frozen=True, kw_only=True, tag="try_recorded"):
    """How one send ended, as its gateway saw it. Always accepted: evidence is never refused."""

    attempt: str
    n: int
    outcome: TryOutcome
    basis: Basis
    status: int = 0
    observed: dict[str, Any] | None = None
    detail: str = ""
    retry_at: int = 0


class EffectRefused(Event, frozen=True, kw_only=True, tag="effect_refused"):
    """A worker asked and the gate said no; the first time per child, slot and reason."""

    child: str
    scope: str
    revision: int
    in_force: int
    slot: str
    service: str
    operation: str
    target: str
    input_ref: str
    reason: Verdict
    detail: str = ""


class ReconcileStarted(Event, frozen=True, kw_only=True, tag="reconcile_started"):
    """A service is about to be asked what became of an attempt; written before the question leaves."""

    attempt: str
    method: Method
    covers: int
    n: int
    epoch: int


class EffectClassified(Event, frozen=True, kw_only=True, tag="effect_classified"):
    """What became of an attempt, found out by asking, or that it could not be found out."""

    attempt: str
    finding: Finding
    basis: Basis
    started: int
    epoch: int
    observed: dict[str, Any] | None = None
    detail: str = ""


class EffectResolved(Event, frozen=True, kw_only=True, tag="effect_resolved"):
    """A person decided what became of an unknown attempt, and signed for it in `by`."""

    attempt: str
    happened: bool
    request_id: str
    payload_hash: str
    reason: str
    evidence: str


AnyEvent = (
    RunStarted
    | UpdateRecorded
    | RevisionAccepted
    | RunHeld
    | RunReleased
    | RunCancelled
    | CheckpointWritten
    | ScopeOpened
    | RunFinished
    | ChildPlanned
    | AgentSilent
    | LaunchStarted
    | ChildBound
    | ChildClaimed
    | StopRequested
    | StopAnswered
    | ChildSeen
    | ChildLost
    | ResultFiled
    | ContractNoted
    | EffectAdmitted
    | TryGranted
    | TryRecorded
    | EffectRefused
    | ReconcileStarted
    | EffectClassified
    | EffectResolved
)

#: Events that count in the control version: what a redirect has to be decided against, and nothing an effect makes.
CONTROL_EVENTS: tuple[type[Event], ...] = (
    RunStarted,
    UpdateRecorded,
    RevisionAccepted,
    RunHeld,
    RunReleased,
    RunCancelled,
    CheckpointWritten,
    ScopeOpened,
    RunFinished,
)

_CONTROL_SET = frozenset(CONTROL_EVENTS)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


class UnreadableEvent(Exception):
    """A log entry is not an event this version knows: the log was written by a newer release, or is damaged."""


def encode(event: Event) -> bytes:
    """The event's JSON bytes, as they stand in the log."""
    return _encoder.encode(event)


def decode(data: bytes) -> AnyEvent:
    """The event in a log entry. Raises UnreadableEvent, which must stop whoever reads: guessing would hide facts."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise UnreadableEvent(f"unreadable log entry: {error}; run `regate doctor`") from error


def is_control(event: Event) -> bool:
    """Whether the event counts in the control version."""
    return type(event) in _CONTROL_SET


def goal_dict(goal: Goal) -> dict[str, Any]:
    """A goal as plain JSON values, for hashing, views and briefs."""
    value = msgspec.to_builtins(goal)
    assert isinstance(value, dict)
    return value
