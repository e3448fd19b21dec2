"""Rules of a run and of its gates: starting, revising, holding, cancelling, opening, finishing. Pure.

Recording a revision and closing the gates are one row: folding RevisionAccepted closes, revokes and marks. Opening
re-derives its precondition here, so that a decision made elsewhere, earlier, can never open a gate.
"""

from typing import Any

import msgspec
from msgspec.structs import replace

from admission import commands as cmd
from admission import events as ev
from admission.goal_rules import affected_scopes, goal_faults, goal_hash, next_goal, revision_faults
from admission.standing import (
    exhausted,
    phase,
    seen_to_end,
)
from admission.state import RunState
from admission.table import Answer, Machine, Row
from admission.vocabulary import (
    AttemptState,
    ChildMode,
    RunPhase,
    UpdateKind,
    canonical,
    digest,
)

P = RunPhase
_LIVE = (P.RUNNING, P.PAUSED, P.REDIRECTING, P.BLOCKED)
_ENDED = (P.CANCELLED, P.COMPLETED, P.FAILED)
_STOPPING = (P.CANCELLING, P.CANCELLED_UNRESOLVED)
_EXISTING = (*_LIVE, *_STOPPING, *_ENDED)

#: How long a cancelled run waits for children to be seen stopped before it reports itself unresolved (ms).
CANCEL_DEADLINE_MS = 15_000


def payload_hash(command: cmd.Command) -> str:
    """What two sendings of one request are compared by: everything but who sent it."""
    return digest(canonical([type(command).__name__, msgspec.to_builtins(replace(command, by=""))]))


# --- guards ----------------------------------------------------------------------------------------------------------


def request_seen(run: RunState, command: Any) -> bool:
    """This request id was carried out before, with the same content."""
    handled = run.requests.get(command.request_id)
    return handled is not None and handled.payload_hash == payload_hash(command)


def request_reused(run: RunState, command: Any) -> bool:
    """This request id was used before, for something else."""
    handled = run.requests.get(command.request_id)
    return handled is not None and handled.payload_hash != payload_hash(command)


def goal_is_faulty(run: RunState, command: cmd.Start) -> bool:
    """The goal cannot be worked on."""
    return bool(_start_faults(command))


def _start_faults(command: cmd.Start) -> list[str]:
    if command.follows:
        # Keys and partition are derived from the lineage's root already; what a linked run must inherit is not: until
        # it is, starting one could do again what its ancestor did, so it is refused.
        return ["a run that follows another one cannot be started yet: its predecessor's effects would not be known"]
    return goal_faults(command.goal)


def another_in_force(run: RunState, command: Any) -> bool:
    """The caller expected another revision than the one in force."""
    return command.expected_revision is not None and command.expected_revision != run.head


def revision_is_faulty(run: RunState, command: cmd.Revise) -> bool:
    """What the revision leads to cannot be worked on, or changes nothing."""
    return bool(revision_faults(run, command))


def held_by_pause(run: RunState, command: Any) -> bool:
    """Every gate is held by a pause."""
    return bool(run.gates) and all("pause" in gate.holds for gate in run.gates.values())


def not_held(run: RunState, command: Any) -> bool:
    """No gate is held by a pause."""
    return not any("pause" in gate.holds for gate in run.gates.values())


def all_done(run: RunState, command: Any) -> bool:
    """Every scope has its result, nothing is open, and no child acts past a gate."""
    if run.open_attempts or run.alarms or _acting(run):
        return False
    return all(run.scope_done(scope) for scope in run.gates)


def given_up(run: RunState, command: Any) -> bool:
    """Nothing is open, and what is not done has used up its relaunches."""
    if run.open_attempts or run.alarms or _acting(run) or any(gate.cur != gate.target for gate in run.gates.values()):
        return False
    stuck = [scope for scope in run.gates if not run.scope_done(scope)]
    return bool(stuck) and all(exhausted(run, scope) for scope in stuck)


def all_stopped(run: RunState, command: Any) -> bool:
    """Every attempt has an outcome and every child was seen to end."""
    return not run.open_attempts and all(seen_to_end(child) for child in run.children.values())


def stopping_took_too_long(run: RunState, command: Any) -> bool:
    """Only unknown attempts are open, and children were given their time to stop."""
    if any(run.attempts[a].state is not AttemptState.UNKNOWN for a in run.open_attempts):
        return False
    return run.clock > max((gate.closed_at for gate in run.gates.values()), default=0) + CANCEL_DEADLINE_MS


def _acting(run: RunState) -> bool:
    return any(not seen_to_end(c) and c.mode is ChildMode.AUTONOMOUS for c in run.children.values())


# --- actions ---------------------------------------------------------------------------------------------------------


def _start(run: RunState, c: cmd.Start, at: int) -> tuple[ev.Event, ...]:
    started = ev.RunStarted(
        at=at, by=c.by, run=c.run, principal=c.principal, request_id=c.request_id, payload_hash=payload_hash(c),
        goal=c.goal, goal_hash=goal_hash(c.goal), follows=c.follows,
    )  # fmt: skip
    return (started,)


def _update(run: RunState, c: Any, at: int, kind: UpdateKind, text: str = "") -> ev.UpdateRecorded:
    return ev.UpdateRecorded(
        at=at, by=c.by, seq=len(run.updates) + 1, kind=kind, request_id=c.request_id, payload_hash=payload_hash(c),
        text=text, reason=c.reason, expected_revision=c.expected_revision,
    )  # fmt: skip


def _revise(run: RunState, c: cmd.Revise, at: int) -> tuple[ev.Event, ...]:
    goal = next_goal(run, c)
    old = run.revisions[run.head].goal
    before = {r.id: r for r in old.requirements}
    after = {r.id: r for r in goal.requirements}
    kept = tuple(r for r in after if before.get(r) == after[r])
    changed = tuple(r for r in (*before, *(a for a in after if a not in before)) if r not in kept)
    update = _update(run, c, at, c.kind, goal.text)
    accepted = ev.RevisionAccepted(
        at=at, by=c.by, n=run.head + 1, seq=update.seq, goal=goal, goal_hash=goal_hash(goal),
        affects=affected_scopes(run, goal, c.kind), changed=changed, kept=kept,
    )  # fmt: skip
    return (update, accepted)


def _pause(run: RunState, c: cmd.Pause, at: int) -> tuple[ev.Event, ...]:
    held = ev.RunHeld(at=at, by=c.by, hold="pause", scopes=tuple(run.gates))
    return (_update(run, c, at, UpdateKind.PAUSE), held)


def _resume(run: RunState, c: cmd.Resume, at: int) -> tuple[ev.Event, ...]:
    scopes = tuple(s for s, gate in run.gates.items() if "pause" in gate.holds)
    return (_update(run, c, at, UpdateKind.RESUME), ev.RunReleased(at=at, by=c.by, hold="pause", scopes=scopes))


def _cancel(run: RunState, c: cmd.Cancel, at: int) -> tuple[ev.Event, ...]:
    update = _update(run, c, at, UpdateKind.CANCEL)
    return (update, ev.RunCancelled(at=at, by=c.by, seq=update.seq))


def _note_pause(run: RunState, c: cmd.Pause, at: int) -> tuple[ev.Event, ...]:
    return (_update(run, c, at, UpdateKind.PAUSE),)


def _note_cancel(run: RunState, c: cmd.Cancel, at: int) -> tuple[ev.Event, ...]:
    return (_update(run, c, at, UpdateKind.CANCEL),)


def _finish_as(end: RunPhase, summary: str) -> Any:
    def finish(run: RunState, c: cmd.Finish, at: int) -> tuple[ev.Event, ...]:
        return (ev.RunFinished(at=at, by=c.by, phase=end.value, summary=summary, epoch=c.epoch),)

    finish.__name__ = f"end as {end.value}"
    return finish


# --- details ---------------------------------------------------------------------------------------------------------


def _after_start(run: RunState, c: cmd.Start) -> dict[str, Any]:
    return {"in_force": 1}


def _after_revision(run: RunState, c: cmd.Revise) -> dict[str, Any]:
    return {"in_force": run.head + 1, "before": run.head, "affects": affected_scopes(run, next_goal(run, c), c.kind)}


def _in_force(run: RunState, c: Any) -> dict[str, Any]:
    return {"in_force": run.head, "phase": phase(run).value}


def _answer_again(run: RunState, c: Any) -> dict[str, Any]:
    return {**_in_force(run, c), **run.requests[c.request_id].answer}


def _goal_faults(run: RunState, c: cmd.Start) -> dict[str, Any]:
    return {"faults": _start_faults(c)}


def _revision_faults(run: RunState, c: cmd.Revise) -> dict[str, Any]:
    return {"faults": revision_faults(run, c), **_in_force(run, c)}


# --- the tables ------------------------------------------------------------------------------------------------------


def _phase_of(run: RunState, command: Any) -> str:
    return phase(run).value


def _request_rows(command: type[cmd.Command], states: tuple[RunPhase, ...]) -> tuple[Row, ...]:
    return (
        Row(states=states, on=command, guard=request_seen, says=Answer.REPEATED, accepted=True, detail=_answer_again),
        Row(states=states, on=command, guard=request_reused, says=Answer.REUSED_ID, detail=_in_force),
    )


def _update_rows(command: type[cmd.Command]) -> tuple[Row, ...]:
    return (
        *_request_rows(command, _EXISTING),
        Row(states=(P.NONE,), on=command, says=Answer.NO_SUCH_RUN),
        Row(states=_ENDED, on=command, says=Answer.RUN_ENDED, detail=_in_force),
        Row(states=(*_LIVE, *_STOPPING), on=command, guard=another_in_force, says=Answer.CONFLICT, detail=_in_force),
    )


RUN = Machine(
    name="run",
    states=tuple(P),
    commands={
        cmd.Start: "a person starts a run",
        cmd.Revise: "a person corrects or replaces the goal",
        cmd.Pause: "a person pauses",
        cmd.Resume: "a person resumes",
        cmd.Cancel: "a person cancels",
        cmd.Finish: "the conductor sees nothing left to do",
    },
    state_of=_phase_of,
    rows=(
        Row(states=(P.NONE,), on=cmd.Start, guard=goal_is_faulty, says=Answer.INVALID, detail=_goal_faults),
        Row(states=(P.NONE,), on=cmd.Start, do=_start, next=P.RUNNING, says=Answer.ACCEPTED, accepted=True,
            detail=_after_start, records="revision 1, gates open"),
        *_request_rows(cmd.Start, _EXISTING),
        Row(states=_EXISTING, on=cmd.Start, says=Answer.REUSED_ID, detail=_in_force),
        *_update_rows(cmd.Revise),
        Row(states=_STOPPING, on=cmd.Revise, says=Answer.RUN_ENDED, detail=_in_force),
        Row(states=_LIVE, on=cmd.Revise, guard=revision_is_faulty, says=Answer.INVALID, detail=_revision_faults),
        Row(states=_LIVE, on=cmd.Revise, do=_revise, next="redirecting, or blocked by what is unknown",
            says=Answer.ACCEPTED, accepted=True,
            detail=_after_revision,
            records="revision n; gates closed; what was not sent revoked; what was sent and children marked"),
        *_update_rows(cmd.Pause),
        Row(states=_STOPPING, on=cmd.Pause, says=Answer.RUN_ENDED, detail=_in_force),
        Row(states=_LIVE, on=cmd.Pause, guard=held_by_pause, do=_note_pause, says=Answer.ALREADY, accepted=True,
            detail=_in_force),
        Row(states=_LIVE, on=cmd.Pause, do=_pause, next="paused, once no gate is closed", says=Answer.ACCEPTED,
            accepted=True, detail=_in_force, records="gates held; what was not sent revoked"),
        *_update_rows(cmd.Resume),
        Row(states=_STOPPING, on=cmd.Resume, says=Answer.RUN_ENDED, detail=_in_force),
        Row(states=_LIVE, on=cmd.Resume, guard=not_held, says=Answer.WRONG_STATE, detail=_in_force),
        Row(states=_LIVE, on=cmd.Resume, do=_resume, next="as before the pause", says=Answer.ACCEPTED, accepted=True,
            detail=_in_force, records="gates released, same revision"),
        *_update_rows(cmd.Cancel),
        Row(states=_STOPPING, on=cmd.Cancel, do=_note_cancel, says=Answer.ALREADY, accepted=True, detail=_in_force),
        Row(states=_LIVE, on=cmd.Cancel, do=_cancel, next=P.CANCELLING, says=Answer.ACCEPTED, accepted=True,
            detail=_in_force, records="gates sealed; what was not sent revoked; what was sent and children marked"),
        Row(states=(P.RUNNING, P.BLOCKED), on=cmd.Finish, guard=all_done,
            do=_finish_as(P.COMPLETED, "every scope has its result"), next=P.COMPLETED, says=Answer.ACCEPTED,
            accepted=True),
        Row(states=(P.RUNNING, P.BLOCKED), on=cmd.Finish, guard=given_up,
            do=_finish_as(P.FAILED, "a child failed or was lost too often"), next=P.FAILED, says=Answer.ACCEPTED,
            accepted=True),
        Row(states=_STOPPING, on=cmd.Finish, guard=all_stopped,
            do=_finish_as(P.CANCELLED, "everything that was sent has an outcome"), next=P.CANCELLED,
            says=Answer.ACCEPTED, accepted=True),
        Row(states=(P.CANCELLING,), on=cmd.Finish, guard=stopping_took_too_long,
            do=_finish_as(P.CANCELLED_UNRESOLVED, "cancelled; something stays unresolved and is listed"),
            next=P.CANCELLED_UNRESOLVED, says=Answer.ACCEPTED, accepted=True),
        Row(states=(P.NONE, P.PAUSED, P.REDIRECTING, P.RUNNING, P.BLOCKED, *_STOPPING, *_ENDED), on=cmd.Finish,
            says=Answer.BLOCKED, detail=_in_force),
    ),
)  # fmt: skip
