"""Where a run stands: its phase, what blocks a gate, what needs a person. Pure questions to a folded state.

Rules, agenda, indexes and views all ask here, so that "blocked" means the same to the gate and to the operator.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from admission.records import Attempt, Child
from admission.state import RunState
from admission.vocabulary import (
    OPEN_ATTEMPTS,
    AttemptState,
    Blocks,
    ChildMode,
    ChildState,
    Disposition,
    GateState,
    RunPhase,
    TaskState,
    TryOutcome,
)

#: How often a scope's child is started again under one revision before a person has to look.
RELAUNCHES_MAX = 3
#: How often a child that acts past the gate is asked to stop before a person has to look.
STOPS_PATIENT = 2


def blocking_attempts(run: RunState, scope: str) -> list[Attempt]:
    """Attempts of superseded revisions that keep a closed gate closed (protocol: gate table, row `open`)."""
    gate = run.gates[scope]
    found = []
    for attempt_id in run.open_attempts:
        attempt = run.attempts[attempt_id]
        if attempt.scope != scope or attempt.revision >= gate.target:
            continue
        unknown = attempt.state is AttemptState.UNKNOWN
        if unknown and run.facts_of(attempt).unknown_blocks is Blocks.SLOT:
            continue  # slot, conflict key and reserve stay taken: exactly the action it could double stays blocked
        found.append(attempt)
    return found


def blocking_children(run: RunState, scope: str) -> list[Child]:
    """Children that act past the gate and were not seen to end. A lost one was not seen to end either."""
    gate = run.gates[scope]
    return [
        child
        for child in run.children.values()
        if child.scope == scope
        and child.revision < gate.target
        and child.mode is ChildMode.AUTONOMOUS
        and child.state not in (ChildState.STOP_CONFIRMED, ChildState.ENDED, ChildState.PLANNED)
    ]


def seen_to_end(child: Child) -> bool:
    """Whether the child cannot act any more as far as anybody saw. A lost child that acts past the gate may."""
    return child.settled and not (child.state is ChildState.LOST and child.mode is ChildMode.AUTONOMOUS)


def budget_overdrawn(run: RunState) -> bool:
    """Whether more is spent and reserved than the goal in force allows."""
    limit = run.budget_limit
    return limit is not None and run.spent + run.reserved > limit


def unmeetable_needs(run: RunState, scope: str) -> list[str]:
    """Needs of a scope that will never be met: their producer is done and did not deliver that artifact."""
    plan = run.goal_of(scope)
    found = []
    for need in plan.needs if plan else ():
        producer, _, name = need.partition(":")
        if producer not in run.gates or not run.scope_done(producer):
            continue
        result = run.results.get(run.adopted.get(producer, ""))
        if result is None or (name and name not in {artifact.name for artifact in result.artifacts}):
            found.append(need)
    return found


def exhausted(run: RunState, scope: str) -> bool:
    """Whether the scope's child has failed or been lost too often under the open revision."""
    return run.relaunches.get(scope, 0) > RELAUNCHES_MAX


def unknown_attempts(run: RunState) -> Iterator[Attempt]:
    """Attempts of which it is not known what became."""
    for attempt_id in run.open_attempts:
        attempt = run.attempts[attempt_id]
        if attempt.state is AttemptState.UNKNOWN:
            yield attempt


def in_doubt(attempt: Attempt) -> bool:
    """Whether a send of this attempt ended without a usable answer and nothing has settled it yet."""
    if attempt.state is AttemptState.UNKNOWN or attempt.contradicted:
        return True
    return any(t.outcome is TryOutcome.IN_DOUBT for t in attempt.tries)


def live_current_child(run: RunState, scope: str) -> Child | None:
    """The child that works for the scope now, if there is one."""
    child = run.children.get(run.current.get(scope, ""))
    return child if child is not None and run.is_current(child) else None


def _stuck_on_unknown(run: RunState) -> bool:
    for attempt in unknown_attempts(run):
        gate = run.gates[attempt.scope]
        if gate.state is GateState.CLOSED:
            if attempt in blocking_attempts(run, attempt.scope):
                return True
        elif run.facts_of(attempt).unknown_blocks is Blocks.SCOPE and attempt.revision == gate.cur:
            return True  # the child that asked for it waits for its outcome
        elif live_current_child(run, attempt.scope) is None:
            return True
    return False


def _stuck_for_good(run: RunState) -> bool:
    """Something that no child and no service can move: only a person or a revision can."""
    if run.alarms:
        return True
    if lost_but_acting(run) or unseen_results(run):
        return True
    for scope, gate in run.gates.items():
        if gate.state is GateState.CLOSED and budget_overdrawn(run):
            return True
        waiting = gate.cur == gate.target and not run.scope_done(scope)
        if waiting and (exhausted(run, scope) or unmeetable_needs(run, scope)):
            return True
    return False


def phase(run: RunState) -> RunPhase:
    """The run's phase, from the folded state alone."""
    if run.head == 0:
        return RunPhase.NONE
    if run.finished:
        return RunPhase(run.finished)
    if run.cancelled:
        return RunPhase.CANCELLING
    gates = run.gates.values()
    if any(g.state is GateState.CLOSED for g in gates):
        stuck = _stuck_on_unknown(run) or stuck_children(run) or _stuck_for_good(run)
        return RunPhase.BLOCKED if stuck else RunPhase.REDIRECTING
    if any(g.holds for g in gates):
        return RunPhase.PAUSED
    return RunPhase.BLOCKED if _stuck_on_unknown(run) or _stuck_for_good(run) else RunPhase.RUNNING


def lost_but_acting(run: RunState) -> list[Child]:
    """Lost children that act past the gate: nobody saw them end, so the run cannot end either."""
    return [child for child in run.children.values() if child.settled and not seen_to_end(child)]


def unseen_results(run: RunState) -> list[Child]:
    """Children of open scopes that act past the gate, are over, and left nothing that may be adopted unseen."""
    found = []
    for scope, gate in run.gates.items():
        child = run.children.get(run.current.get(scope, ""))
        if child is None or child.mode is not ChildMode.AUTONOMOUS or gate.cur != gate.target or run.scope_done(scope):
            continue
        result = run.results.get(child.result)
        dropped = result is not None and result.disposition is Disposition.DROPPED
        failed = seen_to_end(child) and bool(child.task) and child.task_state is not TaskState.COMPLETED
        if child.revision == gate.cur and (dropped or failed):
            found.append(child)
    return found


def stuck_children(run: RunState) -> list[Child]:
    """Children that keep a gate closed and do not stop: refused, unreachable, lost, never found, or asked in vain."""
    plainly = (ChildState.STOP_REFUSED, ChildState.UNREACHABLE, ChildState.LOST, ChildState.LAUNCHING)
    return [
        child
        for scope, gate in run.gates.items()
        if gate.state is GateState.CLOSED
        for child in blocking_children(run, scope)
        if child.state in plainly or child.stops > STOPS_PATIENT
    ]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Something that waits for a person. `id` names an attempt, a child or a scope; `why` says it in one line."""

    kind: str
    id: str
    scope: str
    revision: int
    since: int
    why: str


def waiting(run: RunState) -> list[Waiting]:
    """Everything in this run that waits for a person. A run that is blocked always has an entry here."""
    found = [
        Waiting("effect", a.id, a.scope, a.revision, a.unknown_at, a.why or "it is not known what became of it")
        for a in unknown_attempts(run)
    ]
    for alarm in run.alarms.values():
        row = run.attempts[alarm.attempt]
        found.append(Waiting("alarm", row.id, row.scope, row.revision, alarm.at, alarm.detail))
    if run.finished and run.finished != RunPhase.CANCELLED_UNRESOLVED:
        return found
    children = {child.id: child for child in (*stuck_children(run), *lost_but_acting(run), *_outlasting_cancel(run))}
    for child in children.values():
        since = child.stop_at or child.ended_at or child.launched_at
        words = "it acts past the gate and was not seen to end"
        found.append(Waiting("child", child.id, child.scope, child.revision, since, words))
    for child in unseen_results(run):
        words = "it acted past the gate: only a person can tell what its end means; then redirect or cancel"
        found.append(Waiting("result", child.id, child.scope, child.revision, child.ended_at, words))
    return found + waiting_scopes(run)


def waiting_scopes(run: RunState) -> list[Waiting]:
    """Scopes that wait for a person: too often tried, overdrawn, or in need of what never comes."""
    found: list[Waiting] = []
    if run.cancelled or run.finished:
        return found
    for scope, gate in run.gates.items():
        if run.scope_done(scope):
            continue
        child = run.children.get(run.current.get(scope, ""))
        since = child.ended_at if child else run.started_at
        if gate.cur != gate.target:
            if budget_overdrawn(run):
                words = f"{run.spent} spent and {run.reserved} reserved of a budget of {run.budget_limit} effects"
                found.append(Waiting("budget", scope, scope, gate.target, gate.closed_at, words))
        elif scope in run.silences:
            silence = run.silences[scope]
            words = f"agent {silence.agent} does not answer ({silence.detail}); asking it goes on"
            found.append(Waiting("agent", scope, scope, gate.cur, silence.at, words))
        elif exhausted(run, scope):
            words = "its child failed or was lost too often" + (f": {child.detail}" if child and child.detail else "")
            found.append(Waiting("scope", scope, scope, gate.cur, since, words))
        elif missing := unmeetable_needs(run, scope):
            words = f"it needs {', '.join(missing)}, which nobody delivered"
            found.append(Waiting("need", scope, scope, gate.cur, since, words))
    return found


def _outlasting_cancel(run: RunState) -> list[Child]:
    if run.finished != RunPhase.CANCELLED_UNRESOLVED:
        return []
    return [c for c in run.children.values() if c.mode is ChildMode.AUTONOMOUS and not seen_to_end(c)]


def attention_since(run: RunState) -> int | None:
    """Since when (store time, ms) something in this run has been waiting for a person; None when nothing is."""
    return min((entry.since for entry in waiting(run)), default=None)


def is_live(run: RunState) -> bool:
    """Whether a conductor still has something to follow: the run itself, an open attempt, or an unsettled child."""
    if run.head == 0:
        return False
    if not run.finished or run.finished == RunPhase.CANCELLED_UNRESOLVED:
        return True
    if any(not child.settled for child in run.children.values()):
        return True
    return any(run.attempts[a].state in OPEN_ATTEMPTS for a in run.open_attempts)
