"""Cancelling on the real stack: cases C01 (gated), C02, C04, C06, C07, C08, C10, C32, C49.

A cancel is a request. What was sent is followed to its outcome, what comes late is filed, and nothing is called stopped
before it was seen to stop.
"""

from __future__ import annotations

import time

import pytest

from tests.scenario.story import Story, child_of, children_in, effects_on, mail, refund, scope, select, some

pytestmark = pytest.mark.anyio


async def test_c01_a_gated_child_that_ignores_cancel_gets_no_payment_through(story: Story) -> None:
    story.stack.ensure("stubborn")
    order = some("order")
    run = await story.start(pay=scope(refund(order), agent="stubborn"))
    child = await story.child_at_work(run, "pay")
    assert (await story.steer(run, "cancel")).status_code == 200
    refused = await story.wait_event(run, "effect_refused", child=child["child"])
    assert (refused["reason"], refused["target"]) == ("superseded", order)
    view = await story.wait_end(run, "cancelled")
    seen = child_of(view, child["child"])
    assert seen["stop"]["requested_at"], "that it was asked to stop is shown apart from what was seen"
    assert (seen["state"], seen["task_state"], seen["result"]) == ("stop_confirmed", "canceled", None)
    assert view["refusals"], "the refused payment has a row"
    assert effects_on(view, order) == []
    assert story.stack.effects("payments", order) == []
    await story.checker()


async def test_c02_a_child_that_completes_as_the_cancel_arrives_is_not_called_cancelled(story: Story) -> None:
    story.stack.ensure("finisher")
    first, second = some("order"), some("order")
    run = await story.start(pay=scope(refund(first), agent="finisher"))
    child = await story.child_at_work(run, "pay")
    await story.wait_event(run, "try_recorded", outcome="ok")
    await story.corrected(run, pay=scope(refund(second)))
    view = await story.wait_end(run)
    await story.wait_event(run, "result_filed", child=child["child"])
    view = await story.view(run)
    seen = child_of(view, child["child"])
    assert seen["stop"]["wanted"]
    assert (seen["state"], seen["task_state"]) == ("ended", "completed")
    results = {row["child"]: row for row in view["results"]}
    assert (results[child["child"]]["revision"], results[child["child"]]["disposition"]) == (1, "dropped")
    [followed] = children_in(view, "pay", 2)
    assert results[followed["child"]]["disposition"] == "adopted"
    assert not select(await story.log(run), "child_seen", child=child["child"], state="canceled")
    await story.checker()


async def test_c04_cancelling_three_times_is_one_cancel_and_three_equal_answers(story: Story) -> None:
    to = some("bob")
    story.stack.fault("mail", "send_message", "delay", ms=1_500)
    run = await story.start(tell=scope(mail(to)))
    await story.wait_event(run, "try_granted")
    replies = [await story.steer(run, "cancel") for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200] * 3
    assert {reply.json()["run"]["state"] for reply in replies} == {"cancelling"}
    view = await story.wait_end(run, "cancelled")
    log = await story.log(run)
    assert len(select(log, "run_cancelled")) == 1
    assert len(select(log, "stop_requested")) == 1
    assert [row["outcome"] for row in effects_on(view, to)] == ["succeeded"]
    await story.checker()


async def test_c06_a_finished_run_cannot_be_cancelled_and_stays_as_it_was(story: Story) -> None:
    run = await story.start(pay=scope(refund(some("order"))))
    before = await story.wait_end(run)
    reply = await story.steer(run, "cancel")
    assert reply.status_code == 409, reply.text
    assert reply.headers["content-type"].startswith("application/problem+json")
    assert reply.json()["state"] == "completed"
    after = await story.view(run)
    assert (after["version"], after["state"]) == (before["version"], "completed")
    await story.checker()


async def test_c07_a_cancel_returns_at_once_and_the_blocking_call_is_followed_to_its_end(story: Story) -> None:
    to = some("bob")
    story.stack.fault("mail", "send_message", "delay", ms=1_500)
    run = await story.start(tell=scope(mail(to)))
    await story.wait_event(run, "try_granted")
    began = time.monotonic()
    assert (await story.steer(run, "cancel")).status_code == 200
    view = await story.view(run)
    took_s = time.monotonic() - began
    assert took_s < 1.2, "the answer to a cancel waits for nothing"
    [row] = effects_on(view, to)
    assert (view["state"], row["outcome"]) == ("cancelling", "sending")
    assert row["needs_reconciliation"], "what is in flight is marked by the cancel"
    view = await story.wait_end(run, "cancelled")
    [row] = effects_on(view, to)
    assert (row["outcome"], row["basis"]) == ("succeeded", "reply")
    assert len(story.stack.effects("mail", to)) == 1
    await story.checker()


async def test_c08_a_cancel_while_a_tool_is_waited_for_leaves_a_row_with_proof(story: Story) -> None:
    order = some("order")
    story.stack.fault("payments", "refund", "lose", calls=3)
    run = await story.start(pay=scope(refund(order)))
    await story.wait_event(run, "try_granted")
    assert (await story.steer(run, "cancel")).status_code == 200
    view = await story.wait_end(run, "cancelled")
    [row] = effects_on(view, order)
    assert row["outcome"] == "succeeded"
    assert row["observed_result"], "the receipt was found by asking"
    assert len(story.stack.effects("payments", order)) == 1
    story.stack.restart("payments")
    await story.checker()


async def test_c10_a_cancel_before_the_task_is_known_is_remembered_and_sent_later(story: Story) -> None:
    with story.stack.stopped("plan"):
        run = await story.start(pay=scope(refund(some("order"))))
        await story.wait_event(run, "launch_started")
        assert (await story.steer(run, "cancel")).status_code == 200
        view = await story.view(run)
        assert view["state"] == "cancelling", "nobody saw the child stop"
        assert not select(await story.log(run), "child_bound")
        [child] = view["children"]
        assert child["stop"]["wanted"]
    view = await story.wait_end(run, "cancelled", seconds=30)
    log = await story.log(run)
    [bound] = select(log, "child_bound")
    [cancelled] = select(log, "run_cancelled")
    [finished] = select(log, "run_finished")
    [ended] = [e for e in select(log, "child_seen") if e["state"] in ("canceled", "rejected", "completed")]
    assert cancelled["position"] < bound["position"] < ended["position"] < finished["position"]
    assert view["effects"] == []
    await story.checker()


async def test_c32_what_landed_during_a_pause_is_not_repeated_when_the_run_is_resumed(story: Story) -> None:
    order, after = some("order"), some("order")
    story.stack.fault("payments", "refund", "delay", ms=700)
    run = await story.start(pay=scope(refund(order), refund(after)))
    await story.wait_event(run, "try_granted")
    assert (await story.steer(run, "pause")).status_code == 200
    await story.wait_event(run, "try_recorded", outcome="ok")
    assert (await story.view(run))["state"] == "paused"
    assert effects_on(await story.view(run), after) == []
    assert (await story.steer(run, "resume")).status_code == 200
    await story.wait_end(run)
    assert [len(story.stack.effects("payments", o)) for o in (order, after)] == [1, 1]
    await story.checker()


async def test_c32_what_is_in_doubt_when_a_run_is_resumed_is_classified_before_it_is_done_again(story: Story) -> None:
    order = some("order")
    story.stack.fault("payments", "refund", "lose", calls=3)
    run = await story.start(pay=scope(refund(order)))
    await story.wait_event(run, "try_recorded", outcome="in_doubt")
    assert (await story.steer(run, "pause")).status_code == 200
    [row] = effects_on(await story.view(run), order)
    assert row["outcome"] == "sending", "in doubt is not failed"
    assert (await story.steer(run, "resume")).status_code == 200
    view = await story.wait_end(run)
    [row] = effects_on(view, order)
    assert (row["outcome"], row["basis"], row["generation"]) == ("succeeded", "lookup_found", 1)
    assert len(story.stack.effects("payments", order)) == 1
    story.stack.restart("payments")
    await story.checker()


async def test_c32_a_run_cannot_be_started_as_the_successor_of_another_whose_effects_it_would_not_know(
    story: Story,
) -> None:
    order = some("order")
    run = await story.start(pay=scope(refund(order)))
    await story.wait_end(run)
    again = {"text": "the same again", "requirements": [], "plan": {"pay": scope(refund(order))}}
    reply = await story.http.post("/v1/runs", json={"goal": again, "follows": run})
    assert reply.status_code == 422, reply.text
    assert len(story.stack.effects("payments", order)) == 1
    await story.checker()


async def test_c49_a_child_that_reports_after_the_run_has_ended_is_filed_and_reopens_nothing(story: Story) -> None:
    story.stack.ensure("late")
    first, second = some("order"), some("order")
    run = await story.start(pay=scope(refund(first), agent="late"))
    child = await story.child_at_work(run, "pay")
    await story.wait_event(run, "try_recorded", outcome="ok")
    await story.corrected(run, pay=scope(refund(second)))
    view = await story.wait_end(run)
    assert child_of(view, child["child"])["state"] in ("stop_requested", "unreachable", "stop_refused")
    filed = await story.wait_event(run, "result_filed", child=child["child"])
    assert filed["disposition"] == "dropped"
    [finished] = select(await story.log(run), "run_finished")
    assert filed["position"] > finished["position"], "the story needs the report to come after the end"
    after = await story.view(run)
    assert after["state"] == "completed"
    assert [a["blob"] for a in after["artifacts"]] == [a["blob"] for a in view["artifacts"]]
    assert child_of(after, child["child"])["stop"]["times"] >= 1
    await story.checker()
