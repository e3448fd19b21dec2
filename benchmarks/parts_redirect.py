"""How long a redirect takes to close the gate while two processes commit on the same run.

Two processes with desks of their own admit and record on one scope each, at a fixed rate together. A third one (we)
redirects one scope after the other, waits until it is open again, and starts its next child, as the conductor would.
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
from benchmarks.parts_run import Caller, RunDesk, accepted, goal, new_id, record, start_child, start_run
from benchmarks.parts_store import desk_on

SIDES = ("left", "right")
COMMITS_PER_S = 1_000
#: Each step of the load is an admission and its record.
COMMITS_A_STEP = 2
STEPS_IN_HAND_MAX = 200
PAUSE_S = 0.03
OPEN_MAX_S = 10.0


class _Load:
    """Admissions and records on one scope of the run, at a fixed rate, under whichever child may act there."""

    def __init__(self, desk: RunDesk, run: str, scope: str) -> None:
        self.desk, self.run, self.scope = desk, run, scope
        self.commits = 0
        self.refused = 0
        self._in_hand = 0
        self._caller: Caller | None = None
        self._next = SIDES.index(scope) * 10_000_000

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
            caller = self._caller
            if caller is None:
                caller = self._caller = await self._look()
            if caller is None:
                return
            wish = caller.wish()
            decision = (await self.desk.submit(self.run, wish.admit, blobs=wish.blobs)).decision
            if decision.accepted:
                await self.desk.submit(self.run, record(str(decision.detail["attempt"])))
                self.commits += COMMITS_A_STEP
            else:
                self.refused += 1
                if self._caller is caller:
                    self._caller = None
        finally:
            self._in_hand -= 1

    async def _look(self) -> Caller | None:
        state = await self.desk.current(self.run)
        child = state.children.get(state.current.get(self.scope, ""))
        if child is None or not child.claimed or not state.is_current(child):
            return None
        self._next += 100_000
        return Caller(child.id, scope=self.scope, revision=child.revision, first=self._next)


async def serve_load(settings: dict[str, Any]) -> None:
    """The part `load`: commit on one scope of a run until our input ends; says how much that was."""
    async with desk_on(settings["store"]) as (_, desk):
        load = _Load(desk, settings["run"], settings["scope"])
        await desk.current(settings["run"])
        say(ready=True)
        begun = perf_counter()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.go_on, settings["steps_per_s"])
            await until_input_ends()
            tasks.cancel_scope.cancel()
        say(per_s=load.commits / (perf_counter() - begun), refused=load.refused)


async def redirects(url: str, count: int) -> dict[str, float]:
    """Redirects one after the other under load: until the gate is closed, and until it is open for a new child."""
    run = new_id()
    closed_ms, opened_ms = [], []
    async with desk_on(url) as (_, desk), AsyncExitStack() as stack:
        children = await start_run(desk, run, *SIDES)
        steps_per_s = COMMITS_PER_S / len(SIDES) / COMMITS_A_STEP
        loads = [
            await stack.enter_async_context(
                part("load", {"store": url, "run": run, "scope": side, "steps_per_s": steps_per_s * 1.02})
            )
            for side in SIDES
        ]
        await anyio.sleep(0.3)
        for n in range(count):
            side = SIDES[n % len(SIDES)]
            revise = Revise(
                by="bench", kind=UpdateKind.CORRECT, request_id=new_id(),
                goal=ev.Goal(text="", plan=goal(side, words=f"again, {n}").plan),
            )  # fmt: skip
            begun = perf_counter()
            await accepted(desk, run, revise)
            closed = perf_counter()
            closed_ms.append((closed - begun) * 1e3)
            children[side] = await _reopen(desk, run, side, children[side])
            opened_ms.append((perf_counter() - closed) * 1e3)
            await anyio.sleep(PAUSE_S)
        ends = [await load.end() for load in loads]
    return {
        "redirect_ms_p50": p50(closed_ms), "redirect_ms_p99": p99(closed_ms), "redirect_ms_max": max(closed_ms),
        "redirect_reopen_ms_p50": p50(opened_ms), "redirect_load_per_s": sum(float(end["per_s"]) for end in ends),
        "redirects": len(closed_ms), "redirect_admissions_refused": sum(int(end["refused"]) for end in ends),
    }  # fmt: skip


async def _reopen(desk: RunDesk, run: str, scope: str, old_child: str) -> str:
    """Open a closed scope as soon as what was sent is recorded, and start its next child."""
    await desk.submit(run, RecordSeen(by="bench", child=old_child, state=TaskState.CANCELED))
    revision = (await desk.current(run)).gates[scope].target
    with anyio.fail_after(OPEN_MAX_S):
        command = OpenScope(by="bench", scope=scope, revision=revision, epoch=0)
        while not (await desk.submit(run, command)).decision.accepted:
            await anyio.sleep(0.001)
    return await start_child(desk, run, scope, revision)
