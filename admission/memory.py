"""The store in memory: MemoryStore keeps the rules of storage.py over lists and dictionaries.

Knows: the same order of checks as lua/commit.lua, one line of Python for each of its own; and faults that tests order.
Does not know: events, rules, durability. It is the double in unit tests and the store of the simulation and explorer.
"""

import hashlib
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from admission.feed import Bell, follow
from admission.storage import (
    FEED_ENTRIES_MAX,
    FORMAT,
    PARTITIONS_DEFAULT,
    UNSEEN_ENTRIES_MAX,
    Behind,
    Commit,
    Committed,
    Compare,
    Conflict,
    Entry,
    Far,
    Fenced,
    Index,
    Lease,
    Meta,
    Reply,
    StoreUnavailable,
    checked,
)
from admission.vocabulary import partition_of

FEED_WAIT_S = 2.0


@dataclass
class Faults:
    """What goes wrong next. Each number counts down; `unavailable` holds until it is set back."""

    #: Of so many commits the reply is lost after they were applied; the store sends them again, as RedisStore does.
    lost_replies: int = 0
    #: So many commits are lost on their way to the store, and sent again.
    lost_requests: int = 0
    #: So many commits are applied and then reported as StoreUnavailable.
    unknown_outcomes: int = 0
    unavailable: bool = False


@dataclass
class _Run:
    log: list[Entry] = field(default_factory=list)
    control: int = 0
    blobs: dict[str, bytes] = field(default_factory=dict)
    snapshots: dict[str, bytes] = field(default_factory=dict)


@dataclass
class _Partition:
    bells: list[Bell] = field(default_factory=list)
    runs: dict[str, int] = field(default_factory=dict)
    commits: int = 0
    live: set[str] = field(default_factory=set)
    attention: dict[str, int] = field(default_factory=dict)
    timers: dict[str, int] = field(default_factory=dict)
    lease: Lease = field(default_factory=lambda: Lease(0, "", 0, False, 0))
    incarnation: str = ""
    ousted: str = ""


class MemoryStore:
    """A Store that forgets everything with its process. `now_ms` is the store's clock; `faults` may be set at will."""

    def __init__(
        self,
        *,
        now_ms: Callable[[], int],
        partitions: int = PARTITIONS_DEFAULT,
        identity: str = "memory",
        feed_entries_max: int = FEED_ENTRIES_MAX,
    ) -> None:
        self.faults = Faults()
        #: Commits that reached the store, those sent again included.
        self.arrivals = 0
        self._now_ms = now_ms
        self._meta = Meta(identity, FORMAT, partitions)
        self._feed_entries_max = feed_entries_max
        self._runs: dict[str, _Run] = {}
        self._partitions = [_Partition() for _ in range(partitions)]
        self._rung = anyio.Event()

    @property
    def partitions(self) -> int:
        return self._meta.partitions

    async def meta(self) -> Meta:
        return self._meta

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def commit(self, commit: Commit) -> Reply:
        checked(commit)
        await self._reached()
        resend, faults = commit.resend, self.faults
        while True:
            if faults.lost_requests:
                faults.lost_requests -= 1
            else:
                reply = self.apply(commit, resend=resend)
                if faults.unknown_outcomes:
                    faults.unknown_outcomes -= 1
                    raise StoreUnavailable("the answer to a commit was lost; whether it was written is unknown")
                if not faults.lost_replies:
                    return reply
                faults.lost_replies -= 1
            resend = True
            await anyio.lowlevel.checkpoint()

    def apply(self, commit: Commit, *, resend: bool) -> Reply:
        """One arrival of a commit at the store, in one step. Tests use it for duplicates that arrive late."""
        self.arrivals += 1
        run = self._runs.get(commit.run) or _Run()
        partition = self._partitions[partition_of(commit.run, self.partitions)]
        now, version, known = self._now_ms(), len(run.log), commit.known
        if resend and commit.events:
            for entry in run.log[known:]:
                if entry.commit == commit.id:
                    before = entry.n - 1
                    return Committed(before + len(commit.events), run.control, now, _unseen(run, known, before))
        if commit.fence is not None and commit.fence != partition.lease.epoch:
            return Fenced(partition.lease.epoch, now)
        if version < known:
            return Behind(version, now)
        compared = version if commit.compare is Compare.LOG else run.control
        if commit.compare is not Compare.NONE and compared != commit.expected:
            if version - known > UNSEEN_ENTRIES_MAX:
                return Far(version, run.control, now)
            return Conflict(version, run.control, _unseen(run, known, version), now)
        missed = _unseen(run, known, version)
        if commit.events:
            self._append(run, partition, commit, now)
        if commit.index is not None and version == known:
            _write_index(partition, commit.run, commit.index)
        elif commit.events:
            partition.timers[commit.run] = 0
        return Committed(len(run.log), run.control, now, missed)

    def _append(self, run: _Run, partition: _Partition, commit: Commit, now: int) -> None:
        self._runs[commit.run] = run
        version = len(run.log)
        run.log += [Entry(version + i, commit.id, now, data) for i, data in enumerate(commit.events, 1)]
        run.control += commit.control
        run.blobs.update(commit.blobs)
        partition.commits += 1
        partition.runs[commit.run] = partition.commits
        partition.bells.append((partition.commits, commit.run, len(run.log)))
        del partition.bells[: -self._feed_entries_max]
        self._rung.set()
        self._rung = anyio.Event()

    async def _reached(self) -> None:
        await anyio.lowlevel.checkpoint()
        if self.faults.unavailable:
            raise StoreUnavailable("the store in memory was told to be unavailable")

    async def _run(self, run: str) -> _Run:
        await self._reached()
        return self._runs.get(run) or _Run()

    async def read(self, run: str, after: int, limit: int = 1000) -> list[Entry]:
        return (await self._run(run)).log[after : after + limit]

    async def head(self, run: str) -> tuple[int, int]:
        found = await self._run(run)
        return len(found.log), found.control

    async def blob(self, run: str, sha: str) -> bytes | None:
        return (await self._run(run)).blobs.get(sha)

    async def blobs(self, run: str, shas: Sequence[str]) -> list[bytes | None]:
        found = await self._run(run)
        return [found.blobs.get(sha) for sha in shas]

    async def put_blob(self, run: str, data: bytes) -> str:
        await self._reached()
        sha = hashlib.sha256(data).hexdigest()
        self._runs.setdefault(run, _Run()).blobs[sha] = data
        return sha

    async def snapshot(self, run: str, fold_version: str) -> bytes | None:
        return (await self._run(run)).snapshots.get(fold_version)

    async def put_snapshot(self, run: str, fold_version: str, data: bytes) -> None:
        await self._reached()
        self._runs.setdefault(run, _Run()).snapshots[fold_version] = data

    async def runs(self, partition: int, *, after_commit: int = 0, limit: int = 1000) -> list[tuple[str, int]]:
        await self._reached()
        found = [(run, number) for run, number in self._partitions[partition].runs.items() if number > after_commit]
        return sorted(found, key=lambda pair: pair[1])[:limit]

    async def live(self, partition: int) -> list[str]:
        await self._reached()
        return sorted(self._partitions[partition].live)

    async def attention(self) -> list[tuple[str, int]]:
        await self._reached()
        found = [pair for partition in self._partitions for pair in partition.attention.items()]
        return sorted(found, key=lambda pair: (pair[1], pair[0]))

    async def due(self, partition: int, now_ms: int, limit: int = 100) -> list[str]:
        await self._reached()
        timers = self._partitions[partition].timers.items()
        return [run for at_ms, run in sorted((at_ms, run) for run, at_ms in timers if at_ms <= now_ms)][:limit]

    async def next_due_ms(self, partition: int) -> int | None:
        await self._reached()
        return min(self._partitions[partition].timers.values(), default=None)

    async def marks(self, partitions: Collection[int]) -> dict[int, int]:
        await self._reached()
        return {partition: self._partitions[partition].commits for partition in partitions}

    def feed(
        self, partitions: Collection[int], *, after: Mapping[int, int] | None = None
    ) -> AsyncGenerator[tuple[str, int], None]:
        return self._feed(partitions, after)

    async def _feed(
        self, partitions: Collection[int], after: Mapping[int, int] | None
    ) -> AsyncGenerator[tuple[str, int], None]:
        seen = await self.marks(partitions) if after is None else {p: after.get(p, 0) for p in partitions}
        lost = (StoreUnavailable,)
        async with aclosing(follow(seen, ring=self._ring, missed=self._missed, lost=lost)) as changes:
            async for change in changes:
                yield change

    async def _ring(self, seen: Mapping[int, int]) -> dict[int, list[Bell]]:
        await self._reached()
        if not any(self._partitions[p].commits > number for p, number in seen.items()):
            with anyio.move_on_after(FEED_WAIT_S):
                await self._rung.wait()
        found = {p: [bell for bell in self._partitions[p].bells if bell[0] > number] for p, number in seen.items()}
        return {p: bells for p, bells in found.items() if bells}

    async def _missed(self, partition: int, after: int) -> tuple[list[tuple[str, int]], int]:
        changed = await self.runs(partition, after_commit=after, limit=len(self._runs))
        return [(run, len(self._runs[run].log)) for run, _ in changed], self._partitions[partition].commits

    async def lease(self, partition: int, holder: str, incarnation: str, ttl_ms: int) -> Lease:
        await self._reached()
        if ttl_ms <= 0:
            raise ValueError(f"a lease of {ttl_ms} ms: give a time above 0, or release it")
        place, now = self._partitions[partition], self._now_ms()
        old = place.lease
        same = (old.holder, place.incarnation) == (holder, incarnation)
        successor = old.holder == holder and place.ousted != incarnation
        if not same and old.until_ms > now and not successor:
            return Lease(old.epoch, old.holder, old.until_ms, False, now)
        if not same:
            place.ousted = place.incarnation if old.holder == holder else ""
            place.incarnation = incarnation
        place.lease = Lease(old.epoch + (not same), holder, now + ttl_ms, True, now)
        return place.lease

    async def release(self, partition: int, holder: str, incarnation: str) -> None:
        await self._reached()
        place = self._partitions[partition]
        if (place.lease.holder, place.incarnation) == (holder, incarnation):
            place.lease = Lease(place.lease.epoch, "", 0, False, self._now_ms())
            place.incarnation = place.ousted = ""

    async def now_ms(self) -> int:
        await self._reached()
        return self._now_ms()


def _unseen(run: _Run, known: int, last: int) -> tuple[Entry, ...]:
    return tuple(run.log[known:last]) if last - known <= UNSEEN_ENTRIES_MAX else ()


def _write_index(partition: _Partition, run: str, index: Index) -> None:
    if index.live:
        partition.live.add(run)
    else:
        partition.live.discard(run)
    for scores, score in ((partition.attention, index.attention_ms), (partition.timers, index.due_ms)):
        if score is None:
            scores.pop(run, None)
        else:
            scores[run] = score
