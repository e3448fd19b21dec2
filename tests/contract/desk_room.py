"""What the tests of the desk share: a state machine of a few lines, and stores that can be held up or watched.

Not a test. The machine is a set of names: the first to claim a name has it, notes are facts, orders are control.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from admission.desk import Desk
from admission.machine import Machine, SnapshotCodec
from admission.storage import Commit, Compare, Index, Reply
from tests.contract.store_room import new_id


class Claimed(msgspec.Struct, frozen=True, tag=True):
    name: str
    by: str


class Noted(msgspec.Struct, frozen=True, tag=True):
    text: str


class Ordered(msgspec.Struct, frozen=True, tag=True):
    text: str


Event = Claimed | Noted | Ordered


@dataclass(frozen=True)
class Claim:
    """Refused if the name is taken. Compares the log."""

    name: str
    by: str = ""
    pad: int = 0


@dataclass(frozen=True)
class Note:
    """A fact; the same one a second time leads to nothing."""

    text: str


@dataclass(frozen=True)
class Order:
    """Refused unless so many orders came before. Compares control."""

    text: str
    after: int


@dataclass(frozen=True)
class Bug:
    """Its decide raises."""


Command = Claim | Note | Order | Bug


@dataclass(frozen=True)
class Decision:
    events: tuple[Event, ...]
    says: str


class Names:
    """The folded state. Rows by name; changes since begin can be taken back."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.version = 0
        self.control = 0
        self.claims: dict[str, Claimed] = {}
        self.notes: list[str] = []
        self.orders: list[str] = []
        self._before: list[Callable[[], Any]] | None = None

    def begin(self) -> None:
        self._before = []

    def undo(self) -> None:
        for step in reversed(self._before or []):
            step()
        self._before = None

    def keep(self) -> None:
        self._before = None

    def note_undo(self, step: Callable[[], Any]) -> None:
        if self._before is not None:
            self._before.append(step)

    def facts(self) -> tuple[Any, ...]:
        return self.version, self.control, dict(self.claims), list(self.notes), list(self.orders)


def decide(state: Names, command: Command, at: int) -> Decision:
    match command:
        case Claim():
            taken = state.claims.get(command.name)
            if taken is not None:
                return Decision((), f"taken by {taken.by}")
            return Decision((Claimed(command.name, command.by + "." * command.pad),), "yours")
        case Note():
            known = command.text in state.notes
            return Decision(() if known else (Noted(command.text),), "known" if known else "noted")
        case Order():
            if command.after != state.control:
                return Decision((), f"{state.control} orders came before")
            return Decision((Ordered(command.text),), "ordered")
        case Bug():
            raise ZeroDivisionError("a bug in the rules")


def fold(state: Names, n: int, event: Event) -> None:
    assert n == state.version + 1, (n, state.version)
    version, control = state.version, state.control

    def back() -> None:
        state.version, state.control = version, control

    state.note_undo(back)
    state.version = n
    match event:
        case Claimed():
            old = state.claims.get(event.name)
            state.claims[event.name] = event
            state.note_undo(
                lambda: state.claims.pop(event.name) if old is None else state.claims.update({old.name: old})
            )
        case Noted():
            state.notes.append(event.text)
            state.note_undo(state.notes.pop)
        case Ordered():
            state.orders.append(event.text)
            state.control += 1
            state.note_undo(state.orders.pop)


def compare_of(command: Command) -> Compare:
    return {Note: Compare.NONE, Order: Compare.CONTROL}.get(type(command), Compare.LOG)


class _Live(msgspec.Struct):
    version: int
    control: int
    notes: list[str]
    orders: list[str]
    loose: list[Claimed]


def _encode_live(state: Names, in_chunk: Callable[[str, Any], bool]) -> bytes:
    loose = [row for name, row in state.claims.items() if not in_chunk(name, row)]
    return msgspec.msgpack.encode(_Live(state.version, state.control, state.notes, state.orders, loose))


def _decode_live(run: str, live: bytes, rows: dict[str, Any]) -> Names:
    part = msgspec.msgpack.decode(live, type=_Live)
    state = Names(run)
    state.version, state.control, state.notes, state.orders = part.version, part.control, part.notes, part.orders
    state.claims = rows | {row.name: row for row in part.loose}
    return state


def _decode_rows(data: bytes) -> Iterable[tuple[str, Any]]:
    return [(row.name, row) for row in msgspec.msgpack.decode(data, type=list[Claimed])]


CODEC: SnapshotCodec[Names] = SnapshotCodec(
    version="1",
    settled_rows=lambda state: state.claims.items(),
    encode_rows=lambda rows: msgspec.msgpack.encode(list(rows)),
    decode_rows=_decode_rows,
    encode_live=_encode_live,
    decode_live=_decode_live,
)

MACHINE: Machine[Names, Command, Event, Decision] = Machine(
    new=Names,
    decide=decide,
    fold=fold,
    encode=msgspec.json.encode,
    decode=msgspec.json.Decoder(Event).decode,
    is_control=lambda event: isinstance(event, Ordered),
    compare_of=compare_of,
    index_of=lambda state: Index(True, None, state.version),
    snapshots=CODEC,
)

NamesDesk = Desk[Names, Command, Event, Decision]


def desk_on(store: Any, **settings: Any) -> NamesDesk:
    return Desk(store, MACHINE, new_id=new_id, **settings)


@dataclass
class Watched:
    """A store that writes down each commit, and holds the replies back from `close` until `open` is set."""

    store: Any
    commits: list[Commit] = field(default_factory=list)
    open: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.open.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def close(self) -> None:
        self.open = anyio.Event()

    async def commit(self, commit: Commit) -> Reply:
        self.commits.append(commit)
        reply: Reply = await self.store.commit(commit)
        await self.open.wait()
        return reply


async def until(holds: Callable[[], bool], turns_max: int = 10_000) -> None:
    """Let the other tasks run until it holds."""
    for _ in range(turns_max):
        if holds():
            return
        await anyio.lowlevel.checkpoint()
    raise AssertionError("it never held")


async def folded(store: Any, run: str) -> Names:
    """The state that the whole log adds up to, without a desk."""
    state = Names(run)
    while entries := await store.read(run, state.version):
        for entry in entries:
            fold(state, entry.n, MACHINE.decode(entry.data))
    return state


def commits_of(entries: Sequence[Any]) -> list[str]:
    """The commit ids in a log, each once, in order."""
    return list(dict.fromkeys(entry.commit for entry in entries))
