"""RunState: the folded state of one run, its overlay, and the few changes that several folds share. Pure."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from admission import events as ev
from admission.records import Alarm, Attempt, Child, Gate, Handled, Refusal, Result, Revision, Silence, Update
from admission.rows import Rows
from admission.vocabulary import AttemptState, ChildState, root_of

_ABSENT: Any = object()
#: Plain fields that every effect moves. Setting them does not change a run's shape.
_LEDGER_FIELDS = frozenset(("version", "time", "spent", "reserved"))


class RunState:
    """The folded state of one run. See the module text for how it is owned and undone."""

    __slots__ = (
        "_undo", "adopted", "alarms", "artifacts", "attempts", "cancelled", "checkpoint_hashes", "checkpoints",
        "children", "clock", "conflicts", "contracts", "control", "current", "disputed", "finished", "follows", "gates",
        "generations", "head", "open_attempts", "principal", "refusals", "relaunches", "requests", "reserved",
        "results", "revisions", "run_id", "shape", "silences", "slots", "spent", "started_at", "still", "targets",
        "time", "updates", "version",
    )  # fmt: skip

    def __init__(self, run_id: str) -> None:
        self._undo: list[tuple[Any, Any, Any]] | None = None
        self.run_id = run_id
        #: Grows with every change but those that each effect makes (`book`): what was worked out from the rest still
        #: holds while this number stands. `still` is such a result, kept by agenda.index_of.
        self.shape = 0
        self.still: Any = None
        self.version = 0
        self.control = 0
        self.time = 0
        #: store time of the decision being made; never earlier than `time`, and no part of what is folded
        self.clock = 0
        self.principal = ""
        self.follows = ""
        self.started_at = 0
        self.head = 0
        self.cancelled = False
        self.finished = ""
        self.spent = 0
        self.reserved = 0
        self.revisions: dict[int, Revision] = {}
        self.updates: dict[int, Update] = {}
        self.gates: dict[str, Gate] = {}
        self.children: dict[str, Child] = {}
        self.attempts = Rows()
        #: Slots of which an outcome was ever contradicted: more than one attempt may stand for them.
        self.disputed: dict[str, None] = {}
        self.contracts: dict[str, ev.ContractFacts] = {}
        self.results: dict[str, Result] = {}
        self.refusals: dict[str, Refusal] = {}
        self.alarms: dict[str, Alarm] = {}
        self.checkpoints: dict[str, ev.Checkpoint] = {}
        self.checkpoint_hashes: dict[str, str] = {}
        self.requests: dict[str, Handled] = {}
        self.silences: dict[str, Silence] = {}
        # derived from the rows above; kept because decisions ask for them all the time
        self.open_attempts: dict[str, None] = {}
        self.slots: dict[str, str] = {}
        self.generations: dict[str, int] = {}
        self.conflicts: dict[str, str] = {}
        self.targets: dict[str, str] = {}
        self.current: dict[str, str] = {}
        self.adopted: dict[str, str] = {}
        self.artifacts: dict[str, ev.ArtifactRef] = {}
        self.relaunches: dict[str, int] = {}

    # -- overlay ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """From here on, changes can be taken back."""
        self._undo = []

    def undo(self) -> None:
        """Take back everything since `begin`."""
        journal, self._undo = self._undo or [], None
        self.shape += 1
        for where, key, old in reversed(journal):
            if where is None:
                setattr(self, key, old)
            elif old is _ABSENT:
                del where[key]
            else:
                where[key] = old

    def keep(self) -> None:
        """Make everything since `begin` final."""
        self._undo = None

    def put(self, where: dict[Any, Any], key: Any, value: Any) -> None:
        """Set an entry of one of this state's dicts."""
        self.shape += 1
        self.book(where, key, value)

    def drop(self, where: dict[Any, Any], key: Any) -> None:
        """Remove an entry, if it is there."""
        self.shape += 1
        self.unbook(where, key)

    def book(self, where: dict[Any, Any], key: Any, value: Any) -> None:
        """`put` for the ledger: attempts and what is derived from them, contracts, refusals."""
        if self._undo is not None:
            self._undo.append((where, key, where.get(key, _ABSENT)))
        where[key] = value

    def unbook(self, where: dict[Any, Any], key: Any) -> None:
        """`drop` for the ledger."""
        if key in where:
            if self._undo is not None:
                self._undo.append((where, key, where[key]))
            del where[key]

    def set(self, name: str, value: Any) -> None:
        """Set one of this state's plain fields."""
        if name not in _LEDGER_FIELDS:
            self.shape += 1
        if self._undo is not None:
            self._undo.append((None, name, getattr(self, name)))
        setattr(self, name, value)

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def root(self) -> str:
        """The root run of this run's lineage."""
        return root_of(self.run_id)

    @property
    def budget_limit(self) -> int | None:
        """How many effects may be admitted in all; None means no limit."""
        return self.revisions[self.head].goal.budget_effects if self.head else None

    def goal_of(self, scope: str) -> ev.ScopePlan | None:
        """What the revision that the scope's gate stands at plans for it; None when that revision dropped it."""
        gate = self.gates.get(scope)
        if gate is None or gate.cur == 0:
            return None
        return self.revisions[gate.cur].goal.plan.get(scope)

    def facts_of(self, attempt: Attempt) -> ev.ContractFacts:
        """The contract facts that the attempt was admitted under."""
        return self.contracts[attempt.contract]

    def is_current(self, child: Child) -> bool:
        """Whether the log says that this child may act (its gate may still be held)."""
        gate = self.gates.get(child.scope)
        return (
            gate is not None
            and not self.finished
            and not gate.sealed
            and gate.cur == gate.target == child.revision
            and self.current.get(child.scope) == child.id
            and not child.settled
            and not child.stop_wanted
        )

    def scope_done(self, scope: str) -> bool:
        """Whether the scope's work under its open revision is adopted (or the revision plans none)."""
        gate = self.gates[scope]
        if gate.cur != gate.target:
            return False
        if self.goal_of(scope) is None:
            return True
        result = self.results.get(self.adopted.get(scope, ""))
        return result is not None and result.revision == gate.cur

    # -- changing rows ------------------------------------------------------------------------------------------------

    def settle(self, attempt: Attempt, state: AttemptState, n: int, **fields: Any) -> None:
        """Give an attempt its outcome: slot, generation, reserve and mark follow."""
        row = replace(
            attempt,
            state=state,
            settled=n,
            reconcile=0,
            reconcile_at=0,
            unknown_at=0,
            why=fields.pop("why", ""),
            **fields,
        )
        self.book(self.attempts, row.id, row)
        self.unbook(self.open_attempts, row.id)
        self.set("reserved", self.reserved - row.cost)
        if state is AttemptState.SUCCEEDED:
            self.set("spent", self.spent + row.cost)
            self.book(self.targets, row.touched, row.id)
            return
        if row.conflict_key or row.slot in self.disputed:
            self.derive(row)
            return
        self.unbook(self.slots, row.slot)
        if state is AttemptState.FAILED:
            # Only a conclusive "not executed" frees the next key: a revoked attempt was never sent under its key.
            self.book(self.generations, row.slot, row.generation + 1)

    def derive(self, attempt: Attempt) -> None:
        """Work out again what is derived from the attempts of this one's slot, conflict key and target.

        Reads all attempts: for outcomes that were decided anew, and for intents that have another name.
        """
        slot = generation = conflict = target = None
        for _, row in self.attempts.stored():  # packed ones hold all that is asked for here
            if row.slot == attempt.slot:
                slot = row.id if row.stands else slot
                if row.state is AttemptState.FAILED:
                    generation = max(generation or 1, row.generation + 1)
            if attempt.conflict_key and row.conflict_key == attempt.conflict_key and row.stands:
                conflict = conflict or row.slot
            if row.touched == attempt.touched and row.state is AttemptState.SUCCEEDED:
                target = row if target is None or row.settled > target.settled else target
        self._derived(self.slots, attempt.slot, slot)
        self._derived(self.generations, attempt.slot, generation)
        self._derived(self.targets, attempt.touched, target.id if target else None)
        if attempt.conflict_key:
            self._derived(self.conflicts, attempt.conflict_key, conflict)

    def _derived(self, where: dict[str, Any], key: str, value: Any) -> None:
        if value is None:
            self.unbook(where, key)
        else:
            self.book(where, key, value)

    def end_child(self, child: Child, state: ChildState, at: int, **fields: Any) -> None:
        """A child reached a state it never leaves; its mark goes with it."""
        self.put(self.children, child.id, replace(child, state=state, ended_at=at, reconcile=0, **fields))


def refusal_key(child: str, slot: str, reason: str) -> str:
    """Under which name the first refusal of a kind is kept."""
    return f"{child}|{slot}|{reason}"


#: Applies one kind of event at a log position.
Folder = Callable[[RunState, int, Any], None]
