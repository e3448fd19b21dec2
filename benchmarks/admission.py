"""Benchmark of admission: what one commit costs, what many callers get, what the gateway adds, how fast a gate closes.

    python benchmarks/admission.py [--quick|--smoke] [-o text|json] [--only always|no] [--dir DIR]

Starts its own embedded servers in a temporary directory, one with appendfsync no and one with always. On a machine that
does other work the figures swing: ratios are taken within a round, rounds are repeated and the best one counts. Not a
test: it prints what was measured beside what is aimed at, and exits with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio

# This file has the name of a package that it measures: its own folder must not be where Python looks first.
HERE = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE] + [str(HERE.parent)]

from admission.embedded import ensure_server, stop_server  # noqa: E402
from benchmarks.parts_figures import SIZES, Size, rounded, table  # noqa: E402
from benchmarks.parts_gateway import gateway, serve_gateway, serve_service  # noqa: E402
from benchmarks.parts_load import cold_load  # noqa: E402
from benchmarks.parts_redirect import redirects, serve_load  # noqa: E402
from benchmarks.parts_run import History, history, new_id  # noqa: E402
from benchmarks.parts_store import alone, crowd, desk_on, rewriting  # noqa: E402
from orchestrator.app import calm_collector  # noqa: E402

PARTS: Mapping[str, Callable[[dict[str, Any]], Awaitable[None]]] = {
    "service": serve_service,
    "gateway": serve_gateway,
    "load": serve_load,
}
#: A load average above this says that others use the machine.
BUSY = 0.5
#: Slots of the history are below it.
FIRST_NEW_EFFECT = 50_000_000


def note(words: str) -> None:
    """One line about what goes on, for whoever waits."""
    print(words, file=sys.stderr, flush=True)


async def measure(mode: str, folder: Path, size: Size, busy_run: History, logs: list[History]) -> dict[str, Any]:
    """All figures for one setting of appendfsync."""
    figures: dict[str, Any] = {}
    begun = perf_counter()
    server = await ensure_server(folder, appendfsync=mode)
    try:
        figures["server"] = f"{Path(server.binary).name} {server.version}"
        url = server.url
        async with desk_on(url) as (store, _):
            await busy_run.write(store)
        note(f"{mode}: one caller")
        figures |= await alone(url, busy_run.run, busy_run.child, size=size, first=FIRST_NEW_EFFECT)
        for name, one_run in (("many_runs", False), ("hot_run", True)):
            note(f"{mode}: {name.replace('_', ' ')}")
            found = await crowd(url, size=size, seconds=size.crowd_s, one_run=one_run)
            figures |= {f"{name}_{key}": value for key, value in found.items()}
        note(f"{mode}: gateway")
        figures |= await gateway(url, folder, size)
        note(f"{mode}: redirects")
        figures |= await redirects(url, size.redirects, most_s=5 * size.part_s)
        note(f"{mode}: cold load")
        figures |= await cold_load(url, logs, size)
        note(f"{mode}: the same while the append-only file is rewritten")
        figures |= await in_rewrite(url, size, busy_run)
    finally:
        with anyio.CancelScope(shield=True):
            await stop_server(folder)
    return {**figures, "measured_s": perf_counter() - begun}


async def in_rewrite(url: str, size: Size, busy_run: History) -> dict[str, Any]:
    """The figures of the store and of redirects while the server rewrites its file."""
    found: dict[str, Any] = {}
    size = replace(size, rounds=min(size.rounds, 2))
    async with rewriting(url) as rewrites:
        found |= await alone(url, busy_run.run, busy_run.child, size=size, first=2 * FIRST_NEW_EFFECT)
        for name, one_run in (("many_runs", False), ("hot_run", True)):
            crowded = await crowd(url, size=size, seconds=size.crowd_s / 2, one_run=one_run)
            found |= {f"{name}_{key}": value for key, value in crowded.items()}
        found |= await redirects(url, size.redirects_in_rewrite, most_s=3 * size.part_s)
    return {f"rewrite_{name}": value for name, value in found.items()} | {"rewrites_finished": rewrites.finished}


async def run_all(modes: list[str], size: Size, folder: Path) -> dict[str, Any]:
    """The figures of each mode."""
    note("making the logs")
    busy_run = history(new_id(), operations=size.settled_operations)
    logs = [history(new_id(), events=events) for events in size.load_events]
    found = {}
    for mode in modes:
        found[mode] = rounded(await measure(mode, folder / mode, size, busy_run, logs))
    return found


def main() -> int:
    """The program. Returns its exit code."""
    parser = argparse.ArgumentParser(description="Benchmark of admission.", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="about a minute instead of some")
    parser.add_argument("--smoke", action="store_true", help="a few seconds; only shows that it runs")
    parser.add_argument("-o", dest="output", choices=("text", "json"), default="text")
    parser.add_argument("--only", choices=("no", "always"), help="one setting of appendfsync instead of both")
    parser.add_argument("--dir", type=Path, help="where the servers' data goes (default: the temporary directory)")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--settings", default="{}", help=argparse.SUPPRESS)
    given = parser.parse_args()
    calm_collector()  # as `regate serve` does
    if given.part:
        anyio.run(PARTS[given.part], json.loads(given.settings))
        return 0
    size = "smoke" if given.smoke else "quick" if given.quick else "full"
    busy = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="regate-bench-", dir=given.dir))
    begun = perf_counter()
    try:
        found = anyio.run(run_all, [given.only] if given.only else ["no", "always"], SIZES[size], folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if given.output == "json":
        print(json.dumps(found, indent=2))
        return 0
    for mode, figures in found.items():
        print(f"\n{table(mode, figures)}")
    print(
        f"\n{size}, {perf_counter() - begun:.0f} s; Python {platform.python_version()}, {platform.machine()}, "
        f"{next(iter(found.values()))['server']}; best of {SIZES[size].rounds} rounds. Trust the ratios."
    )
    if busy > BUSY:
        print(
            f"The machine was busy before we began (load {busy:.1f} on {os.cpu_count()} cores): no figure is its best."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
