"""Rows of the run: requests, revisions in order, cancelling, finishing, phases (protocol table 2.1)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from admission import commands as cmd
from admission import events as ev
from admission.rules import compare_of
from admission.storage import Compare
from admission.table import Answer, Decision
from admission.vocabulary import (
    AttemptState,
    Basis,
    Blocks,
    ChildMode,
    ChildState,
    ContractClass,
    Finding,
    GateState,
    Method,
    RunPhase,
    TaskState,
    TryOutcome,
    UpdateKind,
    Verdict,
)
from tests.unit.rules_stage import RUN, Stage, facts, goal, plan

CLOSED, OPEN, HELD, SEALED = GateState.CLOSED, GateState.OPEN, GateState.HELD, GateState.SEALED


def _start(**more: Any) -> cmd.Start:
    fields: dict[str, Any] = {"run": RUN, "principal": "ann", "request_id": "r", "goal": goal("a"), **more}
    return cmd.Start(**fields)


def _correct(*scopes: str, request_id: str = "r", **more: Any) -> cmd.Revise:
    changed = ev.Goal(text="", plan={s: plan(brief="other") for s in scopes})
    return cmd.Revise(kind=UpdateKind.CORRECT, request_id=request_id, goal=changed, by="ann", **more)


def _states(stage: Stage) -> dict[str, GateState]:
    return {scope: gate.state for scope, gate in stage.run.gates.items()}


# --- starting and requests -------------------------------------------------------------------------------------------


def test_start_puts_revision_1_in_force_with_open_gates() -> None:
    stage = Stage(goal("a", "b/c"))
    assert _states(stage) == {"a": OPEN, "b/c": OPEN}
    assert (stage.run.head, stage.phase()) == (1, RunPhase.RUNNING)


def test_start_again_with_the_same_content_changes_nothing() -> None:
    stage = Stage()
    stage.ok(_start())
    before = stage.run.version
    again = stage.do(_start(by="somebody else"))
    assert (again.verdict, again.accepted, again.events) == (Answer.REPEATED, True, ())
    assert stage.run.version == before


@pytest.mark.parametrize(
    "other", [{"goal": goal("b")}, {"request_id": "r2"}, {"principal": "bob"}], ids=["goal", "request", "principal"]
)
def test_a_run_is_started_once(other: dict[str, Any]) -> None:
    stage = Stage()
    stage.ok(_start())
    answer = stage.do(_start(**other))
    assert (answer.verdict, answer.accepted, answer.events) == (Answer.REUSED_ID, False, ())


FAULTY_GOALS = {
    "has no scope": goal(),
    "names no agent": goal(a=plan("")),
    "there is no scope 'x'": goal(a=plan(needs=("x",))),
    "must not form a circle": goal(a=plan(needs=("b:r",)), b=plan(needs=("a",))),
    "needs 'a'": goal(a=plan(needs=("a",))),
    "has an empty part": ev.Goal(text="t", plan={"a//b": plan()}),
    "is used twice": ev.Goal(
        text="t", plan={"a": plan()}, requirements=(ev.Requirement(id="1", text="x"), ev.Requirement(id="1", text="y"))
    ),
    "budget": goal("a", budget=-1),
    "occurrence": goal(a=plan(actions=(ev.PlannedAction(service="s", action="x", arguments={}, occurrence=0),))),
}


@pytest.mark.parametrize("sentence", FAULTY_GOALS)
def test_a_goal_that_cannot_be_worked_on_is_refused_with_the_reason(sentence: str) -> None:
    stage = Stage()
    answer = stage.do(_start(goal=FAULTY_GOALS[sentence]))
    assert (answer.verdict, answer.events) == (Answer.INVALID, ())
    assert any(sentence in fault for fault in answer.detail["faults"])


@pytest.mark.parametrize(
    "command", [_correct("a"), cmd.Pause(request_id="r"), cmd.Resume(request_id="r"), cmd.Cancel(request_id="r")]
)
def test_a_run_that_does_not_exist_is_named_so(command: cmd.Command) -> None:
    assert Stage().do(command).verdict is Answer.NO_SUCH_RUN


def test_a_request_replays_its_own_answer_however_late() -> None:
    stage = Stage(goal("a", "b"))
    command = _correct("a")
    stage.ok(command)
    stage.change("b")
    stage.cancel()
    version = stage.run.version
    again = stage.do(command)
    assert (again.verdict, again.accepted, again.events) == (Answer.REPEATED, True, ())
    assert stage.run.version == version
    assert again.detail["revision"] == 2, "the answer names the revision that this request made"


def test_replies_to_one_request_are_equal() -> None:
    stage = Stage(goal("a", "b"))
    command = _correct("a")
    stage.ok(command)
    first = stage.do(command).detail["revision"]
    stage.change("b")
    assert stage.do(command).detail["revision"] == first == 2


def test_an_accepted_revision_is_answered_with_its_own_number() -> None:
    assert Stage(goal("a")).do(_correct("a")).detail["in_force"] == 2


@pytest.mark.parametrize("first", [cmd.Pause, cmd.Cancel])
@pytest.mark.parametrize("second", [cmd.Pause, cmd.Resume, cmd.Cancel])
def test_a_request_id_used_for_another_wish_is_refused(first: type[Any], second: type[Any]) -> None:
    stage = Stage(goal("a"))
    stage.ok(first(request_id="r"))
    answer = stage.do(second(request_id="r"))
    if first is second:
        assert answer.verdict is Answer.REPEATED
    else:
        assert (answer.verdict, answer.accepted, answer.events) == (Answer.REUSED_ID, False, ())


def test_the_starts_request_id_is_used_up_too() -> None:
    assert Stage(goal("a")).do(cmd.Pause(request_id="start")).verdict is Answer.REUSED_ID


def test_a_pause_resent_after_a_resume_does_not_pause_again() -> None:
    stage = Stage(goal("a"))
    stage.pause()
    late = cmd.Pause(request_id="late")
    first = stage.do(late)
    stage.resume()
    again = stage.do(late)
    if first.accepted:  # what was answered "accepted" has been carried out and is over
        assert again.events == ()
        assert stage.phase() is RunPhase.RUNNING


@pytest.mark.parametrize(
    "command",
    [
        _correct("a", expected_revision=7),
        cmd.Pause(request_id="r", expected_revision=7),
        cmd.Resume(request_id="r", expected_revision=7),
        cmd.Cancel(request_id="r", expected_revision=7),
    ],
    ids=lambda c: type(c).__name__,
)
def test_a_conflict_names_the_revision_in_force(command: cmd.Command) -> None:
    stage = Stage(goal("a"))
    stage.change("a")
    answer = stage.do(command)
    assert (answer.verdict, answer.detail["in_force"], answer.events) == (Answer.CONFLICT, 2, ())
    stage.ok(msgspec.structs.replace(command, expected_revision=2)) if not isinstance(command, cmd.Resume) else None


def test_people_are_compared_on_control_facts_on_nothing_and_the_rest_on_the_log() -> None:
    people = (_correct("a"), cmd.Pause(request_id="r"), cmd.Resume(request_id="r"), cmd.Cancel(request_id="r"))
    opening = cmd.OpenScope(scope="a", revision=1, epoch=1)  # a busy ledger elsewhere must not starve it
    assert {compare_of(c) for c in (*people, opening)} == {Compare.CONTROL}
    said = cmd.RecordTry(attempt="e", n=1, outcome=TryOutcome.OK, basis=Basis.REPLY)
    seen = cmd.RecordSeen(child="c", state=TaskState.WORKING)
    stop = cmd.RecordStop(child="c", refused=True, detail="")
    assert {compare_of(c) for c in (said, seen, stop)} == {Compare.NONE}
    reads_the_ledger = (
        cmd.Finish(epoch=1), cmd.GrantTry(attempt="e", n=2, gateway="g"),
        cmd.Classify(attempt="e", finding=Finding.UNKNOWN, basis=Basis.GAVE_UP, epoch=1),
        cmd.PlanChild(scope="a", revision=1, mode=ChildMode.MEDIATED), cmd.DeclareLost(child="c", detail=""),
        cmd.StartReconcile(attempt="e", method=Method.VOID, epoch=1),
        cmd.Resolve(attempt="e", happened=True, request_id="r", reason="", evidence=""),
        cmd.FileResult(child="c", task="t", stamp=None), cmd.StartLaunch(child="c"),
    )  # fmt: skip
    assert {compare_of(c) for c in reads_the_ledger} == {Compare.LOG}
    stage = Stage(goal("a"))
    assert compare_of(stage.asking(stage.running("a"))) is Compare.LOG


def test_a_control_commit_holds_control_events_only() -> None:
    """A redirect may be appended to a ledger it has not read: so it must not write what it would have to read."""
    stage = Stage(goal("a", "b"))
    stage.sent(stage.running("a"))
    for command in (_correct("a"), cmd.Pause(request_id="p"), cmd.Resume(request_id="q"), cmd.Cancel(request_id="c")):
        before = stage.run.control
        events = stage.ok(command).events
        assert all(ev.is_control(e) for e in events)
        assert stage.run.control == before + len(events)


# --- cancelling ------------------------------------------------------------------------------------------------------


def test_cancel_seals_for_ever_and_what_was_sent_is_followed_to_its_outcome() -> None:
    stage = Stage(goal("a", "b"))
    child = stage.running("a")
    sent = stage.sent(child)
    stage.cancel()
    assert (set(_states(stage).values()), stage.phase()) == ({SEALED}, RunPhase.CANCELLING)
    assert stage.ask(child, "o2").verdict is Verdict.SUPERSEDED
    assert stage.grant(sent, 2).accepted is False
    assert stage.do(cmd.Finish(epoch=1)).verdict is Answer.BLOCKED
    assert stage.do(_correct("a", request_id="late")).verdict is Answer.RUN_ENDED
    assert stage.do(cmd.Pause(request_id="late")).verdict is Answer.RUN_ENDED
    stage.record(sent, TryOutcome.OK)
    stage.seen(child, TaskState.CANCELED)
    stage.ok(cmd.Finish(epoch=1))
    assert (stage.phase(), stage.attempt(sent).state) == (RunPhase.CANCELLED, AttemptState.SUCCEEDED)


def test_cancelled_with_something_open_says_so_and_ends_when_it_is_settled() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    unknown = stage.unknown(child)
    stage.cancel()
    stage.seen(child, TaskState.CANCELED)
    assert stage.do(cmd.Finish(epoch=1)).verdict is Answer.BLOCKED, "it is given its time"
    stage.now += 60_000
    stage.ok(cmd.Finish(epoch=1))
    assert stage.phase() is RunPhase.CANCELLED_UNRESOLVED
    stage.ok(cmd.Resolve(attempt=unknown.id, happened=True, request_id="x", reason="seen", evidence="mail", by="op"))
    stage.ok(cmd.Finish(epoch=1))
    assert stage.phase() is RunPhase.CANCELLED


def test_a_lost_autonomous_agent_was_not_seen_to_end() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a", ChildMode.AUTONOMOUS)
    stage.cancel()
    stage.ok(cmd.DeclareLost(child=child.id, detail="task not found"))
    stage.now += 60_000
    stage.do(cmd.Finish(epoch=1))
    assert stage.phase() is not RunPhase.CANCELLED, "it may be acting still"


# --- finishing -------------------------------------------------------------------------------------------------------


def test_finish_needs_every_result_and_nothing_open() -> None:
    stage = Stage(goal("a", "b"))
    stage.finished("a")
    assert stage.do(cmd.Finish(epoch=1)).verdict is Answer.BLOCKED
    child = stage.running("b")
    sent = stage.sent(child)
    stage.seen(child, TaskState.COMPLETED)
    stage.file(child)
    assert stage.do(cmd.Finish(epoch=1)).verdict is Answer.BLOCKED, "an attempt is open"
    stage.record(sent, TryOutcome.OK)
    stage.ok(cmd.Finish(epoch=1))
    assert stage.phase() is RunPhase.COMPLETED


@pytest.mark.parametrize("first", ["finish", "revise"])
def test_a_redirect_that_races_completion_is_before_it_or_refused(first: str) -> None:
    stage = Stage(goal("a"))
    stage.finished("a")
    answers: dict[str, Decision] = {}
    for name in (first, "revise" if first == "finish" else "finish"):
        answers[name] = stage.do(cmd.Finish(epoch=1) if name == "finish" else _correct("a"))
    assert answers[first].accepted
    if first == "finish":
        assert answers["revise"].verdict is Answer.RUN_ENDED
        assert (stage.phase(), stage.run.head) == (RunPhase.COMPLETED, 1)
    else:
        assert answers["finish"].verdict is Answer.BLOCKED
        assert (stage.phase(), stage.run.head) == (RunPhase.REDIRECTING, 2)


def test_a_finished_run_admits_nothing_even_for_a_child_that_was_never_seen_to_end() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.file(child)
    if stage.do(cmd.Finish(epoch=1)).accepted:
        assert not stage.ask(child).accepted
        assert not stage.do(cmd.PlanChild(scope="a", revision=1, mode=ChildMode.MEDIATED)).accepted


def test_what_failed_too_often_ends_the_run_as_failed() -> None:
    stage = Stage(goal("a"))
    for _ in range(4):
        assert stage.do(cmd.Finish(epoch=1)).verdict is Answer.BLOCKED
        stage.seen(stage.running("a"), TaskState.FAILED)
    assert stage.phase() is RunPhase.BLOCKED
    stage.ok(cmd.Finish(epoch=1))
    assert stage.phase() is RunPhase.FAILED


def test_a_revision_is_not_thrown_away_for_the_failures_of_the_one_before() -> None:
    stage = Stage(goal("a", "b"))
    for _ in range(4):
        stage.seen(stage.running("a"), TaskState.FAILED)
    lost = stage.running("b", ChildMode.AUTONOMOUS)
    stage.change("a", "b")
    stage.ok(cmd.DeclareLost(child=lost.id, detail="gone"))
    assert not stage.do(cmd.Finish(epoch=1)).accepted
    assert stage.phase() is RunPhase.BLOCKED


# --- phases ----------------------------------------------------------------------------------------------------------


def test_an_unknown_that_blocks_only_its_slot_leaves_the_run_running_while_its_child_works() -> None:
    stage = Stage(goal("a", "b"))
    working = stage.running("a")
    stage.unknown(working, contract=facts(ContractClass.OPAQUE, unknown_blocks=Blocks.SLOT, dedupes=False))
    assert (stage.run.is_current(working), stage.phase()) == (True, RunPhase.RUNNING)
    stage.change("b")
    assert stage.phase() is RunPhase.REDIRECTING
    stage.open("b")
    stage.seen(working, TaskState.COMPLETED)
    assert stage.phase() is RunPhase.BLOCKED, "nothing moves it any more but a person"


def test_an_unknown_that_blocks_its_scope_is_shown_as_blocked() -> None:
    stage = Stage(goal("a", "b"))
    stage.unknown(stage.running("a"))
    assert stage.phase() is RunPhase.BLOCKED
    stage.change("a")
    assert stage.phase() is RunPhase.BLOCKED


def test_a_contradiction_blocks_the_run() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    attempt = stage.sent(child)
    stage.voided(attempt)
    stage.record(attempt, TryOutcome.OK)
    stage.seen(child, TaskState.COMPLETED)
    stage.file(child)
    assert stage.phase() is RunPhase.BLOCKED
    assert not stage.do(cmd.Finish(epoch=1)).accepted, "it waits for a person"


def test_a_need_that_can_never_be_met_is_shown() -> None:
    stage = Stage(goal("a", b=plan(needs=("a:report",))))
    stage.finished("a")
    assert ChildState.PLANNED not in {c.state for c in stage.run.children.values()}
    assert stage.phase() is not RunPhase.RUNNING or stage.agenda(), "nothing to do, nothing shown: stuck in silence"
