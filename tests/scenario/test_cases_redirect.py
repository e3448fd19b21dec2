"""Redirecting on the real stack: cases C12, C14, C15, C16, C19, C20, C28, and pausing and correcting in part.

A revision closes its gates in the same commit that records it. What the old revision sent is followed, what it delivers
late is kept as evidence, and what was not touched goes on as if nothing had happened.
"""

from __future__ import annotations

import time
import uuid

import anyio
import httpx
import pytest
from a2a.helpers.proto_helpers import new_data_part
from a2a.types import Message, Role, SendMessageRequest, TaskState
from a2a.utils.errors import A2AError

from admission.wire import EXTENSION, Stamp, launch_metadata
from orchestrator.courier import Courier, Launch, Seen
from tests.scenario.story import Story, child_of, children_in, effects_on, goal, mail, refund, scope, select, some
from tests.scenario.worker_stage import peer

pytestmark = pytest.mark.anyio


async def test_c12_a_late_result_of_the_old_revision_is_kept_and_never_merged(story: Story) -> None:
    story.stack.ensure("late")
    first, second = some("order"), some("order")
    story.stack.fault("payments", "refund", "delay", ms=600)
    run = await story.start(pay=scope(refund(first), agent="late"))
    child = await story.child_at_work(run, "pay")
    await story.wait_event(run, "try_granted")
    await story.corrected(run, pay=scope(refund(second)))
    [marked] = effects_on(await story.view(run), first)
    assert marked["needs_reconciliation"] == 2, "what is in flight is linked to the redirect"
    adopted = await story.wait_event(run, "result_filed", disposition="adopted")
    filed = await story.wait_event(run, "result_filed", child=child["child"])
    assert filed["position"] > adopted["position"], "the story needs the old result to come last"
    view = await story.wait_end(run)
    assert (filed["disposition"], filed["revision"], adopted["revision"]) == ("dropped", 1, 2)
    assert filed["reason"]
    evidence = await story.http.get(f"/v1/runs/{run}/blobs/{filed['artifacts'][0]['blob']}")
    assert first in evidence.text, "what was dropped can still be read"
    assert filed["artifacts"][0]["blob"] not in [a["blob"] for a in view["artifacts"]]
    [settled] = effects_on(view, first)
    assert (settled["outcome"], settled["revision"], settled["needs_reconciliation"]) == ("succeeded", 1, None)
    [checkpoint] = view["checkpoints"]
    assert [effect["attempt"] for effect in checkpoint["effects_done"]] == [settled["attempt"]]
    await story.checker()


async def test_c14_a_second_message_to_a_working_child_starts_nothing(story: Story) -> None:
    to = some("bob")
    story.stack.fault("mail", "send_message", "delay", ms=1_200)
    run = await story.start(tell=scope(mail(to)))
    child = await story.child_at_work(run, "tell")
    async with peer(story.stack.url("plan")) as client:
        message = Message(
            message_id=uuid.uuid4().hex, role=Role.ROLE_USER, parts=[new_data_part({"more": "work"})],
            task_id=child["task"], context_id=child["context"], extensions=[EXTENSION],
        )  # fmt: skip
        with pytest.raises(A2AError, match="takes no second message"):
            await client.launch(SendMessageRequest(message=message))
    await story.wait_end(run)
    log = await story.log(run)
    assert len(select(log, "child_planned")) == len(select(log, "child_claimed")) == 1
    assert len(story.stack.effects("mail", to)) == 1
    await story.checker()


async def test_c28_a_launch_that_is_sent_twice_is_worked_on_once(story: Story) -> None:
    to = some("bob")
    story.stack.fault("mail", "send_message", "delay", ms=1_200)
    run = await story.start(tell=scope(mail(to)))
    child = await story.child_at_work(run, "tell")
    stamp = Stamp(run, child["scope"], child["child"], child["revision"], child["goal_hash"])
    brief = {
        "run": run, "scope": "tell", "revision": 1, "goal_hash": child["goal_hash"], "actions": [mail(to)],
    }  # fmt: skip
    launch = Launch(
        agent=story.stack.url("plan"), child=child["child"], context=child["context"], stamp=stamp,
        grant=story.grant_for(child), gateway=story.stack.url("gateway"), brief=brief,
    )  # fmt: skip
    async with Courier() as courier, peer(story.stack.url("plan")) as client:
        second = await courier.launch(launch)
        assert isinstance(second, Seen)
        assert second.task != child["task"], "the A2A server does not recognise the message id; the claim does"
        ended = await client.ended(second.task)
    assert ended.status.state == TaskState.TASK_STATE_REJECTED
    await story.wait_end(run)
    answers = {e["task"]: e["answer"] for e in select(await story.log(run), "child_claimed")}
    assert answers[child["task"]] == "claimed"
    assert answers.get(second.task, "duplicate") == "duplicate"
    assert len(story.stack.effects("mail", to)) == 1
    assert set(launch_metadata(stamp, grant="g", gateway="u")) == {EXTENSION}
    await story.checker()


async def test_c15_of_three_redirects_in_a_row_only_the_last_is_worked_on(story: Story) -> None:
    to, orders = some("bob"), [some("order") for _ in range(3)]
    story.stack.fault("mail", "send_message", "delay", ms=1_500)
    run = await story.start(tell=scope(mail(to)))
    await story.wait_event(run, "try_granted")
    in_force = [await story.corrected(run, tell=scope(refund(order))) for order in orders]
    assert in_force == [2, 3, 4]
    assert effects_on(await story.view(run), to)[0]["outcome"] == "sending", "the story needs revision 1 to be stopping"
    view = await story.wait_end(run)
    assert [row["status"] for row in view["revisions"]] == ["superseded", "skipped", "skipped", "active"]
    assert {child["revision"] for child in view["children"]} == {1, 4}
    assert [len(story.stack.effects("payments", order)) for order in orders] == [0, 0, 1]
    await story.checker()


async def test_c16_of_two_people_who_redirect_at_once_one_is_told_what_is_in_force(story: Story) -> None:
    story.stack.ensure("silent")
    run = await story.start(wait=scope(agent="silent"))
    await story.child_at_work(run, "wait")
    orders, replies = [some("order"), some("order")], list[httpx.Response]()

    async def redirect(order: str) -> None:
        replies.append(await story.revise(run, plan={"wait": scope(refund(order))}, expected_revision=1))

    async with anyio.create_task_group() as both:
        for order in orders:
            both.start_soon(redirect, order)
    accepted, refused = sorted(replies, key=lambda reply: reply.status_code)
    assert (accepted.status_code, refused.status_code) == (200, 409)
    assert accepted.json()["in_force"] == refused.json()["in_force"] == 2
    assert "revision 2" in refused.json()["detail"]
    await story.wait_end(run)
    assert sorted(len(story.stack.effects("payments", order)) for order in orders) == [0, 1]
    await story.checker()


async def test_c19_clean_up_of_the_old_revision_cannot_touch_what_the_new_one_did(story: Story) -> None:
    story.stack.ensure("silent")
    order, to = some("order"), some("bob")
    run = await story.start(work=scope(agent="silent"), wait=scope(agent="silent"))
    old = await story.child_at_work(run, "work")
    await story.child_at_work(run, "wait")
    await story.corrected(run, work=scope(refund(order)))
    await story.wait_event(run, "result_filed", disposition="adopted")
    before = await story.view(run)
    clean_up = await story.ask(old, mail(to))
    assert clean_up.json()["verdict"] == "superseded"
    assert clean_up.json()["revision_in_force"] == 2
    again = await story.ask(old, refund(order))
    assert again.json()["verdict"] == "superseded", "not even the outcome of the new revision is handed out"
    view = await story.view(run)
    assert view["effects"] == before["effects"]
    assert view["scopes"]["work"]["done"]
    assert story.stack.effects("mail", to) == []
    await story.corrected(run, wait=scope(refund(some("order"))))
    await story.wait_end(run)
    await story.checker()


async def test_c20_what_was_current_when_it_was_looked_at_is_refused_when_it_acts(story: Story) -> None:
    story.stack.ensure("silent")
    order = some("order")
    run = await story.start(work=scope(agent="silent"))
    child = await story.child_at_work(run, "work")
    looked = (await story.at_gateway("/v1/gate", grant=story.grant_for(child))).json()
    assert (looked["gate"], looked["current"]) == ("open", True)
    await story.corrected(run, work=scope(refund(some("order"))))
    acted = (await story.ask(child, refund(order))).json()
    assert (acted["verdict"], acted["revision_in_force"]) == ("superseded", 2)
    assert "revision 2" in acted["detail"]
    await story.wait_end(run)
    refused = await story.wait_event(run, "effect_refused", child=child["child"])
    assert (refused["revision"], refused["in_force"], refused["target"]) == (1, 2, order)
    assert story.stack.effects("payments", order) == []
    await story.checker()


async def test_a_correction_of_one_scope_leaves_the_other_child_its_task_and_its_result(story: Story) -> None:
    one, other, third = some("order"), some("order"), some("order")
    story.stack.fault("payments", "refund", "delay", ms=700, calls=2)
    run = await story.start(a=scope(refund(one)), b=scope(refund(other)))
    await story.wait_event(run, "try_granted", count=2)
    [kept] = children_in(await story.view(run), "b")
    reply = await story.revise(run, plan={"a": scope(refund(third))})
    said = reply.json()["changed"]
    assert (said["changed"]["scopes"], said["kept"]["scopes"]) == (["a"], ["b"])
    view = await story.wait_end(run)
    [child] = children_in(view, "b")
    assert (child["child"], child["task"], child["stop"]["wanted"]) == (kept["child"], kept["task"], False)
    assert (child["revision"], child["disposition"]) == (1, "adopted")
    assert not select(await story.log(run), "stop_requested", child=child["child"])
    [old] = children_in(view, "a", 1)
    [new] = children_in(view, "a", 2)
    assert (old["succeeded_by"], new["follows"]) == (new["child"], old["child"])
    assert new["context"] == old["context"]
    assert new["follows_state"]
    assert [len(story.stack.effects("payments", order)) for order in (one, other, third)] == [1, 1, 1]
    await story.checker()


async def test_a_paused_run_asks_for_nothing_and_wakes_within_a_second_of_resume(story: Story) -> None:
    orders = [some("order") for _ in range(3)]
    story.stack.fault("payments", "refund", "delay", ms=500)
    run = await story.start(pay=scope(*[refund(order) for order in orders]))
    await story.wait_event(run, "try_granted")
    paused = await story.steer(run, "pause", expected_revision=1)
    assert paused.json()["run"]["revision"]["in_force"] == 1
    await story.wait_event(run, "try_recorded", outcome="ok")
    # The child has its answer and would go on at once; the gate's own refusal would be in the log.
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert (await story.at_gateway("/healthz")).json()["effects_in_hand"] == 0
        await anyio.sleep(0.05)
    assert len(select(await story.log(run), "effect_admitted")) == 1
    await story.steer(run, "resume")
    released = await story.wait_event(run, "run_released")
    woken = await story.wait_event(run, "effect_admitted", count=2)
    assert woken["appended_at"] - released["appended_at"] < 1_000
    view = await story.wait_end(run)
    assert {child["revision"] for child in view["children"]} == {1}
    assert [len(story.stack.effects("payments", order)) for order in orders] == [1, 1, 1]
    await story.checker()


async def test_an_agent_that_acts_past_the_gate_holds_it_until_it_is_seen_to_end(story: Story) -> None:
    story.stack.ensure("loner")
    run = await story.start(work=scope(agent="loner"))
    planned = await story.wait_event(run, "child_planned")
    assert planned["mode"] == "autonomous"
    await story.wait_event(run, "child_bound")
    await story.corrected(run, work=scope(refund(some("order"))))
    view = await story.wait_end(run)
    log = await story.log(run)
    [seen] = select(log, "child_seen", child=planned["child"], state="canceled")
    [opened] = select(log, "scope_opened")
    assert seen["position"] < opened["position"]
    assert child_of(view, planned["child"])["state"] == "stop_confirmed"
    await story.checker()


async def test_starting_twice_with_one_request_id_is_one_run_and_another_payload_is_refused(story: Story) -> None:
    order, request_id = some("order"), uuid.uuid4().hex
    body = {"goal": goal(pay=scope(refund(order))), "request_id": request_id}
    replies = [await story.http.post("/v1/runs", json=body) for _ in range(2)]
    [run] = {reply.json()["run"]["run"] for reply in replies}
    other = {**body, "goal": goal(pay=scope(refund(some("order"))))}
    reply = await story.http.post("/v1/runs", json=other)
    assert reply.status_code == 422, reply.text
    await story.wait_end(run)
    assert len(story.stack.effects("payments", order)) == 1
    await story.checker()
