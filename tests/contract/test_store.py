"""What every store promises: one suite, run on MemoryStore and on RedisStore with a real server."""

from __future__ import annotations

import contextlib
import hashlib

import anyio
import anyio.lowlevel
import pytest

from admission import keys
from admission.storage import (
    COMMIT_BLOB_BYTES_MAX,
    Behind,
    Compare,
    Conflict,
    Far,
    Fenced,
    Index,
    Store,
)
from admission.vocabulary import partition_of
from tests.contract.conftest import FEED_ENTRIES_MAX
from tests.contract.store_room import WAIT_S, committed, fill, plain, resent, seen_by

pytestmark = pytest.mark.anyio

RUN = "aaaa"
TTL_MS = 60_000


def runs_of(partition: int, partitions: int, count: int) -> list[str]:
    """Names of runs that live in a partition."""
    names = (f"run{i}" for i in range(100_000))
    return [name for name in names if partition_of(name, partitions) == partition][:count]


async def timer_of(store: Store, run: str) -> bool:
    """Whether the run is due at once."""
    return run in await store.due(partition_of(run, store.partitions), 0)


# --- the answers


async def test_the_first_commit_makes_the_run(store: Store) -> None:
    assert await store.head(RUN) == (0, 0)
    before_ms = await store.now_ms()
    reply = committed(await store.commit(plain(RUN, b"{1}", b"{2}", control=1, id="one")))
    assert (reply.version, reply.control, reply.unseen) == (2, 1, ())
    assert await store.head(RUN) == (2, 1)
    entries = await store.read(RUN, 0)
    assert [(e.n, e.commit, e.data) for e in entries] == [(1, "one", b"{1}"), (2, "one", b"{2}")]
    assert before_ms <= entries[0].at_ms <= reply.time_ms <= await store.now_ms()


@pytest.mark.parametrize("events", [0, 1])
async def test_a_stale_version_is_a_conflict_that_carries_what_was_not_seen(store: Store, events: int) -> None:
    await fill(store, RUN, 5)
    reply = await store.commit(plain(RUN, *[b"{}"] * events, known=2))
    assert isinstance(reply, Conflict)
    assert (reply.version, reply.control) == (5, 0)
    assert reply.entries == tuple(await store.read(RUN, 2))
    assert [e.n for e in reply.entries] == [3, 4, 5]
    assert await store.head(RUN) == (5, 0)


async def test_beyond_256_unseen_entries_the_answer_is_far(store: Store) -> None:
    await fill(store, RUN, 300, at_once=50)
    near = await store.commit(plain(RUN, b"{}", known=300 - 256))
    assert isinstance(near, Conflict)
    assert [e.n for e in near.entries] == list(range(45, 301)), "a copy inside a large commit gets the rest of it"
    far = await store.commit(plain(RUN, b"{}", known=300 - 257))
    assert isinstance(far, Far)
    assert (far.version, far.control) == (300, 0)
    assert await store.head(RUN) == (300, 0)


@pytest.mark.parametrize("compare", list(Compare))
@pytest.mark.parametrize("events", [0, 1])
async def test_a_log_shorter_than_known_is_behind(store: Store, compare: Compare, events: int) -> None:
    await fill(store, RUN, 3)
    expected = 0 if compare is Compare.CONTROL else 4
    reply = await store.commit(plain(RUN, *[b"{}"] * events, known=4, compare=compare, expected=expected))
    assert isinstance(reply, Behind)
    assert reply.version == 3
    assert await store.head(RUN) == (3, 0)


async def test_an_old_fence_writes_nothing(store: Store) -> None:
    partition = partition_of(RUN, store.partitions)
    old = await store.lease(partition, "a", "1", TTL_MS)
    assert committed(await store.commit(plain(RUN, b"{}", fence=old.epoch))).version == 1
    await store.release(partition, "a", "1")
    new = await store.lease(partition, "b", "1", TTL_MS)
    for events in ((), (b"{}",)):
        reply = await store.commit(plain(RUN, *events, known=1, fence=old.epoch))
        assert isinstance(reply, Fenced)
        assert reply.epoch == new.epoch > old.epoch
    assert await store.head(RUN) == (1, 0)
    assert committed(await store.commit(plain(RUN, b"{}", known=1, fence=new.epoch))).version == 2


async def test_a_fence_without_any_lease_is_refused(store: Store) -> None:
    assert isinstance(await store.commit(plain(RUN, b"{}", fence=1)), Fenced)


async def test_control_compares_control_alone(store: Store) -> None:
    version = committed(await store.commit(plain(RUN, b"{start}", control=1))).version
    await fill(store, RUN, 20)
    redirect = plain(RUN, b"{redirect}", known=version, compare=Compare.CONTROL, expected=1, control=1)
    reply = committed(await store.commit(redirect))
    assert (reply.version, reply.control) == (22, 2)
    assert [e.n for e in reply.unseen] == list(range(2, 22)), "the copy learns what it had not seen"
    second = await store.commit(plain(RUN, b"{2}", known=version, compare=Compare.CONTROL, expected=1, control=1))
    assert isinstance(second, Conflict)
    assert (second.version, second.control) == (22, 2)
    assert second.entries[-1].data == b"{redirect}"


async def test_facts_compare_nothing(store: Store) -> None:
    await fill(store, RUN, 4)
    reply = committed(await store.commit(plain(RUN, b"{fact}", known=1, compare=Compare.NONE)))
    assert reply.version == 5
    assert [e.n for e in reply.unseen] == [2, 3, 4]


async def test_unseen_entries_are_left_out_when_they_are_too_many(store: Store) -> None:
    await fill(store, RUN, 300, at_once=100)
    reply = committed(await store.commit(plain(RUN, b"{fact}", known=0, compare=Compare.NONE)))
    assert (reply.version, reply.unseen) == (301, ())


async def test_an_empty_commit_confirms_and_writes_nothing(store: Store) -> None:
    partition = partition_of(RUN, store.partitions)
    await fill(store, RUN, 3)
    marks, runs = await store.marks([partition]), await store.runs(partition)
    reply = committed(await store.commit(plain(RUN, known=3)))
    assert (reply.version, reply.control) == (3, 0)
    assert await store.read(RUN, 0) == await store.read(RUN, 0, 3)
    assert (await store.marks([partition]), await store.runs(partition)) == (marks, runs)
    assert await store.live(partition) == [RUN]
    assert committed(await store.commit(plain("nobody"))).version == 0
    assert await store.head("nobody") == (0, 0)


# --- sent again


@pytest.mark.parametrize("compare", list(Compare))
@pytest.mark.parametrize("later", [0, 3, 600])
async def test_a_commit_sent_again_is_applied_once(store: Store, compare: Compare, later: int) -> None:
    await fill(store, RUN, 2)
    commit = plain(RUN, b"{a}", b"{b}", known=2, control=1, compare=compare, expected=0 if compare == "C" else 2)
    first = committed(await store.commit(commit))
    await fill(store, RUN, later)
    again = committed(await store.commit(resent(commit)))
    assert (again.version, again.unseen) == (first.version, ()) == (4, ())
    assert await store.head(RUN) == (4 + later, 1)


async def test_a_commit_sent_again_that_never_arrived_is_applied(store: Store) -> None:
    await fill(store, RUN, 2)
    assert committed(await store.commit(resent(plain(RUN, b"{a}", known=2)))).version == 3


async def test_a_commit_sent_again_is_found_among_what_others_appended_before_it(store: Store) -> None:
    await fill(store, RUN, 5)
    commit = plain(RUN, b"{fact}", known=2, compare=Compare.NONE)
    await store.commit(commit)
    again = committed(await store.commit(resent(commit)))
    assert again.version == 6
    assert [e.n for e in again.unseen] == [3, 4, 5]


async def test_what_was_applied_before_the_lease_passed_on_stays_applied(store: Store) -> None:
    partition = partition_of(RUN, store.partitions)
    lease = await store.lease(partition, "a", "1", TTL_MS)
    commit = plain(RUN, b"{a}", fence=lease.epoch)
    await store.commit(commit)
    await store.lease(partition, "a", "2", TTL_MS)
    assert committed(await store.commit(resent(commit))).version == 1


@pytest.mark.parametrize("compare", [Compare.LOG, Compare.CONTROL])
async def test_an_original_that_arrives_after_its_copy_is_a_conflict(store: Store, compare: Compare) -> None:
    commit = plain(RUN, b"{a}", control=1, compare=compare)
    committed(await store.commit(resent(commit)))
    late = await store.commit(commit)
    assert isinstance(late, Conflict)
    assert [e.commit for e in late.entries] == [commit.id]
    assert await store.head(RUN) == (1, 1)


# --- reading


async def test_reading_may_begin_and_end_inside_a_commit(store: Store) -> None:
    for size in (1, 7, 2, 40, 1):
        await fill(store, RUN, size, at_once=size)
    whole = await store.read(RUN, 0)
    assert [e.n for e in whole] == list(range(1, 52))
    assert [e.data for e in whole] == [b'{"fact":%d}' % n for n in range(1, 52)]
    for after in range(0, 52, 3):
        for limit in (1, 5, 1000):
            assert await store.read(RUN, after, limit) == whole[after : after + limit]
    assert await store.read(RUN, 51) == []


async def test_a_long_log_is_read_in_pages(store: Store) -> None:
    await fill(store, RUN, 900, at_once=450)
    await fill(store, RUN, 150)
    assert [e.n for e in await store.read(RUN, 0, 1000)] == list(range(1, 1001))
    assert [e.n for e in await store.read(RUN, 1000, 1000)] == list(range(1001, 1051))


async def test_blobs_come_with_the_commit_that_names_them(store: Store) -> None:
    datas = {hashlib.sha256(data).hexdigest(): data for data in (b"receipt", b"\x00\n" * 1000)}
    first, second = datas
    await store.commit(plain(RUN, b"{}", known=9, expected=9, blobs=datas))  # behind
    await fill(store, RUN, 1)
    await store.commit(plain(RUN, b"{}", blobs=datas))  # conflict
    assert await store.blobs(RUN, [first, second]) == [None, None]
    await store.commit(plain(RUN, b"{}", known=1, blobs=datas))
    assert await store.blob(RUN, first) == datas[first]
    assert await store.blobs(RUN, [second, "0" * 64, first]) == [datas[second], None, datas[first]]
    assert await store.blob("other", first) is None
    assert await store.blobs(RUN, []) == []


async def test_a_large_blob_goes_ahead(store: Store) -> None:
    data = b"x" * (COMMIT_BLOB_BYTES_MAX + 1)
    sha = hashlib.sha256(data).hexdigest()
    with pytest.raises(ValueError, match="put_blob"):
        await store.commit(plain(RUN, b"{}", blobs={sha: data}))
    assert await store.head(RUN) == (0, 0)
    assert await store.put_blob(RUN, data) == sha
    assert await store.blob(RUN, sha) == data


@pytest.mark.parametrize("event", [b"", b'{"a":\n1}'])
async def test_an_event_is_one_line(store: Store, event: bytes) -> None:
    with pytest.raises(ValueError, match="one line"):
        await store.commit(plain(RUN, b"{}", event))
    with pytest.raises(ValueError, match="blobs travel"):
        await store.commit(plain(RUN, blobs={"0": b""}))


async def test_a_snapshot_belongs_to_its_fold_version(store: Store) -> None:
    await store.put_snapshot(RUN, "1", b"old")
    await store.put_snapshot(RUN, "1", b"new")
    assert await store.snapshot(RUN, "1") == b"new"
    assert await store.snapshot(RUN, "2") is None
    assert await store.snapshot("other", "1") is None


# --- the indexes


async def test_indexes_follow_each_commit_of_an_exact_copy(store: Store) -> None:
    partition = partition_of(RUN, store.partitions)
    await store.commit(plain(RUN, b"{}", index=Index(True, 500, 900)))
    assert await store.live(partition) == [RUN]
    assert await store.attention() == [(RUN, 500)]
    assert (await store.due(partition, 899), await store.due(partition, 900)) == ([], [RUN])
    assert await store.next_due_ms(partition) == 900
    await store.commit(plain(RUN, b"{}", known=1, index=Index(False)))
    assert (await store.live(partition), await store.attention()) == ([], [])
    assert await store.next_due_ms(partition) is None


@pytest.mark.parametrize("index", [Index(False, None, None), None])
async def test_a_copy_that_is_not_exact_asks_for_a_new_look(store: Store, index: Index | None) -> None:
    partition = partition_of(RUN, store.partitions)
    right = Index(True, 500, 900)
    await store.commit(plain(RUN, b"{}", index=right))
    stale = plain(RUN, b"{}", known=0, compare=Compare.NONE, index=index)
    await store.commit(stale)
    assert await store.live(partition) == [RUN], "its index was not taken"
    assert await store.attention() == [(RUN, 500)]
    assert await store.next_due_ms(partition) == 0
    # The next exact one puts the same index back, which must not be taken for what stands there already.
    await store.commit(plain(RUN, b"{}", known=2, index=right))
    assert await store.next_due_ms(partition) == 900


async def test_a_commit_without_index_asks_for_a_new_look(store: Store) -> None:
    await store.commit(plain(RUN, b"{}"))
    assert await timer_of(store, RUN)


async def test_an_empty_commit_with_an_index_writes_the_indexes_alone(store: Store) -> None:
    partition = partition_of(RUN, store.partitions)
    await store.commit(plain(RUN, b"{}"))
    marks = await store.marks([partition])
    committed(await store.commit(plain(RUN, known=1, index=Index(True, 3, 7))))
    assert (await store.live(partition), await store.attention()) == ([RUN], [(RUN, 3)])
    assert await store.next_due_ms(partition) == 7
    assert await store.marks([partition]) == marks
    await fill(store, RUN, 1)
    stale = plain(RUN, known=1, compare=Compare.NONE, index=Index(False))
    committed(await store.commit(stale))
    assert await store.live(partition) == [RUN]


async def test_runs_are_listed_in_the_order_of_their_last_commits(store: Store) -> None:
    first, second, third = runs_of(3, store.partitions, 3)
    for run in (first, second, third, first):
        await fill(store, run, 1)
    assert await store.runs(3) == [(second, 2), (third, 3), (first, 4)]
    assert await store.runs(3, after_commit=2) == [(third, 3), (first, 4)]
    assert await store.runs(3, limit=1) == [(second, 2)]
    assert await store.marks([3, 4]) == {3: 4, 4: 0}
    assert await store.runs(4) == []


async def test_attention_and_timers_are_sorted(store: Store) -> None:
    late, early, other = *runs_of(3, store.partitions, 2), runs_of(5, store.partitions, 1)[0]
    for run, at_ms in ((late, 30), (early, 10), (other, 20)):
        await store.commit(plain(run, b"{}", index=Index(True, at_ms, at_ms)))
    assert await store.attention() == [(early, 10), (other, 20), (late, 30)]
    assert await store.due(3, 100) == [early, late]
    assert await store.due(3, 100, limit=1) == [early]


# --- the feed


async def test_the_feed_tells_every_change_after_the_marks(store: Store) -> None:
    one, two = runs_of(3, store.partitions, 2)
    other = runs_of(5, store.partitions, 1)[0]
    await fill(store, one, 1)
    marks = await store.marks([3, 5])
    await fill(store, two, 2)
    async with contextlib.aclosing(store.feed([3, 5], after=marks)) as feed:
        assert await seen_by(feed, {two: 2}) == {two: 2}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fill, store, other, 1)
            tasks.start_soon(fill, store, one, 4)
            told = await seen_by(feed, {one: 5, other: 1})
        assert two not in told


async def test_a_feed_starts_from_now(store: Store) -> None:
    one, two = runs_of(3, store.partitions, 2)
    await fill(store, one, 1)
    async with contextlib.aclosing(store.feed([3])) as feed, anyio.create_task_group() as tasks:
        told: dict[str, int] = {}

        async def ring_until_told() -> None:
            while not told:
                await fill(store, two, 1)
                await anyio.sleep(0.01)

        tasks.start_soon(ring_until_told)
        with anyio.fail_after(WAIT_S):
            run, version = await anext(feed)
        told[run] = version
    assert run == two


async def test_bells_that_were_dropped_are_made_up_for(store: Store) -> None:
    quiet, *loud = runs_of(3, store.partitions, 4)
    await fill(store, quiet, 1)
    marks = await store.marks([3])
    await fill(store, quiet, 1)
    for run in loud:
        await fill(store, run, 2 * FEED_ENTRIES_MAX + 10)
    async with contextlib.aclosing(store.feed([3], after=marks)) as feed:
        wanted = {quiet: 2} | dict.fromkeys(loud, 2 * FEED_ENTRIES_MAX + 10)
        assert await seen_by(feed, wanted) == wanted


async def test_bells_that_are_dropped_while_the_reader_sleeps_are_made_up_for(store: Store) -> None:
    quiet, loud = runs_of(3, store.partitions, 2)
    await fill(store, quiet, 1)
    async with contextlib.aclosing(store.feed([3], after={3: 0})) as feed:
        await seen_by(feed, {quiet: 1})
        await fill(store, quiet, 1)
        await fill(store, loud, 4 * FEED_ENTRIES_MAX)
        assert (await seen_by(feed, {quiet: 2, loud: 4 * FEED_ENTRIES_MAX}))[quiet] == 2


# --- the lease


async def test_one_holder_leads_until_its_time_is_over(store: Store) -> None:
    mine = await store.lease(0, "a", "1", TTL_MS)
    assert (mine.mine, mine.epoch, mine.holder) == (True, 1, "a")
    assert mine.until_ms == mine.time_ms + TTL_MS
    theirs = await store.lease(0, "b", "1", TTL_MS)
    assert (theirs.mine, theirs.epoch, theirs.holder, theirs.until_ms) == (False, 1, "a", mine.until_ms)
    assert (await store.lease(1, "b", "1", TTL_MS)).mine, "another partition is free"


async def test_renewing_keeps_the_epoch(store: Store) -> None:
    first = await store.lease(0, "a", "1", TTL_MS)
    again = await store.lease(0, "a", "1", 2 * TTL_MS)
    assert (again.mine, again.epoch) == (True, first.epoch)
    assert again.until_ms > first.until_ms


async def test_a_lease_that_ran_out_is_taken_with_a_new_epoch(store: Store) -> None:
    first = await store.lease(0, "a", "1", 1)
    with anyio.fail_after(WAIT_S):
        while not (taken := await store.lease(0, "b", "1", TTL_MS)).mine:
            await anyio.lowlevel.checkpoint()
    assert taken.epoch == first.epoch + 1
    assert not (await store.lease(0, "a", "1", TTL_MS)).mine


async def test_the_same_instance_takes_over_at_once_and_its_predecessor_stays_out(store: Store) -> None:
    old = await store.lease(0, "a", "1", TTL_MS)
    new = await store.lease(0, "a", "2", TTL_MS)
    assert (new.mine, new.epoch) == (True, old.epoch + 1)
    ghost = await store.lease(0, "a", "1", TTL_MS)
    assert (ghost.mine, ghost.epoch) == (False, new.epoch)
    assert (await store.lease(0, "a", "3", TTL_MS)).epoch == new.epoch + 1


async def test_only_the_holder_releases_and_the_epoch_never_falls(store: Store) -> None:
    await store.lease(0, "a", "1", TTL_MS)
    await store.release(0, "b", "1")
    await store.release(0, "a", "0")
    assert not (await store.lease(0, "b", "1", TTL_MS)).mine
    await store.release(0, "a", "1")
    assert (await store.lease(0, "b", "1", TTL_MS)).epoch == 2
    with pytest.raises(ValueError, match="above 0"):
        await store.lease(0, "b", "1", 0)


# --- names


def test_all_keys_of_a_run_have_the_hash_tag_of_its_partition() -> None:
    for run in ("aaaa", "bbbb.cccc"):
        number = partition_of(run, 16)
        start = f"{{p{number:02d}}}:"
        own, shared = keys.run_keys(run, 16), keys.partition_keys(number)
        names = [getattr(own, n) for n in own.__slots__] + [getattr(shared, n) for n in shared.__slots__]
        names += [keys.blob_key(run, 16, "0"), keys.snapshot_key(run, 16, "1")]
        assert all(name.startswith(start) for name in names)
        assert len(set(names)) == len(names)
    assert keys.run_keys("bbbb.cccc", 16).log.split(":")[0] == keys.run_keys("bbbb", 16).log.split(":")[0]
