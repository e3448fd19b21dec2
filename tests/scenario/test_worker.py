"""A worker in a process of its own, spoken to by A2A's own client, with a gateway that says what it is told to say."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import anyio
import httpx
import pytest
from a2a.types import Task, TaskState
from a2a.utils.errors import (
    A2AError,
    ExtensionSupportRequiredError,
    InvalidParamsError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
)
from google.protobuf.json_format import MessageToDict, MessageToJson

from admission.wire import EXTENSION, launch_metadata, read_stamp
from tests.scenario.worker_stage import (
    TERMINAL,
    Child,
    FakeGateway,
    Peer,
    Running,
    fake_gateway,
    peer,
    running,
    step,
    until,
)

pytestmark = pytest.mark.anyio

ODD = Path(__file__).with_name("odd_worker.py")
COMPLETED, FAILED = TaskState.TASK_STATE_COMPLETED, TaskState.TASK_STATE_FAILED
CANCELED, REJECTED = TaskState.TASK_STATE_CANCELED, TaskState.TASK_STATE_REJECTED
WORKING = TaskState.TASK_STATE_WORKING


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with fake_gateway() as made:
        yield made


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One plan worker for the whole file: 50 ms between two actions."""
    log = tmp_path_factory.mktemp("worker") / "stderr"
    with running(["-m", "workers", "plan", "--think-ms", "50"], log) as worker:
        yield worker


@pytest.fixture
async def planner(plan: Running) -> AsyncIterator[Peer]:
    async with peer(plan.url) as made:
        yield made


def result_of(task: Task) -> dict[str, Any]:
    [artifact] = [a for a in task.artifacts if a.name == "result"]
    found: dict[str, Any] = MessageToDict(artifact.parts[0].data)
    return found


def reason_of(task: Task) -> dict[str, Any]:
    found: dict[str, Any] = MessageToDict(task.metadata)[EXTENSION]
    return found


async def test_the_card_requires_the_extension(planner: Peer) -> None:
    [extension] = planner.card.capabilities.extensions
    assert (extension.uri, extension.required) == (EXTENSION, True)


async def test_a_plan_is_carried_out_and_its_result_is_stamped(gateway: FakeGateway, planner: Peer) -> None:
    child = Child(gateway.url, actions=(step("one", quantity=3), step("two")))
    gateway.script["two"] = [{"verdict": "done_before", "attempt": "run1-e7"}]
    task = await planner.launch(child.request())
    done = await planner.ended(task.id)
    assert done.status.state == COMPLETED
    result = result_of(done)
    assert result["outcome"] == "complete"
    assert [(a["action"], a["verdict"], a["target"]) for a in result["actions"]] == [
        ("one", "done", "#W1"),
        ("two", "done_before", "#W1"),
    ]
    [artifact] = done.artifacts
    assert read_stamp(MessageToDict(artifact.metadata)) == child.stamp
    assert read_stamp(MessageToDict(done.metadata)) == child.stamp
    # A2A turns every number into a double; the gateway must see the integer that the plan named.
    assert json.dumps(gateway.asked[0].body["arguments"]["quantity"]) == "3"
    assert gateway.claims == {f"Bearer {child.grant}": task.id}
    assert {asked.body["task"] for asked in gateway.asked} == {task.id}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_message_without_the_extension_or_its_metadata_is_refused(
    gateway: FakeGateway, planner: Peer, streamed: bool
) -> None:
    child = Child(gateway.url, actions=(step("one"),))
    sender = planner.streams if streamed else planner.client

    async def refused(kind: type[A2AError], says: str, **changes: Any) -> None:
        with pytest.raises(kind, match=says) as caught:
            async for _ in sender.send_message(child.request(**changes)):
                pass
        assert child.grant not in str(caught.value)

    full = launch_metadata(child.stamp, grant=child.grant, gateway=gateway.url)
    await refused(ExtensionSupportRequiredError, "message.extensions", extensions=[])
    await refused(InvalidParamsError, "lacks urn:regate", metadata={})
    for name in ("run", "grant", "gateway", "goal_hash"):
        fields = {key: value for key, value in full[EXTENSION].items() if key != name}
        await refused(InvalidParamsError, name, metadata={EXTENSION: fields})
    await refused(
        InvalidParamsError,
        "actions.0.service",
        data={"run": "run1", "scope": "orders", "revision": 1} | {"actions": [{}]},
    )
    await refused(InvalidParamsError, "differ", data={"run": "run1", "scope": "orders", "revision": 2})
    assert gateway.claims == {}
    assert gateway.asked == []


@pytest.mark.parametrize("claim", ["duplicate", "superseded"])
async def test_a_child_that_cannot_be_claimed_is_rejected_without_an_effect(
    gateway: FakeGateway, planner: Peer, claim: str
) -> None:
    gateway.claim = claim
    task = await planner.launch(Child(gateway.url, actions=(step("one"),)).request())
    ended = await planner.ended(task.id)
    assert (ended.status.state, reason_of(ended)["reason"]) == (REJECTED, claim)
    assert gateway.asked == []


async def test_the_same_launch_sent_twice_works_once(gateway: FakeGateway, planner: Peer) -> None:
    child = Child(gateway.url, actions=(step("one"),))
    first = await planner.launch(child.request())
    second = await planner.launch(child.request())
    assert first.id != second.id
    states = [(await planner.ended(task.id)).status.state for task in (first, second)]
    assert sorted(states) == sorted([COMPLETED, REJECTED])
    assert gateway.actions() == ["one"]


async def test_superseded_while_an_effect_is_asked_for_stops_at_once(gateway: FakeGateway, planner: Peer) -> None:
    gateway.script["one"] = [{"verdict": "superseded"}]
    gateway.revision = 2
    task = await planner.launch(Child(gateway.url, actions=(step("one"), step("two"))).request())
    ended = await planner.ended(task.id)
    assert ended.status.state == CANCELED
    assert reason_of(ended)["reason"] == "superseded"
    assert reason_of(ended)["revision_in_force"] == "2"
    assert gateway.actions() == ["one"]


async def test_superseded_while_nothing_is_asked_stops_at_once(gateway: FakeGateway, planner: Peer) -> None:
    gateway.effect_delay_s = 30
    task = await planner.launch(Child(gateway.url, actions=(step("one"), step("two"))).request())
    await until(lambda: gateway.asked and gateway.watchers)
    before = time.monotonic()
    gateway.turn(current=False, gate="closed", revision=2)
    ended = await planner.ended(task.id)
    assert time.monotonic() - before < 1.0
    assert (ended.status.state, reason_of(ended)["reason"]) == (CANCELED, "superseded")
    assert gateway.actions() == ["one"]


async def test_held_asks_for_nothing_and_goes_on_within_a_second_of_resume(gateway: FakeGateway, planner: Peer) -> None:
    steps = tuple(step(f"a{n}") for n in range(4))
    task = await planner.launch(Child(gateway.url, actions=steps).request())
    await until(lambda: gateway.answered)
    gateway.turn(gate="held")
    await until(lambda: gateway.watchers)  # the watcher has heard of it and asks for the next change
    asked = len(gateway.asked)
    assert asked < 4
    await anyio.sleep(0.7)  # longer than ten pauses between two actions
    assert len(gateway.asked) == asked
    assert (await planner.task(task.id)).status.state == WORKING
    resumed = time.monotonic()
    gateway.turn(gate="open")
    await until(lambda: len(gateway.asked) > asked)
    assert gateway.asked[asked].at_s - resumed < 1.0
    assert (await planner.ended(task.id)).status.state == COMPLETED


async def test_launched_into_a_held_gate_nothing_is_asked_until_it_opens(gateway: FakeGateway, planner: Peer) -> None:
    gateway.gate = "held"
    task = await planner.launch(Child(gateway.url, actions=(step("one"),)).request())
    await until(lambda: gateway.watchers)
    assert gateway.asked == []
    gateway.turn(gate="open")
    assert (await planner.ended(task.id)).status.state == COMPLETED


async def test_waits_through_held_in_flight_in_doubt_and_an_unavailable_gateway(
    gateway: FakeGateway, planner: Peer
) -> None:
    gateway.script["one"] = [
        503,
        {"verdict": "held"},
        {"verdict": "in_flight"},
        {"verdict": "in_doubt", "blocks": "scope"},
        {"verdict": "in_doubt", "blocks": "scope"},
        {"verdict": "done"},
    ]
    task = await planner.launch(Child(gateway.url, actions=(step("one"), step("two"))).request())
    ended = await planner.ended(task.id)
    assert result_of(ended)["outcome"] == "complete"
    assert gateway.actions() == ["one"] * 6 + ["two"]
    wishes = [{name: value for name, value in a.body.items() if name != "about"} for a in gateway.asked[:6]]
    assert all(wish == wishes[0] for wish in wishes)


async def test_a_refusal_is_noted_and_an_unknown_that_blocks_its_slot_leaves_the_plan_incomplete(
    gateway: FakeGateway, planner: Peer
) -> None:
    gateway.script["refused"] = [{"verdict": "failed", "observed_result": {"code": "policy"}}]
    gateway.script["mail"] = [{"verdict": "in_doubt", "blocks": "slot"}]
    gateway.script["nowhere"] = [404]
    steps = (step("refused"), step("last"))
    ended = await planner.ended((await planner.launch(Child(gateway.url, "c1", actions=steps).request())).id)
    assert [a["verdict"] for a in result_of(ended)["actions"]] == ["failed", "done"]
    assert result_of(ended)["outcome"] == "complete"
    other = Child(gateway.url, "c2", actions=(step("mail"), step("nowhere"), step("last")))
    ended = await planner.ended((await planner.launch(other.request())).id)
    assert ended.status.state == COMPLETED
    assert [a["verdict"] for a in result_of(ended)["actions"]] == ["in_doubt", "refused", "done"]
    assert result_of(ended)["outcome"] == "incomplete"


async def test_a_grant_that_the_gateway_refuses_ends_the_task_as_failed(gateway: FakeGateway, planner: Peer) -> None:
    gateway.script["one"] = [401]
    child = Child(gateway.url, actions=(step("one"), step("two")))
    ended = await planner.ended((await planner.launch(child.request())).id)
    assert ended.status.state == FAILED
    assert "401" in ended.status.message.parts[0].text
    assert gateway.actions() == ["one"]


async def test_cancel_stops_the_agent_and_a_wait_in_doubt(gateway: FakeGateway, planner: Peer) -> None:
    gateway.script["one"] = [{"verdict": "in_doubt", "blocks": "scope"}] * 1000
    task = await planner.launch(Child(gateway.url, actions=(step("one"),)).request())
    await until(lambda: len(gateway.asked) > 2)
    cancelled = await planner.cancel(task.id)
    assert cancelled.status.state == CANCELED
    asked = len(gateway.asked)
    await anyio.sleep(1.2)  # longer than the longest pause between two asks
    assert len(gateway.asked) == asked
    with pytest.raises(TaskNotCancelableError):
        await planner.cancel(task.id)
    with pytest.raises(TaskNotFoundError):
        await planner.cancel("no such task")


async def test_a_second_message_to_a_working_task_starts_nothing(gateway: FakeGateway, planner: Peer) -> None:
    gateway.effect_delay_s = 0.3
    child = Child(gateway.url, actions=(step("one"), step("two")))
    task = await planner.launch(child.request())
    await until(lambda: gateway.asked)
    second = Child(gateway.url, "c2", 2, actions=(step("three"),))
    for sender in (planner.client, planner.streams):
        with pytest.raises(UnsupportedOperationError, match="takes no second message"):
            async for _ in sender.send_message(second.request(task_id=task.id)):
                pass
    ended = await planner.ended(task.id)
    assert gateway.actions() == ["one", "two"]
    assert [message.message_id for message in ended.history] == ["c1"]
    with pytest.raises(UnsupportedOperationError):
        await planner.launch(second.request(task_id=task.id))
    with pytest.raises(TaskNotFoundError):
        await planner.launch(second.request(task_id="no such task"))


async def test_a_client_that_goes_away_does_not_stop_the_work(gateway: FakeGateway, planner: Peer) -> None:
    gateway.effect_delay_s = 0.2
    child = Child(gateway.url, actions=(step("one"), step("two"), step("three")))
    url = planner.card.supported_interfaces[0].url
    body = {"jsonrpc": "2.0", "id": 1, "method": "SendStreamingMessage"}
    body["params"] = MessageToDict(child.request(return_immediately=False))
    async with httpx.AsyncClient(timeout=10) as http:
        async with http.stream("POST", url, json=body, headers={"A2A-Version": "1.0"}) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data:"):
                    task_id = json.loads(line[5:])["result"]["task"]["id"]
                    break
            else:
                pytest.fail("no event came")
    ended = await planner.ended(task_id)
    assert ended.status.state == COMPLETED
    assert gateway.actions() == ["one", "two", "three"]


async def test_the_grant_shows_nowhere(gateway: FakeGateway, tmp_path: Path) -> None:
    child = Child(gateway.url, brief="x")
    leaky = Child(gateway.url, "c2", brief=child.grant)  # what its agent raises is a grant
    with running([str(ODD), "leaky"], tmp_path / "log") as worker:
        async with peer(worker.url) as client:
            seen = []
            for launched in (child, leaky):
                task = await client.launch(launched.request())
                seen.append(await client.ended(task.id))
        assert worker.stop() in (0, -15)
    assert [task.status.state for task in seen] == [FAILED, FAILED]
    assert child.grant not in MessageToJson(seen[0])
    told = seen[1].status.message.parts[0].text
    assert "could not go on with" in told
    log = worker.log.read_text()
    assert "RuntimeError" in log
    for piece in (child.grant, leaky.grant, child.grant.split(".")[1]):
        assert piece not in told
        assert piece not in log
        assert piece not in MessageToJson(seen[0])


async def test_an_agent_that_will_not_stop_cannot_hold_up_cancel_and_acts_no_more(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    with running([str(ODD), "stubborn"], tmp_path / "log") as worker:
        async with peer(worker.url) as client:
            task = await client.launch(Child(gateway.url, brief="60").request())
            await until(lambda: gateway.answered)
            before = time.monotonic()
            cancelled = await client.cancel(task.id)
            assert time.monotonic() - before < 2.0  # stop_s is 0.5 here
            assert cancelled.status.state == CANCELED
            assert (await client.task(task.id)).status.state == CANCELED
        before = time.monotonic()
        worker.stop()
        assert time.monotonic() - before < 5.0
    assert gateway.actions() == ["before"]
    assert "does not stop" in worker.log.read_text()


async def test_a_worker_stops_on_sigterm_in_the_middle_of_work(gateway: FakeGateway, tmp_path: Path) -> None:
    with running([str(ODD), "slow"], tmp_path / "log") as worker:
        async with peer(worker.url) as client:
            await client.launch(Child(gateway.url, brief="60000").request())
            await until(lambda: gateway.watchers)
            before = time.monotonic()
            assert worker.stop() in (0, -15)
            assert time.monotonic() - before < 5.0


async def race(
    client: Peer, gateway: FakeGateway, rounds: int, seed: int, *, stretch: int = 1
) -> tuple[list[str], set[int]]:
    """Cancels sent about when the agent ends: the rounds in which somebody was told what is not stored, the endings.

    `stretch` sends the later ones later, for a machine on which everything takes longer.
    """
    chance = Random(seed)
    wrong: list[str] = []
    states: set[int] = set()
    room = anyio.CapacityLimiter(10)

    async def one(n: int, wait_s: float) -> None:
        told: list[int] = []
        ids: list[str] = []
        started = anyio.Event()

        async def listen() -> None:
            async for event in client.streams.send_message(Child(gateway.url, f"c{seed}-{n}", brief="30").request()):
                if event.HasField("task"):
                    ids.append(event.task.id)
                    started.set()
                if event.HasField("status_update") and event.status_update.status.state in TERMINAL:
                    told.append(event.status_update.status.state)

        async with room, anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await started.wait()
            await anyio.sleep(wait_s)
            try:
                told.append((await client.cancel(ids[0])).status.state)
            except TaskNotCancelableError:
                told.append((await client.task(ids[0])).status.state)
        await anyio.sleep(0.1)  # what comes late must have had its chance to overwrite
        stored = (await client.task(ids[0])).status.state
        states.add(stored)
        if set(told) != {stored}:
            wrong.append(f"round {n}: told {told}, stored {stored}")

    async with anyio.create_task_group() as tasks:
        for n in range(rounds):
            tasks.start_soon(one, n, chance.uniform(0.02, 0.09 * stretch))
    return wrong, states


async def test_the_first_ending_wins_in_100_racing_cancels(gateway: FakeGateway, tmp_path: Path) -> None:
    with running([str(ODD), "racer"], tmp_path / "log") as worker:
        async with peer(worker.url) as client:
            ended: set[int] = set()
            for n, stretch in enumerate((1, 3, 9, 27)):
                wrong, states = await race(client, gateway, 100, seed=n + 1, stretch=stretch)
                assert wrong == []
                ended |= states
                if ended == {COMPLETED, CANCELED}:
                    return
    pytest.fail(f"the race never went both ways: {ended}")


async def test_without_the_guard_the_race_is_lost(gateway: FakeGateway, tmp_path: Path) -> None:
    """Shows that the test above can fail."""
    with running([str(ODD), "racer", "--no-guard"], tmp_path / "log") as worker:
        async with peer(worker.url) as client:
            for seed in range(10):
                wrong, _ = await race(client, gateway, 100, seed)
                if wrong:
                    return
    pytest.fail("1000 racing cancels, and nobody was told anything wrong: the race is too gentle to prove a guard")


def test_the_command_line_says_what_is_wrong(plan: Running) -> None:
    port = plan.url.rsplit(":", 1)[1]
    for program in (
        [sys.executable, "-m", "workers"],
        [sys.executable, "-c", "from workers.commands import app; app()"],
    ):
        for given, code, says in ((["--port", port], 1, "cannot listen"), (["--port", "99999"], 2, "port")):
            ended = subprocess.run([*program, "plan", *given], capture_output=True, text=True, timeout=30)
            assert (ended.returncode, ended.stdout) == (code, "")
            assert says in ended.stderr
