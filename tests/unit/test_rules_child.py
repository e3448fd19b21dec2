"""Rows of children: planning, launching, claiming, stopping, observing, losing, results (protocol table 2.3)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from admission import commands as cmd
from admission import events as ev
from admission.standing import RELAUNCHES_MAX
from admission.table import Answer
from admission.vocabulary import (
    ChildMode,
    ChildState,
    Claim,
    Disposition,
    RunPhase,
    TaskState,
    TryOutcome,
    Verdict,
    child_id_for,
)
from tests.unit.rules_stage import RUN, Stage, claim, goal, plan, stamp_of

C = ChildState
TERMINAL = (TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELED, TaskState.REJECTED)
REPORT = ev.ArtifactRef(name="report", blob="0" * 64, size_bytes=1)


def _plan(scope: str = "a", revision: int = 1) -> cmd.PlanChild:
    return cmd.PlanChild(scope=scope, revision=revision, mode=ChildMode.MEDIATED)


# --- planning and launching ------------------------------------------------------------------------------------------


def test_a_child_is_written_down_under_a_derived_id_before_any_message_leaves() -> None:
    stage = Stage(goal("a"))
    child = stage.planned("a")
    assert (child.state, child.id) == (C.PLANNED, child_id_for(RUN, "a", 1, 1))
    assert child.goal_hash == stage.run.revisions[1].goal_hash
    assert stage.do(_plan()).verdict is Answer.ALREADY


@pytest.mark.parametrize(
    "spoil", ["pause", "revise", "cancel", "old revision", "no scope", "held prefix", "closed prefix"]
)
def test_a_child_is_planned_only_behind_an_open_gate(spoil: str) -> None:
    stage = Stage(goal("a", "p/q", p=plan()))
    command = _plan()
    if spoil in ("pause", "held prefix"):
        stage.pause()
        command = _plan("p/q") if spoil == "held prefix" else command
    elif spoil == "revise":
        stage.change("a")
    elif spoil == "cancel":
        stage.cancel()
    elif spoil == "old revision":
        stage.change("a")
        stage.open("a")
    elif spoil == "closed prefix":
        stage.change("p")
        stage.open("p/q")
        command = _plan("p/q", 2)
    answer = stage.do(_plan("nowhere") if spoil == "no scope" else command)
    assert (answer.verdict, answer.events) == (Answer.NOT_FOUND if spoil == "no scope" else Answer.CLOSED, ())


@pytest.mark.parametrize(
    ("need", "artifacts", "met"), [("a", (), True), ("a:report", (), False), ("a:report", (REPORT,), True)]
)
def test_a_scope_waits_for_what_it_needs(need: str, artifacts: tuple[ev.ArtifactRef, ...], met: bool) -> None:
    stage = Stage(goal("a", b=plan(needs=(need,))))
    blocked = stage.do(_plan("b"))
    assert (blocked.verdict, blocked.detail["needs"]) == (Answer.BLOCKED, [need])
    child = stage.running("a")
    stage.seen(child, TaskState.COMPLETED)
    stage.file(child, artifacts=artifacts)
    assert stage.do(_plan("b")).accepted is met


def test_the_launch_is_written_before_it_leaves_and_may_be_repeated_for_the_same_child() -> None:
    stage = Stage(goal("a"))
    child = stage.planned("a")
    for n in (1, 2, 3):
        stage.ok(cmd.StartLaunch(child=child.id))
        assert (stage.child(child).state, stage.child(child).launches) == (C.LAUNCHING, n)
    stage.ok(cmd.BindChild(child=child.id, task="t"))
    assert stage.do(cmd.StartLaunch(child=child.id)).verdict is Answer.ALREADY


@pytest.mark.parametrize("mode", ChildMode)
@pytest.mark.parametrize("change", ["pause", "revise", "cancel"])
def test_nothing_is_launched_behind_a_gate_that_is_not_open(mode: ChildMode, change: str) -> None:
    stage = Stage(goal("a"))
    child = stage.planned("a", mode)
    {"pause": stage.pause, "revise": lambda: stage.change("a"), "cancel": stage.cancel}[change]()
    assert not stage.do(cmd.StartLaunch(child=child.id)).accepted
    if change == "pause":
        stage.resume()
        stage.ok(cmd.StartLaunch(child=child.id))


# --- binding and claiming --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["bind x", "claim x", "bind y", "claim y"])), ids=" ".join
)
def test_the_first_task_to_bind_or_claim_is_the_child_and_the_other_is_a_duplicate(order: tuple[str, ...]) -> None:
    stage = Stage(goal("a"))
    child = stage.launched("a")
    winner = order[0][-1]
    for step in order:
        what, task = step.split()
        command = cmd.BindChild(child=child.id, task=task) if what == "bind" else claim(child, task)
        answer = stage.do(command)
        if task != winner:
            assert (answer.verdict, answer.accepted, answer.events) == (Claim.DUPLICATE, False, ())
        else:
            assert answer.accepted
    row = stage.child(child)
    assert (row.task, row.claimed, row.state) == (winner, True, C.RUNNING)


def test_a_restarted_worker_keeps_its_claim() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    again = stage.do(claim(child, child.task))
    assert (again.verdict, again.accepted, again.events) == (Claim.CLAIMED, True, ())


@pytest.mark.parametrize(
    "reason", ["revised", "cancelled", "stopped", "ended", "lost", "other scope", "other revision", "unknown"]
)
def test_a_claim_that_the_log_does_not_back_is_superseded(reason: str) -> None:
    stage = Stage(goal("a", "b"))
    child = stage.launched("a")
    command = claim(child, "t")
    match reason:
        case "revised":
            stage.change("a")
        case "cancelled":
            stage.cancel()
        case "stopped":
            stage.ok(cmd.BindChild(child=child.id, task="t"))
            stage.ok(cmd.RequestStop(child=child.id, reason="x"))
        case "ended":
            stage.seen(child, TaskState.FAILED)
        case "lost":
            stage.ok(cmd.DeclareLost(child=child.id, detail="x"))
        case "other scope":
            command = cmd.ClaimChild(child=child.id, scope="b", revision=1, task="t")
        case "other revision":
            command = cmd.ClaimChild(child=child.id, scope="a", revision=2, task="t")
        case _:
            command = cmd.ClaimChild(child="nobody", scope="a", revision=1, task="t")
    answer = stage.do(command)
    assert (answer.verdict, answer.accepted, answer.events) == (Claim.SUPERSEDED, False, ())


def test_an_untouched_scopes_child_stays_current_and_its_result_is_adopted() -> None:
    stage = Stage(goal("a", "b"))
    other = stage.running("b")
    stage.change("a")
    assert stage.run.is_current(other)
    assert stage.done(other).state.value == "succeeded"
    stage.open("a")
    stage.seen(other, TaskState.COMPLETED)
    assert stage.file(other).verdict is Disposition.ADOPTED
    assert stage.run.scope_done("b")


# --- stopping --------------------------------------------------------------------------------------------------------


def test_a_stop_is_written_before_it_is_asked_and_says_nothing_about_stopping() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.change("a")
    stage.ok(cmd.RequestStop(child=child.id, reason="superseded"))
    row = stage.child(child)
    assert (row.state, row.stops, row.settled) == (C.STOP_REQUESTED, 1, False)
    stage.seen(child, TaskState.WORKING)
    assert stage.child(child).state is C.STOP_REQUESTED


@pytest.mark.parametrize(
    ("state", "ends"),
    [
        (TaskState.CANCELED, C.STOP_CONFIRMED), (TaskState.COMPLETED, C.ENDED), (TaskState.FAILED, C.ENDED),
        (TaskState.REJECTED, C.ENDED), (TaskState.WORKING, C.STOP_REQUESTED),
        (TaskState.INPUT_REQUIRED, C.STOP_REQUESTED),
    ],
)  # fmt: skip
def test_only_an_observed_terminal_state_ends_a_stop(state: TaskState, ends: ChildState) -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.ok(cmd.RequestStop(child=child.id, reason="x"))
    stage.seen(child, state)
    assert stage.child(child).state is ends


@pytest.mark.parametrize(("refused", "becomes"), [(True, C.STOP_REFUSED), (False, C.UNREACHABLE)])
def test_a_refused_or_unheard_cancel_is_no_proof(refused: bool, becomes: ChildState) -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    assert stage.do(cmd.RecordStop(child=child.id, refused=refused, detail="x")).verdict is Answer.ALREADY
    stage.ok(cmd.RequestStop(child=child.id, reason="x"))
    answer = cmd.RecordStop(child=child.id, refused=refused, detail="x")
    stage.ok(answer)
    assert (stage.child(child).state, stage.child(child).settled) == (becomes, False)
    assert stage.do(answer).verdict is Answer.ALREADY
    stage.ok(cmd.RequestStop(child=child.id, reason="again"))
    stage.seen(child, TaskState.CANCELED)
    assert stage.child(child).state is C.STOP_CONFIRMED


def test_a_task_that_nobody_knows_cannot_be_asked_to_stop() -> None:
    stage = Stage(goal("a"))
    child = stage.launched("a")
    stage.change("a")
    assert not stage.do(cmd.RequestStop(child=child.id, reason="x")).accepted
    assert stage.child(child).state is C.LAUNCHING


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(TERMINAL, 2)))
def test_the_first_terminal_state_is_final(first: TaskState, second: TaskState) -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.seen(child, first)
    row = stage.child(child)
    answer = stage.seen(child, second)
    assert (answer.verdict, answer.events) == (Answer.ALREADY, ())
    stage.fold(ev.ChildSeen(at=stage.now, child=child.id, state=second))  # decided on a copy that was behind
    assert stage.child(child) == row


# --- losing and relaunching ------------------------------------------------------------------------------------------


def test_a_lost_child_is_not_current_and_another_one_follows_it() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.ok(cmd.DeclareLost(child=child.id, detail="gone"))
    assert stage.ask(child).verdict is Verdict.NOT_CURRENT
    follower = stage.running("a")
    assert (follower.n, follower.follows, follower.follows_state) == (2, child.id, "lost")
    assert stage.child(child).succeeded_by == follower.id
    stage.seen(child, TaskState.COMPLETED)
    late = stage.file(child)
    assert (late.verdict, stage.child(child).state) == (Disposition.DROPPED, C.ENDED)
    assert stage.run.is_current(follower)


def test_relaunches_are_limited_and_then_a_person_has_to_look() -> None:
    stage = Stage(goal("a"))
    for _ in range(RELAUNCHES_MAX + 1):
        stage.seen(stage.running("a"), TaskState.FAILED)
    answer = stage.do(_plan())
    assert (answer.verdict, stage.phase()) == (Answer.BLOCKED, RunPhase.BLOCKED)
    stage.change("a")
    stage.open("a")
    assert stage.planned("a").n == 1, "a new revision starts counting again"


def test_a_child_that_was_lost_and_then_seen_failed_counts_once() -> None:
    counts = []
    for lost_first in (True, False):
        stage = Stage(goal("a"))
        child = stage.running("a")
        lost = ev.ChildLost(at=stage.now, child=child.id, detail="x")
        seen = ev.ChildSeen(at=stage.now, child=child.id, state=TaskState.FAILED)
        stage.fold(*((lost, seen) if lost_first else (seen, lost)))
        counts.append((stage.run.relaunches["a"], stage.child(child).state))
    assert counts == [(1, C.ENDED)] * 2


# --- results ---------------------------------------------------------------------------------------------------------


def test_a_result_is_adopted_when_its_stamp_is_what_the_log_says_now() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.seen(child, TaskState.COMPLETED)
    answer = stage.file(child, artifacts=(REPORT,), summary={"outcome": "complete"})
    assert answer.verdict is Disposition.ADOPTED
    assert stage.run.results[stage.run.adopted["a"]].artifacts == (REPORT,)
    again = stage.file(child)
    assert (again.verdict, again.events) == (Answer.ALREADY, ())


WRONG_STAMPS: dict[str, dict[str, Any]] = {
    "run": {"run": "other"}, "scope": {"scope": "b"}, "child": {"child": "c-other"}, "revision": {"revision": 2},
    "goal": {"goal_hash": "f" * 64},
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG_STAMPS)
def test_a_result_that_answers_something_else_is_dropped(field: str) -> None:
    stage = Stage(goal("a", "b"))
    child = stage.running("a")
    stage.seen(child, TaskState.COMPLETED)
    answer = stage.file(child, stamp=stamp_of(child, **WRONG_STAMPS[field]), artifacts=(REPORT,))
    assert (answer.verdict, bool(answer.detail["reason"])) == (Disposition.DROPPED, True)
    assert (stage.run.adopted, stage.run.artifacts) == ({}, {})
    assert stage.run.results[stage.child(child).result].artifacts == (REPORT,), "kept as evidence"


@pytest.mark.parametrize("why", ["no stamp", "never claimed", "superseded", "retargeted", "cancelled", "taken over"])
def test_a_late_or_foreign_result_is_dropped_with_the_reason(why: str) -> None:
    stage = Stage(goal("a"))
    child = stage.launched("a") if why == "never claimed" else stage.running("a")
    more: dict[str, Any] = {}
    match why:
        case "no stamp":
            more = {"stamp": None}
        case "never claimed":
            stage.ok(cmd.BindChild(child=child.id, task="t"))
        case "superseded":
            stage.change("a")
        case "retargeted":
            stage.change("a")
            stage.open("a")
        case "cancelled":
            stage.cancel()
        case _:
            stage.ok(cmd.DeclareLost(child=child.id, detail="x"))
            stage.running("a")
    stage.seen(child, TaskState.COMPLETED)
    answer = stage.file(child, **more)
    assert answer.verdict is Disposition.DROPPED
    assert stage.run.adopted == {}
    assert not stage.run.scope_done("a")


def test_a_result_is_parked_while_held_and_decided_at_resume() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.pause()
    stage.seen(child, TaskState.COMPLETED)
    assert stage.file(child).verdict is Disposition.PARKED
    assert stage.file(child).verdict is Answer.ALREADY
    assert not stage.run.scope_done("a")
    stage.resume()
    assert stage.file(child).verdict is Disposition.ADOPTED


def test_a_parked_result_is_dropped_by_a_revision_and_never_adopted_later() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.pause()
    stage.seen(child, TaskState.COMPLETED)
    stage.file(child)
    stage.change("a")
    assert stage.run.results[stage.child(child).result].disposition is Disposition.DROPPED
    stage.open("a")
    stage.resume()
    assert stage.file(child).verdict is Answer.ALREADY
    assert stage.run.adopted == {}


def test_a_duplicates_result_does_not_take_the_place_of_the_childs_own() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    assert stage.file(child, task="task-of-a-duplicate").verdict is Disposition.DROPPED
    stage.seen(child, TaskState.COMPLETED)
    assert stage.file(child).verdict is Disposition.ADOPTED


def test_a_dropped_result_lets_another_child_follow_but_not_for_ever() -> None:
    stage = Stage(goal("a"))
    for _ in range(RELAUNCHES_MAX + 1):
        child = stage.running("a")
        stage.seen(child, TaskState.COMPLETED)
        stage.file(child, stamp=None)
    assert stage.do(_plan()).verdict is Answer.BLOCKED


def test_an_agent_without_our_extension_is_believed_only_before_any_redirect() -> None:
    stage = Stage(goal("a"))
    first = stage.running("a", ChildMode.AUTONOMOUS)
    stage.seen(first, TaskState.COMPLETED)
    assert stage.file(first, stamp=None).verdict is Disposition.ADOPTED
    stage.change("a")
    stage.open("a")
    second = stage.running("a", ChildMode.AUTONOMOUS)
    stage.seen(second, TaskState.COMPLETED)
    assert stage.file(second, stamp=None).verdict is Disposition.DROPPED


def test_what_a_child_left_open_and_did_not_happen_makes_its_scope_undone_again() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    attempt = stage.sent(child)
    stage.record(attempt, TryOutcome.IN_DOUBT)
    stage.seen(child, TaskState.COMPLETED)
    stage.file(child, summary={"outcome": "incomplete"})
    assert stage.run.scope_done("a")
    stage.voided(attempt)
    assert not stage.run.scope_done("a")
    assert stage.planned("a").n == 2


@pytest.mark.parametrize(
    "command",
    [
        cmd.StartLaunch(child="x"), cmd.BindChild(child="x", task="t"), cmd.RequestStop(child="x", reason=""),
        cmd.RecordStop(child="x", refused=True, detail=""), cmd.RecordSeen(child="x", state=TaskState.WORKING),
        cmd.DeclareLost(child="x", detail=""), cmd.FileResult(child="x", task="t", stamp=None),
    ],
    ids=lambda c: type(c).__name__,
)  # fmt: skip
def test_a_child_that_does_not_exist_is_named_so(command: cmd.Command) -> None:
    answer = Stage(goal("a")).do(command)
    assert (answer.verdict, answer.events) == (Answer.NOT_FOUND, ())
