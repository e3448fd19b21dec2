"""How a process gets its store: the embedded server of the data directory, or the one at a URL, and only a durable one.

Theory of operation. Every process that uses an embedded server holds a shared lock on DATA/users.lock. Whoever leaves
tries to have that lock alone: the last one stops the server, if one of us started it (DATA/store.pid says so). So a
gateway and an orchestrator started apart find the same server, in any order, and nothing is left running afterwards. A
user that was killed lets go of its lock by dying. While it is used, a server that ends is started again.

Knows settings and persistence. Does not know runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import anyio

from admission import data_directory
from admission.embedded import Server, check_persistence, ensure_server, keep_server, stop_server
from admission.storage import StoreRefused, StoreUnavailable
from admission.store import RedisStore, make_client
from orchestrator.settings import Settings

USERS_LOCK = "users.lock"
#: Which external store a data directory was used with.
STORE_IDENTITY = "store.identity"
STORE_PID = "store.pid"
CONNECT_TIMEOUT_S = 10.0
log = logging.getLogger("regate.store")


@dataclass(frozen=True, slots=True)
class Opened:
    """An open store. `warnings` are what was accepted against better advice; `server` is None for a URL."""

    store: RedisStore
    url: str
    server: Server | None
    warnings: tuple[str, ...]


@contextlib.asynccontextmanager
async def opened_store(settings: Settings, *, new_id: Callable[[], str]) -> AsyncIterator[Opened]:
    """The store that the settings name, open for the length of the block.

    Raises StoreRefused (must not be used as it is: a sentence says what to change) and StoreUnavailable.
    """
    data_directory_ready(settings.data_dir)
    if settings.store_url is not None:
        warnings = await _judged(settings, settings.store_url)
        store = await RedisStore.open(settings.store_url, new_id=new_id, partitions=settings.partitions)
        try:
            _same_store(settings.data_dir, settings.store_url, (await store.meta()).identity)
            yield Opened(store, settings.store_url, None, warnings)
        finally:
            with anyio.CancelScope(shield=True):
                await store.aclose()
        return
    async with embedded_server(settings.data_dir) as server:
        store = await RedisStore.open(server.url, new_id=new_id, partitions=settings.partitions)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_kept, settings.data_dir)
                yield Opened(store, server.url, server, ())
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await store.aclose()


def _same_store(data_dir: Path, url: str, identity: str) -> None:
    """Refuse a store that is not the one this directory was used with: it was emptied, or another stands there now.

    The identity is written at a store's first start and lost with its content. Raises StoreRefused.
    """
    path = data_dir / STORE_IDENTITY
    known = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if known and known != identity:
        raise StoreRefused(
            f"the store at {shown(url)} is not the one that {data_dir} was used with: it was emptied, or is another. "
            f"Restore it; or, if it is meant to be new, remove {path} and start again"
        )
    if not known:
        path.write_text(f"{identity}\n", encoding="utf-8")


def data_directory_ready(data_dir: Path) -> None:
    """Make the directory, private to its owner. Raises StoreUnavailable."""
    data_directory.prepare_directory(data_dir)


@contextlib.asynccontextmanager
async def embedded_server(data_dir: Path) -> AsyncIterator[Server]:
    """The server of a data directory; the last user to leave stops it, if one of us started it."""
    data_directory_ready(data_dir)
    with (data_dir / USERS_LOCK).open("a") as users:
        # A short wait: somebody who leaves may hold it alone while they stop the server.
        with anyio.fail_after(CONNECT_TIMEOUT_S):
            while not _locked(users.fileno(), fcntl.LOCK_SH):  # noqa: ASYNC110 - another process holds it
                await anyio.sleep(0.02)
        try:
            server = await ensure_server(data_dir)
            if not server.attached:
                (data_dir / STORE_PID).write_text(f"{server.pid}\n")
            yield server
        finally:
            with anyio.CancelScope(shield=True):
                await _leave(data_dir, users.fileno())


async def stop_if_unused(data_dir: Path) -> bool:
    """Stop the server of a data directory if one of us started it; False when it is still used."""
    if not (data_dir / USERS_LOCK).exists():
        return True
    with (data_dir / USERS_LOCK).open("a") as users:
        return await _leave(data_dir, users.fileno())


async def _leave(data_dir: Path, users: int) -> bool:
    """Give up our use; whether nobody was left."""
    if not _locked(users, fcntl.LOCK_EX):
        return False
    try:
        started = int((data_dir / STORE_PID).read_text())
    except (OSError, ValueError):
        return True
    if data_directory.recorded_pid(data_dir) == started:
        try:
            await stop_server(data_dir)
        except StoreUnavailable as error:
            log.warning("%s", error)
            return True
    (data_dir / STORE_PID).unlink(missing_ok=True)
    return True


def _locked(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _kept(data_dir: Path) -> None:
    """Start the server again when it ends. Whoever starts it is noted, so that the last user may stop it."""

    def report(sentence: str) -> None:
        log.warning("%s", sentence)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_noted, data_dir)
        await keep_server(data_dir, report=report)


async def _noted(data_dir: Path) -> None:
    known = data_directory.recorded_pid(data_dir)

    def note() -> None:
        nonlocal known
        now = data_directory.recorded_pid(data_dir)
        if now is not None and now != known and (data_dir / STORE_PID).exists():
            (data_dir / STORE_PID).write_text(f"{now}\n")
        known = now

    try:
        while True:
            await anyio.sleep(1.0)
            note()
    finally:
        note()  # a server that was started again a moment ago is to be stopped by us all the same


async def _judged(settings: Settings, url: str) -> tuple[str, ...]:
    """What speaks against the server at a URL, if it is accepted after all. Raises StoreRefused, StoreUnavailable."""
    client = make_client(url)
    try:
        with anyio.fail_after(CONNECT_TIMEOUT_S):
            found = await check_persistence(client)
    except Exception as error:  # noqa: BLE001 - the library's errors are not imported here, and all mean the same
        words = f"no server answers at {shown(url)} ({type(error).__name__}): start it, or correct [store] url"
        raise StoreUnavailable(words) from None
    finally:
        await client.aclose()
    grave = [words for words in found if not (settings.assume_durable and "--assume-durable" in words)]
    if grave and not settings.allow_volatile:
        listed = "\n  - ".join(grave)
        raise StoreRefused(
            f"the server at {shown(url)} can lose writes that it acknowledged:\n  - {listed}\n"
            "change that, or accept the loss of runs and effects with --allow-volatile ([store] allow_volatile = true)"
        )
    return tuple(found)


def shown(url: str) -> str:
    """The URL without its password."""
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://…@{tail}" if at else url


def instance_slot(data_dir: Path, host: str) -> tuple[str, int]:
    """A name that this process has alone in its data directory, and that its next incarnation gets again.

    A lease is taken over at once by the same instance, so two processes must not share a name; the lock that goes with
    it is let go by dying. The descriptor is kept open for as long as the process lives.
    """
    for n in range(1, 1000):
        descriptor = os.open(data_dir / f"instance-{n}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _locked(descriptor, fcntl.LOCK_EX):
            return f"{host}:{data_dir}:{n}", descriptor
        os.close(descriptor)
    raise StoreRefused(f"a thousand processes use {data_dir} already")
