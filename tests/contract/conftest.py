"""Fixtures of the contract ring: both stores under one name, and the real server under the one of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from admission.memory import MemoryStore
from admission.storage import Store
from admission.store import RedisStore, make_client
from tests.contract.store_room import StoreServer, new_id, store_server_in

#: The feed of the stores under test is short, so that bells are dropped soon.
FEED_ENTRIES_MAX = 100


@pytest.fixture(scope="session")
def shared_server(valkey_binary: Path) -> Iterator[StoreServer]:
    """One server for all tests that do not stop it."""
    with store_server_in(valkey_binary) as server:
        yield server


@pytest.fixture
async def store_server(shared_server: StoreServer) -> StoreServer:
    """The shared server, emptied."""
    client = make_client(shared_server.url)
    try:
        await client.flushall()
    finally:
        await client.aclose()
        await client.connection_pool.aclose()
    return shared_server


@pytest.fixture
async def redis_store(store_server: StoreServer) -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(store_server.url, new_id=new_id, feed_entries_max=FEED_ENTRIES_MAX)
    yield store
    await store.aclose()


@pytest.fixture
def memory_store() -> MemoryStore:
    return MemoryStore(now_ms=lambda: time.monotonic_ns() // 1_000_000, feed_entries_max=FEED_ENTRIES_MAX)


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, memory_store: MemoryStore, redis_store: RedisStore) -> Store:
    """Each test that asks for it runs on both. (Async fixtures may not be fetched by name from an async fixture.)"""
    both: dict[str, Callable[[], Store]] = {"memory": lambda: memory_store, "redis": lambda: redis_store}
    return both[request.param]()
