"""What the desk promises of its copies: never ahead of the log, limited in number, and loaded from snapshots."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from admission.memory import MemoryStore
from admission.storage import Store
from admission.vocabulary import partition_of
from tests.contract.desk_room import (
    MACHINE,
    Claim,
    Claimed,
    Event,
    Note,
    Noted,
    Ordered,
    Watched,
    desk_on,
    folded,
    until,
)
from tests.contract.store_room import WAIT_S, committed, plain

pytestmark = pytest.mark.anyio

RUN = "aaaa"


def wire(*events: Any) -> list[bytes]:
    return [msgspec.json.encode(event) for event in events]


async def by_another(store: Any, *events: Any, control: int = 0, run: str = RUN) -> None:
    """Somebody else appends these."""
    version = (await store.head(run))[0]
    committed(await store.commit(plain(run, *wire(*events), known=version, control=control)))


@pytest.fixture
def watched(memory_store: MemoryStore) -> Watched:
    """A store whose replies can be held back; they are not, at first."""
    return Watched(memory_store)


# --- copies


async def test_current_is_caught_up_and_never_ahead(watched: Watched) -> None:
    seen: list[tuple[int, int]] = []

    async def look() -> None:
        for _ in range(20):
            state = await desk.current(RUN)
            version = state.version
            seen.append((version, len(await watched.store.read(RUN, 0))))
            assert len(state.claims) >= version

    async def claim(who: str) -> None:
        for k in range(30):
            await desk.submit(RUN, Claim(f"{who}{k}"))

    async with desk_on(watched) as desk:
        await by_another(watched.store, Claimed("x", "other"))
        assert await desk.look(RUN, lambda state: list(state.claims)) == ["x"]
        async with anyio.create_task_group() as tasks:
            for who in "abc":
                tasks.start_soon(claim, who)
            for _ in range(3):
                tasks.start_soon(look)
    assert all(version <= stored for version, stored in seen), "what is folded ahead of the reply is not shown"
    assert max(version for version, _ in seen) > 1


async def test_who_looks_does_not_see_the_next_group(watched: Watched) -> None:
    """The next group is folded ahead of its reply, on the same state, as soon as the desk goes on."""
    seen: list[list[str]] = []

    async def look() -> None:
        seen.append(list((await desk.current(RUN)).claims))

    async with desk_on(watched) as desk, anyio.create_task_group() as tasks:
        lease = await watched.store.lease(partition_of(RUN, watched.store.partitions), "a", "1", 60_000)
        watched.close()
        tasks.start_soon(desk.submit, RUN, Claim("first"))
        await until(lambda: len(watched.commits) == 1)
        tasks.start_soon(look)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(functools.partial(desk.submit, RUN, Claim("next"), fence=lease.epoch))
        await anyio.wait_all_tasks_blocked()
        watched.open.set()
    assert seen == [["first"]]
    assert len(watched.commits) == 3


async def test_blobs_are_written_with_the_events_that_name_them(store: Store) -> None:
    data, other = b"arguments", b"never sent"
    sha, other_sha = (hashlib.sha256(part).hexdigest() for part in (data, other))
    async with desk_on(store) as desk:
        await desk.submit(RUN, Claim("x"), blobs={sha: data})
        await desk.submit(RUN, Claim("x"), blobs={other_sha: other})
        assert await store.blobs(RUN, [sha, other_sha]) == [data, None]
        with pytest.raises(ValueError, match="put_blob"):
            await desk.submit(RUN, Claim("y"), blobs={sha: b"x" * 70_000})


async def test_a_group_carries_the_index_of_what_it_leads_to(store: Store) -> None:
    partition = partition_of(RUN, store.partitions)
    async with desk_on(store) as desk:
        await desk.submit(RUN, Claim("x"))
        await desk.submit(RUN, Claim("y"))
        assert await store.next_due_ms(partition) == 2
        assert await store.live(partition) == [RUN]


async def test_the_copies_are_limited(watched: Watched) -> None:
    async with desk_on(watched, copies_max=3) as desk:
        for i in range(10):
            await desk.submit(f"run{i}", Claim("x"))
        assert len(desk._copies) == 3
        assert (await desk.submit("run0", Claim("y"))).version == 2


async def test_time_is_the_stores() -> None:
    store_ms, process_s = 1_000_000, 50.0
    store = MemoryStore(now_ms=lambda: store_ms)
    async with desk_on(store, monotonic=lambda: process_s) as desk:
        assert desk.now_ms() == 1_000_000
        process_s += 2.5
        assert desk.now_ms() == 1_002_500
        store_ms += 2_400  # the reply was 100 ms on its way
        await desk.submit(RUN, Claim("x"))
        assert desk.now_ms() == 1_002_500, "time does not run backwards"
        store_ms = 5
        await desk.submit(RUN, Claim("y"))
        assert desk.now_ms() == 5, "but it follows a server whose clock was set back"


# --- snapshots


async def test_a_snapshot_and_the_tail_are_the_log(store: Store) -> None:
    async with desk_on(store) as desk:
        for i in range(0, 2600, 50):
            await by_another(store, *[Claimed(f"{k}", "other") for k in range(i, i + 50)])
        await desk.submit(RUN, Note("one"))  # loads, and finds that a snapshot is due
        await by_another(store, Claimed("1", "amended"), Claimed("2599", "amended"))
        for i in range(0, 1500, 50):
            await by_another(store, *[Noted(f"{k}") for k in range(i, i + 50)])
        await desk.submit(RUN, Claim("last"))
        with anyio.fail_after(WAIT_S):
            while await _snapshot_version(store) < 3200:
                await anyio.lowlevel.checkpoint()
        await by_another(store, Claimed("2", "after"), Noted("after"))
    whole = await folded(store, RUN)
    reads: list[int] = []

    class Counting(Watched):
        async def read(self, run: str, after: int, limit: int = 1000) -> Any:
            reads.append(after)
            return await self.store.read(run, after, limit)

    async with desk_on(Counting(store)) as desk:
        assert (await desk.look(RUN, lambda state: state.facts())) == whole.facts()
    assert reads
    assert min(reads) >= 3200, "only the tail was read"
    async with desk_on(store) as desk:
        assert (await desk.submit(RUN, Claim("2"))).decision.says == "taken by after"
        assert (await desk.submit(RUN, Claim("1"))).decision.says == "taken by amended"


async def _snapshot_version(store: Store) -> int:
    data = await store.snapshot(RUN, "1")
    return 0 if data is None else int(msgspec.msgpack.decode(data)[0])


@pytest.mark.parametrize("damage", ["garbage", "other version", "chunk lost"])
async def test_a_snapshot_that_cannot_be_used_is_ignored(memory_store: MemoryStore, damage: str) -> None:
    store = memory_store
    async with desk_on(store) as desk:
        await by_another(store, *[Claimed(f"{k}", "other") for k in range(1200)])
        await desk.current(RUN)
        await until(lambda: bool(store._runs[RUN].snapshots))
    if damage == "garbage":
        store._runs[RUN].snapshots["1"] = b"garbage"
    elif damage == "chunk lost":
        assert store._runs[RUN].blobs
        store._runs[RUN].blobs.clear()
    else:
        store._runs[RUN].snapshots = {"0": store._runs[RUN].snapshots["1"]}
    async with desk_on(store) as desk:
        assert await desk.look(RUN, lambda state: state.facts()) == (await folded(store, RUN)).facts()


async def test_snapshots_write_each_settled_row_about_once(memory_store: MemoryStore) -> None:
    """A naive snapshot would write all rows each time."""
    store = memory_store
    written: list[int] = []

    class Weighing(Watched):
        async def put_blob(self, run: str, data: bytes) -> str:
            written.append(len(data))
            return await self.store.put_blob(run, data)  # type: ignore[no-any-return]

        async def put_snapshot(self, run: str, fold_version: str, data: bytes) -> None:
            written.append(len(data))
            await self.store.put_snapshot(run, fold_version, data)

    weighing = Weighing(store)
    async with desk_on(weighing) as desk, anyio.create_task_group() as tasks:

        async def claim(who: int) -> None:
            for k in range(400):
                await desk.submit(RUN, Claim(f"{who}-{k}"))

        for who in range(40):
            tasks.start_soon(claim, who)
    log_bytes = sum(len(entry.data) for entry in await store.read(RUN, 0, 100_000))
    assert len(written) > 8
    assert sum(written) < 2 * log_bytes


def test_the_machine_of_these_tests_can_take_back() -> None:
    state = MACHINE.new(RUN)
    MACHINE.fold(state, 1, Claimed("x", "me"))
    before = state.facts()
    state.begin()
    events: list[Event] = [Claimed("x", "you"), Claimed("y", "you"), Noted("z"), Ordered("w")]
    for n, event in enumerate(events, 2):
        MACHINE.fold(state, n, event)
    state.undo()
    assert state.facts() == before
