"""What people are shown of a run: rows, one-line summaries, what needs a person, the control channel."""

from __future__ import annotations

import json
from typing import Any

import pytest

from admission import commands as cmd
from admission.vocabulary import (
    Basis,
    Blocks,
    ChildMode,
    ContractClass,
    Finding,
    Method,
    TaskState,
    TryOutcome,
    UpdateKind,
)
from orchestrator.views import change_row, effect_row, revision_status, run_row, run_view
from orchestrator.views_lines import attention_items, brief_of, control_view, summary_line
from tests.unit.rules_stage import Stage, facts, goal

#: Every output shows these of an attempt (interfaces of the rooms).
EFFECT_FIELDS = {
    "attempt", "run", "scope", "revision", "child", "slot", "operation_id", "service", "operation", "target",
    "input_ref", "outcome", "basis", "observed_result", "tries", "unknown_blocks", "why", "needs_reconciliation",
    "admitted_at_position", "settled_at_position",
}  # fmt: skip


def unknown(stage: Stage, contract_class: ContractClass, **more: Any) -> dict[str, Any]:
    """An effect that ended in doubt and was given up, as it is shown."""
    child = stage.running("a")
    attempt = stage.sent(child, contract=facts(contract_class, **more))
    stage.record(attempt, TryOutcome.IN_DOUBT, detail="the connection broke")
    stage.now += 60_000
    stage.ok(cmd.Classify(attempt=attempt.id, finding=Finding.UNKNOWN, basis=Basis.GAVE_UP, epoch=1))
    return effect_row(stage.run, stage.run.attempts[attempt.id])


def stage_removal() -> cmd.Revise:
    """Scope b goes."""
    return cmd.Revise(
        by="ann", kind=UpdateKind.CORRECT, request_id="gone", goal=goal(text=""), remove=("b",), reason="not wanted"
    )


def test_a_view_is_json_and_an_effect_has_every_field() -> None:
    stage = Stage(goal("a", budget=5))
    child = stage.running("a")
    stage.done(child, "o1")
    view = run_view(stage.run)
    assert json.loads(json.dumps(view)) == view
    [effect] = view["effects"]
    assert set(effect) >= EFFECT_FIELDS
    assert (effect["outcome"], effect["basis"], effect["input_ref"]) == ("succeeded", "reply", "bytes-of-o1")
    assert effect["observed_result"] == {"reply": "ok"}
    assert effect["tries"] == [
        {
            "n": 1, "gateway": "gateway-1", "granted_at": stage.now, "outcome": "ok", "basis": "reply", "status": None,
            "detail": "",
        }
    ]  # fmt: skip
    assert effect["operation_id"].startswith("rg-")
    assert 0 < effect["admitted_at_position"] < effect["settled_at_position"]
    assert view["budget"] == {"limit": 5, "spent": 1, "reserved": 0, "left": 4}
    assert view["effect_counts"] == {"succeeded": 1}


def test_a_view_shows_the_newest_effects_and_counts_all() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    for n in range(5):
        stage.done(child, f"o{n}")
    view = run_view(stage.run, effects_max=2)
    assert [effect["target"] for effect in view["effects"]] == ["o3", "o4"]
    assert view["effects_total"] == 5
    assert run_view(stage.run, effects_max=0)["effects"] == []


# --- revisions -------------------------------------------------------------------------------------------------------


def statuses(stage: Stage) -> list[str]:
    return [revision_status(stage.run, revision) for revision in stage.run.revisions.values()]


def test_a_revision_is_accepted_until_its_gates_have_opened_and_one_that_never_did_is_skipped() -> None:
    stage = Stage(goal("a", "b"))
    assert statuses(stage) == ["active"]
    stage.change("a")
    assert statuses(stage) == ["superseded", "accepted"]
    stage.change("a")
    assert statuses(stage) == ["superseded", "skipped", "accepted"]
    stage.open("a")
    assert statuses(stage) == ["superseded", "skipped", "active"]
    rows = run_view(stage.run)["revisions"]
    assert rows[0]["still_in_force_for"] == ["b"]
    assert rows[2]["changed"]["scopes"] == ["a"]
    assert rows[2]["kept"]["scopes"] == ["b"]


def test_a_change_says_what_it_changed_removed_kept_and_what_was_finished_before() -> None:
    stage = Stage(goal("a", "b", "c"))
    child = stage.running("a")
    done = stage.done(child, "o1")
    flying = stage.sent(child, "o2")
    stage.revise(goal("a", text="", b=stage.run.revisions[1].goal.plan["b"]), remove=("c",))
    row = change_row(run_view(stage.run))
    assert row["removed"] == ["c"]
    assert row["kept"]["scopes"] == ["a", "b"]
    stage.change("a")
    row = change_row(run_view(stage.run))
    assert row["changed"]["scopes"] == ["a"]
    assert [effect["attempt"] for effect in row["finished_before"]] == [done.id]
    assert [effect["attempt"] for effect in row["open"]] == [flying.id]


def test_a_closed_scope_says_what_it_waits_for() -> None:
    stage = Stage(goal("a"))
    attempt = stage.sent(stage.running("a"))
    stage.change("a")
    scope = run_view(stage.run)["scopes"]["a"]
    assert (scope["gate"], scope["cur"], scope["target"]) == ("closed", 1, 2)
    assert scope["waits_for"] == [f"the outcome of {attempt.id} (shop.refund)"]
    stage.pause()
    stage.record(attempt, TryOutcome.OK)
    stage.open("a")
    assert run_view(stage.run)["scopes"]["a"]["waits_for"] == ["resume"]


# --- unknown ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contract_class", "settles"),
    [
        (ContractClass.OPAQUE, "shop cannot be asked afterwards: it is settled by `regate effect resolve run1-e1`"),
        (ContractClass.KEY, "shop cannot be asked afterwards"),
        (ContractClass.LOOKUP, "'not found' proves nothing: it is settled when a lookup finds it"),
        (ContractClass.VOID, "it is settled when shop answers the void of its key"),
        (ContractClass.NOT_AFTER, "a lookup at shop after its deadline has passed there"),
    ],
)
def test_an_unknown_says_in_one_line_what_happened_and_what_would_settle_it(
    contract_class: ContractClass, settles: str
) -> None:
    row = unknown(Stage(goal("a")), contract_class)
    assert row["outcome"] == "unknown"
    assert row["why"].startswith("shop was called and gave no usable answer (the connection broke); ")
    assert settles in row["why"]
    assert row["why"].endswith("until then a does not go on")
    assert "\n" not in row["why"]


def test_an_unknown_that_blocks_its_slot_says_so_and_is_listed_with_the_command_that_settles_it() -> None:
    stage = Stage(goal("a"))
    row = unknown(stage, ContractClass.OPAQUE, unknown_blocks=Blocks.SLOT, dedupes=False, tries_max=1)
    assert row["why"].endswith("only this action is blocked")
    [listed] = run_view(stage.run)["unresolved"]
    assert (listed["kind"], listed["id"], listed["blocks"], listed["why"]) == (
        "effect", row["attempt"], "slot", row["why"],
    )  # fmt: skip
    [item] = attention_items(stage.run)
    assert item["command"].startswith(f"regate effect resolve {row['attempt']} --happened|--did-not-happen")
    stage.ok(
        cmd.Resolve(attempt=row["attempt"], happened=True, request_id="r", reason="seen", evidence="inbox", by="ann")
    )
    assert run_view(stage.run)["unresolved"] == []
    assert attention_items(stage.run) == []
    settled = effect_row(stage.run, stage.run.attempts[row["attempt"]])
    assert (settled["basis"], settled["resolved_by"], settled["why"]) == ("operator", "ann", "seen")


def test_a_try_that_was_never_reported_is_told_from_one_that_failed() -> None:
    stage = Stage(goal("a"))
    attempt = stage.sent(stage.running("a"), contract=facts(ContractClass.LOOKUP))
    stage.now += 60_000
    stage.ok(cmd.StartReconcile(attempt=attempt.id, method=Method.LOOKUP, epoch=1))
    stage.ok(cmd.Classify(attempt=attempt.id, finding=Finding.UNKNOWN, basis=Basis.GAVE_UP, epoch=1))
    row = effect_row(stage.run, stage.run.attempts[attempt.id])
    assert row["why"].startswith("it was permitted, and the gateway never said how the call of shop ended; ")
    assert "(asked 1 time so far)" in row["why"]


# --- children --------------------------------------------------------------------------------------------------------


def test_a_gated_child_that_ignores_its_stop_is_unresolved_and_blocks_nothing() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.change("a")
    stage.ok(cmd.RequestStop(child=child.id, reason="superseded"))
    [row] = run_view(stage.run)["unresolved"]
    assert (row["kind"], row["id"], row["state"], row["blocks"]) == ("child", child.id, "stop_requested", "nothing")
    assert "was not seen to end" in row["why"]
    assert attention_items(stage.run) == []
    shown = run_view(stage.run)["children"][0]
    assert shown["stop"]["requested_at"] == stage.now
    assert (shown["needs_reconciliation"], shown["ended_at"]) == (2, None)


def test_an_autonomous_child_that_refuses_to_stop_needs_a_person() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a", ChildMode.AUTONOMOUS)
    stage.change("a")
    stage.ok(cmd.RequestStop(child=child.id, reason="superseded"))
    stage.ok(cmd.RecordStop(child=child.id, refused=True, detail="not cancelable"))
    [item] = attention_items(stage.run)
    assert (item["kind"], item["blocks"]) == ("child", "scope")
    assert "refused to stop it (not cancelable)" in item["why"]


def test_a_follow_up_names_its_predecessor_and_the_state_that_it_was_in() -> None:
    stage = Stage(goal("a"))
    first = stage.running("a")
    stage.change("a")
    stage.ok(cmd.RequestStop(child=first.id, reason="superseded"))
    stage.open("a")
    second = stage.running("a")
    stage.seen(first, TaskState.COMPLETED)
    stage.file(first)
    rows = {row["child"]: row for row in run_view(stage.run)["children"]}
    assert rows[first.id]["succeeded_by"] == second.id
    assert rows[first.id]["disposition"] == "dropped"
    assert (rows[second.id]["follows"], rows[second.id]["follows_state"]) == (first.id, "stop_requested")
    assert (rows[first.id]["current"], rows[second.id]["current"]) == (False, True)
    [result] = run_view(stage.run)["results"]
    assert (result["disposition"], result["reason"]) == ("dropped", "superseded by revision 2")
    [checkpoint] = run_view(stage.run)["checkpoints"]
    assert (checkpoint["checkpoint"], checkpoint["scope"], checkpoint["revision"]) == ("a@2", "a", 2)


def test_a_refusal_is_shown_with_the_revision_in_force() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.change("a")
    stage.ask(child)
    [row] = run_view(stage.run)["refusals"]
    assert (row["reason"], row["revision"], row["in_force"], row["target"]) == ("superseded", 1, 2, "o1")


def test_evidence_against_what_was_settled_is_an_alarm_for_a_person() -> None:
    stage = Stage(goal("a"))
    attempt = stage.sent(stage.running("a"))
    stage.record(attempt, TryOutcome.NOT_EXECUTED)
    stage.record(attempt, TryOutcome.OK)
    [item] = attention_items(stage.run)
    assert (item["kind"], item["id"]) == ("alarm", attempt.id)
    assert run_view(stage.run)["alarms"][0]["attempt"] == attempt.id


# --- one line --------------------------------------------------------------------------------------------------------


def test_the_line_about_a_start() -> None:
    stage = Stage()
    before = brief_of(stage.run)
    stage.ok(cmd.Start(run="run1", principal="ann", request_id="s", goal=goal("a")))
    assert summary_line(before, brief_of(stage.run)) == (
        "started under revision 1, from nothing; no effect had completed; nothing unresolved; next: the agents work"
    )


def test_the_line_about_a_redirect_says_what_was_done_what_flies_and_what_comes_next() -> None:
    stage = Stage(goal("a", "b"))
    child = stage.running("a")
    stage.done(child, "o1")
    flying = stage.sent(child, "o2")
    before = brief_of(stage.run)
    stage.change("a")
    assert summary_line(before, brief_of(stage.run)) == (
        "revision 2 is in force, changes a, keeps b, from running under revision 1; 1 effect had completed; "
        f"1 in flight ({flying.id}); nothing unresolved; "
        f"next: 1 child asked to stop, waits for the outcome of {flying.id}, then the gate of a opens under revision 2"
    )


def test_the_line_keeps_what_was_before_although_states_change_in_place() -> None:
    stage = Stage(goal("a"))
    stage.sent(stage.running("a"))
    before = brief_of(stage.run)
    stage.pause()
    paused = brief_of(stage.run)
    assert summary_line(before, paused) == (
        "now paused, from running under revision 1; no effect had completed; 1 in flight (run1-e1); "
        "nothing unresolved; next: nothing new is sent until `regate run resume`, 1 in flight followed to its outcome"
    )
    stage.resume()
    assert summary_line(paused, brief_of(stage.run)).startswith("now running, from paused under revision 1")
    before = brief_of(stage.run)
    stage.cancel()
    assert summary_line(before, brief_of(stage.run)).startswith("now cancelling, from running under revision 1")


def test_the_line_about_a_decision_by_hand() -> None:
    stage = Stage(goal("a"))
    row = unknown(stage, ContractClass.OPAQUE, dedupes=False, tries_max=1)
    before = brief_of(stage.run)
    assert run_row(stage.run)["state"] == "blocked"
    stage.ok(cmd.Resolve(attempt=row["attempt"], happened=False, request_id="r", reason="no", evidence="log", by="ann"))
    line = summary_line(before, brief_of(stage.run))
    assert line.startswith("now running, from blocked under revision 1; no effect had completed; nothing unresolved")


def test_the_line_does_not_send_agents_to_work_that_is_done() -> None:
    stage = Stage(goal("a"))
    assert brief_of(stage.run).all_done is False
    row = unknown(stage, ContractClass.OPAQUE, dedupes=False, tries_max=1, unknown_blocks=Blocks.SLOT)
    child = stage.run.children[row["child"]]
    stage.seen(child, TaskState.COMPLETED)
    stage.file(child)
    before = brief_of(stage.run)
    stage.ok(
        cmd.Resolve(attempt=row["attempt"], happened=True, request_id="r", reason="seen", evidence="log", by="ann")
    )
    line = summary_line(before, brief_of(stage.run))
    assert "the agents work" not in line
    assert "every branch is done" in line or "the run has ended" in line


def test_the_line_about_a_redirect_of_a_paused_run_says_that_it_stays_held() -> None:
    stage = Stage(goal("a"))
    stage.running("a")
    stage.pause()
    before = brief_of(stage.run)
    stage.change("a")
    assert "`regate run resume`" in summary_line(before, brief_of(stage.run))


def test_a_scope_that_was_removed_says_so() -> None:
    stage = Stage(goal("a", "b"))
    stage.ok(stage_removal())
    scopes = run_view(stage.run)["scopes"]
    assert (scopes["a"]["removed"], scopes["b"]["removed"]) == (False, True)


# --- the control channel ---------------------------------------------------------------------------------------------


def test_the_control_channel_says_who_was_told_and_never_counts_that_as_acknowledged() -> None:
    stage = Stage(goal("a", "b"))
    first, other = stage.running("a"), stage.running("b")
    stage.change("a")
    stage.ok(cmd.RequestStop(child=first.id, reason="superseded"))
    start, change = control_view(enumerate(stage.log, start=1))
    assert [row["child"] for row in start["acknowledged"]] == [first.id, other.id]
    assert (change["seq"], change["kind"], change["revision"], change["affects"]) == (2, "correct", 2, ["a"])
    assert [row["child"] for row in change["told"]] == [first.id]
    assert change["acknowledged"] == []
    assert change["opened"] == []
    stage.ok(cmd.RequestStop(child=first.id, reason="superseded"))  # asked again: told once
    stage.open("a")
    second = stage.running("a")
    stage.seen(first, TaskState.CANCELED)
    _, change = control_view(enumerate(stage.log, start=1))
    assert len(change["told"]) == 1
    assert [(row["child"], row["how"]) for row in change["acknowledged"]] == [
        (second.id, "claimed its task"),
        (first.id, "seen canceled"),
    ]
    assert [row["scope"] for row in change["opened"]] == ["a"]


def test_the_control_channel_has_pauses_and_cancels_in_order() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.pause()
    stage.resume()
    stage.cancel()
    stage.ok(cmd.RequestStop(child=child.id, reason="cancelled"))
    rows = control_view(enumerate(stage.log, start=1))
    assert [row["kind"] for row in rows] == [UpdateKind.START, UpdateKind.PAUSE, UpdateKind.RESUME, UpdateKind.CANCEL]
    assert (rows[1]["held"], rows[2]["released"]) == (["a"], ["a"])
    assert [row["revision"] for row in rows] == [1, 1, 1, 1]
    assert [(row["child"], row["how"]) for row in rows[1]["told"]] == [(child.id, "held")]
    assert [(row["child"], row["how"]) for row in rows[2]["told"]] == [(child.id, "released")]
    assert rows[1]["acknowledged"] == rows[2]["acknowledged"] == []
    assert [(row["child"], row["how"]) for row in rows[3]["told"]] == [(child.id, "asked to stop")]


def test_a_pause_is_acknowledged_by_what_the_held_child_is_seen_to_do() -> None:
    stage = Stage(goal("a", "b"))
    child, old = stage.running("a"), stage.running("b")
    stage.change("b")
    stage.pause()
    stage.ask(child)
    stage.ask(old)  # superseded, so it is not held: it never goes on
    stage.resume()
    stage.ask(child)
    *_, pause, resume = control_view(enumerate(stage.log, start=1))
    assert (pause["revision"], resume["revision"]) == (2, 2)
    assert [row["child"] for row in pause["told"]] == [row["child"] for row in resume["told"]] == [child.id]
    assert [(row["child"], row["how"]) for row in pause["acknowledged"]] == [
        (child.id, "was answered `held` and waits")
    ]
    assert [(row["child"], row["how"]) for row in resume["acknowledged"]] == [(child.id, "acts again")]
