"""The store on Redis or Valkey: RedisStore.

Knows: connections, the two scripts, what a lost reply is, and the shapes of replies. Does not know: events, rules, or
how keys are spelled (keys.py).

Redis-py repeats a command by itself when a connection breaks, and a script that ran would run again as if it were new.
So all connections come from one place (`make_pool`) that switches this off, and the only thing that is ever sent again
is a whole commit that says so (`resend`), until the server answers it. Commands are written packed and replies are read
raw: a client object costs more time than the server does. One deadline an exchange stands in for socket timeouts.
"""

import hashlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from importlib.resources import files
from typing import Any, Self

import anyio
import hiredis
import msgspec
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.maint_notifications import MaintNotificationsConfig

from admission import keys
from admission.feed import Bell, follow
from admission.lanes import Lanes, ReplyLost
from admission.points import point
from admission.replies import entries_of, reply_of, scored
from admission.storage import (
    FEED_ENTRIES_MAX,
    FORMAT,
    PARTITIONS_DEFAULT,
    UNSEEN_ENTRIES_MAX,
    Commit,
    Entry,
    Lease,
    Meta,
    Reply,
    StoreRefused,
    StoreUnavailable,
    check_meta,
    checked,
)
from admission.vocabulary import partition_of

__all__ = ["RedisStore", "make_client", "make_pool"]

CONNECT_TIMEOUT_S = 2.0
REPLY_TIMEOUT_S = 5.0
COMMIT_DEADLINE_S = 10.0
#: Commits of all runs share so many connections; who finds them busy goes with the next batch.
COMMIT_CONNECTIONS = 2
#: Reads have their own, so that a large one does not stand in front of a commit.
READ_CONNECTIONS = 2
RESEND_DELAY_S_MIN, RESEND_DELAY_S_MAX = 0.01, 0.5
READ_COMMITS_FIRST = 64
FEED_BLOCK_MS = 2_000
FEED_READ_ENTRIES = 500
RUN_KEYS_CACHED_MAX = 20_000
#: Error codes of a server that has not looked at the command yet and soon will (loading its file, a slow script, …).
NOT_NOW = frozenset({"LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN"})

_LOST = (RedisConnectionError, RedisTimeoutError, ReplyLost, OSError, TimeoutError)
_UNKNOWN = "the answer to a commit was lost and the store stayed silent; whether it was written is unknown"


def make_pool(url: str, *, connections_max: int = 8, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> ConnectionPool:
    """The one place where connections are made: no retries, RESP3, no time-out of its own, at most so many.

    `url` is unix:///path, redis://host:port/db or rediss://…; ValueError when it is none of them.
    """
    return ConnectionPool.from_url(
        url,
        max_connections=connections_max,
        retry=Retry(NoBackoff(), 0),
        protocol=3,
        legacy_responses=False,
        socket_timeout=None,  # a deadline around the whole exchange is cheaper, and covers a blocking read too
        socket_connect_timeout=connect_timeout_s,
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
    )


def make_client(url: str) -> Redis:
    """A client with the same settings, for looking at the server (its persistence, its memory), not for commits."""
    return Redis(connection_pool=make_pool(url))


class _Script:
    """A script of lua/ by its name, called by its hash."""

    def __init__(self, name: str) -> None:
        self.text = files("admission").joinpath("lua", f"{name}.lua").read_bytes()
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


_COMMIT, _LEASE = _Script("commit"), _Script("lease")


class _RunParts:
    """What every commit of one run repeats, made once."""

    __slots__ = ("blob_prefix", "keys")

    def __init__(self, run: str, partitions: int) -> None:
        own = keys.run_keys(run, partitions)
        self.blob_prefix = keys.blob_prefix(run, partitions)
        p = keys.partition_keys(partition_of(run, partitions))
        self.keys = tuple(
            key.encode() for key in (own.log, own.head, p.feed, p.runs, p.live, p.attention, p.timers, p.lease)
        )


class RedisStore:
    """A Store on one Redis or Valkey primary. Make it with `open`; close it with `aclose`."""

    def __init__(
        self,
        pool: ConnectionPool,
        *,
        commit_deadline_s: float = COMMIT_DEADLINE_S,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
        connections: int = COMMIT_CONNECTIONS,
        feed_entries_max: int = FEED_ENTRIES_MAX,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._commit_deadline_s = commit_deadline_s
        self._reply_timeout_s = reply_timeout_s
        self._feed_entries_max = feed_entries_max
        self._monotonic = monotonic
        self._connections: list[AbstractConnection] = [
            pool.make_connection()  # type: ignore[no-untyped-call]
            for _ in range(connections + READ_CONNECTIONS)
        ]
        self._commits = Lanes(self._connections[:connections], self._exchange)
        self._reads = Lanes(self._connections[connections:], self._exchange)
        self._runs: dict[str, _RunParts] = {}
        self._meta = Meta("", FORMAT, PARTITIONS_DEFAULT)

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        new_id: Callable[[], str],
        partitions: int | None = None,
        **limits: Any,
    ) -> Self:
        """Connect, and check what the store is; `new_id` names it at its first start.

        `partitions` None takes the number that the store has (16 at the first start). `limits` as for the constructor.
        Raises StoreRefused (other format or partition count) and StoreUnavailable.
        """
        store = cls(make_pool(url), **limits)
        try:
            store._meta = check_meta(await store._found(new_id, partitions), partitions)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await store.aclose()
            raise
        return store

    async def _found(self, new_id: Callable[[], str], partitions: int | None) -> Meta:
        fresh = msgspec.json.encode(Meta(new_id(), FORMAT, partitions or PARTITIONS_DEFAULT))
        text = await self._ask("SET", keys.META, fresh, "NX", "GET") or fresh
        try:
            return msgspec.json.decode(text, type=Meta)
        except msgspec.MsgspecError as error:
            raise StoreRefused(f"the key {keys.META} is unreadable ({error}): restore it from a backup") from None

    @property
    def partitions(self) -> int:
        return self._meta.partitions

    async def meta(self) -> Meta:
        return self._meta

    async def aclose(self) -> None:
        for connection in self._connections:
            await connection.disconnect(nowait=True)
        await self._pool.aclose()

    # --- asking

    async def _exchange(self, connection: AbstractConnection, commands: Sequence[bytes]) -> list[Any]:
        return await _exchange(connection, commands, self._reply_timeout_s)

    async def _ask(self, *command: str | bytes | int) -> Any:
        """A command that is safe to repeat, and is repeated once: the idle connection may have been closed long ago."""
        packed = _pack(*command)
        for last in (False, True):
            try:
                reply = await self._reads.call(packed)
            except _LOST as error:
                if last:
                    raise StoreUnavailable(f"the store does not answer ({_said(error)})") from error
                continue
            except RedisError as error:
                raise StoreUnavailable(f"the store cannot be used ({error})") from error
            if isinstance(reply, ResponseError):
                raise StoreUnavailable(f"the store answered {command[0]!s} with an error: {reply}") from reply
            return reply
        raise AssertionError("unreachable")

    # --- commit

    async def commit(self, commit: Commit) -> Reply:
        checked(commit)
        give_up_s = self._monotonic() + self._commit_deadline_s
        point("store.commit.before")
        resend, delay_s = commit.resend, RESEND_DELAY_S_MIN
        command = self._commit_command(commit, resend)
        while True:
            why: Exception
            try:
                reply = await self._commits.call(command)
                if not isinstance(reply, ResponseError):
                    point("store.commit.after")
                    return reply_of(reply, commit.known)
                if isinstance(reply, NoScriptError):  # it was not executed: load, and ask as before
                    await self._ask("SCRIPT", "LOAD", _COMMIT.text)
                    continue
                if str(reply).split(" ", 1)[0] not in NOT_NOW:
                    raise StoreUnavailable(f"the store refused a commit: {reply}") from reply
                why = reply
            except _LOST as error:
                why = error
                if not resend:
                    resend = True
                    command = self._commit_command(commit, resend)
            except RedisError as error:
                raise StoreUnavailable(f"the store cannot be used ({error})") from error
            if self._monotonic() + delay_s > give_up_s:
                raise StoreUnavailable(f"{_UNKNOWN} ({_said(why)})") from why
            await anyio.sleep(delay_s)
            delay_s = min(2 * delay_s, RESEND_DELAY_S_MAX)

    def _commit_command(self, commit: Commit, resend: bool) -> bytes:
        parts = self._runs.get(commit.run)
        if parts is None:
            if len(self._runs) >= RUN_KEYS_CACHED_MAX:
                self._runs.clear()
            parts = self._runs[commit.run] = _RunParts(commit.run, self.partitions)
        index = commit.index
        blobs = commit.blobs
        head: tuple[str | bytes | int, ...] = (
            b"EVALSHA",
            _COMMIT.sha,
            len(parts.keys) + len(blobs),
            *parts.keys,
            *[parts.blob_prefix + sha for sha in blobs],
            commit.id,
            commit.run,
            commit.compare.value,
            commit.expected,
            commit.known,
            b"" if commit.fence is None else commit.fence,
            b"1" if resend else b"",
            commit.control,
            self._feed_entries_max,
            b"" if index is None else b"1" if index.live else b"0",
            b"" if index is None or index.attention_ms is None else index.attention_ms,
            b"" if index is None or index.due_ms is None else index.due_ms,
            UNSEEN_ENTRIES_MAX,
            len(commit.events),
        )
        return _pack(*head, b"\n".join(commit.events), *blobs.values())

    # --- one run

    async def read(self, run: str, after: int, limit: int = 1000) -> list[Entry]:
        log = keys.run_keys(run, self.partitions).log
        found: list[Entry] = []
        count = min(limit, READ_COMMITS_FIRST)
        while len(found) < limit:
            page = await self._ask("XRANGE", log, f"{after + 1}-0", "+", "COUNT", count)
            found += entries_of(page, after)
            if len(page) < count:
                break
            after = found[-1].n
            # Commits hold from one event to thousands: ask for as many as would fill the rest, were all alike.
            count = (limit - len(found)) * len(page) // len(found) + 1
        return found[:limit]

    async def head(self, run: str) -> tuple[int, int]:
        version, control = await self._ask("HMGET", keys.run_keys(run, self.partitions).head, "v", "c")
        return int(version or 0), int(control or 0)

    async def blob(self, run: str, sha: str) -> bytes | None:
        found: bytes | None = await self._ask("GET", keys.blob_key(run, self.partitions, sha))
        return found

    async def blobs(self, run: str, shas: Sequence[str]) -> list[bytes | None]:
        if not shas:
            return []
        return list(await self._ask("MGET", *[keys.blob_key(run, self.partitions, sha) for sha in shas]))

    async def put_blob(self, run: str, data: bytes) -> str:
        sha = hashlib.sha256(data).hexdigest()
        await self._ask("SET", keys.blob_key(run, self.partitions, sha), data, "NX")
        return sha

    async def snapshot(self, run: str, fold_version: str) -> bytes | None:
        found: bytes | None = await self._ask("GET", keys.snapshot_key(run, self.partitions, fold_version))
        return found

    async def put_snapshot(self, run: str, fold_version: str, data: bytes) -> None:
        await self._ask("SET", keys.snapshot_key(run, self.partitions, fold_version), data)

    # --- the partitions' indexes

    async def runs(self, partition: int, *, after_commit: int = 0, limit: int = 1000) -> list[tuple[str, int]]:
        key = keys.partition_keys(partition).runs
        return scored(
            await self._ask("ZRANGE", key, f"({after_commit}", "+inf", "BYSCORE", "LIMIT", 0, limit, "WITHSCORES")
        )

    async def live(self, partition: int) -> list[str]:
        return sorted(run.decode() for run in await self._ask("SMEMBERS", keys.partition_keys(partition).live))

    async def attention(self) -> list[tuple[str, int]]:
        found = []
        for partition in range(self.partitions):
            key = keys.partition_keys(partition).attention
            found += scored(await self._ask("ZRANGE", key, 0, -1, "WITHSCORES"))
        return sorted(found, key=lambda pair: (pair[1], pair[0]))

    async def due(self, partition: int, now_ms: int, limit: int = 100) -> list[str]:
        key = keys.partition_keys(partition).timers
        reply = await self._ask("ZRANGE", key, "-inf", now_ms, "BYSCORE", "LIMIT", 0, limit)
        return [run.decode() for run in reply]

    async def next_due_ms(self, partition: int) -> int | None:
        first = scored(await self._ask("ZRANGE", keys.partition_keys(partition).timers, 0, 0, "WITHSCORES"))
        return first[0][1] if first else None

    async def marks(self, partitions: Collection[int]) -> dict[int, int]:
        found = {}
        for partition in partitions:
            last = await self._ask("XREVRANGE", keys.partition_keys(partition).feed, "+", "-", "COUNT", 1)
            found[partition] = int(last[0][0][2:]) if last else 0
        return found

    def feed(
        self, partitions: Collection[int], *, after: Mapping[int, int] | None = None
    ) -> AsyncGenerator[tuple[str, int], None]:
        return self._feed(partitions, after)

    async def _feed(
        self, partitions: Collection[int], after: Mapping[int, int] | None
    ) -> AsyncGenerator[tuple[str, int], None]:
        seen = await self.marks(partitions) if after is None else {p: after.get(p, 0) for p in partitions}
        streams = {keys.partition_keys(p).feed.encode(): p for p in partitions}
        connection = self._pool.make_connection()  # type: ignore[no-untyped-call]

        async def ring(seen: Mapping[int, int]) -> dict[int, list[Bell]]:
            ids = [f"0-{seen[partition]}" for partition in streams.values()]
            command = _pack("XREAD", "COUNT", FEED_READ_ENTRIES, "BLOCK", FEED_BLOCK_MS, "STREAMS", *streams, *ids)
            deadline_s = FEED_BLOCK_MS / 1000 + self._reply_timeout_s
            reply = (await _exchange(connection, (command,), deadline_s))[0]
            if isinstance(reply, ResponseError):
                raise reply
            return {
                streams[stream]: [(int(id_[2:]), fields[1].decode(), int(fields[3])) for id_, fields in bells]
                for stream, bells in (reply or {}).items()
            }

        lost = (*_LOST, StoreUnavailable, ResponseError)
        try:
            async with aclosing(follow(seen, ring=ring, missed=self._missed, lost=lost)) as changes:
                async for change in changes:
                    yield change
        finally:
            with anyio.CancelScope(shield=True):
                await connection.disconnect(nowait=True)

    async def _missed(self, partition: int, after: int) -> tuple[list[tuple[str, int]], int]:
        now = (await self.marks([partition]))[partition]
        covered = min(after, now)
        changed: list[tuple[str, int]] = []
        while page := await self.runs(partition, after_commit=covered):
            changed += [(run, (await self.head(run))[0]) for run, _ in page]
            covered = page[-1][1]
        return changed, max(covered, now)

    # --- lease and time

    async def lease(self, partition: int, holder: str, incarnation: str, ttl_ms: int) -> Lease:
        if ttl_ms <= 0:
            raise ValueError(f"a lease of {ttl_ms} ms: give a time above 0, or release it")
        return await self._lease(partition, holder, incarnation, ttl_ms)

    async def release(self, partition: int, holder: str, incarnation: str) -> None:
        await self._lease(partition, holder, incarnation, 0)

    async def _lease(self, partition: int, holder: str, incarnation: str, ttl_ms: int) -> Lease:
        arguments = (1, keys.partition_keys(partition).lease, holder, incarnation, ttl_ms)
        # Short and rare: sending the text each time spares the dance about a script that the server does not have.
        mine, epoch, now_holder, until_ms, time_ms = await self._ask("EVAL", _LEASE.text, *arguments)
        return Lease(epoch, now_holder.decode(), until_ms, mine == 1, time_ms)

    async def now_ms(self) -> int:
        seconds, micros = await self._ask("TIME")
        return int(seconds) * 1000 + int(micros) // 1000


async def _exchange(connection: AbstractConnection, commands: Sequence[bytes], deadline_s: float) -> list[Any]:
    """Write all commands and read all replies. An error reply is a value: it concerns its own command alone."""
    try:
        # Not fail_after: as a generator it costs a tenth of the whole exchange.
        with anyio.CancelScope(deadline=anyio.current_time() + deadline_s):
            if not connection.is_connected:
                await connection.connect()  # type: ignore[no-untyped-call]
            await connection.send_packed_command(commands, check_health=False)
            replies: list[Any] = []
            for _ in commands:
                try:
                    replies.append(await connection.read_response(timeout=math.inf))
                except ResponseError as error:
                    replies.append(error)
            return replies
        raise TimeoutError(f"no reply within {deadline_s:g} s")
    except BaseException:
        # Replies that nobody waits for any more must not be taken for those of the next command.
        with anyio.CancelScope(shield=True):
            await connection.disconnect(nowait=True)
        raise


def _pack(*parts: Any) -> bytes:
    packed: bytes = hiredis.pack_command(parts)
    return packed


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
