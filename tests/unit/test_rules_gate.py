"""Rows of gates: what a revision closes and revokes, what opens a scope, what a hold holds (protocol table 2.2)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from admission import commands as cmd
from admission import events as ev
from admission.table import Answer
from admission.vocabulary import (
    AttemptState,
    Basis,
    Blocks,
    ChildMode,
    ContractClass,
    Finding,
    GateState,
    RunPhase,
    TaskState,
    TryOutcome,
    UpdateKind,
    Verdict,
    canonical,
    digest,
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


# --- revisions and gates ---------------------------------------------------------------------------------------------


def test_a_revision_closes_the_gate_revokes_what_was_not_sent_and_marks_what_was() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    sent = stage.sent(child, "o1")
    queued = stage.asking(child, "o2")
    admitted = stage.decide(queued).events[:-1]  # without its permit: as if something lay between the two
    stage.fold(*admitted)
    waiting = list(stage.run.attempts.values())[-1]
    assert waiting.state is AttemptState.ADMITTED
    reserved = stage.run.reserved
    answer = stage.change("a")
    assert [type(e) for e in answer.events] == [ev.UpdateRecorded, ev.RevisionAccepted]
    assert _states(stage) == {"a": CLOSED}
    revoked = stage.attempt(waiting)
    assert (revoked.state, revoked.basis, revoked.reconcile) == (AttemptState.REVOKED, Basis.NEVER_GRANTED, 0)
    assert waiting.slot not in stage.run.slots
    assert waiting.slot not in stage.run.generations, "a revoked attempt was never sent: its key is still fresh"
    assert stage.run.reserved == reserved - waiting.cost
    assert (stage.attempt(sent).state, stage.attempt(sent).reconcile) == (AttemptState.SENDING, 2)
    assert (stage.child(child).stop_wanted, stage.child(child).reconcile) == (True, 2)


def test_marks_go_only_with_the_outcome() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    sent = stage.sent(child)
    stage.change("a")
    stage.ok(cmd.RequestStop(child=child.id, reason="superseded"))
    stage.do(cmd.RecordStop(child=child.id, refused=True, detail="no"))
    stage.record(sent, TryOutcome.IN_DOUBT)
    assert (stage.attempt(sent).reconcile, stage.child(child).reconcile) == (2, 2)
    stage.voided(sent)
    stage.seen(child, TaskState.CANCELED)
    assert (stage.attempt(sent).reconcile, stage.child(child).reconcile) == (0, 0)


def test_a_planned_child_of_the_old_revision_is_never_launched() -> None:
    stage = Stage(goal("a"))
    child = stage.planned("a")
    stage.change("a")
    assert stage.child(child).settled
    assert stage.do(cmd.StartLaunch(child=child.id)).accepted is False


def test_a_partial_correction_affects_what_it_names_and_everything_downstream() -> None:
    stage = Stage(goal("a", "d", b=plan(needs=("a",)), c=plan(needs=("b:report",)), **{"a/x": plan()}))
    stage.change("a")
    assert _states(stage) == {"a": CLOSED, "a/x": CLOSED, "b": CLOSED, "c": CLOSED, "d": OPEN}
    assert stage.run.gates["d"].cur == 1
    assert stage.run.revisions[2].affects == tuple(s for s in stage.run.gates if s != "d")


def test_correcting_a_part_does_not_close_what_it_is_part_of() -> None:
    stage = Stage(goal("a", **{"a/x": plan()}))
    stage.change("a/x")
    assert _states(stage) == {"a": OPEN, "a/x": CLOSED}


def test_words_that_name_no_scope_touch_all_of_them() -> None:
    stage = Stage(goal("a", "b"))
    stage.revise(ev.Goal(text="something else"))
    assert set(_states(stage).values()) == {CLOSED}


def test_a_new_goal_touches_everything_and_new_scopes_start_closed() -> None:
    stage = Stage(goal("a"))
    stage.revise(goal("b", text="new"), kind=UpdateKind.REPLACE)
    assert _states(stage) == {"a": CLOSED, "b": CLOSED}
    stage.open("a")
    assert stage.run.goal_of("a") is None, "the gate of a dropped scope opens for nothing"
    planned = stage.do(cmd.PlanChild(scope="a", revision=2, mode=ChildMode.MEDIATED))
    assert planned.verdict is Answer.ALREADY


def test_what_a_correction_does_not_name_is_carried_over_and_said_to_be_kept() -> None:
    first = ev.Goal(
        text="t", plan={"a": plan(), "b": plan()}, budget_effects=9,
        requirements=tuple(ev.Requirement(id=name, text=name) for name in "xyz"),
    )  # fmt: skip
    stage = Stage(first)
    changed = ev.Goal(text="", plan={}, requirements=(ev.Requirement(id="y", text="other"),))
    stage.revise(changed, remove=("z", "b"))
    revision = stage.run.revisions[2]
    assert revision.goal.text == "t"
    assert revision.goal.budget_effects == 9
    assert {r.id: r.text for r in revision.goal.requirements} == {"x": "x", "y": "other"}
    assert list(revision.goal.plan) == ["a"]
    assert (revision.kept, set(revision.changed)) == (("x",), {"y", "z"})
    assert _states(stage) == {"a": OPEN, "b": CLOSED}


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (cmd.Revise(kind=UpdateKind.CORRECT, request_id="r", goal=ev.Goal(text="")), "changes nothing"),
        (
            cmd.Revise(kind=UpdateKind.CORRECT, request_id="r", goal=ev.Goal(text=""), remove=("q",)),
            "cannot remove 'q'",
        ),
        (cmd.Revise(kind=UpdateKind.CORRECT, request_id="r", goal=ev.Goal(text=""), remove=("a",)), "has no scope"),
        (cmd.Revise(kind=UpdateKind.PAUSE, request_id="r", goal=goal("b")), ""),
    ],
    ids=["nothing", "unknown name", "empty plan", "a kind that is no revision"],
)
def test_a_revision_that_cannot_be_worked_on_is_refused(command: cmd.Revise, sentence: str) -> None:
    stage = Stage(goal("a"))
    answer = stage.do(command)
    assert (answer.verdict, answer.events) == (Answer.INVALID, ())
    assert any(sentence in fault for fault in answer.detail["faults"])


def test_two_revisions_in_quick_succession_skip_the_first() -> None:
    stage = Stage(goal("a"))
    unknown = stage.unknown(stage.running("a"))
    stage.change("a")
    stage.change("a")
    skipped = stage.do(cmd.OpenScope(scope="a", revision=2, epoch=1))
    assert (skipped.verdict, skipped.events) == (Answer.SKIPPED, ())
    blocked = stage.do(cmd.OpenScope(scope="a", revision=3, epoch=1))
    assert (blocked.verdict, blocked.detail["attempts"]) == (Answer.BLOCKED, [unknown.id]), "the set is kept"
    assert stage.attempt(unknown).reconcile == 3


def test_an_open_gate_answers_already_and_a_sealed_one_closed() -> None:
    stage = Stage(goal("a"))
    assert stage.do(cmd.OpenScope(scope="a", revision=1, epoch=1)).verdict is Answer.ALREADY
    assert stage.do(cmd.OpenScope(scope="q", revision=1, epoch=1)).verdict is Answer.NOT_FOUND
    stage.change("a")
    stage.cancel()
    assert stage.do(cmd.OpenScope(scope="a", revision=2, epoch=1)).verdict is Answer.CLOSED


# --- opening ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "state", "opens"),
    [
        (Blocks.SCOPE, AttemptState.SENDING, False),
        (Blocks.SLOT, AttemptState.SENDING, False),
        (Blocks.SCOPE, AttemptState.UNKNOWN, False),
        (Blocks.SLOT, AttemptState.UNKNOWN, True),
        (Blocks.SCOPE, AttemptState.SUCCEEDED, True),
        (Blocks.SCOPE, AttemptState.FAILED, True),
    ],
)
def test_what_keeps_a_gate_closed(blocks: Blocks, state: AttemptState, opens: bool) -> None:
    stage = Stage(goal("a", "b"))
    child = stage.running("a")
    attempt = stage.sent(child, contract=facts(ContractClass.OPAQUE, unknown_blocks=blocks, dedupes=False))
    stage.change("a")
    if state is AttemptState.UNKNOWN:
        stage.record(attempt, TryOutcome.IN_DOUBT)
        assert stage.classify(attempt, Finding.UNKNOWN, Basis.GAVE_UP).accepted
    elif state is AttemptState.SUCCEEDED:
        stage.record(attempt, TryOutcome.OK)
    elif state is AttemptState.FAILED:
        stage.record(attempt, TryOutcome.NOT_EXECUTED)
    assert stage.attempt(attempt).state is state
    answer = stage.do(cmd.OpenScope(scope="a", revision=2, epoch=1))
    assert answer.accepted is opens
    if not opens:
        assert (answer.verdict, answer.detail["attempts"]) == (Answer.BLOCKED, [attempt.id])
    elif state is AttemptState.UNKNOWN:
        assert [p.attempt for p in stage.run.checkpoints["a@2"].pending] == [attempt.id]
        assert stage.run.slots[attempt.slot] == attempt.id, "exactly the action that it could double stays taken"
        assert stage.run.reserved == attempt.cost


def test_an_unknown_of_another_scope_does_not_keep_this_gate_closed() -> None:
    stage = Stage(goal("a", "b"))
    stage.unknown(stage.running("b"))
    stage.change("a")
    stage.open("a")


@pytest.mark.parametrize("seen", [None, TaskState.WORKING, TaskState.CANCELED, TaskState.COMPLETED])
@pytest.mark.parametrize("mode", ChildMode)
def test_only_agents_that_act_past_the_gate_are_waited_for(mode: ChildMode, seen: TaskState | None) -> None:
    stage = Stage(goal("a"))
    child = stage.running("a", mode)
    stage.change("a")
    stage.ok(cmd.RequestStop(child=child.id, reason="superseded"))
    if seen is not None:
        stage.seen(child, seen)
    answer = stage.do(cmd.OpenScope(scope="a", revision=2, epoch=1))
    ended = seen in (TaskState.CANCELED, TaskState.COMPLETED)
    assert answer.accepted is (mode is ChildMode.MEDIATED or ended)
    if not answer.accepted:
        assert answer.detail["children"] == [child.id]


def test_not_found_is_no_proof_that_an_autonomous_agent_has_stopped() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a", ChildMode.AUTONOMOUS)
    stage.change("a")
    stage.ok(cmd.DeclareLost(child=child.id, detail="task not found"))
    assert stage.do(cmd.OpenScope(scope="a", revision=2, epoch=1)).verdict is Answer.BLOCKED
    assert stage.phase() is RunPhase.BLOCKED
    stage.seen(child, TaskState.COMPLETED)
    stage.open("a")


def test_a_checkpoint_is_written_once_before_the_gate_opens_and_never_changes() -> None:
    stage = Stage(goal("a", "b"))
    child = stage.running("a")
    done = stage.done(child, "o1")
    stage.done(stage.running("b"), "o9")
    stage.change("a")
    events = stage.open("a").events
    assert [type(e) for e in events] == [ev.CheckpointWritten, ev.ScopeOpened]
    first = stage.run.checkpoints["a@2"]
    assert [e.attempt for e in first.effects_done] == [done.id], "what the scope did, and nothing of the others"
    assert (first.goal_hash, first.revision, first.budget_spent) == (stage.run.revisions[2].goal_hash, 2, 2)
    assert [(c.child, c.revision) for c in first.children] == [(child.id, 1)]
    assert stage.run.checkpoint_hashes["a@2"] == digest(canonical(msgspec.to_builtins(first)))
    stage.done(stage.running("a"), "o2")
    stage.change("a")
    stage.open("a")
    second = stage.run.checkpoints["a@3"]
    assert (second.predecessor, second.predecessor_hash) == ("a@2", stage.run.checkpoint_hashes["a@2"])
    assert stage.run.checkpoints["a@2"] is first
    assert len(second.effects_done) == 2


def test_a_checkpoint_offers_only_artifacts_that_still_stand() -> None:
    stage = Stage(goal("a", "b"))
    ref = ev.ArtifactRef(name="report", blob="0" * 64, size_bytes=1)
    for scope in ("a", "b"):
        child = stage.running(scope)
        stage.seen(child, TaskState.COMPLETED)
        stage.file(child, artifacts=(ref if scope == "a" else msgspec.structs.replace(ref, blob="1" * 64),))
    stage.change("a")
    stage.open("a")
    assert [a.blob for a in stage.run.checkpoints["a@2"].artifacts] == ["1" * 64], "a's own report was superseded"


def test_a_budget_cut_below_what_is_spent_is_shown_and_waits_for_a_person() -> None:
    stage = Stage(goal("a", budget=5))
    child = stage.running("a")
    for n in range(3):
        stage.done(child, f"o{n}")
    stage.revise(ev.Goal(text="", plan={}, budget_effects=1))
    answer = stage.do(cmd.OpenScope(scope="a", revision=2, epoch=1))
    assert answer.verdict is Answer.BLOCKED
    assert stage.phase() is RunPhase.BLOCKED
    stage.revise(ev.Goal(text="", plan={}, budget_effects=4))
    stage.open("a")


# --- holds -----------------------------------------------------------------------------------------------------------


def test_pause_holds_and_resume_opens_the_same_revision_without_a_barrier() -> None:
    stage = Stage(goal("a", "b"))
    child = stage.running("a")
    sent = stage.sent(child)
    stage.pause()
    assert (set(_states(stage).values()), stage.phase()) == ({HELD}, RunPhase.PAUSED)
    assert stage.ask(child, "o2").verdict is Verdict.HELD
    assert stage.attempt(sent).state is AttemptState.SENDING, "nothing can recall bytes"
    assert not stage.child(child).stop_wanted, "children are kept"
    stage.resume()
    assert (set(_states(stage).values()), stage.phase(), stage.run.head) == ({OPEN}, RunPhase.RUNNING, 1)
    assert stage.ask(child, "o2").accepted


def test_a_hold_revokes_what_was_not_sent_and_the_worker_may_ask_again_under_the_same_key() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    admitted = stage.decide(stage.asking(child)).events[:-1]
    stage.fold(*admitted)
    first = list(stage.run.attempts.values())[-1]
    stage.pause()
    assert stage.attempt(first).state is AttemptState.REVOKED
    stage.resume()
    assert stage.sent(child).key == first.key


def test_a_gate_that_is_closed_and_held_opens_into_held() -> None:
    stage = Stage(goal("a"))
    stage.pause()
    stage.change("a")
    assert _states(stage) == {"a": CLOSED}
    stage.open("a")
    assert (_states(stage), stage.phase()) == ({"a": HELD}, RunPhase.PAUSED)
    stage.resume()
    assert _states(stage) == {"a": OPEN}


def test_scopes_that_a_revision_adds_to_a_paused_run_are_held_too() -> None:
    stage = Stage(goal("a"))
    stage.pause()
    stage.revise(goal("b", text=""))
    stage.open("b")
    assert _states(stage)["b"] is HELD


def test_resume_without_a_pause_is_a_mistake() -> None:
    assert Stage(goal("a")).do(cmd.Resume(request_id="r")).verdict is Answer.WRONG_STATE
