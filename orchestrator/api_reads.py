"""The routes that only look: runs, effects, logs, what needs a person, processes, the doctor.

Knows pages, waiting and how a log is exported. Does not know how anything is changed (api.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import anyio
from fastapi import FastAPI, Query

from admission import events as ev
from admission.state import RunState
from admission.storage import Entry, StoreUnavailable
from admission.vocabulary import AttemptState, RunPhase
from orchestrator.api_parts import ApiParts, resolve_attempt
from orchestrator.directory import RunDirectory
from orchestrator.problems import Problem
from orchestrator.views import checkpoint_rows, child_row, effect_row, refusal_rows, result_row, run_row, run_view
from orchestrator.views_lines import attention_items, control_view

POLL_INTERVAL_S = 0.05
WAIT_MS_MAX = 60_000
PAGE_MAX = 1_000
LOG_PAGE_ENTRIES = 1_000
PROCESSES_FILE = "processes.json"

Limit = Annotated[int, Query(ge=1, le=PAGE_MAX)]


def add_reads(app: FastAPI, parts: ApiParts, runs: RunDirectory) -> None:
    """Add the routes."""
    reads = Reads(parts, runs)
    app.get("/healthz")(reads.healthz)
    app.get("/v1/runs")(reads.list_runs)
    app.get("/v1/runs/{run}")(reads.show)
    app.get("/v1/runs/{run}/effects")(reads.effects)
    app.get("/v1/runs/{run}/log")(reads.log)
    app.get("/v1/runs/{run}/blobs/{sha}")(reads.blob)
    app.get("/v1/runs/{run}/{part}")(reads.part)
    app.get("/v1/effects/{attempt}")(reads.effect)
    app.get("/v1/attention")(reads.attention)
    app.get("/v1/processes")(reads.processes)
    app.get("/v1/doctor")(reads.doctor)


class Reads:
    """The routes that change nothing."""

    def __init__(self, parts: ApiParts, runs: RunDirectory) -> None:
        self._parts = parts
        self._runs = runs

    async def healthz(self) -> dict[str, Any]:
        """GET /healthz: the process answers."""
        return {"status": "ok"}

    async def list_runs(self, limit: Limit = 20, cursor: str = "") -> dict[str, Any]:
        """GET /v1/runs: the newest first. `cursor` is the last run of the page before."""
        ids = await self._runs.newest_first()
        if cursor:
            if cursor not in ids:
                raise Problem(422, "malformed", f"the cursor {cursor[:64]!r} is no run; take it from the page before")
            ids = ids[ids.index(cursor) + 1 :]
        rows = [await self._parts.desk.look(run, run_row) for run in ids[:limit]]
        return {"runs": rows, "cursor": ids[limit - 1] if len(ids) > limit else None}

    async def show(
        self,
        run: str,
        wait_for: str = "",
        changed_since: Annotated[int | None, Query(ge=0)] = None,
        timeout_ms: Annotated[int, Query(ge=0, le=WAIT_MS_MAX)] = 20_000,
    ) -> dict[str, Any]:
        """GET /v1/runs/RUN: the view; with `wait_for=PHASE,…` or `changed_since=VERSION` when that is so, or in time.

        Waiting ends without an error: what is answered says how things stand.
        """
        run_id = await self._runs.resolve(run)
        try:
            wanted = {RunPhase(name.strip()) for name in wait_for.split(",") if name.strip()}
        except ValueError:
            words = f"wait_for holds phases, separated by commas: {', '.join(RunPhase)}"
            raise Problem(422, "malformed", words) from None
        if not wanted and changed_since is None:
            return await self._parts.desk.look(run_id, run_view)

        def reached(state: RunState) -> dict[str, Any] | None:
            row = run_row(state)
            there = row["state"] in wanted or (changed_since is not None and state.version > changed_since)
            return run_view(state) if there else None

        found = await self._wait(run_id, reached, timeout_ms)
        return found if found is not None else await self._parts.desk.look(run_id, run_view)

    async def _wait(
        self, run: str, reached: Callable[[RunState], dict[str, Any] | None], timeout_ms: int
    ) -> dict[str, Any] | None:
        seen = -1
        with anyio.move_on_after(timeout_ms / 1000):
            while not self._parts.closing.is_set():
                version, _ = await self._parts.store.head(run)
                if version != seen:
                    seen = version
                    found = await self._parts.desk.look(run, reached)
                    if found is not None:
                        return found
                await anyio.sleep(POLL_INTERVAL_S)
        return None

    # -- effects ------------------------------------------------------------------------------------------------------

    async def effects(
        self, run: str, state: str = "", limit: Limit = PAGE_MAX, cursor: Annotated[int, Query(ge=0)] = 0
    ) -> dict[str, Any]:
        """GET /v1/runs/RUN/effects: in the order of their admission. `cursor` is the number of the last one seen."""
        run_id = await self._runs.resolve(run)
        try:
            wanted = AttemptState(state) if state else None
        except ValueError:
            words = f"state is one of {', '.join(AttemptState)}"
            raise Problem(422, "malformed", words) from None

        def page(folded: RunState) -> dict[str, Any]:
            rest = [a for a in folded.attempts.values() if a.no > cursor and wanted in (None, a.state)]
            rows = [effect_row(folded, attempt) for attempt in rest[:limit]]
            return {"run": run_id, "effects": rows, "cursor": rest[limit - 1].no if len(rest) > limit else None}

        return await self._parts.desk.look(run_id, page)

    async def effect(self, attempt: str) -> dict[str, Any]:
        """GET /v1/effects/ATTEMPT: one effect, with the request as it was frozen."""
        run, found = await resolve_attempt(self._parts, self._runs, attempt)
        row = await self._parts.desk.look(run, lambda state: effect_row(state, state.attempts[found]))
        row["request"] = _request(await self._parts.store.blob(run, row["input_ref"]))
        if row["resolved_by"] and row["settled_at_position"]:
            entries = await self._parts.store.read(run, row["settled_at_position"] - 1, 1)
            row["evidence"] = next((json.loads(entry.data).get("evidence") for entry in entries), None)
        return row

    # -- parts of a run -----------------------------------------------------------------------------------------------

    async def part(self, run: str, part: str) -> dict[str, Any]:
        """GET /v1/runs/RUN/children, /results, /checkpoints, /refusals, /revisions, /unresolved."""
        rows: dict[str, Callable[[RunState], list[dict[str, Any]]]] = {
            "children": lambda s: [child_row(s, c) for c in s.children.values()],
            "results": lambda s: [result_row(r) for r in s.results.values()],
            "checkpoints": checkpoint_rows,
            "refusals": refusal_rows,
            "revisions": lambda s: list(run_view(s, effects_max=0)["revisions"]),
            "unresolved": lambda s: list(run_view(s, effects_max=0)["unresolved"]),
        }
        if part not in rows:
            raise Problem(404, "no-such-route", f"a run has no {part!r}; it has effects, log, {', '.join(rows)}")
        run_id = await self._runs.resolve(run)
        return {"run": run_id, part: await self._parts.desk.look(run_id, rows[part])}

    async def blob(self, run: str, sha: str) -> dict[str, Any]:
        """GET /v1/runs/RUN/blobs/SHA256: what an artifact or input refers to, as JSON or as text."""
        run_id = await self._runs.resolve(run)
        data = await self._parts.store.blob(run_id, sha)
        if data is None:
            raise Problem(404, "unknown-blob", f"run {run_id} keeps nothing under {sha[:64]!r}")
        return {"run": run_id, "sha256": sha, "size_bytes": len(data), "content": _content(data)}

    async def log(
        self,
        run: str,
        after: Annotated[int, Query(ge=0)] = 0,
        limit: Limit = LOG_PAGE_ENTRIES,
        control: bool = False,
        wait_ms: Annotated[int, Query(ge=0, le=WAIT_MS_MAX)] = 0,
    ) -> dict[str, Any]:
        """GET /v1/runs/RUN/log: the events as they stand; with `control` the updates, who was told, who acknowledged.

        `at` is the store's time when the entry was appended. The next page begins after the last `n`. With `wait_ms`,
        an answer without entries is held back until there is one, or the time is over.
        """
        run_id = await self._runs.resolve(run)
        if wait_ms:
            await self._wait(run_id, lambda state: {} if state.version > after else None, wait_ms)
        if control:
            entries = await self._whole_log(run_id)
            decoded = [(entry.n, ev.decode(entry.data)) for entry in entries]
            shown = [_entry(e) for e, (_, event) in zip(entries, decoded, strict=True) if ev.is_control(event)]
            return {"run": run_id, "updates": control_view(decoded), "entries": shown, "cursor": None}
        page = await self._parts.store.read(run_id, after, limit)
        more = bool(page) and len(page) == limit and page[-1].n < (await self._parts.store.head(run_id))[0]
        return {"run": run_id, "entries": [_entry(e) for e in page], "cursor": page[-1].n if more else None}

    async def _whole_log(self, run: str) -> list[Entry]:
        entries: list[Entry] = []
        while True:
            page = await self._parts.store.read(run, entries[-1].n if entries else 0, LOG_PAGE_ENTRIES)
            entries += page
            if len(page) < LOG_PAGE_ENTRIES:
                return entries

    # -- everything ---------------------------------------------------------------------------------------------------

    async def attention(self) -> dict[str, Any]:
        """GET /v1/attention: what waits for a person, in all runs, oldest first."""
        items: list[dict[str, Any]] = []
        for run, _ in await self._parts.store.attention():
            items += await self._parts.desk.look(run, attention_items)
        items.sort(key=lambda item: int(item["since"] or 0))
        return {"items": items}

    async def processes(self) -> dict[str, Any]:
        """GET /v1/processes: what the supervisor of this data directory wrote down; empty when there is none."""
        return {"processes": read_processes(self._parts.data_dir)}

    async def doctor(self) -> dict[str, Any]:
        """GET /v1/doctor: store, its settings, partitions, clock, versions; a store that is away is a finding."""
        told = await self._parts.doctor()
        try:
            return {**await self._store_health(), **told}
        except StoreUnavailable as error:
            words = f"the store does not answer ({error}): nothing is sent meanwhile; work goes on when it is back"
            return {**told, "problems": [*told.get("problems", ()), words]}

    async def _store_health(self) -> dict[str, Any]:
        store = self._parts.store
        meta = await store.meta()
        before_ms = self._parts.desk.now_ms()
        store_ms = await store.now_ms()
        partitions = []
        for partition in range(store.partitions):
            live, due = await store.live(partition), await store.due(partition, store_ms)
            partitions.append({"partition": partition, "live_runs": len(live), "overdue_runs": len(due)})
        return {
            "store": {"identity": meta.identity, "format": meta.format, "partitions": meta.partitions},
            "partitions": partitions,
            "clock": {"store_ms": store_ms, "desk_ms": before_ms, "desk_behind_ms": store_ms - before_ms},
        }


def read_processes(data_dir: Path | None) -> list[dict[str, Any]]:
    """The rows of DATA/processes.json; none where there is no such file."""
    if data_dir is None:
        return []
    try:
        content = json.loads((data_dir / PROCESSES_FILE).read_text(encoding="utf-8"))
        return [row for row in content["processes"] if isinstance(row, dict)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _entry(entry: Entry) -> dict[str, Any]:
    return {"n": entry.n, "at": entry.at_ms, "commit": entry.commit, "event": json.loads(entry.data)}


def _content(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def _request(frozen: bytes | None) -> Any:
    return None if frozen is None else _content(frozen)
