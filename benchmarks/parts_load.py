"""How long a process that has never seen a run takes to know it, and how that grows with the run.

Knows snapshots only by their effect: a desk of this process writes one, a fresh desk finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import anyio

from admission.desk import Desk
from admission.run_machine import RUN_MACHINE
from admission.state import FOLD_VERSION
from admission.storage import Store
from benchmarks.parts_figures import Size
from benchmarks.parts_run import History, new_id
from benchmarks.parts_store import desk_on

#: The snapshot is this much older than the log: about the longest tail that a desk lets grow.
TAIL_PART = 0.02
SNAPSHOT_MAX_S = 30.0


async def cold_load(url: str, histories: Sequence[History], size: Size) -> dict[str, object]:
    """ms until the first confirmed look at a run of each length; best of several."""
    by_events: dict[str, float] = {}
    from_log_ms = 0.0
    async with desk_on(url) as (store, _):
        for events, log in zip(size.load_events, histories, strict=True):
            version = await log.write(store, upto=int(events * (1 - TAIL_PART)) - 1)
            from_log_ms = await _load_ms(store, log.run)
            await _write_snapshot(store, log.run)
            await log.write(store, version=version)
            by_events[str(events)] = min([await _load_ms(store, log.run) for _ in range(size.loads)])
    return {
        "cold_load_ms": by_events[str(size.load_events[-1])],
        "cold_load_without_snapshot_ms": from_log_ms,
        "cold_load_ms_by_events": by_events,
    }


async def _load_ms(store: Store, run: str) -> float:
    async with Desk(store, RUN_MACHINE, new_id=new_id, writes_snapshots=False) as desk:
        begun = perf_counter()
        await desk.current(run)
        return (perf_counter() - begun) * 1e3


async def _write_snapshot(store: Store, run: str) -> None:
    async with Desk(store, RUN_MACHINE, new_id=new_id) as desk:
        await desk.current(run)
        with anyio.fail_after(SNAPSHOT_MAX_S):
            while await store.snapshot(run, FOLD_VERSION) is None:  # noqa: ASYNC110 - a snapshot rings no bell
                await anyio.sleep(0.01)
