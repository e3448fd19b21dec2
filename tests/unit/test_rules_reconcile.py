"""Rows of attempts, once sent: asking, classifying, deciding by hand (protocol tables 2.4 and 6)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from admission import commands as cmd
from admission.records import Attempt
from admission.table import Answer
from admission.vocabulary import (
    AttemptState,
    Basis,
    ContractClass,
    Finding,
    Method,
    TaskState,
    TryOutcome,
    Verdict,
)
from orchestrator.reconcile import Evidence, conclude
from tests.unit.rules_stage import Stage, facts, goal

A = AttemptState
OK, NOT_EXECUTED, IN_DOUBT = TryOutcome.OK, TryOutcome.NOT_EXECUTED, TryOutcome.IN_DOUBT


def _sent(contract_class: ContractClass = ContractClass.VOID, **given: Any) -> tuple[Stage, Attempt]:
    stage = Stage(goal("a"))
    return stage, stage.sent(stage.running("a"), contract=facts(contract_class, **given))


# --- finding out -----------------------------------------------------------------------------------------------------

#: For each class: on which basis "not executed" is believed after asking (protocol section 6).
CONCLUSIVE = {
    ContractClass.VOID: {Basis.VOIDED, Basis.SERVICE_REFUSED},
    ContractClass.NOT_AFTER: {Basis.NOT_AFTER_PASSED, Basis.SERVICE_REFUSED},
    ContractClass.LOOKUP: {Basis.SERVICE_REFUSED},
    ContractClass.KEY: set(),
    ContractClass.GW_ACK: set(),
    ContractClass.OPAQUE: set(),
}


@pytest.mark.parametrize("basis", Basis)
@pytest.mark.parametrize("contract_class", ContractClass)
def test_a_no_needs_a_basis_that_the_contract_offers(contract_class: ContractClass, basis: Basis) -> None:
    stage, attempt = _sent(
        contract_class, not_after_max_age_ms=30_000 if contract_class is ContractClass.NOT_AFTER else 0
    )
    stage.record(attempt, IN_DOUBT)
    stage.now += 60_000
    method = {
        ContractClass.VOID: Method.VOID,
        ContractClass.LOOKUP: Method.LOOKUP,
        ContractClass.NOT_AFTER: Method.LOOKUP,
    }
    started = stage.question(attempt, method[contract_class]) if contract_class in method else 1
    more = {"started": started, "clock_before_ms": stage.now}
    answer = stage.classify(attempt, Finding.NOT_EXECUTED, basis, **more)
    assert answer.accepted is (basis in CONCLUSIVE[contract_class])
    if not answer.accepted:
        assert (answer.verdict, stage.attempt(attempt).state) == (Answer.NOT_CONCLUSIVE, A.SENDING)


@pytest.mark.parametrize("basis", Basis)
def test_nothing_is_concluded_without_a_question_that_was_written_down(basis: Basis) -> None:
    stage, attempt = _sent()
    stage.record(attempt, IN_DOUBT)
    for started in (0, 1, stage.run.version, stage.run.version + 1):
        answer = stage.classify(attempt, Finding.NOT_EXECUTED, basis, started=started)
        assert answer.verdict is Answer.NOT_CONCLUSIVE


def test_a_question_asked_before_another_one_no_longer_counts_as_a_position_of_its_own() -> None:
    stage, attempt = _sent()
    stage.record(attempt, IN_DOUBT)
    lookup = stage.question(attempt, Method.LOOKUP)
    assert stage.classify(attempt, Finding.NOT_EXECUTED, Basis.VOIDED, started=lookup).verdict is Answer.NOT_CONCLUSIVE
    void = stage.question(attempt, Method.VOID)
    assert stage.classify(attempt, Finding.NOT_EXECUTED, Basis.VOIDED, started=void).accepted


@pytest.mark.parametrize(("past", "conclusive"), [(-1, False), (0, False), (1, True)])
def test_not_found_counts_only_after_expiry_skew_and_lag_on_the_services_clock(past: int, conclusive: bool) -> None:
    stage, attempt = _sent(ContractClass.NOT_AFTER, not_after_max_age_ms=5_000, clock_skew_ms=300, lookup_lag_ms=70)
    stage.record(attempt, IN_DOUBT)
    started = stage.question(attempt, Method.LOOKUP)
    clock = attempt.not_after + 300 + 70 + past
    answer = stage.classify(
        attempt, Finding.NOT_EXECUTED, Basis.NOT_AFTER_PASSED, started=started, clock_before_ms=clock
    )
    assert answer.accepted is conclusive


def test_a_lookup_that_does_not_cover_a_later_try_proves_nothing_about_it() -> None:
    stage, attempt = _sent(ContractClass.NOT_AFTER, not_after_max_age_ms=30_000)
    stage.record(attempt, IN_DOUBT)
    started = stage.question(attempt, Method.LOOKUP)
    assert stage.grant(attempt, 2).accepted
    late = {"started": started, "clock_before_ms": stage.now + 60_000}
    assert not stage.classify(attempt, Finding.NOT_EXECUTED, Basis.NOT_AFTER_PASSED, **late).accepted


@pytest.mark.parametrize("contract_class", ContractClass)
@pytest.mark.parametrize("method", Method)
def test_a_service_is_asked_only_what_its_contract_offers(contract_class: ContractClass, method: Method) -> None:
    offers = {
        ContractClass.VOID: set(Method),
        ContractClass.LOOKUP: {Method.LOOKUP},
        ContractClass.NOT_AFTER: {Method.LOOKUP},
    }
    stage, attempt = _sent(contract_class)
    answer = stage.do(cmd.StartReconcile(attempt=attempt.id, method=method, epoch=1))
    assert answer.accepted is (method in offers.get(contract_class, set()))


def test_found_is_always_conclusive_and_settles_the_cost() -> None:
    stage, attempt = _sent(ContractClass.LOOKUP)
    stage.record(attempt, IN_DOUBT)
    assert stage.classify(attempt, Finding.EXECUTED, Basis.LOOKUP_FOUND, observed={"effect": 7}).accepted
    row = stage.attempt(attempt)
    assert (row.state, row.basis, row.observed) == (A.SUCCEEDED, Basis.LOOKUP_FOUND, {"effect": 7})
    assert (stage.run.spent, stage.run.reserved, stage.run.open_attempts) == (1, 0, {})


def test_nobody_gives_up_while_a_gateway_still_has_time_to_report() -> None:
    stage, attempt = _sent(ContractClass.OPAQUE, timeout_ms=5_000)
    assert stage.classify(attempt, Finding.UNKNOWN, Basis.GAVE_UP).verdict is Answer.NOT_CONCLUSIVE
    stage.now = attempt.reconcile_at
    assert stage.classify(attempt, Finding.UNKNOWN, Basis.GAVE_UP).accepted
    assert stage.classify(attempt, Finding.UNKNOWN, Basis.GAVE_UP).verdict is Answer.ALREADY


@pytest.mark.parametrize("late", ["ok", "found", "voided", "not executed"])
def test_an_unknown_attempt_is_settled_by_evidence_whenever_it_comes(late: str) -> None:
    stage, attempt = _sent()
    stage.record(attempt, IN_DOUBT)
    stage.classify(attempt, Finding.UNKNOWN, Basis.GAVE_UP)
    assert stage.attempt(attempt).state is A.UNKNOWN
    match late:
        case "ok":
            stage.record(attempt, OK)
        case "found":
            stage.classify(attempt, Finding.EXECUTED, Basis.LOOKUP_FOUND)
        case "voided":
            stage.voided(attempt)
        case _:
            stage.record(attempt, NOT_EXECUTED)
    assert stage.attempt(attempt).state is (A.SUCCEEDED if late in ("ok", "found") else A.FAILED)


@pytest.mark.parametrize("pair", list(itertools.permutations(["voided", "late ok"])), ids=" then ".join)
def test_the_first_conclusive_outcome_stands(pair: tuple[str, str]) -> None:
    stage, attempt = _sent()
    started = stage.question(attempt)
    for step in pair:
        if step == "voided":
            stage.classify(attempt, Finding.NOT_EXECUTED, Basis.VOIDED, started=started)
        else:
            stage.record(attempt, OK)
    assert stage.attempt(attempt).state is (A.FAILED if pair[0] == "voided" else A.SUCCEEDED)
    assert bool(stage.run.alarms) is (pair[0] == "voided")


# --- deciding by hand ------------------------------------------------------------------------------------------------


def _resolve(attempt: str, **more: Any) -> cmd.Resolve:
    fields: dict[str, Any] = {
        "happened": True,
        "request_id": "r",
        "reason": "seen",
        "evidence": "mail 3",
        "by": "op",
        **more,
    }
    return cmd.Resolve(attempt=attempt, **fields)


@pytest.mark.parametrize("happened", [True, False])
def test_an_operator_settles_an_unknown_attempt_and_signs_for_it(happened: bool) -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    attempt = stage.unknown(child)
    stage.ok(_resolve(attempt.id, happened=happened))
    row = stage.attempt(attempt)
    assert (row.state, row.basis, row.resolved_by) == (A.SUCCEEDED if happened else A.FAILED, Basis.OPERATOR, "op")
    again = stage.do(_resolve(attempt.id, happened=happened))
    assert (again.verdict, again.events) == (Answer.REPEATED, ())
    assert stage.do(_resolve(attempt.id, happened=not happened)).verdict is Answer.REUSED_ID
    assert stage.ask(child).verdict is (Verdict.DONE_BEFORE if happened else Verdict.IN_FLIGHT)


def test_an_operators_no_that_turns_out_wrong_is_an_alarm() -> None:
    stage = Stage(goal("a"))
    attempt = stage.unknown(stage.running("a"))
    stage.ok(_resolve(attempt.id, happened=False))
    stage.record(attempt, OK)
    assert stage.attempt(attempt).contradicted


@pytest.mark.parametrize(
    ("contract_class", "method", "basis"),
    [
        (ContractClass.VOID, Method.VOID, Basis.VOIDED),
        (ContractClass.VOID, Method.LOOKUP, Basis.SERVICE_REFUSED),
        (ContractClass.NOT_AFTER, Method.LOOKUP, Basis.NOT_AFTER_PASSED),
    ],
)
def test_a_service_that_may_have_forgotten_the_key_proves_nothing_by_not_knowing_it(
    contract_class: ContractClass, method: Method, basis: Basis
) -> None:
    """After an outage longer than the key's retention, "voided" and "not found" are said of what was executed too."""
    for late, conclusive in ((False, True), (True, False)):
        stage = Stage(goal("a"))
        contract = facts(contract_class, not_after_max_age_ms=5_000)
        attempt = stage.sent(stage.running("a"), contract=contract)
        stage.now += contract.retention_ms if late else 10_000
        started = stage.question(attempt, method)
        told = {"started": started, "clock_before_ms": stage.now + 10**9}
        assert stage.classify(attempt, Finding.NOT_EXECUTED, basis, **told).accepted is conclusive
        evidence = Evidence(
            found={Basis.VOIDED: "voided", Basis.SERVICE_REFUSED: "refused"}.get(basis, "not_found"),
            clock_before_ms=stage.now + 10**9,
        )
        if late:
            known = conclude(contract, stage.attempt(attempt), evidence, stage.now + 10**9)
            assert known is not None
            assert known.finding is Finding.UNKNOWN


@pytest.mark.parametrize("missing", ["by", "reason", "evidence"])
def test_a_decision_by_hand_needs_a_name_a_reason_and_evidence(missing: str) -> None:
    stage = Stage(goal("a"))
    attempt = stage.unknown(stage.running("a"))
    answer = stage.do(_resolve(attempt.id, **{missing: "  "}))
    assert (answer.verdict, answer.events) == (Answer.INVALID, ())


def test_only_what_is_unknown_is_decided_by_hand() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    flying, done = stage.sent(child, "o1"), stage.done(child, "o2")
    assert [stage.do(_resolve(a.id)).verdict for a in (flying, done)] == [Answer.WRONG_STATE] * 2
    assert stage.do(_resolve("none")).verdict is Answer.NOT_FOUND


def test_a_redirect_leaves_sent_attempts_to_their_outcome() -> None:
    stage, attempt = _sent()
    stage.change("a")
    assert stage.attempt(attempt).state is A.SENDING
    stage.record(attempt, OK)
    assert (stage.attempt(attempt).state, stage.attempt(attempt).reconcile) == (A.SUCCEEDED, 0)
    stage.open("a")
    assert [e.attempt for e in stage.run.checkpoints["a@2"].effects_done] == [attempt.id]
    child = stage.running("a")
    assert stage.ask(child).verdict is Verdict.DONE_BEFORE
    stage.seen(child, TaskState.COMPLETED)
