"""What a store of runs can do, in words that no particular store owns.

Knows: the questions (Commit), the answers (Committed, Conflict, Far, Behind, Fenced), and the Store protocol that
store.py (Redis, Valkey) and memory.py both keep; tests/contract/test_store.py holds them to it.
Does not know: events, rules, keys, connections. Pure.

A commit is the only way to change a run. Its rules, in order:
1. Sent again (`resend`) and already in the log: committed, with the numbers it has there.
2. A fence is given and is not the partition's lease epoch: fenced.
3. The log is shorter than `known`: behind. Somebody lost acknowledged data.
4. The compared version is not the expected one: conflict with the entries after `known`, or far when they are too many.
5. No events: committed, and nothing is written but the indexes, if they are given.
6. The events are appended; blobs, feed and indexes are written with them. The indexes are taken from the caller only
   if its copy was exact (`known` was the log's version); otherwise the run's timer is set to 0 so that a conductor
   derives them again.
"""

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

#: Format of the store's keys and entries. A store of another format is refused, never converted in passing.
FORMAT = 1
PARTITIONS_DEFAULT = 16
#: Blobs up to this size travel in the commit that names them; larger ones go ahead with put_blob.
COMMIT_BLOB_BYTES_MAX = 64 * 1024
#: A commit holds at most so many events; a larger one could not be read in one piece.
COMMIT_EVENTS_MAX = 5_000
#: A conflict carries at most so many unseen entries; beyond that the answer is Far.
UNSEEN_ENTRIES_MAX = 256
#: The feed keeps about so many doorbells; older gaps are repaired from the index of runs.
FEED_ENTRIES_MAX = 10_000


class StoreUnavailable(Exception):
    """No answer could be had. A commit's outcome is then unknown: drop the copy it was decided on and load again."""


class StoreRefused(Exception):
    """This store must not be used as it is (other format, other partition count). Trying again does not help."""


class StoreBehind(Exception):
    """The log is shorter than we know it to be: acknowledged data was lost. The process stops and raises an alarm."""


class StoreFenced(Exception):
    """The lease under which this was decided has passed to another holder. Nothing was written."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"the partition's lease has epoch {epoch} now; give up what was led under the older one")
        self.epoch = epoch


class Compare(StrEnum):
    """Which version a commit compares with `expected`: that of the log, that of its control events, or none (facts)."""

    LOG = "L"
    CONTROL = "C"
    NONE = "N"


class Index(msgspec.Struct, frozen=True):
    """What the cross-run indexes say of a run; a function of its state alone. Times on the store's clock."""

    live: bool
    attention_ms: int | None = None
    due_ms: int | None = None


class Commit(msgspec.Struct, frozen=True):
    """Events for one run, and the version they were decided on.

    `control` says how many of the events are control events, `known` at which log version the caller's copy is.
    `id` must be new for each decision and the same each time that decision is sent.
    """

    run: str
    id: str
    events: tuple[bytes, ...]
    control: int
    compare: Compare
    expected: int
    known: int
    fence: int | None = None
    index: Index | None = None
    blobs: Mapping[str, bytes] = {}
    resend: bool = False


class Entry(msgspec.Struct, frozen=True):
    """One entry of a log: its position, the commit it came with, the server's time then (for audit only), the event."""

    n: int
    commit: str
    at_ms: int
    data: bytes


class Committed(msgspec.Struct, frozen=True):
    """The decision stands. `version` is the position of the commit's last event, or the log's when it had none.

    `unseen` holds what others had appended after `known` and before this commit, or nothing when that is more than 256.
    """

    version: int
    control: int
    time_ms: int
    unseen: tuple[Entry, ...] = ()


class Conflict(msgspec.Struct, frozen=True):
    """Something came in between: these entries. Fold them and decide again. Nothing was written."""

    version: int
    control: int
    entries: tuple[Entry, ...]
    time_ms: int


class Far(msgspec.Struct, frozen=True):
    """As Conflict, with too many entries for one reply: load the run again."""

    version: int
    control: int
    time_ms: int


class Behind(msgspec.Struct, frozen=True):
    """The log ends at `version`, before what the caller knows. Nothing was written."""

    version: int
    time_ms: int


class Fenced(msgspec.Struct, frozen=True):
    """The partition's lease has this epoch, and the commit named another. Nothing was written."""

    epoch: int
    time_ms: int


Reply = Committed | Conflict | Far | Behind | Fenced


@dataclass(frozen=True, slots=True)
class Lease:
    """Who leads a partition. `mine` says whether the asker does; only then may it decide, fenced with `epoch`."""

    epoch: int
    holder: str
    until_ms: int
    mine: bool
    time_ms: int


@dataclass(frozen=True, slots=True)
class Meta:
    """What a store is, fixed at its first start."""

    identity: str
    format: int
    partitions: int


class Store(Protocol):
    """The logs of all runs, their blobs and snapshots, and the indexes of each partition.

    Every method raises StoreUnavailable when the server cannot be reached or answers with an error.
    """

    @property
    def partitions(self) -> int:
        """How many partitions the store has; fixed at its first start."""

    async def commit(self, commit: Commit) -> Reply:
        """Append, or say why not. After a lost reply the same commit is sent again until the server answers.

        Raises StoreUnavailable after the store's commit deadline (the outcome is then unknown) and ValueError for a
        commit that no caller may make: a blob over 64 kB, blobs without events, an event that is not one line.
        """

    async def read(self, run: str, after: int, limit: int = 1000) -> list[Entry]:
        """Entries after a position, oldest first. One that is not there may still be on its way: it proves nothing."""

    async def head(self, run: str) -> tuple[int, int]:
        """Version and control version; (0, 0) when there is no such run."""

    async def blob(self, run: str, sha: str) -> bytes | None:
        """The bytes under this sha256."""

    async def blobs(self, run: str, shas: Sequence[str]) -> list[bytes | None]:
        """Several of them at once."""

    async def put_blob(self, run: str, data: bytes) -> str:
        """Keep bytes of any size; they are durable before the sha256 is given back."""

    async def snapshot(self, run: str, fold_version: str) -> bytes | None:
        """The newest snapshot that this version of the fold wrote."""

    async def put_snapshot(self, run: str, fold_version: str, data: bytes) -> None:
        """Replace it."""

    async def runs(self, partition: int, *, after_commit: int = 0, limit: int = 1000) -> list[tuple[str, int]]:
        """Runs changed after a commit number of the partition, with the number of their last commit, in that order."""

    async def live(self, partition: int) -> list[str]:
        """Runs that are not finished."""

    async def attention(self) -> list[tuple[str, int]]:
        """Runs of all partitions that wait for a person, with since when (ms), oldest first."""

    async def due(self, partition: int, now_ms: int, limit: int = 100) -> list[str]:
        """Runs whose time has come, earliest first."""

    async def next_due_ms(self, partition: int) -> int | None:
        """The earliest time in the partition's timers."""

    async def marks(self, partitions: Collection[int]) -> dict[int, int]:
        """The present commit number of each: take it, look at the live runs, then follow the feed from it."""

    def feed(
        self, partitions: Collection[int], *, after: Mapping[int, int] | None = None
    ) -> AsyncGenerator[tuple[str, int], None]:
        """Run and version, for each change after these marks (default: after the first step of the iteration).

        Several changes of one run may be told as one. Nothing is left out: gaps are repaired from the index of runs,
        also across reconnects; it waits for a lost server to come back and never ends by itself.
        """

    async def lease(self, partition: int, holder: str, incarnation: str, ttl_ms: int) -> Lease:
        """Take or renew the lease. A new incarnation of its holder takes it over at once, and gets a new epoch."""

    async def release(self, partition: int, holder: str, incarnation: str) -> None:
        """Give the lease up, if it is this incarnation's."""

    async def now_ms(self) -> int:
        """The server's time: the only clock that commands may use."""

    async def meta(self) -> Meta:
        """What the store is."""

    async def aclose(self) -> None:
        """Let go of all connections."""


def checked(commit: Commit) -> Commit:
    """The commit, if a caller may make it; ValueError otherwise. Validated here because Lua must not raise."""
    if commit.blobs and not commit.events:
        raise ValueError("blobs travel with the events that name them; this commit has none")
    for sha, data in commit.blobs.items():
        if len(data) > COMMIT_BLOB_BYTES_MAX:
            raise ValueError(f"blob {sha[:12]} has {len(data)} bytes; above {COMMIT_BLOB_BYTES_MAX} use put_blob first")
    if len(commit.events) > COMMIT_EVENTS_MAX:
        raise ValueError(f"{len(commit.events)} events in one commit; at most {COMMIT_EVENTS_MAX}")
    for data in commit.events:
        if not data or b"\n" in data:
            raise ValueError("an event is one line of JSON, not empty and without line breaks")
    if not 0 <= commit.control <= len(commit.events):
        raise ValueError(f"{commit.control} control events among {len(commit.events)}")
    return commit


def check_meta(meta: Meta, partitions: int | None) -> Meta:
    """Compare what the store is with what this program can use. Raises StoreRefused with a sentence for people."""
    if meta.format != FORMAT:
        raise StoreRefused(
            f"the store has format {meta.format}, and this regate reads and writes format {FORMAT}: start the version "
            "of regate that wrote it, or use another store; nothing was changed"
        )
    if partitions is not None and partitions != meta.partitions:
        raise StoreRefused(
            f"the store was made with {meta.partitions} partitions and the settings ask for {partitions}: the number "
            f"is fixed at the first start, set it to {meta.partitions} or leave it out"
        )
    return meta
