"""Renders the tables of docs/protocol.md from the rules in admission/.

    python docs/render_protocol.py           write the tables between the markers
    python docs/render_protocol.py --check   exit 1 if they are not what the rules say

Knows: the markers and the look of a table. Does not know any rule; the words are the rules' own docstrings.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from admission import events as ev
from admission.rules import MACHINES
from admission.table import Machine, Row, nothing

PAGE = Path(__file__).with_name("protocol.md")


def _first_sentence(text: str | None) -> str:
    words = " ".join((text or "").split())
    head, stop, _ = words.partition(". ")
    return (head if stop else words).rstrip(".")


def _cell(text: str) -> str:
    return text.replace("|", "\\|") or "-"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return [*lines, *(f"| {' | '.join(_cell(c) for c in row)} |" for row in rows)]


def _states(row: Row, machine: Machine) -> str:
    names = [str(state) for state in row.states]
    missing = [str(s) for s in machine.states if str(s) not in names]
    if not missing:
        return "any"
    return f"any but {', '.join(missing)}" if 0 < len(missing) <= 2 and len(names) > 3 else ", ".join(names)


def _guard(row: Row) -> str:
    return "otherwise" if row.guard is None else _first_sentence(row.guard.__doc__)


def _action(row: Row) -> str:
    """What the row writes, in its own words or by the name of what makes the events."""
    if row.do is nothing:
        return "-"
    return row.records or row.do.__name__.strip("_").replace("_", " ")


def _next(row: Row) -> str:
    return str(row.next)


def tables(machines: Sequence[Machine]) -> list[str]:
    """Each machine's rows, in the order in which they are tried."""
    lines: list[str] = []
    for machine in machines:
        lines += [f"### Machine: {machine.name}", ""]
        rows = [
            (_states(r, machine), r.on.__name__, _guard(r), _action(r), _next(r), f"`{r.says}`") for r in machine.rows
        ]
        lines += [*_table(("State", "Event", "Guard", "Action", "Next", "Answer"), rows), ""]
    return lines[:-1]


def commands(machines: Sequence[Machine]) -> list[str]:
    """Each command: what triggers it, where it is accepted, what then holds, and what leaves the process."""
    rows = []
    for machine in machines:
        for command, trigger in machine.commands.items():
            accepted = [r for r in machine.rows if r.on is command and r.accepted and r.do is not nothing]
            needs = dict.fromkeys(_states(r, machine) for r in accepted)
            after = dict.fromkeys(_next(r) for r in accepted)
            sends = dict.fromkeys(r.sends for r in accepted if r.sends)
            records = dict.fromkeys(_action(r) for r in accepted)
            says = ["; ".join(part) for part in (needs, after, sends, records)]
            rows.append((command.__name__, machine.name, trigger, says[0], says[1], says[2] or "none", says[3]))
    heads = ("Command", "Machine", "Trigger", "Required states", "State after", "External effect", "Records")
    return _table(heads, rows)


def events() -> list[str]:
    """Each event, by the name that it has in the log."""
    kinds = [c for _, c in inspect.getmembers(ev, inspect.isclass) if issubclass(c, ev.Event) and c is not ev.Event]
    order = {kind: n for n, kind in enumerate(ev.AnyEvent.__args__)}
    rows = []
    for kind in sorted(kinds, key=order.__getitem__):
        own = [f.name for f in msgspec.structs.fields(kind) if f.name not in ("at", "by")]
        control = "control" if kind in ev.CONTROL_EVENTS else "ledger"
        fields = ", ".join(f"`{name}`" for name in own)
        rows.append((f"`{kind.__struct_config__.tag}`", control, _first_sentence(kind.__doc__), fields))
    return _table(("Event", "Part", "Says", "Fields"), rows)


def render(text: str) -> str:
    """The page with its tables made anew. Raises ValueError when a marker is missing."""
    parts = {"tables": tables(MACHINES), "commands": commands(MACHINES), "events": events()}
    for name, lines in parts.items():
        start, end = f"<!-- {name}: made by docs/render_protocol.py -->", f"<!-- end of {name} -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise ValueError(f"docs/protocol.md lacks the markers of {name!r}")
        before, _, rest = text.partition(start)
        after = rest.partition(end)[2]
        text = "\n".join([before + start, "", *lines, "", end]) + after
    return text


def main() -> int:
    """The program. Writes the page, or says that it is not up to date."""
    parser = argparse.ArgumentParser(description="Render the tables of docs/protocol.md from the rules.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page is not up to date")
    check = parser.parse_args().check
    old = PAGE.read_text(encoding="utf-8")
    new = render(old)
    if check and old != new:
        print("docs/protocol.md is not what the rules say: run `python docs/render_protocol.py`", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
