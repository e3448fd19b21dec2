"""No effect twice, on the real stack: cases C25, C26, C29, forged grants, and what an unknown outcome blocks.

An intent has one slot and one key, whoever asks and however often. Where a service cannot be asked, the outcome stays
unknown until a person says what happened, and until then nothing is done that it could double.
"""

from __future__ import annotations

import time
from typing import Any

import anyio
import httpx
import pytest

from tests.scenario.story import Story, children_in, effects_on, mail, refund, scope, select, some

pytestmark = pytest.mark.anyio


async def test_c25_a_reply_that_comes_too_late_is_asked_for_again_under_the_same_key(story: Story) -> None:
    order = some("order")
    story.stack.fault("till", "refund", "delay", ms=1_500)
    run = await story.start(pay=scope({**refund(order), "service": "till"}))
    view = await story.wait_end(run)
    [row] = effects_on(view, order)
    assert (row["outcome"], len(row["tries"])) == ("succeeded", 2)
    assert row["tries"][0]["outcome"] == "in_doubt"
    arrived = [line["event"] for line in story.stack.lines("till") if line["key"] == row["operation_id"]]
    assert arrived == ["executed", "replayed"]
    assert len(story.stack.effects("till", order)) == 1
    await story.checker()


async def test_c25_a_worker_that_hangs_up_and_asks_again_gets_the_one_outcome(story: Story) -> None:
    story.stack.ensure("silent")
    order = some("order")
    story.stack.fault("payments", "refund", "delay", ms=900)
    run = await story.start(pay=scope(agent="silent"))
    child = await story.child_at_work(run, "pay")
    with pytest.raises(httpx.TimeoutException):
        await story.ask(child, refund(order), timeout=0.2)
    await story.wait_event(run, "try_granted")
    said = (await story.ask(child, refund(order))).json()
    assert said["verdict"] == "in_flight", "asking again sends nothing while the first is under way"
    await story.wait_event(run, "try_recorded", outcome="ok")
    again = (await story.ask(child, refund(order))).json()
    assert (again["verdict"], again["attempt"]) == ("done_before", said["attempt"])
    assert again["observed_result"]["target"] == order
    assert len(story.stack.effects("payments", order)) == 1
    await story.corrected(run, pay=scope(refund(some("order"))))
    await story.wait_end(run)
    await story.checker()


async def test_c26_a_child_that_is_started_again_does_not_repeat_what_its_predecessor_did(story: Story) -> None:
    order, to = some("order"), some("bob")
    story.stack.fault("mail", "send_message", "delay", ms=1_500)
    run = await story.start(work=scope(refund(order), mail(to)))
    await story.wait_event(run, "try_granted", count=2)
    story.stack.kill9("plan")
    story.stack.restart("plan")
    view = await story.wait_end(run, seconds=40)
    first, second = children_in(view, "work")
    assert (first["state"], second["revision"]) == ("lost", 1)
    result = next(row for row in view["results"] if row["child"] == second["child"])
    verdicts = [action["verdict"] for action in result["summary"]["actions"]]
    assert verdicts == ["done_before", "done_before"]
    assert result["summary"]["actions"][0]["observed_result"]["target"] == order, "with the earlier receipt"
    assert [len(story.stack.effects("payments", order)), len(story.stack.effects("mail", to))] == [1, 1]
    await story.checker()


async def test_c29_the_same_intent_in_other_words_gets_the_first_outcome(story: Story) -> None:
    story.stack.ensure("silent")
    to = some("bob")
    run = await story.start(tell=scope(agent="silent"))
    child = await story.child_at_work(run, "tell")
    first, other = mail(to), mail(to)
    first["arguments"]["body"], other["arguments"]["body"] = "Hi Bob", "Dear Bob"
    done = (await story.ask(child, first)).json()
    assert done["verdict"] == "done"
    again = (await story.ask(child, other)).json()
    assert (again["verdict"], again["attempt"], again["input_ref"]) == (
        "done_before", done["attempt"], done["input_ref"],
    )  # fmt: skip
    [sent] = story.stack.effects("mail", to)
    assert sent["arguments"]["body"] == "Hi Bob"
    await story.corrected(run, tell=scope(refund(some("order"))))
    await story.wait_end(run)
    await story.checker()


async def test_c29_a_request_id_used_for_something_else_is_refused_and_the_first_stands(story: Story) -> None:
    story.stack.ensure("silent")
    run = await story.start(work=scope(agent="silent"))
    await story.child_at_work(run, "work")
    request_id = some("request")
    accepted = await story.revise(run, plan={"work": scope(refund(some("order")))}, request_id=request_id)
    assert accepted.status_code == 200, accepted.text
    refused = await story.revise(run, plan={"work": scope(refund(some("order")))}, request_id=request_id)
    assert refused.status_code == 422, refused.text
    view = await story.wait_end(run)
    assert view["revision"]["in_force"] == 2
    await story.checker()


async def test_a_forged_an_expired_and_a_foreign_grant_open_nothing(story: Story) -> None:
    story.stack.ensure("silent")
    order = some("order")
    run = await story.start(work=scope(agent="silent"), other=scope(agent="silent"))
    child = await story.child_at_work(run, "work")
    other = await story.child_at_work(run, "other")
    good = story.grant_for(child)
    refused = {
        "forged": story.grant_for(child, key=b"somebody else's key, 32 bytes ok"),
        "altered": good[:20] + ("A" if good[20] != "A" else "B") + good[21:],
        "expired": story.grant_for(child, expires_ms=1),
    }
    for name, grant in refused.items():
        reply = await story.ask(child, refund(order), grant=grant)
        assert reply.status_code == 401, name
        assert grant not in reply.text
    verdicts: dict[str, Any] = {
        "of another scope's child": story.grant_for(other),
        "of a later revision": story.grant_for(child, revision=2),
        "of a child that never was": story.grant_for(child, child="c000000000000"),
        "of another scope": story.grant_for(child, scope="other"),
    }
    for name, grant in verdicts.items():
        reply = await story.ask(child, refund(order), grant=grant)
        assert reply.status_code == 200, name
        assert reply.json()["verdict"] in ("not_current", "superseded"), name
    assert not select(await story.log(run), "effect_admitted")
    assert story.stack.effects("payments", order) == []
    assert (await story.ask(child, refund(order))).json()["verdict"] == "done", "the right one does"
    await story.steer(run, "cancel")
    await story.checker()


async def _blocked_by_a_letter(story: Story, to: str, fault: str) -> tuple[str, dict[str, Any]]:
    """A run whose letter is in doubt, redirected to a plan that wants the same letter; and the letter's row."""
    story.stack.fault("letters", "send_message", fault)
    run = await story.start(tell=scope(mail(to, service="letters")))
    await story.wait_event(run, "effect_classified", finding="unknown")
    await story.corrected(run, tell=scope(mail(to, service="letters"), refund(f"order-of-{to}")))
    view = await story.wait_view(run, lambda view: view["state"] == "blocked")
    [row] = [row for row in view["unresolved"] if row["kind"] == "effect"]
    assert (row["blocks"], row["state"]) == ("scope", "unknown")
    assert "cannot be asked" in row["why"]
    assert view["scopes"]["tell"]["gate"] == "closed"
    assert children_in(view, "tell", 2) == []
    items = (await story.http.get("/v1/attention")).json()["items"]
    assert [item["id"] for item in items if item["run"] == run] == [row["id"]]
    return run, row


async def _resolve(story: Story, attempt: str, *, happened: bool) -> None:
    body = {"happened": happened, "reason": "asked the postman", "evidence": "his notebook, page 7"}
    reply = await story.http.post(f"/v1/effects/{attempt}/resolve", json=body)
    assert reply.status_code == 200, reply.text


async def test_an_unknown_letter_blocks_its_scope_until_somebody_says_that_it_was_sent(story: Story) -> None:
    to = some("bob")
    run, row = await _blocked_by_a_letter(story, to, "lose")
    await _resolve(story, row["id"], happened=True)
    view = await story.wait_end(run)
    [letter] = effects_on(view, to)
    assert (letter["outcome"], letter["basis"]) == ("succeeded", "operator")
    [child] = children_in(view, "tell", 2)
    result = next(r for r in view["results"] if r["child"] == child["child"])
    assert [a["verdict"] for a in result["summary"]["actions"]] == ["done_before", "done"]
    assert len(story.stack.effects("letters", to)) == 1
    assert len(story.stack.effects("payments", f"order-of-{to}")) == 1
    await story.checker()


async def test_an_unknown_letter_is_sent_anew_when_somebody_says_that_it_was_not_sent(story: Story) -> None:
    to = some("bob")
    run, row = await _blocked_by_a_letter(story, to, "reset")
    assert story.stack.effects("letters", to) == []
    await _resolve(story, row["id"], happened=False)
    view = await story.wait_end(run)
    first, second = effects_on(view, to)
    assert (first["outcome"], first["basis"]) == ("failed", "operator")
    assert (second["outcome"], second["basis"]) == ("succeeded", "reply")
    assert first["operation_id"] != second["operation_id"]
    assert len(story.stack.effects("letters", to)) == 1
    await story.checker()


async def test_a_lost_mail_that_blocks_only_its_slot_lets_everything_else_go_on(story: Story) -> None:
    to, order = some("bob"), some("order")
    story.stack.fault("mail", "send_message", "lose")
    run = await story.start(tell=scope(mail(to)))
    await story.wait_event(run, "try_recorded", outcome="in_doubt")
    await story.corrected(run, tell=scope(mail(to), refund(order)))
    adopted = await story.wait_event(run, "result_filed", disposition="adopted", revision=2)
    view = await story.view(run)
    verdicts = [action["verdict"] for action in adopted["summary"]["actions"]]
    assert verdicts == ["in_doubt", "done"], "exactly the action that it could double is blocked"
    [row] = view["unresolved"]
    assert (row["blocks"], row["what"]) == ("slot", f"mail.send_message on {to}")
    assert [p["attempt"] for p in view["checkpoints"][-1]["pending"]] == [row["id"]]
    assert len(story.stack.effects("payments", order)) == 1
    verdict = await story.checker()
    assert [u["attempt"] for u in verdict["unresolved"] if u["run"] == run] == [row["id"]]
    await _resolve(story, row["id"], happened=True)
    await story.wait_end(run)
    assert len(story.stack.effects("mail", to)) == 1
    await story.checker()


async def test_c43_a_client_that_goes_away_cancels_nothing(story: Story) -> None:
    order, to = some("order"), some("bob")
    story.stack.fault("mail", "send_message", "delay", ms=1_000)
    run = await story.start(work=scope(mail(to), refund(order)))
    with pytest.raises(httpx.TimeoutException):
        await story.http.get(f"/v1/runs/{run}", params={"wait_for": "completed", "timeout_ms": 30_000}, timeout=0.1)
    view = await story.wait_end(run)
    assert [child["state"] for child in view["children"]] == ["ended"]
    assert not select(await story.log(run), "stop_requested")
    assert [len(story.stack.effects("mail", to)), len(story.stack.effects("payments", order))] == [1, 1]
    await story.checker()


async def test_c43_a_worker_that_goes_away_leaves_its_effect_to_its_end(story: Story) -> None:
    to = some("bob")
    story.stack.fault("mail", "send_message", "delay", ms=1_000)
    run = await story.start(tell=scope(mail(to)))
    await story.wait_event(run, "try_granted")
    story.stack.kill9("plan")
    recorded = await story.wait_event(run, "try_recorded")
    assert recorded["outcome"] == "ok", "the gateway waited for the reply, although nobody waits for it"
    story.stack.restart("plan")
    view = await story.wait_end(run, seconds=40)
    assert [row["outcome"] for row in effects_on(view, to)] == ["succeeded"]
    await story.checker()


async def test_everybody_who_asks_for_one_effect_at_once_gets_one_effect(story: Story) -> None:
    story.stack.ensure("silent")
    order, said = some("order"), list[dict[str, Any]]()
    run = await story.start(pay=scope(agent="silent"))
    child = await story.child_at_work(run, "pay")

    async def ask() -> None:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            answer = (await story.ask(child, refund(order))).json()
            if answer["verdict"] not in ("in_flight", "in_doubt"):
                said.append(answer)
                return
            await anyio.sleep(0.02)

    async with anyio.create_task_group() as crowd:
        for _ in range(12):
            crowd.start_soon(ask)
    assert sorted(answer["verdict"] for answer in said) == ["done"] + ["done_before"] * 11
    assert len({answer["attempt"] for answer in said}) == 1
    assert len(story.stack.effects("payments", order)) == 1
    await story.corrected(run, pay=scope(refund(some("order"))))
    await story.wait_end(run)
    await story.checker()
