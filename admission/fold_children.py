"""Folds of children: planned, launched, claimed, asked to stop, seen, lost, and what they delivered. Pure."""

from msgspec.structs import replace

from admission import events as ev
from admission.records import Child, Result, Silence
from admission.run_state import Folder, RunState
from admission.vocabulary import TERMINAL_TASKS, ChildMode, ChildState, Claim, Disposition, TaskState


def _child_planned(run: RunState, n: int, e: ev.ChildPlanned) -> None:
    child = Child(
        id=e.child, scope=e.scope, revision=e.revision, n=e.n, agent=e.agent, mode=e.mode, goal_hash=e.goal_hash,
        context=e.context, planned_at=e.at, follows=e.follows, follows_state=e.follows_state,
    )  # fmt: skip
    run.put(run.children, e.child, child)
    run.put(run.current, e.scope, e.child)
    run.drop(run.silences, e.scope)
    predecessor = run.children.get(e.follows)
    if predecessor is not None:
        run.put(run.children, predecessor.id, replace(predecessor, succeeded_by=e.child))


def _agent_silent(run: RunState, n: int, e: ev.AgentSilent) -> None:
    run.put(run.silences, e.scope, Silence(agent=e.agent, revision=e.revision, at=e.at, detail=e.detail))


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


def _child_bound(run: RunState, n: int, e: ev.ChildBound) -> None:
    _bind(run, e.child, e.task, claimed=False)


def _child_claimed(run: RunState, n: int, e: ev.ChildClaimed) -> None:
    if e.answer is Claim.CLAIMED:
        _bind(run, e.child, e.task, claimed=True)


def _stop_requested(run: RunState, n: int, e: ev.StopRequested) -> None:
    child = run.children[e.child]
    if not child.settled:
        row = replace(
            child, state=ChildState.STOP_REQUESTED, stop_wanted=True, stops=e.n, stop_at=e.at, stop_reason=e.reason
        )
        run.put(run.children, child.id, row)


def _stop_answered(run: RunState, n: int, e: ev.StopAnswered) -> None:
    child = run.children[e.child]
    if not child.settled:
        state = ChildState.STOP_REFUSED if e.refused else ChildState.UNREACHABLE
        run.put(run.children, child.id, replace(child, state=state, stop_detail=e.detail))


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


def _child_lost(run: RunState, n: int, e: ev.ChildLost) -> None:
    child = run.children[e.child]
    if not child.settled:
        # A lost autonomous child is not known to have stopped: its mark stays, and so does what it blocks.
        reconcile = child.reconcile if child.mode is ChildMode.AUTONOMOUS else 0
        row = replace(child, state=ChildState.LOST, ended_at=e.at, detail=e.detail, reconcile=reconcile)
        run.put(run.children, child.id, row)
        if not child.stop_wanted:
            run.put(run.relaunches, child.scope, run.relaunches.get(child.scope, 0) + 1)


def _result_filed(run: RunState, n: int, e: ev.ResultFiled) -> None:
    result = Result(
        id=e.result, child=e.child, task=e.task, scope=e.scope, revision=e.revision, disposition=e.disposition, at=e.at,
        position=n, reason=e.reason, artifacts=e.artifacts, summary=e.summary,
    )  # fmt: skip
    run.put(run.results, e.result, result)
    child = run.children[e.child]
    if e.task != child.task:
        return  # a second task of the same launch: on record, and nothing follows from it
    run.put(run.children, e.child, replace(child, result=e.result))
    failed = (
        child.mode is ChildMode.MEDIATED
    )  # an agent that has acted on its own is not sent again for want of a stamp
    if (
        e.disposition is Disposition.DROPPED
        and run.current.get(e.scope) == e.child
        and not child.stop_wanted
        and failed
    ):
        run.put(run.relaunches, e.scope, run.relaunches.get(e.scope, 0) + 1)
    if e.disposition is Disposition.ADOPTED:
        run.put(run.adopted, e.scope, e.result)
        for artifact in e.artifacts:
            run.put(run.artifacts, f"{e.scope}:{artifact.name}", artifact)


#: Which function folds which event.
CHILDREN: dict[type[ev.Event], Folder] = {
    ev.ChildPlanned: _child_planned,
    ev.AgentSilent: _agent_silent,
    ev.LaunchStarted: _launch_started,
    ev.ChildBound: _child_bound,
    ev.ChildClaimed: _child_claimed,
    ev.StopRequested: _stop_requested,
    ev.StopAnswered: _stop_answered,
    ev.ChildSeen: _child_seen,
    ev.ChildLost: _child_lost,
    ev.ResultFiled: _result_filed,
}
