"""agenda(): what to do next, from the folded state and the store's time alone.

The conductor only performs what stands here, and the explorer uses the same function to show that nothing gets stuck.
Everything is level-triggered: an action is listed for as long as it is due, so a conductor that starts after a crash
lists exactly what its predecessor left undone. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from admission import commands as cmd
from admission.records import Attempt, Child
from admission.rules_child import (
    finished_without_result,
    may_not_start,
    missing_needs,
    not_open_for,
)
from admission.rules_run import CANCEL_DEADLINE_MS, all_done, all_stopped, given_up, stopping_took_too_long
from admission.standing import (
    attention_since,
    blocking_attempts,
    blocking_children,
    budget_overdrawn,
    exhausted,
    is_live,
    lost_but_acting,
    phase,
    seen_to_end,
    unseen_results,
)
from admission.state import RunState
from admission.storage import Index
from admission.vocabulary import (
    AttemptState,
    ChildMode,
    ChildState,
    ContractClass,
    Disposition,
    GateState,
    Method,
    RunPhase,
    TaskState,
    TryOutcome,
    scope_prefixes,
)

#: How long a launch may stay without an answer before the same message is sent again (ms).
LAUNCH_RETRY_MS = 3_000
#: How often a launch is tried before the child is given up.
LAUNCHES_MAX = 6
#: How long the task of an unanswered launch is looked for once its child is superseded (ms).
FIND_FOR_MS = 20_000
#: Pause before the third child of a scope under one revision; doubled for each further one (ms).
RELAUNCH_PAUSE_MS = 1_000
#: First wait before a stop is asked for again; doubled each time (ms).
STOP_RETRY_MS = 2_000
STOP_RETRY_MAX_MS = 60_000
#: How long a service's own answer is waited for after the gate closed, before its void is asked for (ms).
CLOSE_GRACE_MS = 250
#: Waits between questions about one attempt: doubled each time, up to a minute (ms).
ASK_AGAIN_MS = 500
ASK_AGAIN_MAX_MS = 60_000
#: The longest wait where an answer can only ever be "found" or "not yet" (ms).
LOOK_AGAIN_MAX_MS = 900_000


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan the next child of a scope (its agent's card says in which mode)."""

    scope: str
    revision: int
    agent: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Send a child's launching message, for the first time or again."""

    child: str


@dataclass(frozen=True, slots=True)
class FindTask:
    """A launch went out, its answer did not come, and the child must stop: look for its task."""

    child: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask a child to stop."""

    child: str


@dataclass(frozen=True, slots=True)
class Observe:
    """Keep looking at a child's task until it is seen in a terminal state."""

    child: str


@dataclass(frozen=True, slots=True)
class Collect:
    """Fetch and file the result of a child that is over."""

    child: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Find out what became of an attempt, as its contract allows."""

    attempt: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Append what follows from the state."""

    command: cmd.Command


Action = Plan | Launch | FindTask | Stop | Observe | Collect | Ask | Commit


@dataclass(frozen=True, slots=True)
class Agenda:
    """What is due, and when (store time, ms) something else will be; None when only an event can change that."""

    actions: tuple[Action, ...]
    due_ms: int | None


class _Times:
    """Collects the earliest future time."""

    def __init__(self, now: int) -> None:
        self.now = now
        self.due: int | None = None

    def reached(self, at: int) -> bool:
        """Whether `at` has come; if not, it is remembered as a time to look again."""
        if at <= self.now:
            return True
        if self.due is None or at < self.due:
            self.due = at
        return False


def agenda(run: RunState, now: int, *, epoch: int = 0) -> Agenda:
    """What the conductor should do for a run at store time `now`."""
    times = _Times(now)
    run.clock = max(run.time, now)
    actions: list[Action] = []
    if run.head:
        actions += _gates(run, epoch, times)
        for child in run.children.values():
            actions += _child(run, child, times)
        for attempt_id in run.open_attempts:
            if _due_to_ask(run, run.attempts[attempt_id], times):
                actions.append(Ask(attempt_id))
        now_in = phase(run)
        if _may_finish(run, now_in, epoch):
            actions.append(Commit(cmd.Finish(by="conductor", epoch=epoch)))
        elif now_in is RunPhase.CANCELLING:
            _note_cancel_deadline(run, times)
    return Agenda(tuple(actions), times.due)


def _gates(run: RunState, epoch: int, times: _Times) -> Iterator[Action]:
    for scope, gate in run.gates.items():
        if gate.state is GateState.CLOSED:
            if _has_unasked_child(run, scope):
                continue  # first it is written down who is asked to stop, so that the checkpoint can say so
            if not (blocking_attempts(run, scope) or blocking_children(run, scope) or budget_overdrawn(run)):
                yield Commit(cmd.OpenScope(by="conductor", scope=scope, revision=gate.target, epoch=epoch))
        elif gate.state is GateState.OPEN and not run.finished and _wants_child(run, scope):
            if not times.reached(_next_child_at(run, scope)):
                continue
            plan = run.goal_of(scope)
            if plan is not None:
                yield Plan(scope, gate.cur, plan.agent)


def _has_unasked_child(run: RunState, scope: str) -> bool:
    return any(
        child.scope == scope and child.stop_wanted and child.task and not child.stops and not child.settled
        for child in run.children.values()
    )


def _next_child_at(run: RunState, scope: str) -> int:
    """When a scope's next child is due: at once the first times, then after a pause that grows with the failures."""
    failures = run.relaunches.get(scope, 0)
    child = run.children.get(run.current.get(scope, ""))
    if failures < 2 or child is None:
        return 0
    return child.ended_at + (RELAUNCH_PAUSE_MS << min(failures - 2, 10))


def _wants_child(run: RunState, scope: str) -> bool:
    if run.scope_done(scope) or exhausted(run, scope) or missing_needs(run, scope):
        return False
    gate = run.gates[scope]
    if not_open_for(run, cmd.PlanChild(scope=scope, revision=gate.cur, mode=ChildMode.MEDIATED)):
        return False
    child = run.children.get(run.current.get(scope, ""))
    return child is None or child.revision != gate.cur or finished_without_result(run, child)


def _child(run: RunState, child: Child, times: _Times) -> Iterator[Action]:
    if child.settled:
        if child.task and _result_is_due(run, child):
            yield Collect(child.id)
        if child.task and not seen_to_end(child) and is_live(run):
            yield Observe(child.id)
        return
    current = run.is_current(child)
    match child.state:
        case ChildState.PLANNED:
            if current and _way_is_open(run, child):
                yield Launch(child.id)
        case ChildState.LAUNCHING:
            if times.reached(child.launched_at + LAUNCH_RETRY_MS):
                if child.launches >= LAUNCHES_MAX:
                    lost = f"no answer to {child.launches} launches"
                    yield Commit(cmd.DeclareLost(by="conductor", child=child.id, detail=lost))
                elif not current:
                    yield FindTask(child.id)
                    if times.reached(child.launched_at + FIND_FOR_MS):
                        lost = "launched, never answered, and its task is not to be found"
                        yield Commit(cmd.DeclareLost(by="conductor", child=child.id, detail=lost))
                elif _way_is_open(run, child):
                    yield Launch(child.id)
        case _:
            yield Observe(child.id)
            if child.stop_wanted and times.reached(next_stop_at(child)):
                yield Stop(child.id)


def _way_is_open(run: RunState, child: Child) -> bool:
    return not may_not_start(run, cmd.StartLaunch(child=child.id))


def next_stop_at(child: Child) -> int:
    """When a child is asked (again) to stop; 0 the first time."""
    if child.stops == 0:
        return 0
    return child.stop_at + min(STOP_RETRY_MS << min(child.stops - 1, 10), STOP_RETRY_MAX_MS)


def _result_is_due(run: RunState, child: Child) -> bool:
    result = run.results.get(child.result)
    if result is None:
        return child.task_state is TaskState.COMPLETED
    held = any(run.gates[s].holds for s in scope_prefixes(child.scope) if s in run.gates)
    return result.disposition is Disposition.PARKED and not held


def can_be_asked(contract_class: ContractClass) -> Method | None:
    """By which question a class of service can be asked what became of an attempt; None when it cannot."""
    match contract_class:
        case ContractClass.VOID:
            return Method.VOID
        case ContractClass.LOOKUP | ContractClass.NOT_AFTER:
            return Method.LOOKUP
        case ContractClass.KEY | ContractClass.GW_ACK | ContractClass.OPAQUE:
            return None


def all_closed(attempt: Attempt) -> bool:
    """Whether every granted try is proven not executed."""
    return bool(attempt.tries) and all(t.outcome is TryOutcome.NOT_EXECUTED for t in attempt.tries)


def _due_to_ask(run: RunState, attempt: Attempt, times: _Times) -> bool:
    if attempt.state is AttemptState.ADMITTED:
        return False
    facts = run.facts_of(attempt)
    method = can_be_asked(facts.contract_class)
    gate = run.gates[attempt.scope]
    closed = gate.state in (GateState.CLOSED, GateState.SEALED)
    if all_closed(attempt) and closed:
        return True  # its gateway meant to try again, and may no longer
    if attempt.state is AttemptState.UNKNOWN:
        return method is not None and times.reached(_ask_again_at(run, attempt))
    start = attempt.reconcile_at
    if closed and method is Method.VOID:
        start = min(start, gate.closed_at + CLOSE_GRACE_MS)
    if not times.reached(start):
        return False
    return attempt.asked == 0 or times.reached(_ask_again_at(run, attempt))


def _ask_again_at(run: RunState, attempt: Attempt) -> int:
    if attempt.asked == 0:
        return 0
    most = ASK_AGAIN_MAX_MS
    if attempt.state is AttemptState.UNKNOWN and run.facts_of(attempt).contract_class is ContractClass.LOOKUP:
        most = LOOK_AGAIN_MAX_MS  # each question is an entry of a log that is never trimmed, and may go on for days
    return attempt.asked_at + min(ASK_AGAIN_MS << min(attempt.asked - 1, 20), most)


def _may_finish(run: RunState, now_in: RunPhase, epoch: int) -> bool:
    finish = cmd.Finish(epoch=epoch)
    match now_in:
        case RunPhase.RUNNING | RunPhase.BLOCKED:
            return all_done(run, finish) or given_up(run, finish)
        case RunPhase.CANCELLING:
            return all_stopped(run, finish) or stopping_took_too_long(run, finish)
        case RunPhase.CANCELLED_UNRESOLVED:
            return all_stopped(run, finish)
        case _:
            return False


def _note_cancel_deadline(run: RunState, times: _Times) -> None:
    times.reached(max((gate.closed_at for gate in run.gates.values()), default=0) + CANCEL_DEADLINE_MS + 1)


@dataclass(frozen=True, slots=True)
class _Still:
    """What of a run's index no effect can change while the run keeps its shape.

    `steady`: only attempts have times, and the run cannot end; otherwise everything is worked out each time. `acts`:
    something but an attempt is due at once.
    """

    shape: int
    steady: bool
    acts: bool = False
    attention_ms: int | None = None


def _still(run: RunState) -> _Still:
    if (
        run.head == 0
        or run.finished
        or run.cancelled
        or run.alarms
        or lost_but_acting(run)
        or any(n and not run.scope_done(scope) for scope, n in run.relaunches.items() if scope in run.gates)
        or unseen_results(run)
        or any(gate.state not in (GateState.OPEN, GateState.HELD) for gate in run.gates.values())
        or any(
            child.state is ChildState.LAUNCHING or child.stop_wanted
            for child in run.children.values()
            if not child.settled
        )
        or all(run.scope_done(scope) or exhausted(run, scope) for scope in run.gates)
        or any(run.attempts[attempt_id].state is AttemptState.UNKNOWN for attempt_id in run.open_attempts)
    ):
        return _Still(run.shape, steady=False)
    # No gate is closed and nothing is unknown, so nothing below looks at attempts.
    times = _Times(run.time)
    due = [*_gates(run, 0, times), *(action for child in run.children.values() for action in _child(run, child, times))]
    acts = any(not isinstance(action, Observe) for action in due)
    return _Still(run.shape, steady=True, acts=acts, attention_ms=attention_since(run))


def index_of(run: RunState) -> Index:
    """The run's entries in its partition's indexes; a function of the state alone, so they can be rebuilt.

    Every commit asks for them. Most runs are steady, and then only their open attempts have to be looked at.
    """
    still: _Still | None = run.still
    if still is None or still.shape != run.shape:
        still = run.still = _still(run)
    if not still.steady:
        return index_in_full(run)
    run.clock = run.time
    times, acts = _Times(run.time), still.acts
    for attempt_id in run.open_attempts:
        attempt = run.attempts[attempt_id]
        if attempt.state is AttemptState.UNKNOWN:
            return index_in_full(run)
        acts = _due_to_ask(run, attempt, times) or acts
    return Index(live=True, attention_ms=still.attention_ms, due_ms=run.time if acts else times.due)


def index_in_full(run: RunState) -> Index:
    """The same, from everything there is: what index_of must always agree with."""
    live = is_live(run)
    if not live:
        return Index(live=False, attention_ms=attention_since(run), due_ms=None)
    plan = agenda(run, run.time)
    waits_for_time = any(not isinstance(action, Observe) for action in plan.actions)
    return Index(live=True, attention_ms=attention_since(run), due_ms=run.time if waits_for_time else plan.due_ms)
