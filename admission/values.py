"""Values inside events and state: goals, contract facts, references, checkpoints. Immutable, pure."""

from typing import Any

import msgspec

from admission.vocabulary import Blocks, ContractClass


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value inside events and state."""


class Requirement(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One thing the user wants, under an id that survives corrections."""

    id: str
    text: str


class PlannedAction(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One effect that a plan asks for. `occurrence` > 1 says: this is meant to happen again."""

    service: str
    action: str
    arguments: dict[str, Any]
    occurrence: int = 1


class ScopePlan(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What one branch of the plan does: which agent, told what, needing which artifacts of other scopes."""

    agent: str
    brief: str = ""
    actions: tuple[PlannedAction, ...] = ()
    needs: tuple[str, ...] = ()


class Goal(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What a run is for, whole. `budget_effects` limits admitted effects; None means no limit."""

    text: str
    requirements: tuple[Requirement, ...] = ()
    plan: dict[str, ScopePlan] = msgspec.field(default_factory=dict)
    budget_effects: int | None = None


class ContractFacts(Record, frozen=True, kw_only=True, omit_defaults=True):
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


class ArtifactRef(Record, frozen=True, kw_only=True, omit_defaults=True):
    """An artifact by reference. `blob` is its sha256, under which the store holds the bytes."""

    name: str
    blob: str
    size_bytes: int


class EffectRef(Record, frozen=True, kw_only=True, omit_defaults=True):
    """An effect that stands, as a checkpoint names it. Its receipt is in the log, under the attempt."""

    attempt: str
    slot: str
    service: str
    operation: str
    target: str
    revision: int


class PendingRef(Record, frozen=True, kw_only=True, omit_defaults=True):
    """An operation whose outcome is open, as a checkpoint names it."""

    attempt: str
    slot: str
    service: str
    operation: str
    target: str
    revision: int
    why: str


class ChildRef(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A child of an older revision, with the state it was in when the checkpoint was written."""

    child: str
    revision: int
    state: str


class Checkpoint(Record, frozen=True, kw_only=True, omit_defaults=True):
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
