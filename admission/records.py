"""The rows of a run's folded state: gates, revisions, children, attempts, results. Immutable, pure.

A row is replaced, never changed in place, so that a group of commands can be decided on an overlay and undone, and a
snapshot can tell a row that changed from one that did not by identity.
"""

from typing import Any

import msgspec

from admission.events import ArtifactRef, Goal, Record
from admission.vocabulary import (
    OPEN_ATTEMPTS,
    SETTLED_CHILDREN,
    AttemptState,
    Basis,
    ChildMode,
    ChildState,
    Disposition,
    GateState,
    Method,
    TaskState,
    TryOutcome,
    UpdateKind,
)


class Gate(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The gate of one scope: `cur` is the revision it was last opened for, `target` the one it is meant to reach."""

    cur: int
    target: int
    holds: tuple[str, ...] = ()
    sealed: bool = False
    closed_at: int = 0

    @property
    def state(self) -> GateState:
        """OPEN only when nothing closes, holds or seals it."""
        if self.sealed:
            return GateState.SEALED
        if self.cur != self.target:
            return GateState.CLOSED
        return GateState.HELD if self.holds else GateState.OPEN


class Update(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of the control channel, as a person asked it."""

    seq: int
    kind: UpdateKind
    by: str
    at: int
    position: int
    text: str = ""
    reason: str = ""
    revision: int = 0


class Revision(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A goal that was, is, or will be in force. `opened` are the scopes that reached it."""

    n: int
    seq: int
    goal: Goal
    goal_hash: str
    affects: tuple[str, ...]
    changed: tuple[str, ...]
    kept: tuple[str, ...]
    at: int
    position: int
    by: str = ""
    opened: tuple[str, ...] = ()


class Child(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One child. `reconcile` is the revision that wants it settled; it goes back to 0 only with its outcome."""

    id: str
    scope: str
    revision: int
    n: int
    agent: str
    mode: ChildMode
    goal_hash: str
    context: str
    planned_at: int
    state: ChildState = ChildState.PLANNED
    task: str = ""
    claimed: bool = False
    task_state: TaskState | None = None
    launches: int = 0
    launched_at: int = 0
    stop_wanted: bool = False
    stop_reason: str = ""
    stops: int = 0
    stop_at: int = 0
    stop_detail: str = ""
    reconcile: int = 0
    follows: str = ""
    follows_state: str = ""
    succeeded_by: str = ""
    ended_at: int = 0
    detail: str = ""
    result: str = ""

    @property
    def settled(self) -> bool:
        """A terminal state was seen, or it is given up as lost."""
        return self.state in SETTLED_CHILDREN


class Try(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One send: who was permitted to make it, and how it ended."""

    n: int
    gateway: str
    granted_at: int
    outcome: TryOutcome = TryOutcome.GRANTED
    basis: Basis | None = None
    status: int = 0
    detail: str = ""


class Attempt(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One admitted intention. `reconcile_at` is when the conductor starts to ask; `reconcile` as for children."""

    id: str
    no: int
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
    state: AttemptState
    position: int
    at: int
    conflict_key: str = ""
    tries: tuple[Try, ...] = ()
    not_after: int = 0
    basis: Basis | None = None
    observed: dict[str, Any] | None = None
    why: str = ""
    reconcile: int = 0
    reconcile_at: int = 0
    asked: int = 0
    asked_method: Method | None = None
    asked_position: int = 0
    asked_covers: int = 0
    asked_at: int = 0
    voiding: bool = False
    unknown_at: int = 0
    settled: int = 0
    resolved_by: str = ""
    contradicted: bool = False

    @property
    def touched(self) -> str:
        """What it acts on, under one name."""
        return f"{self.service}:{self.target}"

    @property
    def stands(self) -> bool:
        """Whether it happened or may have: its intent is taken."""
        return self.contradicted or self.state not in (AttemptState.FAILED, AttemptState.REVOKED)

    @property
    def open(self) -> bool:
        """Whether its outcome is still open."""
        return self.state in OPEN_ATTEMPTS


class Result(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What a child delivered, and what became of it."""

    id: str
    child: str
    task: str
    scope: str
    revision: int
    disposition: Disposition
    at: int
    position: int
    reason: str = ""
    artifacts: tuple[ArtifactRef, ...] = ()
    summary: dict[str, Any] = msgspec.field(default_factory=dict)


class Refusal(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The first time the gate said no to a child about a slot for a reason."""

    child: str
    scope: str
    revision: int
    in_force: int
    slot: str
    service: str
    operation: str
    target: str
    input_ref: str
    reason: str
    detail: str
    at: int
    position: int


class Alarm(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Evidence that contradicts what was recorded as settled. Never overwritten, always shown."""

    attempt: str
    detail: str
    at: int
    position: int


class Silence(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Since when the agent of an open scope has not answered. Gone with the next child, or the next revision."""

    agent: str
    revision: int
    at: int
    detail: str


class Handled(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A person's request that was already carried out, so that sending it again changes nothing."""

    payload_hash: str
    position: int
    answer: dict[str, Any] = msgspec.field(default_factory=dict)
