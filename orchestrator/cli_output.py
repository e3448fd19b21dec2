"""How the command speaks: JSON on standard output, words on standard error, tables for people.

Knows the three outputs, the exit codes, and how to show a text that somebody else wrote without letting it act: neither
as rich's markup nor as an order to the terminal. Does not know what a run or an effect is (cli_tables.py).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

#: Columns of a table that does not go to a terminal: wide enough that a filter sees each row on one line.
PIPE_WIDTH_COLUMNS = 400
CELL_CHARACTERS_MAX = 200
#: A column that may be folded keeps so many columns of the screen, if it has as much to say.
FOLDED_COLUMNS_MIN = 12

# What a terminal obeys or reorders instead of showing: control signs but tab and newline, and directional marks.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Exit(IntEnum):
    """How a command ended; scripts rely on the numbers."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    CONFLICT = 3
    NOT_FOUND = 4
    UNAVAILABLE = 5


class CommandFailed(Exception):
    """The command cannot do what it was asked. The message says why and what to do; `code` is how the command ends."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


class Output(StrEnum):
    """What goes to standard output."""

    TEXT = "text"
    JSON = "json"
    JSONL = "jsonl"


def visible(text: object) -> str:
    """The text with everything a terminal would obey spelled out, so that it is shown and does nothing."""
    return _OBEYED.sub(lambda sign: f"\\x{ord(sign[0]):02x}", str(text))


def literal(text: object, style: str = "") -> Text:
    """A text for rich that is shown as it stands: square brackets are no markup, control signs are spelled out."""
    return Text(visible(text), style=style)


def cell(value: object, style: str = "") -> Text:
    """A value as one line of a table: empty for None, lists joined, objects as JSON, long ones shortened."""
    if value is None or value == "":
        return Text("")
    if isinstance(value, bool):
        words = "yes" if value else "no"
    elif isinstance(value, dict):
        words = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, (list, tuple)):
        words = ", ".join(str(part) for part in value)
    else:
        words = str(value)
    words = " ".join(words.split())
    if len(words) > CELL_CHARACTERS_MAX:
        words = words[: CELL_CHARACTERS_MAX - 1] + "…"
    return literal(words, style)


def clock_time(at_ms: object) -> str:
    """Milliseconds since 1970 as date and time in UTC; empty for nothing."""
    if not isinstance(at_ms, (int, float)) or isinstance(at_ms, bool) or not 0 < at_ms < 4e12:
        return ""
    return datetime.fromtimestamp(at_ms / 1000, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, how its value is found in a row, and whether it must stay in one piece (ids)."""

    title: str
    value: str | Callable[[dict[str, Any]], object]
    whole: bool = False
    style: str = ""
    #: Columns with a rank are left out, the highest first, where the screen is too narrow for all.
    rank: int = 0

    def of(self, row: dict[str, Any]) -> Text:
        """The cell of that row."""
        found = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        return found if isinstance(found, Text) else cell(found, self.style)


class Rows:
    """Rows under headings, fitted to the screen that they come to: what must stay whole does, what has no room goes."""

    def __init__(self, rows: Iterable[dict[str, Any]], columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        self.cells = [[column.of(row) for column in columns] for row in rows]

    @property
    def row_count(self) -> int:
        """How many rows there are."""
        return len(self.cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What rich draws."""
        widths = [self._width(place) for place in range(len(self.columns))]
        shown = list(range(len(self.columns)))
        while sum(widths[place] + 1 for place in shown) > options.max_width + 1:
            rank, place = max((self.columns[place].rank, place) for place in shown)
            if not rank:
                break
            shown.remove(place)
        drawn = Table(box=None, pad_edge=False)
        for place in shown:
            column = self.columns[place]
            least = widths[place] if column.whole else None
            drawn.add_column(column.title, no_wrap=column.whole, overflow="fold", header_style="bold", min_width=least)
        for cells in self.cells:
            drawn.add_row(*(cells[place] for place in shown))
        yield drawn

    def _width(self, place: int) -> int:
        """What the column needs: all of it, or some words."""
        title = self.columns[place].title
        longest = max((cells[place].cell_len for cells in self.cells), default=0)
        return max(len(title), longest if self.columns[place].whole else min(longest, FOLDED_COLUMNS_MIN))


def table(rows: Iterable[dict[str, Any]], columns: Sequence[Column]) -> Rows:
    """Rows under headings, without a frame."""
    return Rows(rows, columns)


def pairs(entries: Iterable[tuple[str, object]]) -> Table:
    """Names and values, one pair a line; pairs without a value are left out."""
    drawn = Table(box=None, pad_edge=False, show_header=False)
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, value in entries:
        shown = value if isinstance(value, Text) else cell(value)
        if shown.plain:
            drawn.add_row(literal(name), shown)
    return drawn


@dataclass(frozen=True, slots=True)
class Screen:
    """Where a command writes. `out` is standard output, `err` standard error."""

    output: Output
    out: Console
    err: Console

    @property
    def machine(self) -> bool:
        """Whether standard output holds JSON, so that words belong elsewhere."""
        return self.output is not Output.TEXT

    def say(self, text: str, style: str = "") -> None:
        """Words for a person, on standard error."""
        self.err.print(literal(text, style), soft_wrap=True)

    def result(self, text: str, style: str = "") -> None:
        """The sentence a command answers with: on standard output, or beside the JSON."""
        (self.err if self.machine else self.out).print(literal(text, style), soft_wrap=True)

    def draw(self, *parts: RenderableType) -> None:
        """Tables, fitted to the width, and texts, which the terminal wraps: nothing may cut a line that is piped."""
        for part in parts:
            self.out.print(part, soft_wrap=not isinstance(part, (Table, Rows)))

    def show(self, value: Any, draw: Callable[[], Iterable[RenderableType]]) -> None:
        """One value: as JSON (one line for jsonl), or drawn."""
        if self.machine:
            self.json(value)
        else:
            self.draw(*draw())

    def rows(self, rows: Sequence[Any], draw: Callable[[], Iterable[RenderableType]]) -> None:
        """Several values: one JSON list, one JSON line each, or drawn."""
        match self.output:
            case Output.JSONL:
                for row in rows:
                    self.json(row)
            case Output.JSON:
                self.json(list(rows))
            case Output.TEXT:
                self.draw(*(draw() if rows else ()))

    def json(self, value: Any) -> None:
        """One JSON document: indented for `json`, on one line for `jsonl`."""
        utf8 = (self.out.encoding or "").lower().replace("-", "") == "utf8"
        indent = 2 if self.output is Output.JSON else None
        try:
            text = json.dumps(value, indent=indent, ensure_ascii=not utf8)
            self.out.file.write(text + "\n")
        except UnicodeEncodeError:  # half a surrogate pair has no UTF-8
            self.out.file.write(json.dumps(value, indent=indent) + "\n")
        self.out.file.flush()


def _console(file: IO[str]) -> Console:
    terminal = file.isatty()
    width = None if terminal else PIPE_WIDTH_COLUMNS
    return Console(file=file, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


def screen_for(output: Output) -> Screen:
    """A screen on this process's standard output and error."""
    return Screen(output, _console(sys.stdout), _console(sys.stderr))
