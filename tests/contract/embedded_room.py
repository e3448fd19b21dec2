"""What the tests of the embedded store share: a room that is emptied afterwards, a client, stand-in programs.

Not a test. Servers are real: REGATE_TEST_SERVER, or the one in the wheel.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from admission.embedded import (
    Server,
)

WAIT_S = 20.0


@pytest.fixture
async def data_dir() -> AsyncIterator[Path]:
    """A directory that does not exist yet, with a short path; what runs on it or beside it is stopped afterwards."""
    with tempfile.TemporaryDirectory(prefix="rg-", dir="/tmp") as room:
        try:
            yield Path(room) / "data"
        finally:
            for lock in Path(room).rglob("valkey.lock"):
                end(lock.parent)


@pytest.fixture
def binary(valkey_binary: Path) -> str:
    return str(valkey_binary)


def end(data_dir: Path) -> None:
    """Kill the server of the directory when it still runs. The lock tells, so that no other process is hit."""
    if locked(data_dir):
        os.kill(int((data_dir / "valkey.pid").read_text()), signal.SIGKILL)


def locked(data_dir: Path) -> bool:
    """Whether a server, or a starter, holds the directory; written apart from the code under test."""
    with (data_dir / "valkey.lock").open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


async def until(predicate: Callable[[], bool]) -> None:
    with anyio.fail_after(WAIT_S):
        while not predicate():  # noqa: ASYNC110 - other processes set no event
            await anyio.sleep(0.005)


@contextlib.asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[Redis]:
    client = Redis.from_url(
        server.url, retry=Retry(NoBackoff(), 0), decode_responses=True, protocol=3, legacy_responses=False
    )
    try:
        yield client
    finally:
        await client.aclose()


async def kill_server(server: Server, data_dir: Path) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await until(lambda: not locked(data_dir))


def program(path: Path, *, version: str, body: str) -> str:
    """A stand-in for a server that cannot start, to see what is made of its last words."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "Redis server v={version} sha=0"; exit; }}\n{body}\n')
    path.chmod(0o700)
    return str(path)
