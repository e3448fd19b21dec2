"""Each simulated child misbehaves as its name says: real processes, A2A's own client, a gateway that notes who asks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from a2a.client import ClientCallContext
from a2a.client.errors import A2AClientError
from a2a.types import CancelTaskRequest, TaskState
from google.protobuf.json_format import MessageToDict

from admission.wire import EXTENSION, read_stamp
from simulators.children.behaviours import KINDS
from simulators.children.commands import ChildKind
from tests.scenario.worker_stage import Child, FakeGateway, Running, fake_gateway, peer, running, step, until

pytestmark = pytest.mark.anyio

COMPLETED, CANCELED = TaskState.TASK_STATE_COMPLETED, TaskState.TASK_STATE_CANCELED
WORKING, REJECTED = TaskState.TASK_STATE_WORKING, TaskState.TASK_STATE_REJECTED


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with fake_gateway() as made:
        yield made


@contextmanager
def child(kind: str, delay_ms: int, log: Path) -> Iterator[Running]:
    with running(["-m", "simulators.children", kind, "--delay-ms", str(delay_ms)], log) as made:
        yield made
        started = time.monotonic()
        made.stop()
        assert time.monotonic() - started < 8.0


def test_every_kind_has_a_word_on_the_command_line() -> None:
    assert {kind.value for kind in ChildKind} == set(KINDS)


async def test_ignores_cancel_answers_canceled_and_acts_afterwards(gateway: FakeGateway, tmp_path: Path) -> None:
    launched = Child(gateway.url, actions=(step("pay", cents=5),))
    with child("ignores_cancel", 600, tmp_path / "log") as made:
        async with peer(made.url) as client:
            [extension] = client.card.capabilities.extensions
            assert (extension.uri, extension.required) == (EXTENSION, True)
            task = await client.launch(launched.request())
            await until(lambda: gateway.claims)
            cancelled = await client.cancel(task.id)
            answered = time.monotonic()
            assert cancelled.status.state == CANCELED
            assert gateway.asked == []
            await until(lambda: gateway.asked)
            assert gateway.asked[0].at_s > answered
            assert gateway.asked[0].body["arguments"] == {"order_id": "#W1", "cents": 5}
            assert gateway.asked[0].grant == launched.grant
            assert (await client.task(task.id)).status.state == CANCELED
        await until(lambda: '"after_cancel": true' in made.log.read_text())
    assert launched.grant not in made.log.read_text()


async def test_late_completes_after_the_cancel_with_its_old_stamp(gateway: FakeGateway, tmp_path: Path) -> None:
    launched = Child(gateway.url, actions=(step("pay"),))
    with child("late", 800, tmp_path / "log") as made:
        async with peer(made.url) as client:
            task = await client.launch(launched.request())
            await until(lambda: gateway.answered)
            asked = time.monotonic()
            with pytest.raises(A2AClientError):  # no answer in time proves nothing
                await client.client.cancel_task(CancelTaskRequest(id=task.id), context=ClientCallContext(timeout=0.2))
            assert (await client.task(task.id)).status.state == WORKING
            ended = await client.ended(task.id)
            assert time.monotonic() - asked > 0.7
            assert ended.status.state == COMPLETED
            [artifact] = ended.artifacts
            assert artifact.name == "result"
            assert read_stamp(MessageToDict(artifact.metadata)) == launched.stamp


async def test_completes_during_cancel_answers_the_cancel_with_a_completed_task(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    launched = Child(gateway.url, actions=(step("pay"),))
    with child("completes_during_cancel", 100, tmp_path / "log") as made:
        async with peer(made.url) as client:
            task = await client.launch(launched.request())
            await until(lambda: gateway.answered)
            cancelled = await client.cancel(task.id)
            assert cancelled.status.state == COMPLETED
            stored = await client.task(task.id)
            assert stored.status.state == COMPLETED
            assert read_stamp(MessageToDict(stored.artifacts[0].metadata)) == launched.stamp


async def test_never_answers_hangs_the_cancel_and_stays_working(gateway: FakeGateway, tmp_path: Path) -> None:
    with child("never_answers", 0, tmp_path / "log") as made:
        async with peer(made.url) as client:
            task = await client.launch(Child(gateway.url).request())
            await until(lambda: gateway.claims)
            for _ in range(2):
                with pytest.raises(A2AClientError):
                    await client.client.cancel_task(
                        CancelTaskRequest(id=task.id), context=ClientCallContext(timeout=0.5)
                    )
            assert (await client.task(task.id)).status.state == WORKING


async def test_autonomous_has_no_extension_no_claim_and_no_stamp(gateway: FakeGateway, tmp_path: Path) -> None:
    with child("autonomous", 300, tmp_path / "log") as made:
        async with peer(made.url) as client:
            assert not client.card.capabilities.extensions
            request = Child(gateway.url, actions=(step("pay"),)).request(extensions=[], metadata={})
            done = await client.ended((await client.launch(request)).id)
            assert done.status.state == COMPLETED
            assert read_stamp(MessageToDict(done.artifacts[0].metadata)) is None
            task = await client.launch(request)
            assert (await client.cancel(task.id)).status.state == CANCELED
    assert gateway.claims == {}
    assert gateway.asked == []


async def test_a_child_that_cannot_be_claimed_rejects(gateway: FakeGateway, tmp_path: Path) -> None:
    gateway.claim = "duplicate"
    with child("late", 0, tmp_path / "log") as made:
        async with peer(made.url) as client:
            task = await client.launch(Child(gateway.url, actions=(step("pay"),)).request())
            assert (await client.ended(task.id)).status.state == REJECTED
    assert gateway.asked == []
