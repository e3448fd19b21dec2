"""Attempts as a run keeps them: settled ones that came from a snapshot stay packed until somebody reads them.

A run of a hundred thousand events has tens of thousands of settled attempts, of which hardly one is ever looked at
again, but each slot of which must be known. So a packed row carries what decisions ask of a settled attempt in the
open, and the rest as bytes. Pure.
"""

from collections.abc import ItemsView, Iterable, Iterator, ValuesView
from typing import Any, TypeVar

import msgspec

from admission.records import Attempt
from admission.vocabulary import AttemptState

T = TypeVar("T")

#: So many unpacked rows are kept for those who read one by its id again; the oldest goes first.
READ_ROWS_MAX = 1_000


class Packed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A settled attempt: what the derived entries need, and all of it as bytes."""

    id: str
    no: int
    slot: str
    state: AttemptState
    generation: int
    settled: int
    touched: str
    conflict_key: str
    stands: bool
    whole: msgspec.Raw


_encode = msgspec.msgpack.Encoder().encode
_decode_whole = msgspec.msgpack.Decoder(Attempt).decode
_decode_packed = msgspec.msgpack.Decoder(list[Packed]).decode


def pack(attempt: Attempt) -> Packed:
    """The packed form of a settled attempt."""
    return Packed(
        attempt.id,
        attempt.no,
        attempt.slot,
        attempt.state,
        attempt.generation,
        attempt.settled,
        attempt.touched,
        attempt.conflict_key,
        attempt.stands,
        msgspec.Raw(_encode(attempt)),
    )


def encode_rows(rows: list[Attempt | Packed]) -> bytes:
    """A chunk of rows as bytes."""
    return _encode([row if isinstance(row, Packed) else pack(row) for row in rows])


def decode_rows(data: bytes) -> list[Packed]:
    """The rows of a chunk, packed."""
    return _decode_packed(data)


class Rows(dict[str, Attempt]):
    """Attempts by id, in the order of their numbers. Behaves as a dict of Attempt; unpacks on reading.

    Who walks all of them unpacks each for the moment: only what is read by its id is kept unpacked, up to a limit.
    """

    def __init__(self) -> None:
        super().__init__()
        self._read: dict[str, Attempt] = {}

    def hold(self, rows: Iterable[Attempt | Packed]) -> None:
        """Add rows as they come from a snapshot, in the order of their numbers."""
        dict.update(self, [(row.id, row) for row in rows])

    def stored(self) -> Iterator[tuple[str, Attempt | Packed]]:
        """The rows as they are held: a row that nobody changed is the very object that the snapshot gave."""
        return iter(dict.items(self))

    def _found(self, row: Any) -> Attempt:
        """The row, kept unpacked for the next one who asks for its id."""
        if type(row) is not Packed:
            attempt: Attempt = row
            return attempt
        found = self._read.get(row.id)
        if found is None:
            if len(self._read) >= READ_ROWS_MAX:
                del self._read[next(iter(self._read))]
            found = self._read[row.id] = _decode_whole(row.whole)
        return found

    def __getitem__(self, key: str) -> Attempt:
        return self._found(dict.__getitem__(self, key))

    def get(self, key: str, default: T | None = None) -> Any:
        """As of a dict."""
        row = dict.get(self, key)
        return default if row is None else self._found(row)

    def values(self) -> ValuesView[Attempt]:  # type: ignore[override]
        """As of a dict, unpacking each as it is reached."""
        return _Values(self)

    def items(self) -> ItemsView[str, Attempt]:  # type: ignore[override]
        """As of a dict, unpacking each as it is reached."""
        return _Items(self)


def _unpacked(row: Any) -> Attempt:
    return _decode_whole(row.whole) if type(row) is Packed else row


class _Values(ValuesView[Attempt]):
    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self._rows = rows

    def __iter__(self) -> Iterator[Attempt]:
        return (_unpacked(row) for row in dict.values(self._rows))


class _Items(ItemsView[str, Attempt]):
    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self._rows = rows

    def __iter__(self) -> Iterator[tuple[str, Attempt]]:
        return ((key, _unpacked(row)) for key, row in dict.items(self._rows))
