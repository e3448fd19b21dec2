"""What the independent checker reads: exported run logs and the services' own journals.

Knows the two file formats and nothing of what the lines mean together. It imports nothing of the code that wrote them,
so that a mistake in their shared words cannot hide itself here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]


class InputError(Exception):
    """A file cannot be read as what it was given for. The message names the file and the line or position."""


@dataclass(frozen=True)
class Entry:
    """One event of one run's log. `n` is its position, `at` the store's clock at the append (ms)."""

    run: str
    n: int
    at: int
    commit: str
    event: Json

    @property
    def type(self) -> str:
        return str(self.event["type"])

    def text(self, name: str, default: str | None = None) -> str:
        """A text field. A field that equals its default may be left out of the wire form."""
        value = self.event.get(name, default)
        if not isinstance(value, str):
            raise InputError(f"log of {self.run}, position {self.n}: {self.type} needs a text {name!r}")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """A whole-number field."""
        value = self.event.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(f"log of {self.run}, position {self.n}: {self.type} needs a whole number {name!r}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts; left out means empty."""
        value = self.event.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InputError(f"log of {self.run}, position {self.n}: {self.type} needs a list of texts {name!r}")
        return tuple(value)

    def object(self, name: str) -> Json:
        """A nested object."""
        value = self.event.get(name)
        if not isinstance(value, dict):
            raise InputError(f"log of {self.run}, position {self.n}: {self.type} needs an object {name!r}")
        return value


@dataclass(frozen=True)
class Effect:
    """One thing that a service says it did. `at_ms` is that service's clock."""

    service: str
    n: int
    at_ms: int
    key: str | None
    action: str
    arguments: Json
    payload_sha256: str
    receipt: Any


@dataclass
class Journal:
    """What one service recorded: its effects, and the keys that reached it with a payload other than the first."""

    service: str
    effects: list[Effect] = field(default_factory=list)
    reused_keys: list[tuple[int, str]] = field(default_factory=list)


def _lines(path: Path, *, torn_end: bool = False) -> Iterator[tuple[int, Json]]:
    try:
        data = path.read_bytes()
        text = (data.rpartition(b"\n")[0] if torn_end else data).decode("utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise InputError(f"{path} cannot be read: {failure}") from failure
    for number, piece in enumerate(text.split("\n"), start=1):
        if not piece.strip():
            continue
        try:
            value = json.loads(piece)
        except ValueError as damage:
            raise InputError(f"{path}:{number}: not JSON ({damage})") from damage
        if not isinstance(value, dict):
            raise InputError(f"{path}:{number}: expected a JSON object")
        yield number, value


def read_log(path: Path) -> list[Entry]:
    """The events of one run, in the order of the file.

    The run's id stands in a first line {"run": ID}, or in the run_started event.
    """
    run = ""
    raw: list[tuple[int, Json]] = []
    for number, value in _lines(path):
        if not raw and not run and "event" not in value and isinstance(value.get("run"), str):
            run = value["run"]
            continue
        event = value.get("event")
        if not isinstance(event, dict) or not isinstance(event.get("type"), str):
            raise InputError(f'{path}:{number}: expected {{"n", "at", "commit", "event": {{"type": ...}}}}')
        if not isinstance(value.get("n"), int) or not isinstance(value.get("at"), int):
            raise InputError(f"{path}:{number}: n and at must be whole numbers")
        raw.append((number, value))
    if not raw:
        raise InputError(f"{path} holds no event; export the log of a run into it")
    named = raw[0][1]["event"].get("run")
    if not run:
        if not isinstance(named, str):
            raise InputError(f'{path}: no first line {{"run": ID}} and no run_started event says whose log this is')
        run = named
    return [Entry(run, v["n"], v["at"], str(v.get("commit", "")), v["event"]) for _, v in raw]


def read_journal(service: str, path: Path) -> Journal:
    """The journal of one service. A last line without its end is what a kill leaves behind; it is no record yet."""
    journal = Journal(service)
    for number, value in _lines(path, torn_end=True):
        kind, key = value.get("event"), value.get("key")
        if kind == "key_reused" and isinstance(key, str):
            journal.reused_keys.append((number, key))
        if kind != "executed":
            continue
        arguments = value.get("arguments")
        if not isinstance(value.get("at_ms"), int) or not isinstance(value.get("action"), str):
            raise InputError(f"{path}:{number}: an executed line needs at_ms (whole number) and action (text)")
        journal.effects.append(
            Effect(
                service=service,
                n=number,
                at_ms=value["at_ms"],
                key=key if isinstance(key, str) and key else None,
                action=value["action"],
                arguments=arguments if isinstance(arguments, dict) else {},
                payload_sha256=str(value.get("payload_sha256") or ""),
                receipt=value.get("receipt"),
            )
        )
    return journal
