"""Killing and stopping on the real stack: cases C11, C23, C41, C47, and two orchestrators on one store.

Everything is re-derivable from the log: whoever is killed, at whatever moment, is started again where it was and goes
on. What nobody can know any more is found out by asking the service, or stays unknown; nothing is sent to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from tests.scenario.stack import LETTERS, MAIL, PAYMENTS, Stack, StackSpec, running_stack
from tests.scenario.story import Story, child_of, children_in, effects_on, mail, refund, scope, select, some

pytestmark = pytest.mark.anyio

SPEC = StackSpec(
    services={"payments": PAYMENTS, "mail": MAIL, "letters": LETTERS},
    children={"silent": ("never_answers",)},
    partitions=1,
)
#: A restart, the time until a lease or a child counts as lost, and a loaded machine.
PATIENCE_S = 45.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, valkey_binary: Path) -> Iterator[Stack]:
    """A stack of this module's own: its parts are killed."""
    with running_stack(tmp_path_factory.mktemp("restart") / "s", valkey_binary, SPEC) as running:
        yield running


async def until(holds: Callable[[], Any], *, seconds: float = 20.0) -> None:
    """Wait for something outside the log: a journal, a process's words."""
    with anyio.fail_after(seconds):
        while not holds():  # noqa: ASYNC110 - it happens in another process
            await anyio.sleep(0.01)


async def test_c23_a_gateway_killed_after_the_effect_and_before_its_record_repeats_nothing(story: Story) -> None:
    order, after = some("order"), some("order")
    story.stack.fault("payments", "refund", "delay", ms=3_000)
    run = await story.start(pay=scope(refund(order), refund(after)))
    await until(lambda: story.stack.effects("payments", order))
    story.stack.kill9("gateway")
    assert not select(await story.log(run), "try_recorded")
    story.stack.restart("gateway")
    view = await story.wait_end(run, seconds=PATIENCE_S)
    [row] = effects_on(view, order)
    assert (row["outcome"], row["basis"]) == ("succeeded", "lookup_found")
    assert row["observed_result"]["target"] == order, "the receipt was found by asking"
    assert [len(story.stack.effects("payments", o)) for o in (order, after)] == [1, 1]
    await story.checker()


async def test_c23_what_cannot_be_asked_stays_unknown_and_keeps_its_scope_until_it_is_settled(story: Story) -> None:
    to = some("bob")
    story.stack.fault("letters", "send_message", "delay", ms=3_000)
    run = await story.start(tell=scope(mail(to, service="letters")))
    await until(lambda: story.stack.effects("letters", to))
    story.stack.kill9("gateway")
    story.stack.restart("gateway")
    await story.wait_event(run, "effect_classified", finding="unknown")
    await story.corrected(run, tell=scope(mail(to, service="letters"), refund(some("order"))))
    view = await story.wait_view(run, lambda view: view["state"] == "blocked")
    assert children_in(view, "tell", 2) == [], "the relaunch waits"
    [row] = effects_on(view, to)
    assert "never said how the call" in row["why"]
    body = {"happened": True, "reason": "the postman said so", "evidence": "his notebook"}
    reply = await story.http.post(f"/v1/effects/{row['attempt']}/resolve", json=body)
    assert reply.status_code == 200, reply.text
    await story.wait_end(run, seconds=PATIENCE_S)
    assert len(story.stack.effects("letters", to)) == 1
    await story.checker()


async def test_an_orchestrator_killed_once_a_redirect_is_answered_carries_it_out_afterwards(story: Story) -> None:
    to, order = some("bob"), some("order")
    story.stack.fault("mail", "send_message", "delay", ms=1_000)
    run = await story.start(tell=scope(mail(to)))
    await story.wait_event(run, "try_granted")
    assert await story.corrected(run, tell=scope(refund(order))) == 2
    story.stack.kill9("orchestrator")
    story.stack.restart("orchestrator")
    view = await story.wait_end(run, seconds=PATIENCE_S)
    assert [row["status"] for row in view["revisions"]] == ["superseded", "active"]
    assert [len(story.stack.effects("mail", to)), len(story.stack.effects("payments", order))] == [1, 1]
    await story.checker()


async def test_an_orchestrator_that_is_killed_finds_the_child_at_its_task_again(story: Story) -> None:
    to, order = some("bob"), some("order")
    story.stack.fault("mail", "send_message", "delay", ms=2_500)
    run = await story.start(tell=scope(mail(to), refund(order)))
    child = await story.child_at_work(run, "tell")
    await story.wait_event(run, "try_granted")
    story.stack.kill9("orchestrator")
    story.stack.restart("orchestrator")
    view = await story.wait_end(run, seconds=PATIENCE_S)
    [same] = view["children"]
    assert (same["child"], same["task"], same["launches"]) == (child["child"], child["task"], 1)
    assert same["disposition"] == "adopted"
    assert [len(story.stack.effects("mail", to)), len(story.stack.effects("payments", order))] == [1, 1]
    await story.checker()


async def test_c41_a_child_whose_worker_does_not_come_back_is_lost_and_replaced(story: Story) -> None:
    to, order = some("bob"), some("order")
    story.stack.fault("mail", "send_message", "delay", ms=1_000)
    run = await story.start(tell=scope(mail(to), refund(order)))
    child = await story.child_at_work(run, "tell")
    await story.wait_event(run, "try_granted")
    story.stack.kill9("plan")
    lost = await story.wait_event(run, "child_lost", child=child["child"])
    assert lost["detail"], "C11: the reason is recorded"
    story.stack.restart("plan")
    view = await story.wait_end(run, seconds=PATIENCE_S)
    assert child_of(view, child["child"])["state"] == "lost"
    assert children_in(view, "tell")[-1]["disposition"] == "adopted"
    assert [len(story.stack.effects("mail", to)), len(story.stack.effects("payments", order))] == [1, 1]
    await story.checker()


async def test_c47_while_the_store_is_away_the_gate_is_shut_and_nothing_is_sent(story: Story) -> None:
    story.stack.ensure("silent")
    order = some("order")
    run = await story.start(pay=scope(agent="silent"))
    child = await story.child_at_work(run, "pay")
    with story.stack.stopped("store"):
        reply = await story.ask(child, refund(order), timeout=60)
        assert reply.status_code == 503, reply.text
        assert reply.headers["content-type"].startswith("application/problem+json")
        assert story.stack.effects("payments", order) == []
        assert (await story.at_gateway("/readyz")).status_code == 503
    done: dict[str, Any] = {}
    with anyio.fail_after(PATIENCE_S):
        while done.get("verdict") not in ("done", "done_before"):
            done = (await story.ask(child, refund(order))).json()
            await anyio.sleep(0.1)
    assert len(story.stack.effects("payments", order)) == 1
    await story.corrected(run, pay=scope(refund(some("order"))))
    await story.wait_end(run, seconds=PATIENCE_S)
    await story.checker()


async def test_c47_a_store_killed_between_admission_and_record_comes_back_with_the_admission(story: Story) -> None:
    to, order = some("bob"), some("order")
    story.stack.fault("mail", "send_message", "delay", ms=1_500)
    run = await story.start(tell=scope(mail(to), refund(order)))
    await story.wait_event(run, "try_granted")
    before = story.stack.store_pid
    story.stack.kill9("store")
    view = await story.wait_end(run, seconds=PATIENCE_S)
    assert story.stack.store_pid != before, "whoever uses the store started it again"
    assert [row["outcome"] for row in effects_on(view, to)] == ["succeeded"], "and recorded what came back meanwhile"
    assert [len(story.stack.effects("mail", to)), len(story.stack.effects("payments", order))] == [1, 1]
    await story.checker()


async def test_a_run_survives_its_store_being_killed_again_and_again(story: Story) -> None:
    orders = [some("order") for _ in range(6)]
    story.stack.fault("payments", "refund", "delay", ms=300, calls=6)
    run = await story.start(pay=scope(*[refund(order) for order in orders]))
    for n in (1, 3, 5):
        await story.wait_event(run, "try_granted", count=n)
        story.stack.kill9("store")
    await story.wait_end(run, seconds=PATIENCE_S)
    assert [len(story.stack.effects("payments", order)) for order in orders] == [1] * 6
    await story.checker()


async def test_when_everything_is_killed_at_once_the_run_goes_on_afterwards(story: Story) -> None:
    order, to, wanted = some("order"), some("bob"), some("order")
    story.stack.fault("payments", "refund", "delay", ms=2_000)
    run = await story.start(a=scope(refund(order)), b=scope(mail(to)))
    await until(lambda: story.stack.effects("payments", order))
    await story.corrected(run, a=scope(refund(wanted)))
    for name in ("orchestrator", "gateway", "plan", "store"):
        story.stack.kill9(name)
    story.stack.start("gateway", "orchestrator", "plan")
    await story.wait_log(
        run, lambda log: {e["scope"] for e in select(log, "result_filed", disposition="adopted")} == {"a", "b"},
        seconds=PATIENCE_S, what="for both results",
    )  # fmt: skip
    assert [len(story.stack.effects("payments", o)) for o in (order, wanted)] == [1, 1]
    assert len(story.stack.effects("mail", to)) == 1
    await story.checker()


async def _beside_each_other(story: Story) -> None:
    """A second orchestrator, started when the first is known to hold the lease."""
    await story.wait_end(await story.start(pay=scope(refund(some("order")))), seconds=PATIENCE_S)
    story.stack.start("orchestrator2")


async def test_a_second_orchestrator_takes_over_when_the_first_is_killed(story: Story) -> None:
    to, order = some("bob"), some("order")
    await _beside_each_other(story)
    story.stack.fault("mail", "send_message", "delay", ms=1_500)
    run = await story.start(tell=scope(mail(to), refund(order)))
    child = await story.child_at_work(run, "tell")
    story.stack.kill9("orchestrator")
    story.http.base_url = httpx.URL(story.stack.url("api2"))
    view = await story.wait_end(run, seconds=PATIENCE_S)
    [same] = view["children"]
    assert (same["child"], same["task"]) == (child["child"], child["task"])
    story.stack.restart("orchestrator")
    await story.checker()
    story.stack.parts["orchestrator2"].stop()
    assert [len(story.stack.effects("mail", to)), len(story.stack.effects("payments", order))] == [1, 1]


async def test_an_orchestrator_that_stood_still_past_its_lease_is_fenced_when_it_wakes(story: Story) -> None:
    story.stack.ensure("silent")
    order = some("order")
    await _beside_each_other(story)
    run = await story.start(work=scope(agent="silent"), other=scope(agent="silent"))
    await story.child_at_work(run, "work")
    await story.child_at_work(run, "other")
    story.http.base_url = httpx.URL(story.stack.url("api2"))
    with story.stack.stopped("orchestrator"):
        await story.corrected(run, work=scope(refund(order)))
        await story.wait_log(
            run, lambda log: select(log, "result_filed", disposition="adopted"), seconds=PATIENCE_S, what="for a result"
        )
    await until(lambda: "is led by" in story.stack.parts["orchestrator"].said())
    await story.corrected(run, other=scope(refund(some("order"))))
    view = await story.wait_end(run, seconds=PATIENCE_S)
    assert len(children_in(view, "work", 2)) == len(children_in(view, "other", 3)) == 1
    epochs = [e["epoch"] for e in await story.log(run) if "epoch" in e]
    assert epochs == sorted(epochs)
    await story.checker()
    story.stack.parts["orchestrator2"].stop()
    assert len(story.stack.effects("payments", order)) == 1
