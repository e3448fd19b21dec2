"""fold(): what a run's events add up to.

Theory of operation. A RunState has one owner, who mutates it by folding events in log order. Rows are immutable and
replaced. While a group of commands is decided, changes are journalled (`begin`) and can be taken back (`undo`) or kept
(`keep`), so an overlay costs nothing but the list of old values. What follows from an event (which admissions a
revision revokes, which children must stop) is derived here, at the event's position, and not carried by the command:
a redirect is decided on the control part of a copy whose ledger may be behind.

`fold` takes facts (tries, observations) in any order and any number of times. Pure.
"""

from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from admission import events as ev
from admission.records import (
    Alarm,
    Attempt,
    Child,
    Gate,
    Handled,
    Refusal,
    Result,
    Revision,
    Try,
    Update,
)
from admission.vocabulary import (
    TERMINAL_TASKS,
    AttemptState,
    Basis,
    ChildMode,
    ChildState,
    Claim,
    Disposition,
    Finding,
    GateState,
    TaskState,
    TryOutcome,
    UpdateKind,
    root_of,
    within,
)

#: Names the meaning of a snapshot. A snapshot of another fold version is ignored and the log is folded again.
FOLD_VERSION = "1"

_ABSENT: Any = object()

#: A granted try is given its contract's time-out plus this long to be recorded before the conductor asks (ms).
RECORD_MARGIN_MS = 500


class RunState:
    """The folded state of one run. See the module text for how it is owned and undone."""

    __slots__ = (
        "_undo", "adopted", "alarms", "artifacts", "attempts", "cancelled", "checkpoint_hashes", "checkpoints",
        "children", "clock", "conflicts", "contracts", "control", "current", "finished", "follows", "gates",
        "generations", "head", "open_attempts", "principal", "refusals", "relaunches", "requests", "reserved",
        "results", "revisions", "run_id", "slots", "spent", "started_at", "targets", "time", "updates", "version",
    )  # fmt: skip

    def __init__(self, run_id: str) -> None:
        self._undo: list[tuple[Any, Any, Any]] | None = None
        self.run_id = run_id
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
        self.attempts: dict[str, Attempt] = {}
        self.contracts: dict[str, ev.ContractFacts] = {}
        self.results: dict[str, Result] = {}
        self.refusals: dict[str, Refusal] = {}
        self.alarms: dict[str, Alarm] = {}
        self.checkpoints: dict[str, ev.Checkpoint] = {}
        self.checkpoint_hashes: dict[str, str] = {}
        self.requests: dict[str, Handled] = {}
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
        if self._undo is not None:
            self._undo.append((where, key, where.get(key, _ABSENT)))
        where[key] = value

    def drop(self, where: dict[Any, Any], key: Any) -> None:
        """Remove an entry, if it is there."""
        if key in where:
            if self._undo is not None:
                self._undo.append((where, key, where[key]))
            del where[key]

    def set(self, name: str, value: Any) -> None:
        """Set one of this state's plain fields."""
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
            attempt, state=state, settled=n, reconcile=0, reconcile_at=0, unknown_at=0, why=fields.pop("why", ""), **fields
        )
        self.put(self.attempts, row.id, row)
        self.drop(self.open_attempts, row.id)
        self.set("reserved", self.reserved - row.cost)
        if state is AttemptState.SUCCEEDED:
            self.set("spent", self.spent + row.cost)
            self.put(self.targets, f"{row.service}:{row.target}", row.id)
            return
        self.drop(self.slots, row.slot)
        if row.conflict_key and self.conflicts.get(row.conflict_key) == row.slot:
            self.drop(self.conflicts, row.conflict_key)
        if state is AttemptState.FAILED:
            # Only a conclusive "not executed" frees the next key: a revoked attempt was never sent under its key.
            self.put(self.generations, row.slot, row.generation + 1)

    def end_child(self, child: Child, state: ChildState, at: int, **fields: Any) -> None:
        """A child reached a state it never leaves; its mark goes with it."""
        self.put(self.children, child.id, replace(child, state=state, ended_at=at, reconcile=0, **fields))


Folder = Callable[[RunState, int, Any], None]
_FOLDERS: dict[type[ev.Event], Folder] = {}


def _folds(kind: type[ev.Event]) -> Callable[[Folder], Folder]:
    def register(folder: Folder) -> Folder:
        _FOLDERS[kind] = folder
        return folder

    return register


def fold(run: RunState, n: int, event: ev.Event) -> None:
    """Apply the event at log position `n`. Positions are gapless: another one is a broken promise of the store."""
    if n != run.version + 1:
        raise AssertionError(f"run {run.run_id}: event {n} after {run.version}")
    run.set("version", n)
    if ev.is_control(event):
        run.set("control", run.control + 1)
    if event.at > run.time:
        run.set("time", event.at)
    _FOLDERS[type(event)](run, n, event)


# --- control ---------------------------------------------------------------------------------------------------------


@_folds(ev.RunStarted)
def _run_started(run: RunState, n: int, e: ev.RunStarted) -> None:
    run.set("principal", e.principal)
    run.set("follows", e.follows)
    run.set("started_at", e.at)
    run.set("head", 1)
    scopes = tuple(e.goal.plan)
    run.put(run.updates, 1, Update(seq=1, kind=UpdateKind.START, by=e.by, at=e.at, position=n, text=e.goal.text, revision=1))
    changed = tuple(r.id for r in e.goal.requirements)
    revision = Revision(
        n=1, seq=1, goal=e.goal, goal_hash=e.goal_hash, affects=scopes, changed=changed, kept=(), at=e.at, position=n,
        by=e.by, opened=scopes,
    )  # fmt: skip
    run.put(run.revisions, 1, revision)
    for scope in scopes:
        run.put(run.gates, scope, Gate(cur=1, target=1))
    run.put(run.requests, e.request_id, Handled(payload_hash=e.payload_hash, position=n, answer={"revision": 1}))


@_folds(ev.UpdateRecorded)
def _update_recorded(run: RunState, n: int, e: ev.UpdateRecorded) -> None:
    update = Update(seq=e.seq, kind=e.kind, by=e.by, at=e.at, position=n, text=e.text, reason=e.reason, revision=run.head)
    run.put(run.updates, e.seq, update)
    answer = {"seq": e.seq, "kind": e.kind.value, "revision": run.head}
    run.put(run.requests, e.request_id, Handled(payload_hash=e.payload_hash, position=n, answer=answer))


def _closing(run: RunState, scopes: Iterable[str], *, revision: int, at: int, n: int, why: str) -> None:
    """Revoke what was not yet sent, mark what was, and want the children of older revisions stopped."""
    touched = set(scopes)
    for attempt_id in list(run.open_attempts):
        attempt = run.attempts[attempt_id]
        if attempt.scope not in touched:
            continue
        if attempt.state is AttemptState.ADMITTED:
            run.settle(attempt, AttemptState.REVOKED, n, basis=Basis.NEVER_GRANTED, why=why)
        else:
            run.put(run.attempts, attempt_id, replace(attempt, reconcile=revision))
    for child in list(run.children.values()):
        if child.scope not in touched or child.settled:
            continue
        if child.state is ChildState.PLANNED:
            run.end_child(child, ChildState.ENDED, at, detail=f"never launched: {why}")
        else:
            run.put(run.children, child.id, replace(child, stop_wanted=True, stop_reason=why, reconcile=revision))
    for result in list(run.results.values()):
        if result.scope in touched and result.disposition is Disposition.PARKED:
            run.put(run.results, result.id, replace(result, disposition=Disposition.DROPPED, reason=why))


@_folds(ev.RevisionAccepted)
def _revision_accepted(run: RunState, n: int, e: ev.RevisionAccepted) -> None:
    run.set("head", e.n)
    update = run.updates[e.seq]
    run.put(run.updates, e.seq, replace(update, revision=e.n))
    revision = Revision(
        n=e.n, seq=e.seq, goal=e.goal, goal_hash=e.goal_hash, affects=e.affects, changed=e.changed, kept=e.kept, at=e.at,
        position=n, by=e.by,
    )  # fmt: skip
    run.put(run.revisions, e.n, revision)
    touched = [s for s in run.gates if any(within(s, prefix) for prefix in e.affects)]
    for scope in touched:
        gate = run.gates[scope]
        closed_at = e.at if gate.cur == gate.target else gate.closed_at
        run.put(run.gates, scope, replace(gate, target=e.n, closed_at=closed_at))
    held = next((g.holds for g in run.gates.values() if g.holds), ())
    for scope in e.goal.plan:
        if scope not in run.gates:
            run.put(run.gates, scope, Gate(cur=0, target=e.n, holds=held, closed_at=e.at))
    _closing(run, touched, revision=e.n, at=e.at, n=n, why=f"superseded by revision {e.n}")


@_folds(ev.RunHeld)
def _run_held(run: RunState, n: int, e: ev.RunHeld) -> None:
    for scope in e.scopes:
        gate = run.gates[scope]
        if e.hold not in gate.holds:
            run.put(run.gates, scope, replace(gate, holds=(*gate.holds, e.hold)))
    for attempt_id in list(run.open_attempts):
        attempt = run.attempts[attempt_id]
        if attempt.scope in e.scopes and attempt.state is AttemptState.ADMITTED:
            run.settle(attempt, AttemptState.REVOKED, n, basis=Basis.NEVER_GRANTED, why="held before it was sent")


@_folds(ev.RunReleased)
def _run_released(run: RunState, n: int, e: ev.RunReleased) -> None:
    for scope in e.scopes:
        gate = run.gates[scope]
        run.put(run.gates, scope, replace(gate, holds=tuple(h for h in gate.holds if h != e.hold)))


@_folds(ev.RunCancelled)
def _run_cancelled(run: RunState, n: int, e: ev.RunCancelled) -> None:
    run.set("cancelled", True)
    for scope, gate in list(run.gates.items()):
        run.put(run.gates, scope, replace(gate, sealed=True, closed_at=e.at))
    _closing(run, list(run.gates), revision=run.head, at=e.at, n=n, why="the run was cancelled")


@_folds(ev.CheckpointWritten)
def _checkpoint_written(run: RunState, n: int, e: ev.CheckpointWritten) -> None:
    run.put(run.checkpoints, e.checkpoint.id, e.checkpoint)
    run.put(run.checkpoint_hashes, e.checkpoint.id, e.hash)


@_folds(ev.ScopeOpened)
def _scope_opened(run: RunState, n: int, e: ev.ScopeOpened) -> None:
    gate = run.gates[e.scope]
    run.put(run.gates, e.scope, replace(gate, cur=e.revision, closed_at=0))
    revision = run.revisions[e.revision]
    run.put(run.revisions, e.revision, replace(revision, opened=(*revision.opened, e.scope)))
    run.put(run.relaunches, e.scope, 0)


@_folds(ev.RunFinished)
def _run_finished(run: RunState, n: int, e: ev.RunFinished) -> None:
    run.set("finished", e.phase)


# --- children --------------------------------------------------------------------------------------------------------


@_folds(ev.ChildPlanned)
def _child_planned(run: RunState, n: int, e: ev.ChildPlanned) -> None:
    child = Child(
        id=e.child, scope=e.scope, revision=e.revision, n=e.n, agent=e.agent, mode=e.mode, goal_hash=e.goal_hash,
        context=e.context, planned_at=e.at, follows=e.follows, follows_state=e.follows_state,
    )  # fmt: skip
    run.put(run.children, e.child, child)
    run.put(run.current, e.scope, e.child)
    predecessor = run.children.get(e.follows)
    if predecessor is not None:
        run.put(run.children, predecessor.id, replace(predecessor, succeeded_by=e.child))


@_folds(ev.LaunchStarted)
def _launch_started(run: RunState, n: int, e: ev.LaunchStarted) -> None:
    child = run.children[e.child]
    if child.state in (ChildState.PLANNED, ChildState.LAUNCHING):
        run.put(run.children, child.id, replace(child, state=ChildState.LAUNCHING, launches=e.n, launched_at=e.at))


def _bind(run: RunState, child_id: str, task: str, *, claimed: bool) -> None:
    child = run.children[child_id]
    if child.task and child.task != task:
        return
    state = ChildState.RUNNING if child.state in (ChildState.PLANNED, ChildState.LAUNCHING) else child.state
    run.put(run.children, child_id, replace(child, task=task, state=state, claimed=child.claimed or claimed))


@_folds(ev.ChildBound)
def _child_bound(run: RunState, n: int, e: ev.ChildBound) -> None:
    _bind(run, e.child, e.task, claimed=False)


@_folds(ev.ChildClaimed)
def _child_claimed(run: RunState, n: int, e: ev.ChildClaimed) -> None:
    if e.answer is Claim.CLAIMED:
        _bind(run, e.child, e.task, claimed=True)


@_folds(ev.StopRequested)
def _stop_requested(run: RunState, n: int, e: ev.StopRequested) -> None:
    child = run.children[e.child]
    if not child.settled:
        row = replace(child, state=ChildState.STOP_REQUESTED, stop_wanted=True, stops=e.n, stop_at=e.at, stop_reason=e.reason)
        run.put(run.children, child.id, row)


@_folds(ev.StopAnswered)
def _stop_answered(run: RunState, n: int, e: ev.StopAnswered) -> None:
    child = run.children[e.child]
    if not child.settled:
        state = ChildState.STOP_REFUSED if e.refused else ChildState.UNREACHABLE
        run.put(run.children, child.id, replace(child, state=state, stop_detail=e.detail))


@_folds(ev.ChildSeen)
def _child_seen(run: RunState, n: int, e: ev.ChildSeen) -> None:
    child = run.children[e.child]
    if child.state in (ChildState.STOP_CONFIRMED, ChildState.ENDED):
        return  # the first terminal state is final; what an agent says later does not bring a child back
    if e.state in TERMINAL_TASKS:
        stopped = e.state is TaskState.CANCELED and child.stop_wanted
        state = ChildState.STOP_CONFIRMED if stopped else ChildState.ENDED
        run.end_child(child, state, e.at, task_state=e.state, detail=e.detail)
        if e.state is not TaskState.COMPLETED and not child.stop_wanted and child.state is not ChildState.LOST:
            run.put(run.relaunches, child.scope, run.relaunches.get(child.scope, 0) + 1)
        return
    run.put(run.children, child.id, replace(child, task_state=e.state, detail=e.detail))


@_folds(ev.ChildLost)
def _child_lost(run: RunState, n: int, e: ev.ChildLost) -> None:
    child = run.children[e.child]
    if not child.settled:
        # A lost autonomous child is not known to have stopped: its mark stays, and so does what it blocks.
        reconcile = child.reconcile if child.mode is ChildMode.AUTONOMOUS else 0
        row = replace(child, state=ChildState.LOST, ended_at=e.at, detail=e.detail, reconcile=reconcile)
        run.put(run.children, child.id, row)
        if not child.stop_wanted:
            run.put(run.relaunches, child.scope, run.relaunches.get(child.scope, 0) + 1)


@_folds(ev.ResultFiled)
def _result_filed(run: RunState, n: int, e: ev.ResultFiled) -> None:
    result = Result(
        id=e.result, child=e.child, task=e.task, scope=e.scope, revision=e.revision, disposition=e.disposition, at=e.at,
        position=n, reason=e.reason, artifacts=e.artifacts, summary=e.summary,
    )  # fmt: skip
    run.put(run.results, e.result, result)
    run.put(run.children, e.child, replace(run.children[e.child], result=e.result))
    child = run.children[e.child]
    if e.disposition is Disposition.DROPPED and run.current.get(e.scope) == e.child and not child.stop_wanted:
        run.put(run.relaunches, e.scope, run.relaunches.get(e.scope, 0) + 1)
    if e.disposition is Disposition.ADOPTED:
        run.put(run.adopted, e.scope, e.result)
        for artifact in e.artifacts:
            run.put(run.artifacts, artifact.name, artifact)


# --- attempts --------------------------------------------------------------------------------------------------------


@_folds(ev.ContractNoted)
def _contract_noted(run: RunState, n: int, e: ev.ContractNoted) -> None:
    run.put(run.contracts, e.ref, e.facts)


@_folds(ev.EffectAdmitted)
def _effect_admitted(run: RunState, n: int, e: ev.EffectAdmitted) -> None:
    attempt = Attempt(
        id=e.attempt, no=len(run.attempts) + 1, scope=e.scope, revision=e.revision, child=e.child, slot=e.slot,
        generation=e.generation, key=e.key, service=e.service, operation=e.operation, target=e.target,
        contract=e.contract, input_ref=e.input_ref, cost=e.cost, state=AttemptState.ADMITTED, position=n, at=e.at,
        conflict_key=e.conflict_key,
    )  # fmt: skip
    run.put(run.attempts, e.attempt, attempt)
    run.put(run.open_attempts, e.attempt, None)
    run.put(run.slots, e.slot, e.attempt)
    if e.conflict_key:
        run.put(run.conflicts, e.conflict_key, e.slot)
    run.set("reserved", run.reserved + e.cost)


@_folds(ev.TryGranted)
def _try_granted(run: RunState, n: int, e: ev.TryGranted) -> None:
    attempt = run.attempts[e.attempt]
    tries = (*attempt.tries, Try(n=e.n, gateway=e.gateway, granted_at=e.at))
    due = e.at + run.facts_of(attempt).timeout_ms + RECORD_MARGIN_MS
    row = replace(
        attempt, state=AttemptState.SENDING, tries=tries, not_after=attempt.not_after or e.not_after, reconcile_at=due
    )
    run.put(run.attempts, attempt.id, row)


@_folds(ev.TryRecorded)
def _try_recorded(run: RunState, n: int, e: ev.TryRecorded) -> None:
    attempt = run.attempts[e.attempt]
    before = next((t for t in attempt.tries if t.n == e.n), None)
    if before is None or before.outcome is TryOutcome.OK or before.outcome is e.outcome:
        return  # a doubled or older fact
    if before.outcome is TryOutcome.NOT_EXECUTED and e.outcome is TryOutcome.IN_DOUBT:
        return
    done = replace(before, outcome=e.outcome, basis=e.basis, status=e.status, detail=e.detail)
    tries = tuple(done if t.n == e.n else t for t in attempt.tries)
    row = replace(attempt, tries=tries)
    if e.outcome is TryOutcome.OK:
        if attempt.state in (AttemptState.FAILED, AttemptState.REVOKED):
            alarm = Alarm(attempt=attempt.id, detail=f"recorded as {attempt.state}, then the service said it was done", at=e.at, position=n)
            run.put(run.alarms, f"{attempt.id}:{n}", alarm)
            run.put(run.attempts, attempt.id, replace(row, contradicted=True))
        elif attempt.open:
            run.settle(row, AttemptState.SUCCEEDED, n, basis=e.basis, observed=e.observed)
        else:
            run.put(run.attempts, attempt.id, row)
        return
    if not attempt.open:
        run.put(run.attempts, attempt.id, row)
        return
    closed = all(t.outcome is TryOutcome.NOT_EXECUTED for t in tries)
    if closed and not e.retry_at:
        run.settle(row, AttemptState.FAILED, n, basis=e.basis, observed=e.observed, why=e.detail)
        return
    due = e.retry_at + RECORD_MARGIN_MS if e.retry_at else e.at
    run.put(run.attempts, attempt.id, replace(row, reconcile_at=due, why=e.detail, observed=e.observed or row.observed))


@_folds(ev.EffectRefused)
def _effect_refused(run: RunState, n: int, e: ev.EffectRefused) -> None:
    refusal = Refusal(
        child=e.child, scope=e.scope, revision=e.revision, in_force=e.in_force, slot=e.slot, service=e.service,
        operation=e.operation, target=e.target, input_ref=e.input_ref, reason=e.reason.value, detail=e.detail, at=e.at,
        position=n,
    )  # fmt: skip
    run.put(run.refusals, refusal_key(e.child, e.slot, e.reason.value), refusal)


def refusal_key(child: str, slot: str, reason: str) -> str:
    """Under which name the first refusal of a kind is kept."""
    return f"{child}|{slot}|{reason}"


@_folds(ev.ReconcileStarted)
def _reconcile_started(run: RunState, n: int, e: ev.ReconcileStarted) -> None:
    attempt = run.attempts[e.attempt]
    row = replace(
        attempt, asked=e.n, asked_method=e.method, asked_position=n, asked_covers=e.covers, asked_at=e.at
    )
    run.put(run.attempts, attempt.id, row)


@_folds(ev.EffectClassified)
def _effect_classified(run: RunState, n: int, e: ev.EffectClassified) -> None:
    attempt = run.attempts[e.attempt]
    if not attempt.open:
        return
    if e.finding is Finding.EXECUTED:
        run.settle(attempt, AttemptState.SUCCEEDED, n, basis=e.basis, observed=e.observed)
    elif e.finding is Finding.NOT_EXECUTED:
        run.settle(attempt, AttemptState.FAILED, n, basis=e.basis, observed=e.observed, why=e.detail)
    else:
        row = replace(attempt, state=AttemptState.UNKNOWN, unknown_at=e.at, why=e.detail, basis=e.basis)
        run.put(run.attempts, attempt.id, row)


@_folds(ev.EffectResolved)
def _effect_resolved(run: RunState, n: int, e: ev.EffectResolved) -> None:
    attempt = run.attempts[e.attempt]
    state = AttemptState.SUCCEEDED if e.happened else AttemptState.FAILED
    run.settle(attempt, state, n, basis=Basis.OPERATOR, resolved_by=e.by, why=e.reason)
    answer = {"attempt": e.attempt, "outcome": state.value}
    run.put(run.requests, e.request_id, Handled(payload_hash=e.payload_hash, position=n, answer=answer))


def gate_open_for(run: RunState, child: Child, scopes: Iterable[str]) -> bool:
    """Whether every gate on the way to a child is open and its own stands at the child's revision."""
    own = run.gates.get(child.scope)
    if own is None or own.cur != child.revision:
        return False
    return all(run.gates[s].state is GateState.OPEN for s in scopes if s in run.gates)
