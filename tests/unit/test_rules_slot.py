"""Rows of admission: who may act, and what was wanted before (protocol sections 1 and 4, row `admit`)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from admission import commands as cmd
from admission import events as ev
from admission.vocabulary import (
    AttemptState,
    Basis,
    Blocks,
    ContractClass,
    Finding,
    TaskState,
    TryOutcome,
    Verdict,
    idempotency_key,
)
from tests.unit.rules_stage import RUN, Stage, action, facts, goal, plan


def test_admission_and_the_permit_for_try_1_are_one_decision() -> None:
    stage = Stage(goal("a"))
    answer = stage.decide(stage.asking(stage.running("a")))
    assert answer.accepted
    assert [type(e) for e in answer.events] == [ev.ContractNoted, ev.EffectAdmitted, ev.TryGranted]
    stage.fold(*answer.events)
    attempt = stage.run.attempts[str(answer.detail["attempt"])]
    assert (attempt.state, len(attempt.tries), attempt.tries[0].gateway) == (AttemptState.SENDING, 1, "gateway-1")
    assert attempt.key == answer.detail["key"] == idempotency_key(RUN, attempt.slot, 1)
    assert stage.run.reserved == 1


def test_a_contract_is_noted_once_and_what_was_admitted_under_it_keeps_it() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    first = stage.sent(child, "o1", contract=facts(schema_hash="s"))
    assert ev.ContractNoted not in {type(e) for e in stage.ask(child, "o2", contract=facts(schema_hash="s")).events}
    other = stage.sent(child, "o3", contract=facts(ContractClass.OPAQUE, schema_hash="s"))
    assert stage.run.facts_of(stage.attempt(first)).contract_class is ContractClass.VOID
    assert stage.run.facts_of(other).contract_class is ContractClass.OPAQUE


# --- who may act -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("situation", "verdict"),
    [
        ("closed", Verdict.SUPERSEDED), ("opened for another revision", Verdict.SUPERSEDED),
        ("sealed", Verdict.SUPERSEDED), ("closed prefix", Verdict.SUPERSEDED), ("unknown scope", Verdict.SUPERSEDED),
        ("held", Verdict.HELD), ("closed and held", Verdict.SUPERSEDED),
        ("another task", Verdict.NOT_CURRENT), ("not claimed", Verdict.NOT_CURRENT),
        ("unknown child", Verdict.NOT_CURRENT),
        ("lost", Verdict.NOT_CURRENT), ("over", Verdict.NOT_CURRENT), ("asked to stop", Verdict.NOT_CURRENT),
        ("child of another scope", Verdict.NOT_CURRENT), ("refused by contract", Verdict.REFUSED),
        ("superseded and refused by contract", Verdict.SUPERSEDED),
    ],
)  # fmt: skip
def test_who_is_refused_and_how(situation: str, verdict: Verdict) -> None:
    stage = Stage(goal("a", "b", "p", "p/q"))
    child = stage.launched("a") if situation == "not claimed" else stage.running("a")
    more: dict[str, Any] = {}
    match situation:
        case "closed":
            stage.change("a")
        case "opened for another revision":
            stage.change("a")
            stage.open("a")
        case "sealed":
            stage.cancel()
        case "closed prefix":
            child = stage.running("p/q")
            stage.change("p")
            stage.open("p/q")
            child = replace(child, revision=2)
            more = {"revision": 2}
        case "unknown scope":
            more = {"scope": "zz"}
        case "held":
            stage.pause()
        case "closed and held":
            stage.pause()
            stage.change("a")
        case "another task":
            more = {"task": "t2"}
        case "not claimed":
            stage.ok(cmd.BindChild(child=child.id, task="t"))
        case "unknown child":
            more = {"child": "nobody"}
        case "lost":
            stage.ok(cmd.DeclareLost(child=child.id, detail="x"))
        case "over":
            stage.seen(child, TaskState.FAILED)
        case "asked to stop":
            stage.ok(cmd.RequestStop(child=child.id, reason="x"))
        case "child of another scope":
            more = {"scope": "b"}
        case "refused by contract":
            more = {"refusal": "not for you"}
        case _:
            stage.change("a")
            more = {"refusal": "not for you"}
    open_before = dict(stage.run.open_attempts)
    answer = stage.ask(child, **more)
    assert (answer.verdict, answer.accepted) == (verdict, False)
    assert stage.run.open_attempts == open_before


def test_a_refusal_names_the_revision_in_force() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.change("a")
    assert stage.ask(child).detail["in_force"] == 2


def test_only_the_first_refusal_per_child_slot_and_reason_is_an_event() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.pause()
    assert [type(e) for e in stage.ask(child, "o1").events] == [ev.EffectRefused]
    assert stage.ask(child, "o1").events == ()
    assert len(stage.ask(child, "o2").events) == 1, "another slot"
    stage.change("a")
    assert len(stage.ask(child, "o1").events) == 1, "another reason"
    assert stage.ask(child, "o1").events == ()
    assert len(stage.run.refusals) == 3


def test_a_run_that_does_not_exist_is_not_brought_into_being_by_a_refusal() -> None:
    stage = Stage()
    other = Stage(goal("a"))
    assert stage.do(other.asking(other.running("a"))).events == ()


# --- what was wanted before ------------------------------------------------------------------------------------------


def test_a_slot_that_is_taken_is_waited_for() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    attempt = stage.sent(child)
    answer = stage.ask(child)
    assert (answer.verdict, answer.detail["attempt"], answer.events) == (Verdict.IN_FLIGHT, attempt.id, ())
    stage.record(attempt, TryOutcome.IN_DOUBT)
    assert stage.ask(child).verdict is Verdict.IN_DOUBT
    stage.record(attempt, TryOutcome.OK)
    done = stage.ask(child)
    assert (done.verdict, done.detail["observed"]) == (Verdict.DONE_BEFORE, {"reply": "ok"})


def test_slots_are_the_runs_not_a_revisions_or_a_scopes() -> None:
    stage = Stage(goal("a", "b"))
    done = stage.done(stage.running("a"))
    stage.change("a")
    stage.open("a")
    for scope in ("a", "b"):
        answer = stage.ask(stage.running(scope))
        assert (answer.verdict, answer.detail["attempt"]) == (Verdict.DONE_BEFORE, done.id)


@pytest.mark.parametrize("blocks", Blocks)
def test_an_unknown_keeps_its_slot_across_revisions(blocks: Blocks) -> None:
    stage = Stage(goal("a", "b"))
    attempt = stage.unknown(
        stage.running("a"), contract=facts(ContractClass.OPAQUE, unknown_blocks=blocks, dedupes=False)
    )
    answer = stage.ask(stage.running("b"))
    assert (answer.verdict, answer.detail["attempt"], answer.detail["blocks"]) == (
        Verdict.IN_DOUBT,
        attempt.id,
        blocks.value,
    )


def test_what_conclusively_did_not_happen_may_be_asked_for_again_under_a_new_key() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    first = stage.sent(child)
    stage.voided(first)
    again = stage.sent(child)
    assert (first.generation, again.generation) == (1, 2)
    assert again.key not in (first.key, "")


def test_a_revoked_attempt_gives_its_key_back_unused() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.fold(*stage.decide(stage.asking(child)).events[:-1])
    stage.pause()
    stage.resume()
    again = stage.sent(child)
    assert (again.generation, len(stage.run.attempts)) == (1, 2)


def test_after_a_contradiction_the_slot_is_not_free() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    attempt = stage.sent(child)
    stage.voided(attempt)
    stage.record(attempt, TryOutcome.OK)
    answer = stage.ask(child)
    assert (answer.verdict, answer.accepted) == (Verdict.IN_DOUBT, False)


def test_after_a_contradiction_the_slot_is_not_freed_by_a_later_attempt_either() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    first = stage.sent(child)
    stage.voided(first)
    second = stage.sent(child)
    stage.record(first, TryOutcome.OK)
    stage.voided(second)
    assert not stage.ask(child).accepted


# --- occurrences and conflicts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planned", "asked", "admitted"),
    [(1, 2, False), (2, 2, True), (2, 3, False), (3, 2, True), (2, 0, False), (1, -1, False)],
)
def test_a_worker_cannot_invent_an_occurrence(planned: int, asked: int, admitted: bool) -> None:
    stage = Stage(goal(a=plan(actions=(action("o1", occurrence=planned),))))
    child = stage.running("a")
    stage.done(child)
    answer = stage.ask(child, occurrence=asked)
    assert answer.accepted is admitted
    if not admitted:
        assert answer.verdict is Verdict.NEEDS_OCCURRENCE


def test_a_planned_occurrence_of_another_target_allows_nothing_here() -> None:
    stage = Stage(goal(a=plan(actions=(action("o2", occurrence=2),))))
    child = stage.running("a")
    assert stage.ask(child, "o1", occurrence=2).verdict is Verdict.NEEDS_OCCURRENCE


def test_a_then_b_then_a_is_a_wish_that_a_new_revision_has_to_state() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.done(child, operation="set_red")
    stage.done(child, operation="set_blue")
    stage.revise(ev.Goal(text="", plan={"a": plan(actions=(action("o1", occurrence=2, operation="set_red"),))}))
    stage.open("a")
    child = stage.running("a")
    assert stage.ask(child, operation="set_red").verdict is Verdict.NEEDS_OCCURRENCE
    assert stage.ask(child, operation="set_blue").verdict is Verdict.DONE_BEFORE, "nothing has changed it since"
    stage.done(child, operation="set_red", occurrence=2)
    assert stage.ask(child, operation="set_red", occurrence=2).verdict is Verdict.DONE_BEFORE
    assert stage.ask(child, operation="set_blue").verdict is Verdict.NEEDS_OCCURRENCE


def test_a_child_that_starts_over_is_told_what_was_done_before_it() -> None:
    stage = Stage(goal(a=plan(actions=(action("o1", occurrence=2),))))
    child = stage.running("a")
    stage.done(child)
    stage.done(child, operation="other")
    stage.done(child, occurrence=2)
    stage.ok(cmd.DeclareLost(child=child.id, detail="x"))
    follower = stage.running("a")
    for more in ({}, {"operation": "other"}, {"occurrence": 2}):
        assert stage.ask(follower, **more).verdict is Verdict.DONE_BEFORE


@pytest.mark.parametrize("first", [AttemptState.SENDING, AttemptState.SUCCEEDED, AttemptState.UNKNOWN])
def test_the_same_intent_in_other_words_conflicts(first: AttemptState) -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    more: dict[str, Any] = {"conflict_key": "refund:o1", "contract": facts(ContractClass.OPAQUE)}
    attempt = stage.sent(child, "o1", **more)
    if first is AttemptState.SUCCEEDED:
        stage.record(attempt, TryOutcome.OK)
    elif first is AttemptState.UNKNOWN:
        stage.record(attempt, TryOutcome.IN_DOUBT)
        stage.classify(attempt, Finding.UNKNOWN, Basis.GAVE_UP)
    assert stage.attempt(attempt).state is first
    assert stage.ask(child, "order one", **more).verdict is Verdict.CONFLICTS_WITH
    assert stage.ask(child, "o2", **{**more, "conflict_key": "refund:o2"}).accepted


def test_a_conflict_ends_with_what_it_rests_on() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.voided(stage.sent(child, "o1", conflict_key="k"))
    assert stage.ask(child, "other words", conflict_key="k").accepted


def test_a_further_occurrence_is_the_same_intent_and_does_not_conflict_with_itself() -> None:
    stage = Stage(goal(a=plan(actions=(action("o1", occurrence=2),))))
    child = stage.running("a")
    stage.done(child, conflict_key="k")
    second = stage.sent(child, occurrence=2, conflict_key="k")
    stage.voided(second)
    assert stage.ask(child, "other words", conflict_key="k").verdict is Verdict.CONFLICTS_WITH, "the first one stands"


# --- budget ----------------------------------------------------------------------------------------------------------


def test_the_budget_counts_what_is_spent_and_what_is_reserved() -> None:
    stage = Stage(goal("a", budget=3))
    child = stage.running("a")
    stage.done(child, "o1")
    flying = stage.sent(child, "o2")
    unknown = stage.unknown(child, "o3")
    assert (stage.run.spent, stage.run.reserved) == (1, 2)
    assert stage.ask(child, "o4").verdict is Verdict.BUDGET
    stage.voided(flying)
    assert stage.ask(child, "o4").accepted
    assert stage.attempt(unknown).state is AttemptState.UNKNOWN, "it keeps its reserve"
    assert stage.ask(child, "o5").verdict is Verdict.BUDGET


def test_a_cost_that_does_not_fit_is_refused_and_a_smaller_one_is_not() -> None:
    stage = Stage(goal("a", budget=3))
    child = stage.running("a")
    assert stage.ask(child, "o1", contract=facts(cost=4)).verdict is Verdict.BUDGET
    assert stage.ask(child, "o1", contract=facts(cost=3)).accepted
