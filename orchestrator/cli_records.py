"""What waits for a person, logs, and what the doctor finds, as tables and lines for people.

Knows the fields of the API's rows and which of them a person wants to see first. Decides nothing, asks nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator.cli_output import Column, Rows, cell, clock_time, literal, pairs, table
from orchestrator.cli_tables import object_of, rows_of, section

#: Fields of a log entry that stand in columns of their own.
_ENTRY_FIELDS = frozenset({"n", "at", "at_ms", "type", "by", "commit", "event"})


def attention_table(rows: Sequence[dict[str, Any]]) -> Rows:
    """One line for each thing that waits for a person, with the command that deals with it."""
    return table(rows, _ATTENTION_COLUMNS)


#: What waits, in words, by the API's `kind`.
_WAITING: Mapping[str, str] = {
    "effect": "unknown effect", "alarm": "contradicted effect", "child": "agent not seen to end",
    "result": "result to be looked at", "budget": "budget overdrawn", "scope": "branch given up",
    "need": "branch lacks an artifact",
}  # fmt: skip
_ATTENTION_COLUMNS = (
    Column("since (UTC)", lambda row: clock_time(row.get("since")), whole=True, rank=3),
    Column("what", lambda row: _waiting_thing(row)),
    Column("run", "run", whole=True, rank=1),
    Column("rev", "revision", rank=2),
    Column("why", "why"),
    Column("blocks", lambda row: _blocks(row)),
    Column("command", "command"),
)


def _waiting_thing(row: dict[str, Any]) -> Text:
    """`unknown effect RUN-e3: mail.send_message on x`; a branch is named once."""
    kind = str(row.get("kind"))
    words = literal(_WAITING.get(kind, kind), "bold red").append_text(literal(f" {row.get('id')}"))
    more = str(row.get("what") or "")
    return words.append_text(literal(f": {more}")) if more and more != f"scope {row.get('id')}" else words


def _blocks(row: dict[str, Any]) -> str:
    match row.get("blocks"):
        case "scope":
            return f"branch {row.get('scope')}"
        case "slot":
            return "this action alone"
        case other:
            return str(other or "")


def log_lines(entries: Sequence[dict[str, Any]]) -> Group:
    """One line for each entry of a log: position, time, what happened, and its fields."""
    return Group(*(_log_line(entry) for entry in entries))


def _log_line(entry: dict[str, Any]) -> Text:
    event = object_of(entry.get("event")) or entry
    kind = str(event.get("type", ""))
    line = literal(f"{entry.get('n', ''):>6}  {clock_time(event.get('at') or entry.get('at_ms'))}  ")
    line.append_text(literal(f"{kind:<20}", "bold"))
    fields = (f"{name}={cell(value).plain}" for name, value in event.items() if name not in _ENTRY_FIELDS)
    by = f"  by {event['by']}" if event.get("by") else ""
    return line.append_text(literal(f"  {' '.join(fields)}{by}"))


def control_lines(updates: Sequence[dict[str, Any]]) -> Group:
    """Every update in order, who was told and who acknowledged."""
    return Group(*(line for update in updates for line in _control_lines(update)))


def _control_lines(update: dict[str, Any]) -> Iterator[Text]:
    revision = f"revision {update['revision']}" if update.get("revision") else ""
    head = [str(update.get("seq", "")), clock_time(update.get("at")), str(update.get("kind", "")), revision]
    by = f"by {update['by']}" if update.get("by") else ""
    yield literal("  ".join(part for part in (*head, by, str(update.get("text") or "")) if part), "bold")
    if update.get("reason"):
        yield literal(f"     reason: {update['reason']}")
    for title in ("affects", "held", "released"):
        if update.get(title):
            yield literal(f"     {title}: {', '.join(map(str, update[title]))}")
    for row in rows_of(update.get("told")):
        yield literal(
            f"     told: child {row.get('child')} ({row.get('scope')}) {row.get('how', 'asked to stop')} "
            f"at {row.get('position')}"
        )
    for row in rows_of(update.get("acknowledged")):
        yield literal(f"     acknowledged: child {row.get('child')} {row.get('how')} at {row.get('position')}")
    for row in rows_of(update.get("opened")):
        yield literal(
            f"     opened: {row.get('scope')} from checkpoint {row.get('checkpoint')} at {row.get('position')}"
        )


def doctor_report(report: dict[str, Any]) -> Iterator[RenderableType]:
    """What an installation says of itself, part by part."""
    plain = [(name, value) for name, value in report.items() if not isinstance(value, (dict, list))]
    yield pairs(plain)
    for name, value in report.items():
        if isinstance(value, dict) and value:
            yield from section(name, [pairs((f"  {key}", inner) for key, inner in value.items())])
        elif isinstance(value, list) and value:
            yield from section(name, [_listed(value)])


def _listed(values: list[Any]) -> RenderableType:
    rows = rows_of(values)
    if len(rows) < len(values):
        return Group(*(literal(f"  {value}") for value in values))
    names = list(dict.fromkeys(name for row in rows for name in row))
    return table(rows, [Column(name, name) for name in names])
