"""The demo's last screen: what the API says of the run, and what an independent program finds.

The checker is a process of its own that shares no code with the rules. It is given the log as the API exports it and
the services' own journals, and nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orchestrator.cli_client import Api
from orchestrator.cli_output import literal

LOG_PAGE = 1_000
SCREEN_COLUMNS = 118
CHECK_TIMEOUT_S = 30


async def report(api: Api, run: str, data: Path, journals: Mapping[str, Path], *, paste: str) -> dict[str, Any]:
    """One object with everything that the last screen shows."""
    view = await anyio.to_thread.run_sync(lambda: api.get(f"/v1/runs/{run}"))
    processes = await anyio.to_thread.run_sync(lambda: api.get("/v1/processes"))
    log = data / f"{run}.jsonl"
    await anyio.to_thread.run_sync(_export, api, run, log)
    checked = await anyio.to_thread.run_sync(_check, log, dict(journals))
    return {
        "run": {name: view[name] for name in ("run", "state", "text", "revision", "started_at", "version")},
        "revisions": view["revisions"],
        "children": view["children"],
        "effects": view["effects"],
        "refused": view["refusals"],
        "late_results": [result for result in view["results"] if result["disposition"] == "dropped"],
        "results": view["results"],
        "unresolved": view["unresolved"],
        "checkpoints": view["checkpoints"],
        "processes": [
            {"role": row["role"], "pid": row["pid"], "ended": row["ended"], "restarts": row.get("restarts", 0)}
            for row in processes["processes"]
        ],
        "promises": {
            "duplicate_effects": checked["duplicate_effects"],
            "stale_effects": checked["stale_effects"],
            "hidden_unknowns": checked["hidden_unknowns"],
            "checked_against": checked["checked_against"],
            "late_landings": checked.get("late_landings", []),
            "violations": checked["violations"],
        },
        "kept_in": str(data),
        "paste": paste,
    }


def _export(api: Api, run: str, path: Path) -> None:
    """The whole log, as JSON lines."""
    after = 0
    with path.open("w", encoding="utf-8") as out:
        out.write(json.dumps({"run": run}) + "\n")
        while True:
            entries = api.get(f"/v1/runs/{run}/log", after=after, limit=LOG_PAGE)["entries"]
            for entry in entries:
                out.write(json.dumps(entry) + "\n")
                after = entry["n"]
            if len(entries) < LOG_PAGE:
                return


def _check(log: Path, journals: Mapping[str, Path]) -> dict[str, Any]:
    command = [sys.executable, "-m", "simulators.checker", "--log", str(log), "-o", "json"]
    for name, journal in journals.items():
        command += ["--journal", f"{name}={journal}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        words = done.stderr.strip() or "said nothing"
        found = {"violations": [{"check": "CHECKER", "detail": f"could not check: {words}"}]}
    return {"duplicate_effects": 0, "stale_effects": 0, "hidden_unknowns": 0, "checked_against": [], **found}


# --- the screen ------------------------------------------------------------------------------------------------------


def draw(shown: Mapping[str, Any]) -> Iterable[RenderableType]:
    """The last screen."""
    newest = shown["revisions"][-1]
    at = newest["position"]
    settled = [e for e in shown["effects"] if e["settled_at_position"]]
    before = [e for e in settled if e["settled_at_position"] < at]
    flying = [e for e in shown["effects"] if e["admitted_at_position"] < at and e not in before]
    after = [e for e in shown["effects"] if e["admitted_at_position"] > at]
    yield literal(f"run {shown['run']['run']}: {shown['run']['text']}", "bold")
    yield _panel("what changed", _changed(newest, shown["revisions"][-2]), "cyan")
    yield _panel("finished before the change", [_effect(e) for e in before] or ["nothing"], "green")
    yield _panel(
        "under way when it changed, and what became of it", [_effect(e) for e in flying] or ["nothing"], "blue"
    )
    yield _panel("done since the change", [_effect(e) for e in after] or ["nothing"], "green")
    stale = [r for r in shown["refused"] if r["reason"] == "superseded"]
    doubted = [r for r in shown["refused"] if r["reason"] == "in_doubt"]
    yield _panel("refused as superseded", [_refusal(r) for r in stale] or ["nothing"], "yellow")
    yield _panel("asked for again, and answered from the record instead of done twice", _done_before(shown), "green")
    yield _panel("agents", _children(shown), "blue")
    yield _panel(
        "stays unresolved",
        [*(_unresolved(u) for u in shown["unresolved"]), *map(_refusal, doubted)] or ["nothing"],
        "red",
    )
    yield _panel("an independent check of the log against the services' own journals", _promises(shown), "magenta")
    yield from _last_lines(shown)


def _panel(title: str, lines: Iterable[str], style: str) -> Panel:
    grid = Table.grid(padding=(0, 1))
    for line in lines:
        words = literal(line)
        words.no_wrap, words.overflow = False, "fold"
        grid.add_row(Text("•"), words)
    return Panel(grid, title=title, title_align="left", border_style=style, width=SCREEN_COLUMNS)


def _changed(revision: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    changed, kept = revision["changed"], revision["kept"]
    lines = [f"revision {revision['n']} ({revision['kind']}), by {revision['by']}: {revision['reason']}"]
    for name in changed["requirements"]:
        was, now = before["requirements"].get(name, "-"), revision["requirements"].get(name, "withdrawn")
        lines.append(f"{name}: {was} → {now}")
    lines.append(f"changed: {_names(changed)}")
    lines.append(f"kept as it was: {_names(kept)}")
    return lines


def _names(part: Mapping[str, Any]) -> str:
    words = [f"{kind[:-1]} {name}" for kind in ("requirements", "scopes") for name in part[kind]]
    return ", ".join(words) or "nothing"


def _effect(row: Mapping[str, Any]) -> str:
    why = f" ({row['basis']})" if row["basis"] else ""
    tries = f", {len(row['tries'])} tries" if len(row["tries"]) > 1 else ""
    return f"{row['service']}.{row['operation']} on {row['target']}: {row['outcome']}{why}{tries}"


def _refusal(row: Mapping[str, Any]) -> str:
    return (
        f"{row['service']}.{row['operation']} on {row['target']}, asked by child {row['child']} of revision "
        f"{row['revision']}: {row['reason']} - {row['detail']}"
    )


def _done_before(shown: Mapping[str, Any]) -> list[str]:
    lines = []
    for result in shown["results"]:
        for action in (result.get("summary") or {}).get("actions") or []:
            if action.get("verdict") == "done_before":
                what = f"{action['service']}.{action['action']} on {action['target']}"
                lines.append(f"{what}, asked by child {result['child']} of revision {result['revision']}: done before")
    return lines or ["nothing"]


def _children(shown: Mapping[str, Any]) -> list[str]:
    lines = []
    results = {result["child"]: result for result in shown["results"]}
    for child in shown["children"]:
        line = f"{child['scope']}, revision {child['revision']}, {child['agent']}: {child['state']}"
        if child["stop"]["requested_at"]:
            line += f"; asked to stop {child['stop']['times']} time(s)"
        result = results.get(child["child"])
        if result is not None:
            line += f"; result {result['disposition']}" + (f" ({result['reason']})" if result["reason"] else "")
        if child["follows"]:
            line += f"; follows {child['follows']}, which was {child['follows_state']}"
        lines.append(f"{line}; A2A task {child['task']}")
    dead = [row for row in shown["processes"] if row["ended"].startswith("killed")]
    return lines + [f"process {row['role']} (pid {row['pid']}): {row['ended']}, started again" for row in dead]


def _unresolved(row: Mapping[str, Any]) -> str:
    return f"{row['what']} ({row['id']}): {row['why']}"


def _promises(shown: Mapping[str, Any]) -> list[str]:
    promises = shown["promises"]
    lines = [
        f"effects done twice: {promises['duplicate_effects']}",
        f"effects of superseded instructions: {promises['stale_effects']}",
        f"unknowns that are not shown: {promises['hidden_unknowns']}",
        f"checked against {', '.join(promises['checked_against'])}",
    ]
    if promises["late_landings"]:
        lines.append(
            f"sent before the change and landed after it, which is shown and legal: {len(promises['late_landings'])}"
        )
    return lines + [f"VIOLATION {v['check']}: {v['detail']}" for v in promises["violations"]]


def _last_lines(shown: Mapping[str, Any]) -> Iterable[RenderableType]:
    regate, data, run = shown["paste"], shown["kept_in"], shown["run"]["run"]
    yield literal(f"Everything is kept in {data}. To look at it, and to settle what is open:")
    yield literal(f"  {regate} run show {run} --data {data}")
    yield literal(f"  {regate} log {run} --control --data {data}")
    for row in shown["unresolved"]:
        if row["kind"] == "effect":
            why = '--reason "asked the customer" --evidence "she has the mail"'
            yield literal(f"  {regate} effect resolve {row['id']} --happened {why} --data {data}")
