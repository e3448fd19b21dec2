"""Runs and effects as tables and lines for people.

Knows the fields of the API's rows and which of them a person wants to see first. Decides nothing, asks nobody: what is
shown is what the API said, and a field that is missing is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator.cli_output import Column, Rows, cell, clock_time, literal, pairs, table

_STYLES: Mapping[str, str] = {
    "running": "green", "completed": "green", "succeeded": "green", "open": "green", "active": "green",
    "adopted": "green", "ok": "green", "ended": "green", "stop_confirmed": "green",
    "paused": "yellow", "held": "yellow", "redirecting": "yellow", "cancelling": "yellow", "closed": "yellow",
    "admitted": "yellow", "sending": "yellow", "accepted": "yellow", "stop_requested": "yellow", "launching": "yellow",
    "blocked": "bold red", "unknown": "bold red", "failed": "red", "lost": "red", "cancelled_unresolved": "bold red",
    "unreachable": "red", "stop_refused": "red",
    "superseded": "dim", "skipped": "dim", "revoked": "dim", "cancelled": "dim", "sealed": "dim", "dropped": "dim",
}  # fmt: skip


def _state(row: dict[str, Any], name: str = "state") -> Text:
    words = str(row.get(name) or "")
    return literal(words.replace("_", " "), _STYLES.get(words, ""))


def rows_of(value: object) -> list[dict[str, Any]]:
    """The objects of a list, none where there is no list."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def object_of(value: object) -> dict[str, Any]:
    """The object, empty where there is none."""
    return value if isinstance(value, dict) else {}


def state_of(view: dict[str, Any]) -> str:
    """The phase that a run is in."""
    return str(view.get("state") or "")


def revision_of(view: dict[str, Any]) -> int | None:
    """The revision in force."""
    found = object_of(view.get("revision")).get("in_force")
    return found if isinstance(found, int) else None


def _counts(row: dict[str, Any]) -> str:
    counts = object_of(row.get("effect_counts"))
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


# --- runs ------------------------------------------------------------------------------------------------------------

_RUN_COLUMNS = (
    Column("run", "run", whole=True),
    Column("state", _state, whole=True),
    Column("rev", revision_of),
    Column("started (UTC)", lambda row: clock_time(row.get("started_at")), whole=True, rank=2),
    Column("effects", _counts, rank=1),
    Column("unresolved", lambda row: row.get("unresolved_total") or None, style="bold red"),
    Column("goal", "text"),
)


def runs_table(rows: Sequence[dict[str, Any]]) -> Rows:
    """One line for each run."""
    return table(rows, _RUN_COLUMNS)


def run_report(view: dict[str, Any]) -> Iterator[RenderableType]:
    """Where a run stands: its heading, then revisions, branches, children, refusals, and what is unresolved."""
    yield literal(f"run {view.get('run')}: {view.get('text', '')}", "bold")
    yield pairs(
        [
            ("state", _state_words(view)),
            ("revision in force", revision_of(view)),
            ("started", clock_time(view.get("started_at"))),
            ("follows", view.get("follows")),
            ("effects", _counts(view)),
            ("budget", _budget(object_of(view.get("budget")))),
        ]
    )
    yield from section("revisions", [_revision_line(row) for row in rows_of(view.get("revisions"))])
    scopes = [{"scope": name, **object_of(row)} for name, row in object_of(view.get("scopes")).items()]
    yield from section("branches", [table(scopes, _SCOPE_COLUMNS)] if scopes else [])
    children = rows_of(view.get("children"))
    yield from section("children", [table(children, _CHILD_COLUMNS)] if children else [])
    refusals = rows_of(view.get("refusals"))
    yield from section("refused at the gate", [table(refusals, _REFUSAL_COLUMNS)] if refusals else [])
    failed = [_failed_line(row) for row in rows_of(view.get("effects")) if row.get("outcome") == "failed"]
    yield from section("failed: the service said no, and nothing happened", failed)
    dropped = [row for row in rows_of(view.get("results")) if row.get("disposition") not in (None, "adopted")]
    yield from section("results kept as evidence only", [table(dropped, _RESULT_COLUMNS)] if dropped else [])
    yield from section("unresolved", [_unresolved_line(row) for row in rows_of(view.get("unresolved"))])
    alarms = [f"{row.get('attempt')}: {row.get('detail')}" for row in rows_of(view.get("alarms"))]
    yield from section("evidence against what was recorded", [literal(f"  {alarm}", "bold red") for alarm in alarms])


def _state_words(view: dict[str, Any]) -> Text:
    """The state; that effects failed on the way is part of it, since an end alone says nothing of them."""
    failed = object_of(view.get("effect_counts")).get("failed")
    words = _state(view)
    return (
        words.append_text(literal(f", {failed} effect{'s' if failed != 1 else ''} failed", "red")) if failed else words
    )


def not_achieved(view: dict[str, Any]) -> list[str]:
    """The failed effects of the revisions in force whose action was not done by another attempt either."""
    effects, scopes = rows_of(view.get("effects")), object_of(view.get("scopes"))
    done = {row.get("slot") for row in effects if row.get("outcome") == "succeeded"}
    return [
        f"{row.get('attempt')} ({row.get('service')}.{row.get('operation')} on {row.get('target')})"
        for row in effects
        if row.get("outcome") == "failed"
        and row.get("slot") not in done
        and row.get("revision") == object_of(scopes.get(str(row.get("scope")))).get("cur")
    ]


def _failed_line(row: dict[str, Any]) -> Text:
    line = literal(f"  {row.get('attempt')}", "red")
    words = f"  {row.get('service')}.{row.get('operation')} on {row.get('target')} (revision {row.get('revision')})"
    return line.append_text(literal(f"{words}: {_said(row)}"))


def _said(row: dict[str, Any]) -> str:
    """What the service answered, and what was made of it."""
    observed = row.get("observed_result")
    last = next((str(t["detail"]) for t in reversed(rows_of(row.get("tries"))) if t.get("detail")), "")
    said = cell(observed).plain if observed else ""
    return (
        "; ".join(dict.fromkeys(part for part in (last, said, str(row.get("why") or "")) if part)) or "no reason given"
    )


def section(title: str, parts: Sequence[RenderableType]) -> Iterator[RenderableType]:
    """Parts under a heading, nothing where there are none."""
    if parts:
        yield Text("")
        yield literal(title, "bold")
        yield from parts


def _budget(budget: dict[str, Any]) -> str:
    if budget.get("limit") is None:
        return ""
    return f"{budget.get('left')} of {budget.get('limit')} left, {budget.get('reserved')} reserved"


def _revision_line(row: dict[str, Any]) -> RenderableType:
    head = literal(f"  {row.get('n')} ")
    head.append_text(_state(row, "status"))
    head.append_text(literal(f"  {row.get('kind', '')}  {clock_time(row.get('at'))}  {row.get('text', '')}"))
    lines: list[RenderableType] = [head]
    first = row.get("n") == 1
    for title in ("changed", "kept"):
        names = _named(object_of(row.get(title)))
        if names and not first:
            lines.append(literal(f"      {title}: {names}"))
    if row.get("reason"):
        lines.append(literal(f"      reason: {row['reason']}"))
    return Group(*lines)


def _named(named: Mapping[str, Any]) -> str:
    """`requirements address; scopes address, mail`: what a revision changed or kept, by kind."""
    return "; ".join(f"{kind} {', '.join(map(str, names))}" for kind, names in named.items() if names)


_SCOPE_COLUMNS = (
    Column("  scope", lambda row: f"  {row['scope']}" if row.get("scope") else "", whole=True),
    Column("gate", lambda row: _state(row, "gate"), whole=True),
    Column("rev", lambda row: _gate_revision(row)),
    Column("agent", "agent", rank=2),
    Column("child", "child", whole=True, rank=3),
    Column("done", "done"),
    Column("waits for", lambda row: "nothing: removed from the plan" if row.get("removed") else row.get("waits_for")),
)
_CHILD_COLUMNS = (
    Column("  child", lambda row: literal(f"  {row.get('child')}"), whole=True),
    Column("scope", "scope", whole=True),
    Column("rev", "revision"),
    Column("state", _state, whole=True),
    Column("A2A task", lambda row: _task(row), whole=True, rank=4),
    Column("follows", "follows", whole=True, rank=2),
    Column("succeeded by", "succeeded_by", whole=True, rank=3),
    Column("result", "disposition", rank=1),
)
_REFUSAL_COLUMNS = (
    Column("  action", lambda row: literal(f"  {row.get('service')}.{row.get('operation')}"), whole=True),
    Column("on", "target", whole=True),
    Column("asked under", lambda row: f"revision {row.get('revision')}", rank=2),
    Column("refused as", lambda row: str(row.get("reason", "")).replace("_", " ")),
    Column("in force", lambda row: f"revision {row.get('in_force')}", rank=1),
    Column("child", "child", whole=True, rank=3),
)
_RESULT_COLUMNS = (
    Column("  result", lambda row: literal(f"  {row.get('result')}"), whole=True),
    Column("child", "child", whole=True),
    Column("rev", "revision"),
    Column("disposition", lambda row: _state(row, "disposition")),
    Column("because", "reason"),
)


def _gate_revision(row: dict[str, Any]) -> str:
    cur, target = row.get("cur"), row.get("target")
    return f"{cur}" if cur == target else f"{cur} → {target}"


def _task(row: dict[str, Any]) -> str:
    task = row.get("task") or ""
    return f"{task} ({row['task_state']})" if task and row.get("task_state") else str(task)


def _unresolved_line(row: dict[str, Any]) -> Text:
    line = literal(f"  {row.get('id')}", "bold red")
    return line.append_text(literal(f"  {row.get('what')} (revision {row.get('revision')}): {row.get('why')}"))


# --- changes ---------------------------------------------------------------------------------------------------------


def change_line(answer: dict[str, Any], name: str) -> str:
    """The API's one line about what a change did."""
    return str(answer.get("line") or f"{name}: done")


def change_report(answer: dict[str, Any]) -> Iterator[RenderableType]:
    """After a revision: what it changed, what it kept, what had been finished before, and what is still open."""
    view = object_of(answer.get("run"))
    newest = next((row for row in rows_of(view.get("revisions")) if row.get("n") == answer.get("in_force")), {})
    effects = rows_of(view.get("effects"))
    earlier = [row for row in effects if row.get("revision") != newest.get("n")]
    done = [_effect_words(row) for row in earlier if row.get("outcome") == "succeeded"]
    still = [_effect_words(row) for row in earlier if row.get("outcome") in _OPEN]
    for title, lines in (
        ("changed", _named_lines(newest.get("changed"))),
        ("kept", _named_lines(newest.get("kept"))),
        ("finished before", done),
        ("still open", still),
    ):
        yield literal(title, "bold")
        yield from (literal(f"  {line}") for line in lines or ["nothing"])


_OPEN = ("admitted", "sending", "unknown")


def _named_lines(named: object) -> list[str]:
    return [f"{kind}: {', '.join(map(str, names))}" for kind, names in object_of(named).items() if names]


def _effect_words(row: dict[str, Any]) -> str:
    outcome = str(row.get("outcome") or "").replace("_", " ")
    words = f"{row.get('attempt')}  {row.get('service')}.{row.get('operation')} on {row.get('target')}: {outcome}"
    return f"{words} ({row['why']})" if row.get("why") else words


def waiting_words(view: dict[str, Any]) -> str:
    """One line for somebody who waits: the run's state, and what its branches wait for."""
    words = f"run {view.get('run')}: {_state_words(view).plain}, revision {revision_of(view)}"
    effects = _counts(view)
    words += f"; effects: {effects}" if effects else ""
    waits = [
        f"{name} waits for {', '.join(map(str, object_of(row)['waits_for']))}"
        for name, row in object_of(view.get("scopes")).items()
        if object_of(row).get("waits_for")
    ]
    return "; ".join([words, *waits])


# --- effects ---------------------------------------------------------------------------------------------------------


def _what_came_back(row: dict[str, Any]) -> object:
    """What the service said; for what nobody knows, why."""
    if row.get("outcome") == "unknown":
        return row.get("why")
    return row.get("observed_result") or row.get("why")


_EFFECT_COLUMNS = (
    Column("effect", "attempt", whole=True),
    Column("rev", "revision"),
    Column("scope", "scope", whole=True, rank=2),
    Column("action", lambda row: f"{row.get('service')}.{row.get('operation')}"),
    Column("target", "target"),
    Column("outcome", lambda row: _state(row, "outcome"), whole=True),
    Column("basis", "basis", rank=4),
    Column("tries", lambda row: len(rows_of(row.get("tries"))) or None, rank=3),
    Column("observed result / why", _what_came_back, rank=1),
    Column("input", lambda row: str(row.get("input_ref") or "")[:12], whole=True, rank=6),
    Column("operation id", "operation_id", whole=True, rank=7),
    Column("child", "child", whole=True, rank=5),
)


def effects_table(rows: Sequence[dict[str, Any]]) -> Rows:
    """One line for each effect."""
    return table(rows, _EFFECT_COLUMNS)


def effect_report(row: dict[str, Any]) -> Iterator[RenderableType]:
    """Everything of one effect."""
    contract = object_of(row.get("contract"))
    yield pairs(
        [
            ("effect", row.get("attempt")),
            ("run", row.get("run")),
            ("action", f"{row.get('service')}.{row.get('operation')}"),
            ("target", row.get("target")),
            ("outcome", _state(row, "outcome")),
            ("basis", row.get("basis")),
            ("why", row.get("why")),
            ("observed result", row.get("observed_result")),
            ("revision", row.get("revision")),
            ("scope", row.get("scope")),
            ("child", row.get("child")),
            ("operation id", row.get("operation_id")),
            ("input", row.get("input_ref")),
            ("slot", row.get("slot")),
            ("contract", f"{contract.get('class')}, version {contract.get('version')}" if contract else ""),
            ("unknown blocks", row.get("unknown_blocks")),
            ("reconciled for", row.get("needs_reconciliation")),
            ("admitted", clock_time(row.get("admitted_at"))),
            ("resolved by", row.get("resolved_by")),
            ("evidence", row.get("evidence")),
            ("contradicted", "yes: evidence against the recorded outcome" if row.get("contradicted") else ""),
        ]
    )
    tries = rows_of(row.get("tries"))
    yield from section("tries", [table(tries, _TRY_COLUMNS)] if tries else [])


_TRY_COLUMNS = (
    Column("  try", lambda row: f"  {row['n']}" if "n" in row else ""),
    Column("granted (UTC)", lambda row: clock_time(row.get("granted_at")), whole=True, rank=1),
    Column("gateway", "gateway", whole=True, rank=2),
    Column("outcome", lambda row: _state(row, "outcome"), whole=True),
    Column("basis", "basis"),
    Column("status", "status"),
    Column("detail", "detail"),
)
