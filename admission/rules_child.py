"""Rules of children: planning, launching, claiming, stopping, observing, losing, and what their results are worth.
Pure.

"Stop requested" is written before anybody is asked and is never taken for "stopped"; the first terminal state that was
seen is final; a result is adopted only if what it echoes is what the log says now.
"""

from typing import Any

from admission import commands as cmd
from admission import events as ev
from admission.records import Child
from admission.standing import exhausted, seen_to_end
from admission.state import RunState
from admission.table import Answer, Machine, Row
from admission.vocabulary import (
    TERMINAL_TASKS,
    ChildMode,
    ChildState,
    Claim,
    Disposition,
    GateState,
    TaskState,
    child_id_for,
    context_id_for,
    scope_prefixes,
    short_hash,
)
from admission.wire import Stamp

C = ChildState
_NONE = "none"
_SETTLED = (C.STOP_CONFIRMED, C.ENDED, C.LOST)
_STARTED = (C.LAUNCHING, C.RUNNING, C.STOP_REQUESTED, C.STOP_REFUSED, C.UNREACHABLE)
_BOUND = (C.RUNNING, C.STOP_REQUESTED, C.STOP_REFUSED, C.UNREACHABLE)
_EVERY = (C.PLANNED, *_STARTED, *_SETTLED)


# --- planning --------------------------------------------------------------------------------------------------------


def not_open_for(run: RunState, command: cmd.PlanChild) -> bool:
    """The gate, or one above it, is not open at that revision."""
    gate = run.gates.get(command.scope)
    if gate is None or gate.cur != command.revision:
        return True
    return any(run.gates[s].state is not GateState.OPEN for s in scope_prefixes(command.scope) if s in run.gates)


def no_work_left(run: RunState, command: cmd.PlanChild | cmd.ReportSilence) -> bool:
    """The revision plans nothing for the scope, its result is there, or a child is at it."""
    if run.goal_of(command.scope) is None or run.scope_done(command.scope):
        return True
    child = run.children.get(run.current.get(command.scope, ""))
    return child is not None and child.revision == command.revision and not finished_without_result(run, child)


def needs_are_missing(run: RunState, command: cmd.PlanChild) -> bool:
    """An artifact of another scope that it needs is not there yet."""
    return bool(missing_needs(run, command.scope))


def relaunches_used_up(run: RunState, command: cmd.PlanChild) -> bool:
    """Its child has failed or was lost too often under this revision."""
    return exhausted(run, command.scope)


def finished_without_result(run: RunState, child: Child) -> bool:
    """Whether the child is over and left nothing to adopt, so that another one may follow."""
    if not child.settled:
        return False
    if child.state is C.LOST:
        return seen_to_end(child)  # one that acts past the gate may still be at it
    if child.mode is ChildMode.AUTONOMOUS:
        # What it did cannot be asked of the gate: another one would do it again, unless it never had a task.
        return not child.task
    if child.task_state is not TaskState.COMPLETED:
        return True
    result = run.results.get(child.result)
    if result is None:
        return False
    if result.disposition is Disposition.ADOPTED:
        return run.adopted.get(child.scope) != result.id  # it was put aside: something it left open did not happen
    return result.disposition is Disposition.DROPPED


def missing_needs(run: RunState, scope: str) -> list[str]:
    """The needs of a scope that no adopted result meets. `a` needs all of scope a, `a:name` that artifact of it."""
    plan = run.goal_of(scope)
    missing = []
    for need in plan.needs if plan else ():
        producer, _, name = need.partition(":")
        result = run.results.get(run.adopted.get(producer, "")) if run.scope_done(producer) else None
        if result is None or (name and name not in {a.name for a in result.artifacts}):
            missing.append(need)
    return missing


def _plan(run: RunState, c: cmd.PlanChild, at: int) -> tuple[ev.Event, ...]:
    plan = run.goal_of(c.scope)
    assert plan is not None  # guarded by no_work_left
    n = 1 + sum(1 for k in run.children.values() if k.scope == c.scope and k.revision == c.revision)
    before = [k for k in run.children.values() if k.scope == c.scope]
    planned = ev.ChildPlanned(
        at=at, by=c.by, child=child_id_for(run.run_id, c.scope, c.revision, n), scope=c.scope, revision=c.revision, n=n,
        agent=plan.agent, mode=c.mode, goal_hash=run.revisions[c.revision].goal_hash,
        context=context_id_for(run.run_id, c.scope), follows=before[-1].id if before else "",
        follows_state=before[-1].state.value if before else "",
    )  # fmt: skip
    return (planned,)


def told_already(run: RunState, command: cmd.ReportSilence) -> bool:
    """That it does not answer is on record."""
    silence = run.silences.get(command.scope)
    return silence is not None and silence.revision == command.revision


def _silent(run: RunState, c: cmd.ReportSilence, at: int) -> tuple[ev.Event, ...]:
    plan = run.goal_of(c.scope)
    agent = plan.agent if plan else ""
    return (ev.AgentSilent(at=at, by=c.by, scope=c.scope, revision=c.revision, agent=agent, detail=c.detail),)


def _scope_state(run: RunState, c: cmd.PlanChild | cmd.ReportSilence) -> str:
    gate = run.gates.get(c.scope)
    return gate.state.value if gate else _NONE


PLAN = Machine(
    name="plan",
    states=(_NONE, *GateState),
    commands={
        cmd.PlanChild: "the conductor finds an open scope without a child",
        cmd.ReportSilence: "the agent of an open scope has not answered for a while",
    },
    state_of=_scope_state,
    rows=(
        Row(states=(_NONE,), on=cmd.ReportSilence, says=Answer.NOT_FOUND),
        Row(states=(GateState.HELD, GateState.CLOSED, GateState.SEALED), on=cmd.ReportSilence, says=Answer.CLOSED),
        Row(states=(GateState.OPEN,), on=cmd.ReportSilence, guard=no_work_left, says=Answer.ALREADY),
        Row(states=(GateState.OPEN,), on=cmd.ReportSilence, guard=told_already, says=Answer.ALREADY),
        Row(states=(GateState.OPEN,), on=cmd.ReportSilence, do=_silent, says=Answer.ACCEPTED, accepted=True,
            records="since when it has been silent, for people; asking goes on"),
        Row(states=(_NONE,), on=cmd.PlanChild, says=Answer.NOT_FOUND),
        Row(states=(GateState.HELD, GateState.CLOSED, GateState.SEALED), on=cmd.PlanChild, says=Answer.CLOSED),
        Row(states=(GateState.OPEN,), on=cmd.PlanChild, guard=not_open_for, says=Answer.CLOSED),
        Row(states=(GateState.OPEN,), on=cmd.PlanChild, guard=no_work_left, says=Answer.ALREADY),
        Row(states=(GateState.OPEN,), on=cmd.PlanChild, guard=needs_are_missing, says=Answer.BLOCKED,
            detail=lambda run, c: {"needs": missing_needs(run, c.scope)}),
        Row(states=(GateState.OPEN,), on=cmd.PlanChild, guard=relaunches_used_up, says=Answer.BLOCKED,
            detail=lambda run, c: {"why": "relaunches are used up"}),
        Row(states=(GateState.OPEN,), on=cmd.PlanChild, do=_plan, says=Answer.ACCEPTED, accepted=True,
            records="a child, before any message leaves",
            detail=lambda run, c: {"child": child_id_for(run.run_id, c.scope, c.revision, 1 + sum(
                1 for k in run.children.values() if k.scope == c.scope and k.revision == c.revision))}),
    ),
)  # fmt: skip


# --- launching, claiming ---------------------------------------------------------------------------------------------


def no_longer_current(run: RunState, command: Any) -> bool:
    """The log does not say (any more) that this child may act."""
    return not run.is_current(run.children[command.child])


def may_not_start(run: RunState, command: cmd.StartLaunch) -> bool:
    """The log does not say that this child may act, or a gate on its way is not open."""
    child = run.children[command.child]
    if not run.is_current(child):
        return True
    return any(run.gates[s].state is not GateState.OPEN for s in scope_prefixes(child.scope) if s in run.gates)


def grant_differs(run: RunState, command: cmd.ClaimChild) -> bool:
    """The grant names another scope or revision than the child has."""
    child = run.children[command.child]
    return (child.scope, child.revision) != (command.scope, command.revision)


def other_task(run: RunState, command: Any) -> bool:
    """Another A2A task is this child already."""
    task = run.children[command.child].task
    return bool(task) and task != command.task


def same_task_claimed(run: RunState, command: cmd.ClaimChild) -> bool:
    """This task claimed the child before: a restart keeps its id."""
    child = run.children[command.child]
    return child.claimed and child.task == command.task


def bound_already(run: RunState, command: cmd.BindChild) -> bool:
    """This task id is known."""
    return run.children[command.child].task == command.task


def _claimed(run: RunState, c: cmd.ClaimChild, at: int) -> tuple[ev.Event, ...]:
    return (ev.ChildClaimed(at=at, by=c.by, child=c.child, task=c.task, answer=Claim.CLAIMED),)


def _launch(run: RunState, c: cmd.StartLaunch, at: int) -> tuple[ev.Event, ...]:
    return (ev.LaunchStarted(at=at, by=c.by, child=c.child, n=run.children[c.child].launches + 1),)


def _bound(run: RunState, c: cmd.BindChild, at: int) -> tuple[ev.Event, ...]:
    return (ev.ChildBound(at=at, by=c.by, child=c.child, task=c.task),)


def _superseding(run: RunState, c: Any) -> dict[str, Any]:
    return {"in_force": run.head}


# --- stopping, observing ---------------------------------------------------------------------------------------------


def terminal_seen(run: RunState, command: cmd.RecordSeen) -> bool:
    """The task was seen in a terminal state."""
    return command.state in TERMINAL_TASKS


def seen_before(run: RunState, command: cmd.RecordSeen) -> bool:
    """Nothing new: the same state was seen last time."""
    child = run.children[command.child]
    return child.task_state is command.state and child.detail == command.detail


def answered_so(run: RunState, command: cmd.RecordStop) -> bool:
    """The same answer to a stop request is on record."""
    child = run.children[command.child]
    return child.state is (C.STOP_REFUSED if command.refused else C.UNREACHABLE) and child.stop_detail == command.detail


def _stop(run: RunState, c: cmd.RequestStop, at: int) -> tuple[ev.Event, ...]:
    return (ev.StopRequested(at=at, by=c.by, child=c.child, reason=c.reason, n=run.children[c.child].stops + 1),)


def _stop_answer(run: RunState, c: cmd.RecordStop, at: int) -> tuple[ev.Event, ...]:
    return (ev.StopAnswered(at=at, by=c.by, child=c.child, refused=c.refused, detail=c.detail),)


def _seen(run: RunState, c: cmd.RecordSeen, at: int) -> tuple[ev.Event, ...]:
    return (ev.ChildSeen(at=at, by=c.by, child=c.child, state=c.state, detail=c.detail),)


def _lost(run: RunState, c: cmd.DeclareLost, at: int) -> tuple[ev.Event, ...]:
    return (ev.ChildLost(at=at, by=c.by, child=c.child, detail=c.detail),)


# --- results ---------------------------------------------------------------------------------------------------------


def filed_already(run: RunState, command: cmd.FileResult) -> bool:
    """The child's result is on record and was not parked."""
    result = run.results.get(result_name(run, command))
    return result is not None and result.disposition is not Disposition.PARKED


def drop_reason(run: RunState, command: cmd.FileResult) -> str:
    """Why a result must not be adopted, or an empty string."""
    child = run.children[command.child]
    gate = run.gates[child.scope]
    stamp = command.stamp
    if child.mode is ChildMode.AUTONOMOUS and stamp is None:
        if any(c.scope == child.scope and c.revision < child.revision for c in run.children.values()):
            return "its agent does not say which revision it answers: after a redirect a person has to look first"
        stamp = Stamp(run=run.run_id, scope=child.scope, child=child.id, revision=child.revision,
                      goal_hash=child.goal_hash)  # fmt: skip
    if stamp is None:
        return "it does not say which run, child and revision it answers"
    if (stamp.run, stamp.scope, stamp.child, stamp.revision) != (run.run_id, child.scope, child.id, child.revision):
        return "it answers for another run, scope, child or revision"
    if stamp.goal_hash != child.goal_hash:
        return "it answers another goal"
    if gate.sealed:
        return "the run was cancelled"
    if gate.target != child.revision:
        return f"superseded by revision {gate.target}"
    if gate.cur != child.revision or run.current.get(child.scope) != child.id or child.state is C.LOST:
        return "another child has taken over"
    claimed = child.claimed or child.mode is ChildMode.AUTONOMOUS
    if not claimed or child.task != command.task:
        return "its task never claimed the child"
    if run.finished:
        return "the run had ended"
    return ""


def must_be_dropped(run: RunState, command: cmd.FileResult) -> bool:
    """It is late, foreign, or lacks its stamp."""
    return bool(drop_reason(run, command))


def gate_is_held(run: RunState, command: cmd.FileResult) -> bool:
    """Its gate is held: whether it counts is decided when the hold ends."""
    scope = run.children[command.child].scope
    return any(run.gates[s].holds for s in scope_prefixes(scope) if s in run.gates)


def parked_already(run: RunState, command: cmd.FileResult) -> bool:
    """It is parked and its gate is still held."""
    return result_name(run, command) in run.results and gate_is_held(run, command)


def result_id(child: str) -> str:
    """The name of a child's result: a child has one."""
    return f"{child}-r"


def result_name(run: RunState, command: cmd.FileResult) -> str:
    """The name of what this task delivered: a task that is not the child's does not take the child's place."""
    if command.task == run.children[command.child].task:
        return result_id(command.child)
    return f"{result_id(command.child)}-{short_hash(command.task, length=8)}"


def _file(run: RunState, c: cmd.FileResult, at: int, disposition: Disposition, reason: str) -> tuple[ev.Event, ...]:
    child = run.children[c.child]
    filed = ev.ResultFiled(
        at=at, by=c.by, result=result_name(run, c), child=c.child, task=c.task, scope=child.scope,
        revision=child.revision, disposition=disposition, reason=reason, artifacts=c.artifacts, summary=c.summary,
    )  # fmt: skip
    return (filed,)


def _adopt(run: RunState, c: cmd.FileResult, at: int) -> tuple[ev.Event, ...]:
    return _file(run, c, at, Disposition.ADOPTED, "")


def _park(run: RunState, c: cmd.FileResult, at: int) -> tuple[ev.Event, ...]:
    return _file(run, c, at, Disposition.PARKED, "its gate is held")


def _drop(run: RunState, c: cmd.FileResult, at: int) -> tuple[ev.Event, ...]:
    return _file(run, c, at, Disposition.DROPPED, drop_reason(run, c))


def _drop_detail(run: RunState, c: cmd.FileResult) -> dict[str, Any]:
    return {"reason": drop_reason(run, c)}


def _child_of(run: RunState, command: Any) -> str:
    child = run.children.get(command.child)
    return child.state.value if child else _NONE


def _unknown_child(command: type[cmd.Command]) -> Row:
    return Row(states=(_NONE,), on=command, says=Answer.NOT_FOUND)


CHILD = Machine(
    name="child",
    states=(_NONE, *C),
    commands={
        cmd.ClaimChild: "a worker starts executing",
        cmd.StartLaunch: "the conductor is about to send the launching message",
        cmd.BindChild: "the courier learned the A2A task id",
        cmd.RequestStop: "the conductor is about to ask the child to stop",
        cmd.RecordStop: "the cancel was refused or reached nobody",
        cmd.RecordSeen: "the courier saw the task's state",
        cmd.DeclareLost: "the task is gone, or silent for too long",
        cmd.FileResult: "the courier saw a result",
    },
    state_of=_child_of,
    rows=(
        Row(states=(_NONE,), on=cmd.ClaimChild, says=Claim.SUPERSEDED, detail=_superseding),
        Row(states=_EVERY, on=cmd.ClaimChild, guard=grant_differs, says=Claim.SUPERSEDED, detail=_superseding),
        Row(states=_EVERY, on=cmd.ClaimChild, guard=no_longer_current, says=Claim.SUPERSEDED, detail=_superseding),
        Row(states=_EVERY, on=cmd.ClaimChild, guard=other_task, says=Claim.DUPLICATE, detail=_superseding),
        Row(states=_EVERY, on=cmd.ClaimChild, guard=same_task_claimed, says=Claim.CLAIMED, accepted=True,
            detail=_superseding),
        Row(states=_EVERY, on=cmd.ClaimChild, do=_claimed, next=C.RUNNING, says=Claim.CLAIMED, accepted=True,
            detail=_superseding, records="the first task to claim is the child"),
        _unknown_child(cmd.StartLaunch),
        Row(states=(C.PLANNED, C.LAUNCHING), on=cmd.StartLaunch, guard=may_not_start, says=Answer.CLOSED),
        Row(states=(C.PLANNED, C.LAUNCHING), on=cmd.StartLaunch, do=_launch, next=C.LAUNCHING, says=Answer.ACCEPTED,
            accepted=True, sends="SendMessage with the child's id as message id"),
        Row(states=(*_BOUND, *_SETTLED), on=cmd.StartLaunch, says=Answer.ALREADY),
        _unknown_child(cmd.BindChild),
        Row(states=_EVERY, on=cmd.BindChild, guard=bound_already, says=Answer.ALREADY, accepted=True),
        Row(states=_EVERY, on=cmd.BindChild, guard=other_task, says=Claim.DUPLICATE,
            detail=lambda run, c: {"task": run.children[c.child].task}),
        Row(states=_EVERY, on=cmd.BindChild, do=_bound, next="running if it was launching", says=Answer.ACCEPTED,
            accepted=True, records="the task id; the first one wins"),
        _unknown_child(cmd.RequestStop),
        Row(states=(C.PLANNED, C.LAUNCHING, *_SETTLED), on=cmd.RequestStop, says=Answer.ALREADY),
        Row(states=_BOUND, on=cmd.RequestStop, do=_stop, next=C.STOP_REQUESTED, says=Answer.ACCEPTED, accepted=True,
            sends="CancelTask", records="that it is asked, before it is asked"),
        _unknown_child(cmd.RecordStop),
        Row(states=(C.PLANNED, C.LAUNCHING, C.RUNNING, *_SETTLED), on=cmd.RecordStop, says=Answer.ALREADY),
        Row(states=(C.STOP_REQUESTED, C.STOP_REFUSED, C.UNREACHABLE), on=cmd.RecordStop, guard=answered_so,
            says=Answer.ALREADY),
        Row(states=(C.STOP_REQUESTED, C.STOP_REFUSED, C.UNREACHABLE), on=cmd.RecordStop, do=_stop_answer,
            next="stop_refused or unreachable", says=Answer.ACCEPTED, accepted=True),
        _unknown_child(cmd.RecordSeen),
        Row(states=(C.STOP_CONFIRMED, C.ENDED), on=cmd.RecordSeen, says=Answer.ALREADY),
        Row(states=(C.LOST,), on=cmd.RecordSeen, guard=terminal_seen, do=_seen, next=C.ENDED, says=Answer.ACCEPTED,
            accepted=True),
        Row(states=(C.LOST,), on=cmd.RecordSeen, says=Answer.ALREADY),
        Row(states=(C.PLANNED, *_STARTED), on=cmd.RecordSeen, guard=terminal_seen, do=_seen,
            next="ended, or stop_confirmed if it was asked and is canceled", says=Answer.ACCEPTED, accepted=True),
        Row(states=(C.PLANNED, *_STARTED), on=cmd.RecordSeen, guard=seen_before, says=Answer.ALREADY),
        Row(states=(C.PLANNED, *_STARTED), on=cmd.RecordSeen, do=_seen, says=Answer.ACCEPTED, accepted=True),
        _unknown_child(cmd.DeclareLost),
        Row(states=(C.PLANNED, *_SETTLED), on=cmd.DeclareLost, says=Answer.ALREADY),
        Row(states=_STARTED, on=cmd.DeclareLost, do=_lost, next=C.LOST, says=Answer.ACCEPTED, accepted=True),
        _unknown_child(cmd.FileResult),
        Row(states=_EVERY, on=cmd.FileResult, guard=filed_already, says=Answer.ALREADY),
        Row(states=_EVERY, on=cmd.FileResult, guard=must_be_dropped, do=_drop, says=Disposition.DROPPED, accepted=True,
            detail=_drop_detail, records="kept as evidence; nothing reads it until a person adopts it"),
        Row(states=_EVERY, on=cmd.FileResult, guard=parked_already, says=Answer.ALREADY),
        Row(states=_EVERY, on=cmd.FileResult, guard=gate_is_held, do=_park, says=Disposition.PARKED, accepted=True),
        Row(states=_EVERY, on=cmd.FileResult, do=_adopt, says=Disposition.ADOPTED, accepted=True,
            records="the scope's result and its artifacts"),
    ),
)  # fmt: skip
