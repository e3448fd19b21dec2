"""What `retail` says about a run: a clean run passes, and each thing that can go wrong is noticed, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from admission.contracts import parse_contract
from simulators.faults import Profile
from simulators.retail_cases import CHANGED, KEPT, ONLY, Moment, MomentKind, make_cases
from simulators.retail_report import Asked, Report, Round
from simulators.retail_runs import late_pending, moment_has_come
from simulators.retail_stack import ContractKind, contract_text
from simulators.retail_verdict import Hit, Outcome
from simulators.shop import ACTIONS, Action
from simulators.tasks import Shift, load
from tests.unit.retail_story import (
    EXTRA,
    FIRST,
    RUN,
    SECOND,
    USER,
    Told,
    blocked,
    cancel,
    case,
    passed,
    said,
)

DATA = load()


@pytest.mark.parametrize("two", [False, True])
def test_a_clean_run_passes(two):
    verdict = passed(two=two).verdict()
    assert verdict.violations == ()
    assert (verdict.outcome, verdict.hit) == (Outcome.PASSED, Hit.BETWEEN)
    assert verdict.counts["executed"] == 3


def test_a_refusal_that_the_oracle_has_too_passes():
    again = cancel("#S1", "ordered by mistake")
    told = Told(case(second=(again, FIRST)))
    told.done(EXTRA)
    told.accept()
    told.open()
    told.done(again, ONLY, 2)
    told.done(FIRST, ONLY, 2)
    told.result(ONLY, 2)
    told.finish()
    assert (told.verdict().outcome, said(told)) == (Outcome.PASSED, "")


def test_a_refusal_under_another_rule_is_noticed():
    again = cancel("#S1", "ordered by mistake")
    told = Told(case(second=(again, FIRST)))
    told.done(EXTRA)
    told.accept()
    told.open()
    told.done(again, ONLY, 2)
    told.journal[-1]["error"]["rule"] = "reason_not_accepted"
    told.done(FIRST, ONLY, 2)
    told.result(ONLY, 2)
    told.finish()
    assert "where the oracle has order_not_pending" in said(told)


def test_a_run_with_an_unknown_is_blocked_and_never_passed():
    verdict = blocked().verdict()
    assert verdict.violations == ()
    assert verdict.outcome is Outcome.BLOCKED
    assert "proves nothing" in verdict.unknown[0]


def test_an_unknown_that_is_not_listed_is_noticed():
    told = blocked()
    told.unresolved = []
    assert "is unknown, but not listed" in said(told)


def test_an_unknown_that_is_listed_without_a_reason_is_noticed():
    told = blocked()
    told.unresolved[0]["why"] = ""
    assert "without one line that says why" in said(told)


def test_an_unknown_that_the_shop_could_have_told_is_noticed():
    told = blocked()
    told.perform(f"{RUN}-e1", EXTRA)
    assert "when asked, would say what became of it" in said(told)


def test_a_run_that_does_not_end_is_stuck_and_says_where():
    told = passed()
    told.log.pop()
    told.phase = "running"
    assert "stuck: the run is running" in said(told)


def test_a_run_that_completes_with_something_unknown_is_noticed():
    told = blocked()
    told.phase = "completed"
    assert "stuck: the run is completed, open: r1-e1" in said(told)


def test_a_wanted_action_that_did_not_happen_is_noticed():
    told = passed()
    lost = told.journal.pop()
    told.restart_shop()
    words = said(told)
    assert f'"order_id":"{lost["arguments"]["order_id"]}","reason":"no longer needed"}} took effect 0 times' in words
    assert "checker S6" in words
    assert "oracle: the shop's data" in words


def test_a_second_effect_is_noticed():
    told = passed()
    told.journal.append({**told.journal[-1], "n": len(told.journal) + 1})
    words = said(told)
    assert "took effect 2 times, only 1 were due" in words
    assert "duplicate_effects" in words


def test_an_effect_without_an_attempt_is_noticed():
    told = passed()
    told.journal[-1]["key"] = "nobody's"
    assert "checker S3" in said(told)


def test_another_database_than_the_oracles_is_noticed():
    told = passed()
    told.shop.execute(Action("modify_user_address", {"user_id": USER, "address1": "9", "address2": "", "city": "C",
                                                     "state": "VT", "country": "USA", "zip": "05099"}))  # fmt: skip
    assert said(told) == f"oracle: the shop's data of {USER} is not what the landed and the wanted actions lead to"


def test_a_retracted_action_that_is_admitted_after_the_gate_closed_is_noticed():
    told = Told(case())
    told.done(FIRST)
    told.accept()
    told.done(EXTRA)
    told.open()
    told.done(SECOND, ONLY, 2)
    told.result(ONLY, 2)
    told.finish()
    assert "after the gate closed" in said(told)


def test_an_attempt_that_no_plan_has_is_noticed():
    told = passed()
    told.log.pop()
    told.done(cancel("#S2", "ordered by mistake"), ONLY, 2)
    told.finish()
    assert "is in no plan of its revision" in said(told)


def test_a_change_that_was_never_accepted_is_noticed():
    told = Told(case())
    for action in (EXTRA, FIRST, SECOND):
        told.done(action)
    told.result(ONLY, 1)
    told.finish()
    verdict = told.verdict()
    assert verdict.hit is Hit.MISSED
    assert "the change was never accepted" in verdict.violations


def test_a_kept_scope_whose_child_is_stopped_is_noticed():
    told = passed(two=True)
    told.log.insert(-1, {"type": "stop_requested", "at": told.log[-1]["at"], "child": f"c-{KEPT}-1", "reason": "x",
                         "n": 1})  # fmt: skip
    assert f"the child of {KEPT} was asked to stop" in said(told)


def test_a_kept_scope_whose_result_is_dropped_is_noticed():
    told = passed(two=True)
    filed = next(e for e in told.log if e["type"] == "result_filed" and e["scope"] == KEPT)
    filed["disposition"] = "dropped"
    assert f"the result of {KEPT}'s child was not adopted" in said(told)


def test_a_kept_scope_with_a_second_child_is_noticed():
    told = passed(two=True)
    told.log.pop()
    told.add("child_planned", child="c9", scope=KEPT, revision=2, n=2, agent="plan", mode="mediated", goal_hash="g2",
             context="x-kept")  # fmt: skip
    told.finish()
    assert f"scope {KEPT} was left alone, but had 2 children" in said(told)


def test_a_change_that_affects_the_kept_scope_is_noticed():
    told = passed(two=True)
    next(e for e in told.log if e["type"] == "revision_accepted")["affects"] = [CHANGED, KEPT]
    assert f"affected {CHANGED}, {KEPT}" in said(told)


def test_trouble_of_the_driver_is_no_pass():
    told = passed()
    told.trouble = "the shop was not quiet"
    assert told.verdict().outcome is Outcome.VIOLATED


def test_where_a_redirect_hit_is_read_from_the_log():
    def hit(*steps: str) -> Hit:
        told = Told(case())
        attempt = ""
        for action, step in zip((EXTRA, FIRST, SECOND), steps, strict=False):
            attempt = told.admit(action)
            if step == "done":
                told.perform(attempt, action)
                told.recorded(attempt)
            elif step == "unknown":
                told.add("reconcile_started", attempt=attempt, method="void", covers=1, n=1, epoch=1)
                told.add("effect_classified", attempt=attempt, finding="unknown", basis="gave_up", started=9, epoch=1)
            elif step == "doubt":
                told.recorded(attempt, "in_doubt")
        told.accept()
        return told.verdict().hit

    assert hit() is Hit.BEFORE
    assert hit("sending") is Hit.IN_FLIGHT
    assert hit("done", "doubt") is Hit.IN_FLIGHT
    assert hit("done") is Hit.BETWEEN
    assert hit("done", "done") is Hit.BETWEEN
    assert hit("done", "done", "done") is Hit.AFTER
    assert hit("unknown") is Hit.UNKNOWN


# --- cases, moments, reports -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(Shift))
def test_cases_are_dealt_by_the_seed_and_reach_their_shares(kind):
    dealt = make_cases(DATA, DATA.tasks, kind, 3)
    assert dealt == make_cases(DATA, DATA.tasks, kind, 3)
    places = [(one.service, one.user_id) for one in dealt.runs]
    assert len(set(places)) == len(places)
    assert set(dealt.not_redirectable.values()) == {"writes nothing"}
    two = [one for one in dealt.runs if one.kept]
    assert len(two) >= 0.2 * len(dealt.runs)
    for one in two:
        assert one.first[KEPT] == one.second[KEPT]
        kept = {action.target for action in one.first[KEPT]}
        assert not kept & {action.target for action in (*one.first[CHANGED], *one.second[CHANGED])}
        assert list(one.change()["goal"]["plan"]) == [CHANGED]
    for one in dealt.runs:
        assert one.first != one.second


def test_an_action_that_stands_twice_gets_an_occurrence():
    twice = replace(case(), first={ONLY: (EXTRA, FIRST, EXTRA)})
    actions = twice.goal()["plan"][ONLY]["actions"]
    assert [action["occurrence"] for action in actions] == [1, 1, 2]
    assert len(twice.slots(1)) == 3


def test_moments_are_found_in_the_log():
    def come(told: Told, kind: str, k: int = 0) -> bool:
        return moment_has_come(replace(told.case, moment=Moment(MomentKind(kind), k)), list(told.evidence().log))

    told = Told(case())
    assert come(told, "before_anything")
    assert not come(told, "in_flight", 1)
    attempt = told.admit(EXTRA)
    assert come(told, "in_flight", 1)
    assert not come(told, "between_two", 1)
    assert not come(told, "in_flight", 2)
    told.recorded(attempt)
    assert come(told, "between_two", 1)


def test_late_requests_are_waited_for():
    dropped = {"event": "dropped", "fault": "late", "key": "k"}
    assert late_pending([dropped], {"k"})
    assert not late_pending([dropped], {"other"})
    assert late_pending([dropped, {"event": "voided", "fault": None, "key": "k"}], {"k"})
    assert not late_pending([dropped, {"event": "rejected", "fault": None, "key": "k"}], {"k"})


def report(*told: Told, contract: ContractKind = ContractKind.VOID, faults: Profile = Profile.MIXED) -> Report:
    found = Report(Asked("data", "all", faults, contract, only=("7",)))
    found.rounds.append(Round(Shift.RETRACT, 4, tuple(one.verdict() for one in told), {}, 1.0))
    return found


def test_a_violation_fails_the_command_and_says_what_repeats_it():
    told = passed()
    told.journal.append({**told.journal[-1], "n": len(told.journal) + 1})
    found = report(told)
    assert found.failures() == ["1 runs break what was promised"]
    repeat = found.as_json()["violations"][0]["repeat"]
    assert repeat.startswith("regate retail --data data --tasks all --faults mixed --contract void --shift retract")
    assert repeat.endswith("--seed 4")


def test_blocked_runs_are_only_right_where_nothing_can_be_proven():
    assert report(blocked()).failures() == ["1 runs are blocked, though these shops can prove what happened"]
    assert report(blocked(), contract=ContractKind.LOOKUP).failures() == []
    assert "no run is blocked" in report(passed(), contract=ContractKind.LOOKUP).failures()[0]
    assert report(passed(), contract=ContractKind.LOOKUP, faults=Profile.DELAYED).failures() == []


def test_shares_below_what_is_wanted_fail_the_command():
    found = report(passed())
    found.asked = replace(found.asked, only=())
    assert found.failures() == [
        "only 0% of the runs are in_flight, at least 30% are wanted",
        "only 0% of the runs are two_scopes, at least 20% are wanted",
    ]


def test_nothing_run_is_no_pass():
    assert "nothing was run" in report().failures()


@pytest.mark.parametrize("kind", list(ContractKind))
def test_the_contracts_name_every_action_of_the_shop(kind):
    contract = parse_contract(contract_text(kind, "shop4"), "shop4.yaml")
    assert contract.service == "shop4"
    assert set(contract.operations) == set(ACTIONS)
