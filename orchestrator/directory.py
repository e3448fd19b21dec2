"""Which runs there are, in what order, and which one is meant by the beginning of an id.

Knows the store's index of runs and that a run's first entry says when it was started. Does not know their states.
"""

from __future__ import annotations

import anyio

from admission.storage import Store, StoreBehind, StoreUnavailable
from orchestrator.problems import Problem

PAGE_RUNS = 1_000
READERS_MAX = 16
CANDIDATES_SHOWN_MAX = 6
NEWEST_SHOWN_MAX = 5
LAST = "last"


class RunDirectory:
    """The runs of a store. Start times never change, so they are read once a process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._started: dict[str, int] = {}
        self._seen: set[str] = set()

    async def newest_first(self) -> list[str]:
        """All run ids, the newest first. Raises StoreUnavailable."""
        found: list[str] = []
        for partition in range(self._store.partitions):
            after = 0
            while True:
                page = await self._store.runs(partition, after_commit=after, limit=PAGE_RUNS)
                found += [run for run, _ in page]
                if len(page) < PAGE_RUNS:
                    break
                after = page[-1][1]
        unknown = [run for run in found if run not in self._started]
        limit = anyio.CapacityLimiter(READERS_MAX)
        failures: list[StoreUnavailable] = []
        async with anyio.create_task_group() as tasks:
            for run in unknown:
                tasks.start_soon(self._look, run, limit, failures)
        if failures:
            raise failures[0]
        # A run that changes between two pages is listed twice.
        return sorted(dict.fromkeys(found), key=lambda run: (self._started.get(run, 0), run), reverse=True)

    async def _look(self, run: str, limit: anyio.CapacityLimiter, failures: list[StoreUnavailable]) -> None:
        async with limit:
            try:
                first = [] if failures else await self._store.read(run, 0, 1)
            except StoreUnavailable as error:
                failures.append(error)  # raised once by the caller: out of the group it would arrive wrapped
                return
        if first:
            self._started[run] = first[0].at_ms

    async def resolve(self, given: str) -> str:
        """The id of the run that is meant: whole, a unique beginning, or `last`.

        Raises Problem: 404 when there is none, 409 when there are several. Raises StoreBehind for a run that was there.
        """
        if given != LAST:
            if (await self._store.head(given))[0]:
                self._seen.add(given)
                return given
            if given in self._seen:
                raise StoreBehind(f"run {given} is gone from the store: acknowledged data was lost; restore the store")
        runs = await self.newest_first()
        if given == LAST:
            if not runs:
                raise Problem(404, "unknown-run", "there is no run yet; start one with POST /v1/runs")
            return runs[0]
        found = [run for run in runs if run.startswith(given)]
        if len(found) == 1:
            return found[0]
        if not found:
            newest = runs[:NEWEST_SHOWN_MAX]
            words = f"the newest are {', '.join(newest)}" if newest else "there is no run yet"
            raise Problem(404, "unknown-run", f"no run {given!r}; {words}", known=newest)
        shown = found[:CANDIDATES_SHOWN_MAX]
        more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
        words = f"{given!r} begins {len(found)} runs: {', '.join(shown)}{more}; give more of it"
        raise Problem(409, "ambiguous", words, known=shown)
