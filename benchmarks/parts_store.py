"""What a commit costs: alone against PING and the floor, by many callers on many runs, and by many on one.

Knows the store's own connection, because the floor must be measured on it. Does not know HTTP.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import anyio
import hiredis
from redis.exceptions import ResponseError

from admission.desk import Desk
from admission.rules import decide
from admission.run_machine import RUN_MACHINE
from admission.store import RedisStore, make_client
from benchmarks.parts_figures import Size, p50, p99
from benchmarks.parts_run import Caller, RunDesk, Wish, new_id, record, start_run

FLOOR = (Path(__file__).parent / "floor.lua").read_bytes()
FLOOR_SHA = hashlib.sha1(FLOOR, usedforsecurity=False).hexdigest()
REWRITE_LOOK_S = 0.02
#: Callers have wishes for as many commits a second; nobody gets that far.
COMMITS_PER_S_MAX = 40_000


@asynccontextmanager
async def desk_on(url: str, **limits: Any) -> AsyncIterator[tuple[RedisStore, RunDesk]]:
    """A store and a desk of this process."""
    store = await RedisStore.open(url, new_id=new_id, **limits)
    try:
        async with Desk(store, RUN_MACHINE, new_id=new_id) as desk:
            yield store, desk
    finally:
        await store.aclose()


def _packed(*parts: Any) -> bytes:
    packed: bytes = hiredis.pack_command(parts)
    return packed


async def _raw(connection: Any, command: bytes) -> Any:
    """One command and its reply with nothing around it."""
    await connection.send_packed_command((command,), check_health=False)
    return await connection.read_response(timeout=math.inf)


async def alone(url: str, run: str, child: str, *, size: Size, first: int) -> dict[str, float]:
    """One caller, one connection: PING, the floor and the commit of an admission in turn. The best round counts."""
    async with desk_on(url, connections=1) as (store, desk):
        connection: Any = store._connections[0]
        state = await desk.current(run)
        caller = Caller(child, first=first)
        sample = caller.wish()
        events = b"\n".join(map(RUN_MACHINE.encode, decide(state, sample.admit, desk.now_ms()).events))
        (blob,) = sample.blobs.values()
        await desk.submit(run, record(await admit(desk, run, caller.wish())))  # connects, and loads the script
        await _raw(connection, _packed("SCRIPT", "LOAD", FLOOR))
        rounds = []
        for _ in range(size.rounds):
            wishes = caller.wishes(size.alone_calls)
            floors = [
                _packed("EVALSHA", FLOOR_SHA, 2, "bench:floor", f"bench:floor-blob-{new_id()}", events, blob)
                for _ in wishes
            ]
            rounds.append(
                await _alone_round(desk, run, connection, list(zip(wishes, floors, strict=True)), size.part_s)
            )
        return min(rounds, key=lambda figures: figures["commit_over_floor_p50"])


async def _alone_round(
    desk: RunDesk, run: str, connection: Any, calls: Sequence[tuple[Wish, bytes]], seconds: float
) -> dict[str, float]:
    ping = _packed("PING")
    pings, appends, commits = [], [], []
    until = perf_counter() + seconds
    for wish, floor in calls:
        a = perf_counter()
        if a > until:
            break
        await _raw(connection, ping)
        b = perf_counter()
        await _raw(connection, floor)
        c = perf_counter()
        answer = await desk.submit(run, wish.admit, blobs=wish.blobs)
        d = perf_counter()
        pings.append((b - a) * 1e6)
        appends.append((c - b) * 1e6)
        commits.append((d - c) * 1e6)
        await desk.submit(run, record(str(answer.decision.detail["attempt"])))
    return {
        "ping_us_p50": p50(pings), "ping_us_p99": p99(pings), "floor_us_p50": p50(appends),
        "floor_us_p99": p99(appends), "commit_us_p50": p50(commits), "commit_us_p99": p99(commits),
        "commit_over_floor_p50": p50(commits) / p50(appends),
    }  # fmt: skip


async def admit(desk: RunDesk, run: str, wish: Wish) -> str:
    """An admission that must be accepted; its attempt."""
    decision = (await desk.submit(run, wish.admit, blobs=wish.blobs)).decision
    if not decision.accepted:
        raise RuntimeError(f"an admission was answered {decision.verdict}: {decision.detail}")
    return str(decision.detail["attempt"])


# --- many callers


@dataclass(slots=True)
class _Crowd:
    """Callers that each admit and record, one after the other, until the time is over."""

    desk: RunDesk
    latencies_ms: list[float] = field(default_factory=list)
    until: float = 0.0

    async def call(self, run: str, wishes: Sequence[Wish]) -> None:
        for wish in wishes:
            a = perf_counter()
            if a >= self.until:
                return
            attempt = await admit(self.desk, run, wish)
            b = perf_counter()
            await self.desk.submit(run, record(attempt))
            c = perf_counter()
            self.latencies_ms += ((b - a) * 1e3, (c - b) * 1e3)
        raise RuntimeError("the callers ran out of wishes")


async def crowd(url: str, *, size: Size, seconds: float, one_run: bool) -> dict[str, float]:
    """Admissions and their records (each is a commit) of many callers, each on its own run or all on one. Best round.

    Callers are closed loops in one process: the rate is what this process and the server do together.
    """
    best: dict[str, float] = {"per_s": 0.0}
    for _ in range(size.rounds):
        async with desk_on(url) as (_, desk):
            runs = [new_id() for _ in range(1 if one_run else size.clients)]
            children = [(await start_run(desk, run))["orders"] for run in runs]
            # As many as fit into the time at a rate that nobody reaches.
            each = int(seconds * COMMITS_PER_S_MAX / 2 / size.clients) + 50
            todo = [
                (runs[i % len(runs)], Caller(children[i % len(runs)], first=i * each if one_run else 0).wishes(each))
                for i in range(size.clients)
            ]
            crowd = _Crowd(desk)
            begun, cpu_begun = perf_counter(), process_time()
            crowd.until = begun + seconds
            async with anyio.create_task_group() as tasks:
                for run, wishes in todo:
                    tasks.start_soon(crowd.call, run, wishes)
            took_s, cpu_s = perf_counter() - begun, process_time() - cpu_begun
        per_s = len(crowd.latencies_ms) / took_s
        if per_s > best["per_s"]:
            best = {
                "per_s": per_s, "ms_p50": p50(crowd.latencies_ms), "ms_p99": p99(crowd.latencies_ms),
                "cpu_us": cpu_s * 1e6 / len(crowd.latencies_ms),
            }  # fmt: skip
    return best


# --- the file is rewritten


@dataclass(slots=True)
class Rewrites:
    """How many rewrites of the file ended while something was measured."""

    finished: int = 0


@asynccontextmanager
async def rewriting(url: str) -> AsyncIterator[Rewrites]:
    """While inside, the server is rewriting its append-only file, again and again."""
    rewrites = Rewrites()
    client = make_client(url)

    async def keep_on() -> None:
        while True:
            info: Any = await client.info("persistence")
            if not info["aof_rewrite_in_progress"]:
                rewrites.finished += 1
                try:
                    await client.bgrewriteaof()
                except ResponseError:
                    rewrites.finished -= 1  # one is under way already
            await anyio.sleep(REWRITE_LOOK_S)

    try:
        await client.bgrewriteaof()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_on)
            yield rewrites
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await client.aclose()
