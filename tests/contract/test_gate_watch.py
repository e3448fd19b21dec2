"""Waiting at a gate: who waits is told, and nothing is kept for runs at which nobody waits."""

from __future__ import annotations

import time

import anyio
import pytest

from admission.commands import Start
from admission.desk import Desk
from admission.events import Goal, ScopePlan
from admission.gate_watch import GateView, GateWatch
from admission.memory import MemoryStore
from admission.run_machine import RUN_MACHINE
from admission.vocabulary import GateState
from admission.wire import Grant
from tests.contract.store_room import WAIT_S, new_id

pytestmark = pytest.mark.anyio

CLOSED = (GateState.CLOSED, False)


def grant(run: str) -> Grant:
    return Grant(run, "a", "child", 1, 10**15)


async def test_a_bell_is_kept_only_while_somebody_waits() -> None:
    store = MemoryStore(now_ms=lambda: time.monotonic_ns() // 1_000_000)
    async with Desk(store, RUN_MACHINE, new_id=new_id) as desk, anyio.create_task_group() as tasks:
        watch = GateWatch(desk, store)
        for i in range(20):
            await watch.wait(grant(f"run{i}"), known=None, wait_ms=0)
            await watch.wait(grant(f"run{i}"), known=CLOSED, wait_ms=1)
        assert watch._bells == {}, "they only asked"
        with anyio.CancelScope() as scope:
            tasks.start_soon(anyio.sleep, 0)
            scope.cancel()
            await watch.wait(grant("run1"), known=CLOSED, wait_ms=30_000)
        assert watch._bells == {}, "it was cancelled"


async def test_one_who_leaves_takes_no_bell_from_those_who_stay() -> None:
    store = MemoryStore(now_ms=lambda: time.monotonic_ns() // 1_000_000)
    views: list[GateView] = []
    leaving = anyio.CancelScope()

    async def stays() -> None:
        views.append(await watch.wait(grant("run1"), known=CLOSED, wait_ms=30_000))

    async def leaves() -> None:
        with leaving:
            await watch.wait(grant("run1"), known=CLOSED, wait_ms=30_000)

    async with Desk(store, RUN_MACHINE, new_id=new_id) as desk, anyio.create_task_group() as tasks:
        watch = GateWatch(desk, store)
        tasks.start_soon(watch.listen)
        async with anyio.create_task_group() as waiting:
            waiting.start_soon(stays)
            waiting.start_soon(leaves)
            with anyio.fail_after(WAIT_S):
                while "run1" not in watch._bells or watch._bells["run1"].holders < 2:  # noqa: ASYNC110 - no bell here
                    await anyio.sleep(0.001)
            leaving.cancel()
            await anyio.wait_all_tasks_blocked()
            assert watch._bells["run1"].holders == 1
            bell = watch._bells["run1"].rung
            goal = Goal(text="x", plan={"a": ScopePlan(agent="p")})
            await desk.submit("run1", Start(run="run1", principal="t", request_id="r", goal=goal))
            with anyio.fail_after(WAIT_S):
                await bell.wait()
        assert [view.gate for view in views] == [GateState.OPEN]
        assert watch._bells == {}
        tasks.cancel_scope.cancel()
