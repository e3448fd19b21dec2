"""Snapshots of a run: what is written, when, and how it is read again.

Knows: a snapshot is a live part, replaced each time, and chunks of 1000 settled rows, written once as blobs under their
hash. A row that is amended after it went into a chunk is simply in the live part again. So what a snapshot costs grows
with what changed, not with the length of the run.
Does not know: what a row or a state is (machine.SnapshotCodec does).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic

import msgspec

from admission.machine import SnapshotCodec, State
from admission.storage import Store

CHUNK_ROWS = 1000
#: No snapshot before so many new events: loading them is as fast as loading a snapshot.
TAIL_EVENTS_MIN = 500
#: One new event pays for going through so many settled rows.
ROWS_A_TAIL_EVENT = 16


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    version: int
    chunks: tuple[str, ...]
    live: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Stored)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A snapshot taken at one moment, to be written at leisure: new chunks, names of all chunks, the live part."""

    version: int
    fold_version: str
    fresh: tuple[bytes, ...]
    known: tuple[str, ...]
    live: bytes


class SnapshotBook(Generic[State]):
    """What one process knows of one run's snapshots: which rows are in chunks, and how long the tail has grown."""

    __slots__ = ("_chunks", "_codec", "_in_chunks", "_live_bytes", "_pending", "_tail_bytes", "_tail_events")

    def __init__(self, codec: SnapshotCodec[State]) -> None:
        self._codec = codec
        self._chunks: tuple[str, ...] = ()
        #: Row by id, as it stands in a chunk.
        self._in_chunks: dict[str, Any] = {}
        self._live_bytes = 0
        self._tail_events = 0
        self._tail_bytes = 0
        self._pending = False

    def grew(self, events: int, size_bytes: int) -> None:
        """The log got so much longer."""
        self._tail_events += events
        self._tail_bytes += size_bytes

    @property
    def is_due(self) -> bool:
        """Whether the tail is worth a snapshot: long, for the rows that must be gone through and the bytes to write.

        So all live parts ever written are never more bytes than the log itself, and a snapshot's time is shared by a
        number of events that grows with it.
        """
        long = self._tail_events >= max(TAIL_EVENTS_MIN, len(self._in_chunks) // ROWS_A_TAIL_EVENT)
        return long and not self._pending and self._tail_bytes >= self._live_bytes

    def prepare(self, state: State) -> Prepared:
        """Take the snapshot of a state as it stands now."""
        codec, in_chunks = self._codec, self._in_chunks
        loose = [(key, row) for key, row in codec.settled_rows(state) if key not in in_chunks]
        fresh = []
        for start in range(0, len(loose) - CHUNK_ROWS + 1, CHUNK_ROWS):
            rows = loose[start : start + CHUNK_ROWS]
            fresh.append(codec.encode_rows([row for _, row in rows]))
            in_chunks.update(rows)
        live = codec.encode_live(state, lambda key, row: in_chunks.get(key) is row)
        self._live_bytes, self._tail_events, self._tail_bytes, self._pending = len(live), 0, 0, True
        return Prepared(state.version, codec.version, tuple(fresh), self._chunks, live)

    async def write(self, store: Store, run: str, prepared: Prepared) -> None:
        """Write the chunks, then the snapshot that names them. After StoreUnavailable the next one makes them anew."""
        try:
            made = [await store.put_blob(run, chunk) for chunk in prepared.fresh]
            chunks = (*prepared.known, *made)
            body = _encoder.encode(_Stored(prepared.version, chunks, prepared.live))
            await store.put_snapshot(run, prepared.fold_version, body)
            self._chunks = chunks
        except BaseException:
            self._in_chunks.clear()
            self._chunks = ()
            raise
        finally:
            self._pending = False

    async def load(self, store: Store, run: str) -> State | None:
        """The state in the stored snapshot, or None when there is none that can be read: then the log is folded."""
        data = await store.snapshot(run, self._codec.version)
        if data is None:
            return None
        try:
            stored = _decoder.decode(data)
        except msgspec.MsgspecError:
            return None
        chunks = await store.blobs(run, stored.chunks)
        if any(chunk is None for chunk in chunks):
            return None
        rows: dict[str, Any] = {}
        try:
            with _no_collector():
                for chunk in chunks:
                    rows.update(self._codec.decode_rows(chunk or b""))
                state = self._codec.decode_live(run, stored.live, rows)
        except msgspec.MsgspecError:
            return None  # a snapshot only saves time: one that cannot be read is as good as none
        self._in_chunks, self._chunks, self._live_bytes = rows, stored.chunks, len(stored.live)
        self._tail_events = self._tail_bytes = 0
        return state


@contextmanager
def _no_collector() -> Iterator[None]:
    """Making 100,000 objects that all stay would start the cyclic collector again and again, for nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
