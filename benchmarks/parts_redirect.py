"""How long a redirect takes to close the gate while two processes commit on the same run.

Two processes with desks of their own admit and record on one scope each, at a fixed rate together. A third one (we)
redirects another scope, each time while an attempt of it is in flight, and then does what the conductor would: the
attempt is recorded, the scope opened again, its next child started.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any

import anyio

from admission import events as ev
from admission.commands import OpenScope, RecordSeen, Revise
from admission.vocabulary import TaskState, UpdateKind
from benchmarks.parts_figures import p50, p99
from benchmarks.parts_process import part, say, until_input_ends
from benchmarks.parts_run import SCOPE, Caller, RunDesk, accepted, goal, new_id, record, start_child, start_run
from benchmarks.parts_store import admit, desk_on

SIDES = ("left", "right")
COMMITS_PER_S = 1_000
#: Each step of the load is an admission and its record.
COMMITS_A_STEP = 2
STEPS_IN_HAND_MAX = 200
#: What a timer that is always a little late takes off the rate.
SPARE = 1.02
#: The load runs so long before the first redirect.
SETTLE_S = 0.3
PAUSE_S = 0.03
OPEN_MAX_S = 10.0


class _Load:
    """Admissions and records of one child, at a fixed rate."""

    def __init__(self, desk: RunDesk, run: str, caller: Caller) -> None:
        self.desk, self.run, self.caller = desk, run, caller
        self.commits = 0
        self._in_hand = 0

    async def go_on(self, steps_per_s: float) -> None:
        """Until cancelled. Open loop: a slow store does not slow the load down, up to a limit."""
        begun, step = perf_counter(), 0
        async with anyio.create_task_group() as tasks:
            while True:
                step += 1
                await anyio.sleep(max(0.0, begun + step / steps_per_s - perf_counter()))
                if self._in_hand < STEPS_IN_HAND_MAX:
                    tasks.start_soon(self._step)

    async def _step(self) -> None:
        self._in_hand += 1
        try:
            await self.desk.submit(self.run, record(await admit(self.desk, self.run, self.caller.wish())))
            self.commits += COMMITS_A_STEP
        finally:
            self._in_hand -= 1


async def serve_load(settings: dict[str, Any]) -> None:
    """The part `load`: commit on one scope of a run until our input ends; says how much that was."""
    async with desk_on(settings["store"]) as (_, desk):
        caller = Caller(settings["child"], scope=settings["scope"], first=settings["first"])
        load = _Load(desk, settings["run"], caller)
        await desk.current(settings["run"])
        say(ready=True)
        begun = perf_counter()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.go_on, settings["steps_per_s"])
            await until_input_ends()
            tasks.cancel_scope.cancel()
        say(per_s=load.commits / (perf_counter() - begun))


async def redirects(url: str, count: int, *, most_s: float) -> dict[str, float]:
    """Redirects one after the other under load: until the gate is closed, and until it is open for a new child."""
    run = new_id()
    closed_ms, opened_ms = [], []
    async with desk_on(url) as (_, desk), AsyncExitStack() as stack:
        children = await start_run(desk, run, SCOPE, *SIDES)
        loads = [await stack.enter_async_context(part("load", _load_of(url, run, children, side))) for side in SIDES]
        await anyio.sleep(SETTLE_S)
        caller = Caller(children[SCOPE])
        until = perf_counter() + most_s
        for n in range(count):
            if perf_counter() > until:
                break
            in_flight = await admit(desk, run, caller.wish())
            await anyio.sleep(PAUSE_S)
            revise = Revise(
                by="bench", kind=UpdateKind.CORRECT, request_id=new_id(),
                goal=ev.Goal(text="", plan=goal(SCOPE, words=f"again, {n}").plan),
            )  # fmt: skip
            begun = perf_counter()
            await accepted(desk, run, revise)
            closed = perf_counter()
            await desk.submit(run, record(in_flight))
            caller = await _reopen(desk, run, caller)
            closed_ms.append((closed - begun) * 1e3)
            opened_ms.append((perf_counter() - closed) * 1e3)
        ends = [await load.end() for load in loads]
    return {
        "redirect_ms_p50": p50(closed_ms), "redirect_ms_p99": p99(closed_ms), "redirect_ms_max": max(closed_ms),
        "redirect_reopen_ms_p50": p50(opened_ms), "redirect_load_per_s": sum(float(end["per_s"]) for end in ends),
        "redirects": len(closed_ms),
    }  # fmt: skip


def _load_of(url: str, run: str, children: dict[str, str], side: str) -> dict[str, Any]:
    return {
        "store": url, "run": run, "scope": side, "child": children[side], "first": (1 + SIDES.index(side)) * 10_000_000,
        "steps_per_s": COMMITS_PER_S * SPARE / len(SIDES) / COMMITS_A_STEP,
    }  # fmt: skip


async def _reopen(desk: RunDesk, run: str, old: Caller) -> Caller:
    """Open the closed scope as soon as what was sent is recorded, and start its next child."""
    await desk.submit(run, RecordSeen(by="bench", child=old.child, state=TaskState.CANCELED))
    revision = (await desk.current(run)).gates[old.scope].target
    with anyio.fail_after(OPEN_MAX_S):
        command = OpenScope(by="bench", scope=old.scope, revision=revision, epoch=0)
        while not (await desk.submit(run, command)).decision.accepted:  # noqa: ASYNC110 - each look asks the log
            await anyio.sleep(0.001)
    child = await start_child(desk, run, old.scope, revision)
    return Caller(child, scope=old.scope, revision=revision, first=revision * 10)
