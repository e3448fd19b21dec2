"""What only a store on a real server can get wrong: lost replies, late requests, retries, errors, restarts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from admission import keys
from admission.storage import FORMAT, Compare, Conflict, Index, StoreRefused, StoreUnavailable
from admission.store import RedisStore, make_client
from admission.vocabulary import partition_of
from tests.contract.store_room import (
    WAIT_S,
    StoreServer,
    Wire,
    arguments,
    committed,
    fill,
    new_id,
    plain,
    resent,
    seen_by,
    store_server_in,
    wire_to,
)

pytestmark = pytest.mark.anyio

RUN = "aaaa"


@pytest.fixture
async def wire(store_server: StoreServer) -> AsyncIterator[Wire]:
    async with wire_to(store_server) as wire:
        yield wire


@pytest.fixture
async def through_wire(wire: Wire) -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(wire.url, new_id=new_id)
    await store.commit(plain("warm", b"{}"))
    wire.requests.clear()
    yield store
    await store.aclose()


# --- a lost reply


@pytest.mark.parametrize("compare", list(Compare))
@pytest.mark.parametrize("lost", [1, 3])
async def test_a_lost_reply_is_resolved_by_sending_the_same_commit_again(
    through_wire: RedisStore, wire: Wire, compare: Compare, lost: int
) -> None:
    wire.lose_replies = lost
    commit = plain(RUN, b"{a}", b"{b}", control=1, compare=compare)
    reply = committed(await through_wire.commit(commit))
    assert (reply.version, reply.control) == (2, 1)
    assert [e.commit for e in await through_wire.read(RUN, 0)] == [commit.id] * 2
    assert len(wire.requests) == 1 + lost
    assert all(commit.id.encode() in request for request in wire.requests)


async def test_the_original_may_arrive_after_the_copy_that_was_sent_again(through_wire: RedisStore, wire: Wire) -> None:
    wire.hold_requests = 1
    commit = plain(RUN, b"{a}")
    assert committed(await through_wire.commit(commit)).version == 1
    wire.released.set()
    with anyio.fail_after(WAIT_S):
        await wire.landed.wait()
    assert [e.commit for e in await through_wire.read(RUN, 0)] == [commit.id]


async def test_a_read_never_proves_absence(store_server: StoreServer, wire: Wire) -> None:
    """A commit that no read finds lands afterwards. So the store says "unknown", and another try meets a conflict."""
    store = await RedisStore.open(wire.url, new_id=new_id, commit_deadline_s=0.05)
    try:
        await store.commit(plain("warm", b"{}"))
        wire.hold_requests = 1_000
        commit = plain(RUN, b"{a}")
        with pytest.raises(StoreUnavailable, match="unknown"):
            await store.commit(commit)
        assert await store.read(RUN, 0) == []
        assert await store.head(RUN) == (0, 0)
        wire.released.set()
        with anyio.fail_after(WAIT_S):
            await wire.landed.wait()
        wire.hold_requests = 0
        assert [e.commit for e in await store.read(RUN, 0)] == [commit.id]
        assert isinstance(await store.commit(plain(RUN, b"{b}")), Conflict)
        assert committed(await store.commit(resent(commit))).version == 1
    finally:
        await store.aclose()


async def test_a_lost_reply_fails_none_of_those_that_shared_the_connection(wire: Wire) -> None:
    store = await RedisStore.open(wire.url, new_id=new_id, connections=1)
    runs = [f"run{i}" for i in range(30)]
    versions: dict[str, int] = {}

    async def commit(run: str) -> None:
        versions[run] = committed(await store.commit(plain(run, b"{a}"))).version

    try:
        await store.commit(plain("warm", b"{}"))
        wire.requests.clear()
        wire.lose_replies = 2
        async with anyio.create_task_group() as tasks:
            for run in runs:
                tasks.start_soon(commit, run)
        assert versions == dict.fromkeys(runs, 1)
        assert [await store.head(run) for run in runs] == [(1, 0)] * 30
        assert len(wire.requests) < 30, "they did share it"
    finally:
        await store.aclose()


async def test_a_cancelled_caller_breaks_nobody_else(redis_store: RedisStore, store_server: StoreServer) -> None:
    store = await RedisStore.open(store_server.url, new_id=new_id, connections=1)
    answered: list[str] = []

    async def commit(run: str) -> None:
        committed(await store.commit(plain(run, b"{a}")))
        answered.append(run)

    try:
        async with anyio.create_task_group() as all_tasks:
            scopes = []
            for i in range(20):
                scope = anyio.CancelScope()
                scopes.append(scope)

                async def one(run: str = f"run{i}", scope: anyio.CancelScope = scope) -> None:
                    with scope:
                        await commit(run)

                all_tasks.start_soon(one)
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            for scope in scopes[:2]:
                scope.cancel()
        assert set(answered) >= {f"run{i}" for i in range(2, 20)}
        assert [(await store.head(f"run{i}"))[0] for i in range(2, 20)] == [1] * 18
        assert committed(await store.commit(plain("after", b"{a}"))).version == 1
    finally:
        await store.aclose()


# --- redis-py


async def test_the_client_itself_repeats_nothing(wire: Wire) -> None:
    """Left alone, redis-py would send a command ten times more, as if each were the first."""
    client = make_client(wire.url)
    try:
        await client.ping()
        wire.matches = lambda data: b"INCR" in data
        wire.lose_replies = 10
        with pytest.raises(RedisConnectionError):
            await client.incr("counter")
        assert len(wire.requests) == 1
    finally:
        await client.aclose()
        await client.connection_pool.aclose()


async def test_a_commit_arrives_as_often_as_it_was_sent_and_says_when_it_is_sent_again(
    through_wire: RedisStore, wire: Wire
) -> None:
    wire.lose_replies = 2
    await through_wire.commit(plain(RUN, b"{a}"))
    sent_again = 3 + 8 + 6  # EVALSHA, hash, number of keys, 8 keys, and the seventh argument
    first, *others = [arguments(request) for request in wire.requests]
    assert first[sent_again] == b""
    for other in others:
        assert other[sent_again] == b"1"
        assert other[:sent_again] + other[sent_again + 1 :] == first[:sent_again] + first[sent_again + 1 :]


async def test_many_callers_share_few_connections(redis_store: RedisStore, store_server: StoreServer) -> None:
    async with anyio.create_task_group() as tasks:
        for i in range(300):
            tasks.start_soon(fill, redis_store, f"run{i}", 1)
    client = make_client(store_server.url)
    try:
        assert len(await client.client_list()) <= 6
    finally:
        await client.aclose()
        await client.connection_pool.aclose()
    assert [await redis_store.head(f"run{i}") for i in range(300)] == [(1, 0)] * 300


async def test_a_script_that_the_server_forgot_is_loaded_again(
    redis_store: RedisStore, store_server: StoreServer
) -> None:
    client = make_client(store_server.url)
    try:
        await client.script_flush()
        assert committed(await redis_store.commit(plain(RUN, b"{a}"))).version == 1
        await client.script_flush()
        assert (await redis_store.lease(0, "a", "1", 1000)).mine
    finally:
        await client.aclose()
        await client.connection_pool.aclose()


# --- errors


async def test_an_error_in_one_run_fails_no_other(store_server: StoreServer) -> None:
    store = await RedisStore.open(store_server.url, new_id=new_id, connections=1)
    client = make_client(store_server.url)
    broken = ["run3", "run7"]
    failed: dict[str, str] = {}
    versions: dict[str, int] = {}

    async def commit(run: str) -> None:
        try:
            versions[run] = committed(await store.commit(plain(run, b"{a}", index=Index(True)))).version
        except StoreUnavailable as error:
            failed[run] = str(error)

    try:
        await client.set(keys.run_keys("run3", store.partitions).head, "not a hash")
        await client.set(keys.run_keys("run7", store.partitions).log, "not a stream")
        async with anyio.create_task_group() as tasks:
            for i in range(20):
                tasks.start_soon(commit, f"run{i}")
        assert sorted(failed) == broken
        assert all("WRONGTYPE" in why for why in failed.values())
        assert versions == {f"run{i}": 1 for i in range(20) if f"run{i}" not in broken}
        assert (await store.head("run7")) == (0, 0), "an error before the log leaves the run as it was"
    finally:
        await store.aclose()
        await client.aclose()
        await client.connection_pool.aclose()


async def test_an_empty_commit_rebuilds_indexes_that_were_lost(
    redis_store: RedisStore, store_server: StoreServer
) -> None:
    """What the run's head says of the indexes must not keep them from being written."""
    partition = partition_of(RUN, redis_store.partitions)
    index = Index(True, 5, 9)
    await redis_store.commit(plain(RUN, b"{a}", index=index))
    client = make_client(store_server.url)
    try:
        shared = keys.partition_keys(partition)
        await client.delete(shared.live, shared.attention, shared.timers)
    finally:
        await client.aclose()
        await client.connection_pool.aclose()
    committed(await redis_store.commit(plain(RUN, known=1, index=index)))
    assert await redis_store.live(partition) == [RUN]
    assert await redis_store.attention() == [(RUN, 5)]
    assert await redis_store.next_due_ms(partition) == 9


# --- the server goes and comes


@pytest.fixture
async def own_server(valkey_binary: Path) -> AsyncIterator[StoreServer]:
    with store_server_in(valkey_binary) as server:
        yield server


async def test_a_commit_waits_for_a_server_that_comes_back(own_server: StoreServer) -> None:
    store = await RedisStore.open(own_server.url, new_id=new_id, commit_deadline_s=WAIT_S)
    try:
        await fill(store, RUN, 2)
        own_server.kill()
        async with anyio.create_task_group() as tasks:

            async def start_again() -> None:
                await anyio.to_thread.run_sync(own_server.start)

            tasks.start_soon(start_again)
            assert committed(await store.commit(plain(RUN, b"{a}", known=2))).version == 3
        assert len(await store.read(RUN, 0)) == 3
    finally:
        await store.aclose()


async def test_a_feed_survives_the_server(own_server: StoreServer) -> None:
    store = await RedisStore.open(own_server.url, new_id=new_id)
    feed = store.feed(range(store.partitions), after={})
    try:
        await fill(store, RUN, 1)
        await seen_by(feed, {RUN: 1})
        own_server.kill()
        async with anyio.create_task_group() as tasks:

            async def follow() -> None:
                await seen_by(feed, {RUN: 2})

            tasks.start_soon(follow)
            await anyio.to_thread.run_sync(own_server.start)
            await fill(store, RUN, 1)
    finally:
        await feed.aclose()
        await store.aclose()


async def test_without_a_server_nothing_is_promised(own_server: StoreServer) -> None:
    store = await RedisStore.open(own_server.url, new_id=new_id, commit_deadline_s=0.05)
    try:
        own_server.kill()
        with pytest.raises(StoreUnavailable, match="whether it was written is unknown"):
            await store.commit(plain(RUN, b"{a}"))
        with pytest.raises(StoreUnavailable, match="does not answer"):
            await store.read(RUN, 0)
        with pytest.raises(StoreUnavailable):
            await RedisStore.open(own_server.url, new_id=new_id)
    finally:
        await store.aclose()


# --- what the store is


async def test_the_first_start_fixes_identity_and_partitions(store_server: StoreServer) -> None:
    metas = []
    for partitions in (5, None, 5):
        store = await RedisStore.open(store_server.url, new_id=new_id, partitions=partitions)
        metas.append(await store.meta())
        await store.aclose()
    assert metas[0] == metas[1] == metas[2]
    assert (metas[0].partitions, metas[0].format) == (5, FORMAT)
    with pytest.raises(StoreRefused, match="made with 5 partitions and the settings ask for 16"):
        await RedisStore.open(store_server.url, new_id=new_id, partitions=16)


async def test_a_store_of_another_format_is_refused(store_server: StoreServer) -> None:
    client = make_client(store_server.url)
    try:
        await client.set(keys.META, json.dumps({"identity": "x", "format": FORMAT + 1, "partitions": 16}))
        with pytest.raises(StoreRefused, match=rf"format {FORMAT + 1}.*nothing was changed"):
            await RedisStore.open(store_server.url, new_id=new_id)
        await client.set(keys.META, "garbage")
        with pytest.raises(StoreRefused, match="unreadable"):
            await RedisStore.open(store_server.url, new_id=new_id)
    finally:
        await client.aclose()
        await client.connection_pool.aclose()


async def test_all_keys_stand_in_the_list_of_keys(redis_store: RedisStore, store_server: StoreServer) -> None:
    """A key that is not in keys.py would be one that nobody deletes."""
    await redis_store.commit(plain(RUN, b"{a}", index=Index(True, 1, 2), blobs={"0" * 64: b"x"}))
    await redis_store.put_snapshot(RUN, "1", b"x")
    await redis_store.lease(0, "a", "1", 1000)
    client = make_client(store_server.url)
    try:
        found = {str(key, "ascii") for key in await client.execute_command("KEYS", "*")}
    finally:
        await client.aclose()
        await client.connection_pool.aclose()
    known = {keys.META, keys.blob_key(RUN, 16, "0" * 64), keys.snapshot_key(RUN, 16, "1")}
    own = keys.run_keys(RUN, 16)
    known |= {getattr(own, name) for name in own.__slots__}
    for partition in range(16):
        shared = keys.partition_keys(partition)
        known |= {getattr(shared, name) for name in shared.__slots__}
    assert found <= known
    assert len(found) == 11


@pytest.mark.parametrize("url", ["http://localhost", "nonsense"])
async def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="redis://"):
        await RedisStore.open(url, new_id=new_id)
