"""The events of a run, and their wire form.

An event says what has happened; it is appended to the run's log and never changed. The log is the control channel
(control events), the gate (an admission can only be appended while its revision is in force) and the ledger (every
attempt and its outcome). Knows the shapes and the JSON. Does not know what may happen (rules.py) nor what it adds up
to (state.py). Times are milliseconds on the store's clock.
"""

from typing import Any

import msgspec

from admission.vocabulary import (
    Basis,
    Blocks,
    ChildMode,
    Claim,
    ContractClass,
    Disposition,
    Finding,
    Method,
    TaskState,
    TryOutcome,
    UpdateKind,
    Verdict,
)


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value inside events and state."""


class Requirement(Record):
    """One thing the user wants, under an id that survives corrections."""

    id: str
    text: str


class PlannedAction(Record):
    """One effect that a plan asks for. `occurrence` > 1 says: this is meant to happen again."""

    service: str
    action: str
    arguments: dict[str, Any]
    occurrence: int = 1


class ScopePlan(Record):
    """What one branch of the plan does: which agent, told what, needing which artifacts of other scopes."""

    agent: str
    brief: str = ""
    actions: tuple[PlannedAction, ...] = ()
    needs: tuple[str, ...] = ()


class Goal(Record):
    """What a run is for, whole. `budget_effects` limits admitted effects; None means no limit."""

    text: str
    requirements: tuple[Requirement, ...] = ()
    plan: dict[str, ScopePlan] = {}
    budget_effects: int | None = None


class ContractFacts(Record):
    """What an attempt needs to know of its operation's contract, copied when it was admitted (times in ms)."""

    service: str
    operation: str
    version: str
    contract_class: ContractClass
    schema_hash: str
    unknown_blocks: Blocks = Blocks.SCOPE
    dedupes: bool = False
    tries_max: int = 1
    timeout_ms: int = 10_000
    retention_ms: int = 0
    late_arrival_max_ms: int = 0
    not_after_max_age_ms: int = 0
    clock_skew_ms: int = 0
    lookup_lag_ms: int = 0
    reconcile_deadline_ms: int = 10_000
    cost: int = 1


class ArtifactRef(Record):
    """An artifact by reference. `blob` is its sha256, under which the store holds the bytes."""

    name: str
    blob: str
    size_bytes: int


class EffectRef(Record):
    """An effect that stands, as a checkpoint and a brief name it."""

    attempt: str
    slot: str
    service: str
    operation: str
    target: str
    revision: int
    receipt: dict[str, Any] | None = None


class PendingRef(Record):
    """An operation whose outcome is open, as a checkpoint names it."""

    attempt: str
    slot: str
    service: str
    operation: str
    target: str
    revision: int
    why: str


class ChildRef(Record):
    """A child of an older revision, with the state it was in when the checkpoint was written."""

    child: str
    revision: int
    state: str


class Checkpoint(Record):
    """What was true when a scope's gate opened for a revision. Written once, in the same commit as the opening."""

    id: str
    scope: str
    revision: int
    goal_hash: str
    position: int
    effects_done: tuple[EffectRef, ...]
    artifacts: tuple[ArtifactRef, ...]
    pending: tuple[PendingRef, ...]
    children: tuple[ChildRef, ...]
    budget_limit: int | None
    budget_spent: int
    budget_reserved: int
    predecessor: str = ""
    predecessor_hash: str = ""


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
    summary: dict[str, Any] = {}


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
    return isinstance(event, CONTROL_EVENTS)


def goal_dict(goal: Goal) -> dict[str, Any]:
    """A goal as plain JSON values, for hashing, views and briefs."""
    value = msgspec.to_builtins(goal)
    assert isinstance(value, dict)
    return value
