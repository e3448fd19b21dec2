"""Commands: what people, workers, gateways and the conductor ask of a run.

A command carries facts from outside and people's words, and nothing that follows from the state: checkpoints, keys,
attempt ids and revoked lists are made inside `decide`, at the version they are committed on. Pure.
"""

from typing import Any

import msgspec

from admission.events import ArtifactRef, ContractFacts, Goal
from admission.vocabulary import (
    Basis,
    ChildMode,
    Finding,
    Method,
    TaskState,
    TryOutcome,
    UpdateKind,
)
from admission.wire import Stamp


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all commands. `by` names who asks."""

    by: str = ""


# --- people ----------------------------------------------------------------------------------------------------------


class Start(Command, frozen=True, kw_only=True):
    """Create the run. Its id is derived from principal and request id, so this is safe to send twice."""

    run: str
    principal: str
    request_id: str
    goal: Goal
    follows: str = ""


class Revise(Command, frozen=True, kw_only=True):
    """Replace the goal in whole (`replace`) or in part (`correct`).

    For `correct`, `goal` holds only what changes: requirements by id, scopes by name, a new text if not empty;
    `remove` names requirements and scopes that go. Everything else is carried over unchanged by `decide`.
    """

    kind: UpdateKind
    request_id: str
    goal: Goal
    remove: tuple[str, ...] = ()
    expected_revision: int | None = None
    reason: str = ""


class Pause(Command, frozen=True, kw_only=True):
    """Hold every scope."""

    request_id: str
    expected_revision: int | None = None
    reason: str = ""


class Resume(Command, frozen=True, kw_only=True):
    """Release what Pause held; the same revision goes on."""

    request_id: str
    expected_revision: int | None = None
    reason: str = ""


class Cancel(Command, frozen=True, kw_only=True):
    """Stop the run for good."""

    request_id: str
    expected_revision: int | None = None
    reason: str = ""


class Resolve(Command, frozen=True, kw_only=True):
    """An operator states what became of an unknown attempt."""

    attempt: str
    happened: bool
    request_id: str
    reason: str
    evidence: str


# --- workers, through the gateway ------------------------------------------------------------------------------------


class ClaimChild(Command, frozen=True, kw_only=True):
    """A worker starts this child in this A2A task."""

    child: str
    scope: str
    revision: int
    task: str


class Admit(Command, frozen=True, kw_only=True):
    """A worker wants one effect. If admitted, the first try is granted in the same commit.

    `slot` names the intent; `input_ref` is the sha256 of the frozen request; `refusal` is the contract's own "no".
    """

    child: str
    scope: str
    revision: int
    task: str
    service: str
    operation: str
    target: str
    slot: str
    input_ref: str
    contract: ContractFacts
    gateway: str
    occurrence: int = 1
    conflict_key: str = ""
    refusal: str = ""


class GrantTry(Command, frozen=True, kw_only=True):
    """A gateway wants to send try `n` (2 or later) of an attempt: same key, same bytes, gate checked again."""

    attempt: str
    n: int
    gateway: str


class RecordTry(Command, frozen=True, kw_only=True):
    """A gateway says how its send ended. `retry_at` > 0: it means to ask for another try then (store time, ms)."""

    attempt: str
    n: int
    outcome: TryOutcome
    basis: Basis
    status: int = 0
    observed: dict[str, Any] | None = None
    detail: str = ""
    retry_at: int = 0


# --- the conductor ---------------------------------------------------------------------------------------------------


class PlanChild(Command, frozen=True, kw_only=True):
    """Write down the next child of an open scope before anything is sent."""

    scope: str
    revision: int
    mode: ChildMode


class ReportSilence(Command, frozen=True, kw_only=True):
    """The agent of an open scope has not answered for a while, so no child can be planned."""

    scope: str
    revision: int
    detail: str


class StartLaunch(Command, frozen=True, kw_only=True):
    """The launching message is about to leave (again)."""

    child: str


class BindChild(Command, frozen=True, kw_only=True):
    """The A2A task id of a launched child became known."""

    child: str
    task: str


class RequestStop(Command, frozen=True, kw_only=True):
    """Write down that a child is asked to stop, before asking it."""

    child: str
    reason: str


class RecordStop(Command, frozen=True, kw_only=True):
    """The cancel was refused, or nobody was reached."""

    child: str
    refused: bool
    detail: str


class RecordSeen(Command, frozen=True, kw_only=True):
    """The child's task was seen in a state."""

    child: str
    state: TaskState
    detail: str = ""


class DeclareLost(Command, frozen=True, kw_only=True):
    """The child's task does not exist any more, or nothing was heard for too long."""

    child: str
    detail: str


class FileResult(Command, frozen=True, kw_only=True):
    """A child's terminal task carried this result. `stamp` is what it echoed, None if nothing usable."""

    child: str
    task: str
    stamp: Stamp | None
    artifacts: tuple[ArtifactRef, ...] = ()
    summary: dict[str, Any] = msgspec.field(default_factory=dict)


class OpenScope(Command, frozen=True, kw_only=True):
    """Open a closed scope for the revision that closed it. `epoch` is the partition lease's."""

    scope: str
    revision: int
    epoch: int


class StartReconcile(Command, frozen=True, kw_only=True):
    """A service is about to be asked about an attempt."""

    attempt: str
    method: Method
    epoch: int


class Classify(Command, frozen=True, kw_only=True):
    """What asking showed. `started` is the log position of the ReconcileStarted it rests on (0: none was possible).

    `clock_before_ms`: the service's own clock, read before the lookup was issued (class NOT_AFTER).
    """

    attempt: str
    finding: Finding
    basis: Basis
    epoch: int
    started: int = 0
    clock_before_ms: int = 0
    observed: dict[str, Any] | None = None
    detail: str = ""


class Finish(Command, frozen=True, kw_only=True):
    """End the run if everything is accounted for."""

    epoch: int
