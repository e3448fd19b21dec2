"""Rows of attempts: sending again, recording, contradictions (protocol table 2.4)."""

from __future__ import annotations

from typing import Any

import pytest

from admission import commands as cmd
from admission.records import Attempt
from admission.rules_attempt import KEY_MARGIN_MS
from admission.table import Answer
from admission.vocabulary import (
    AttemptState,
    Basis,
    Blocks,
    ContractClass,
    Finding,
    Method,
    RunPhase,
    TryOutcome,
    Verdict,
)
from tests.unit.rules_stage import Stage, facts, goal

A = AttemptState
OK, NOT_EXECUTED, IN_DOUBT = TryOutcome.OK, TryOutcome.NOT_EXECUTED, TryOutcome.IN_DOUBT


def _sent(contract_class: ContractClass = ContractClass.VOID, **given: Any) -> tuple[Stage, Attempt]:
    stage = Stage(goal("a"))
    return stage, stage.sent(stage.running("a"), contract=facts(contract_class, **given))


# --- sending again ---------------------------------------------------------------------------------------------------


def test_a_retry_has_the_same_key_bytes_and_expiry() -> None:
    stage, attempt = _sent(ContractClass.NOT_AFTER, not_after_max_age_ms=30_000)
    assert attempt.not_after == stage.now + 30_000
    stage.record(attempt, IN_DOUBT, retry_in=100)
    stage.now += 100
    answer = stage.grant(attempt, 2)
    assert (answer.verdict, answer.detail["not_after"]) == (Answer.ACCEPTED, attempt.not_after)
    row = stage.attempt(attempt)
    assert (row.key, row.input_ref, row.not_after, len(row.tries)) == (
        attempt.key,
        attempt.input_ref,
        attempt.not_after,
        2,
    )


RETRIES: dict[str, tuple[dict[str, Any], Answer]] = {
    "ready": ({}, Answer.ACCEPTED),
    "does not dedupe": ({"dedupes": False}, Answer.NO_RETRY),
    "tries used up": ({"tries_max": 1}, Answer.NO_RETRY),
    "no retention promised": ({"retention_ms": 0}, Answer.NO_RETRY),
    "shorter than lateness": ({"retention_ms": 60_000, "late_arrival_max_ms": 60_000}, Answer.NO_RETRY),
}


@pytest.mark.parametrize("case", RETRIES)
def test_a_retry_needs_a_deduping_contract_with_a_young_key(case: str) -> None:
    given, answer = RETRIES[case]
    stage, attempt = _sent(**given)
    stage.record(attempt, IN_DOUBT)
    assert stage.grant(attempt, 2).verdict is answer


@pytest.mark.parametrize("early", [True, False])
def test_key_age_counts_from_the_first_permit_and_leaves_room_for_lateness(early: bool) -> None:
    stage, attempt = _sent(retention_ms=100_000, late_arrival_max_ms=60_000)
    stage.record(attempt, IN_DOUBT)
    stage.now += 100_000 - 60_000 - KEY_MARGIN_MS - (1 if early else 0)
    assert stage.grant(attempt, 2).accepted is early


def test_the_decisions_own_time_counts_not_the_time_of_the_last_event() -> None:
    stage, attempt = _sent(ContractClass.NOT_AFTER, not_after_max_age_ms=1_000)
    stage.record(attempt, NOT_EXECUTED, retry_in=5_000)
    stage.now += 1_000
    assert stage.grant(attempt, 2).verdict is Answer.NO_RETRY, "it would arrive expired"


def test_what_was_proven_not_executed_may_be_sent_again_even_without_deduplication() -> None:
    stage, attempt = _sent(ContractClass.OPAQUE, dedupes=False)
    stage.record(attempt, NOT_EXECUTED, retry_in=100, basis=Basis.NOTHING_WRITTEN)
    assert stage.attempt(attempt).state is A.SENDING
    assert stage.grant(attempt, 2).accepted
    stage.record(attempt, IN_DOUBT, n=2)
    assert stage.grant(attempt, 3).verdict is Answer.NO_RETRY


def test_two_gateways_cannot_both_be_given_the_same_try() -> None:
    stage, attempt = _sent()
    assert stage.grant(attempt, 2).verdict is Answer.NOT_YOURS, "the one before is on the wire"
    stage.record(attempt, IN_DOUBT)
    assert stage.grant(attempt, 2, "gateway-1").accepted
    assert stage.grant(attempt, 2, "gateway-2").verdict is Answer.NOT_YOURS
    assert stage.grant(attempt, 3, "gateway-2").verdict is Answer.NOT_YOURS
    stage.record(attempt, IN_DOUBT, n=2)
    assert stage.grant(attempt, 4).verdict is Answer.NOT_YOURS


@pytest.mark.parametrize("change", ["revise", "pause", "cancel", "reopened", "other scope"])
def test_the_gate_is_checked_again_for_every_try(change: str) -> None:
    stage = Stage(goal("a", "b"))
    attempt = stage.sent(stage.running("a"))
    stage.record(attempt, IN_DOUBT)
    match change:
        case "pause":
            stage.pause()
        case "cancel":
            stage.cancel()
        case "other scope":
            stage.change("b")
        case _:
            stage.change("a")
    if change == "reopened":
        stage.voided(attempt)
        stage.open("a")
    answer = stage.grant(attempt, 2)
    assert answer.accepted is (change == "other scope")
    if not answer.accepted:
        assert (answer.verdict, answer.events) == (Answer.CLOSED, ())


@pytest.mark.parametrize("later", [None, Method.LOOKUP])
def test_a_key_that_is_being_voided_is_not_sent_again(later: Method | None) -> None:
    stage, attempt = _sent()
    stage.record(attempt, IN_DOUBT)
    stage.question(attempt, Method.VOID)
    if later is not None:
        stage.question(attempt, later)
    assert stage.grant(attempt, 2).verdict is Answer.NO_RETRY


def test_an_unknown_or_settled_attempt_is_not_sent_again() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    unknown = stage.unknown(child, "o1", contract=facts(ContractClass.OPAQUE))
    done = stage.done(child, "o2")
    assert [stage.grant(a, 2).verdict for a in (unknown, done)] == [Answer.CLOSED] * 2
    assert stage.do(cmd.GrantTry(attempt="none", n=1, gateway="g")).verdict is Answer.NOT_FOUND


# --- recording -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "ends"),
    [
        (OK, None, A.SUCCEEDED), (NOT_EXECUTED, None, A.FAILED), (IN_DOUBT, None, A.SENDING),
        (IN_DOUBT, OK, A.SUCCEEDED), (IN_DOUBT, NOT_EXECUTED, A.SENDING), (IN_DOUBT, IN_DOUBT, A.SENDING),
        (NOT_EXECUTED, OK, A.SUCCEEDED), (NOT_EXECUTED, NOT_EXECUTED, A.FAILED), (NOT_EXECUTED, IN_DOUBT, A.SENDING),
    ],
)  # fmt: skip
def test_one_yes_is_enough_and_a_no_needs_every_try(
    first: TryOutcome, second: TryOutcome | None, ends: AttemptState
) -> None:
    stage, attempt = _sent()
    stage.record(attempt, first, retry_in=100 if second and first is NOT_EXECUTED else 0)
    if second is not None:
        assert stage.grant(attempt, 2).accepted
        stage.record(attempt, second, n=2)
    row = stage.attempt(attempt)
    assert row.state is ends
    if ends is A.FAILED:
        assert stage.run.generations[row.slot] == 2
    else:
        assert row.slot not in stage.run.generations, "the key grows only after a conclusive no"


def test_a_refusal_of_try_2_says_nothing_about_try_1_even_by_classification() -> None:
    stage, attempt = _sent(ContractClass.OPAQUE)
    stage.record(attempt, IN_DOUBT)
    stage.grant(attempt, 2)
    stage.record(attempt, NOT_EXECUTED, n=2)
    assert stage.classify(attempt, Finding.NOT_EXECUTED, Basis.SERVICE_REFUSED).verdict is Answer.NOT_CONCLUSIVE
    assert stage.classify(attempt, Finding.NOT_EXECUTED, Basis.NOTHING_WRITTEN).verdict is Answer.NOT_CONCLUSIVE
    stage.record(attempt, OK, n=1)
    assert stage.attempt(attempt).state is A.SUCCEEDED


def test_evidence_is_never_refused() -> None:
    """A report is appended in every state of the run, of its gates and of the attempt."""
    for change in ("none", "revise", "pause", "cancel", "opened"):
        stage, attempt = _sent(ContractClass.OPAQUE, unknown_blocks=Blocks.SLOT)
        if change == "opened":
            stage.record(attempt, IN_DOUBT)
            stage.classify(attempt, Finding.UNKNOWN, Basis.GAVE_UP)
        if change in ("revise", "opened"):
            stage.change("a")
        elif change != "none":
            _ = stage.pause() if change == "pause" else stage.cancel()
        if change == "opened":
            stage.open("a")
        assert stage.record(attempt, OK).accepted
        assert stage.attempt(attempt).state is A.SUCCEEDED


@pytest.mark.parametrize("n", [0, 2, -1])
def test_a_report_about_a_try_that_was_never_granted_is_not_about_this_run(n: int) -> None:
    stage, attempt = _sent()
    assert stage.record(attempt, OK, n=n).verdict is Answer.NOT_FOUND
    assert stage.attempt(attempt).state is A.SENDING


def test_a_gateway_that_gives_up_its_retry_closes_the_attempt() -> None:
    stage, attempt = _sent()
    stage.record(attempt, NOT_EXECUTED, retry_in=1_000)
    stage.pause()
    assert stage.grant(attempt, 2).verdict is Answer.CLOSED
    stage.record(attempt, NOT_EXECUTED)
    assert stage.attempt(attempt).state is A.FAILED


def test_a_late_no_closes_an_unknown_attempt_though_its_gateway_meant_to_try_again() -> None:
    stage, attempt = _sent(ContractClass.OPAQUE)
    stage.now += 60_000
    assert stage.classify(attempt, Finding.UNKNOWN, Basis.GAVE_UP).accepted
    stage.record(attempt, NOT_EXECUTED, retry_in=1_000)
    assert stage.attempt(attempt).state is A.FAILED


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_doubled_report_changes_nothing_and_a_permit_cannot_be_reported(order: tuple[int, int]) -> None:
    stage, attempt = _sent()
    stage.record(attempt, IN_DOUBT)
    row = stage.attempt(attempt)
    for n in order:
        stage.record(attempt, (IN_DOUBT, TryOutcome.GRANTED)[n])
        assert stage.attempt(attempt) == row


# --- contradictions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["late reply", "found"])
def test_a_late_yes_against_a_no_is_an_alarm_and_changes_nothing_else(how: str) -> None:
    stage, attempt = _sent()
    stage.voided(attempt)
    before = stage.attempt(attempt)
    spent, reserved = stage.run.spent, stage.run.reserved
    if how == "late reply":
        answer = stage.record(attempt, OK)
    else:
        answer = stage.classify(attempt, Finding.EXECUTED, Basis.LOOKUP_FOUND)
    assert answer.accepted
    row = stage.attempt(attempt)
    assert (row.state, row.basis, row.settled, row.contradicted) == (A.FAILED, before.basis, before.settled, True)
    assert (stage.run.spent, stage.run.reserved) == (spent, reserved)
    assert [alarm.attempt for alarm in stage.run.alarms.values()] == [attempt.id]
    stage.record(attempt, OK)
    assert len(stage.run.alarms) == 1 if how == "late reply" else True


def test_a_revoked_attempt_that_was_executed_all_the_same_is_an_alarm() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.fold(*stage.decide(stage.asking(child)).events[:-1])
    revoked = list(stage.run.attempts.values())[-1]
    stage.change("a")
    answer = stage.classify(revoked, Finding.EXECUTED, Basis.LOOKUP_FOUND)
    assert answer.accepted
    assert stage.attempt(revoked).contradicted


def test_a_person_decides_a_contradiction() -> None:
    for happened in (True, False):
        stage, attempt = _sent()
        stage.voided(attempt)
        stage.record(attempt, OK)
        stage.ok(cmd.Resolve(attempt=attempt.id, happened=happened, request_id="r", reason="x", evidence="y", by="op"))
        assert stage.run.alarms == {}
        assert stage.attempt(attempt).state is (A.SUCCEEDED if happened else A.FAILED)
        assert stage.run.spent == int(happened)
        child = list(stage.run.children.values())[-1]
        answer = stage.ask(child)
        assert answer.verdict is (Verdict.DONE_BEFORE if happened else Verdict.IN_FLIGHT)
        assert stage.phase() is RunPhase.RUNNING
