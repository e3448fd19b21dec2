"""What the tests of the stores share: a real server, a wire that loses things, and how a plain commit looks.

Not a test. The server is REGATE_TEST_SERVER, or the one in the wheel, with the settings that regate's own has.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import hiredis
import msgspec
from anyio.abc import ByteStream, SocketStream

from admission.storage import Commit, Committed, Compare, Index, Reply, Store

WAIT_S = 20.0
_numbers = itertools.count(1)


def new_id() -> str:
    return f"id{next(_numbers)}"


class StoreServer:
    """A server on a Unix socket in a directory of its own; `stop` and `start` keep its data."""

    def __init__(self, binary: Path, directory: Path) -> None:
        self._binary = binary
        self._directory = directory
        self.socket = directory / "s.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(self._binary), "--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700",
                    "--dir", str(self._directory), "--appendonly", "yes", "--appendfsync", "always",
                    "--aof-use-rdb-preamble", "no", "--save", "", "--maxmemory-policy", "noeviction",
                    "--daemonize", "no",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        give_up_s = time.monotonic() + WAIT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                raise RuntimeError((self._directory / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.005)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(WAIT_S)
            probe.connect(str(self.socket))
            probe.sendall(b"PING\r\n")
            return probe.recv(64).startswith(b"+PONG")
        return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def store_server_in(binary: Path) -> Iterator[StoreServer]:
    """A running server in a short path of its own, killed afterwards."""
    with tempfile.TemporaryDirectory(prefix="rg-", dir="/tmp") as room:
        server = StoreServer(binary, Path(room))
        server.start()
        try:
            yield server
        finally:
            server.kill()


class Wire:
    """A proxy in front of the server. Faults count down, and concern only requests for which `matches` holds."""

    def __init__(self, url: str, server: Path) -> None:
        self.url = url
        self._server = server
        self.matches: Callable[[bytes], bool] = lambda data: b"EVALSHA" in data
        self.requests: list[bytes] = []
        #: The request reaches the server, its reply does not reach the client: the connection is closed instead.
        self.lose_replies = 0
        #: The connection is closed, and the request reaches the server when `released` is set.
        self.hold_requests = 0
        self.released = anyio.Event()
        self.landed = anyio.Event()

    async def serve(self, client: SocketStream) -> None:
        async with client, await anyio.connect_unix(str(self._server)) as upstream:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
                while True:
                    request = await client.receive()
                    fault = await self._forward(request, client, upstream)
                    if fault:
                        return

    async def _forward(self, request: bytes, client: ByteStream, upstream: ByteStream) -> bool:
        if self.matches(request):
            self.requests.append(request)
            if self.hold_requests:
                self.hold_requests -= 1
                await client.aclose()
                await self.released.wait()
                await upstream.send(request)
                await upstream.receive()
                self.landed.set()
                return True
            if self.lose_replies:
                self.lose_replies -= 1
                await upstream.send(request)
                await upstream.receive()
                return True
        await upstream.send(request)
        await client.send(await upstream.receive())
        return False


@contextlib.asynccontextmanager
async def wire_to(server: StoreServer) -> AsyncIterator[Wire]:
    """A Wire that listens beside the server's socket."""
    path = server.socket.with_name(f"w{next(_numbers)}.sock")
    wire = Wire(f"unix://{path}", server.socket)
    async with await anyio.create_unix_listener(path) as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, wire.serve)
        yield wire
        tasks.cancel_scope.cancel()


def arguments(request: bytes) -> list[bytes]:
    """The parts of one command as it travels."""
    reader = hiredis.Reader()
    reader.feed(request)
    parts = reader.gets()
    assert isinstance(parts, list)
    return parts


def plain(run: str, *events: bytes, known: int = 0, **fields: Any) -> Commit:
    """A commit decided on an exact copy, compared by log version, unless `fields` say otherwise."""
    settings: dict[str, Any] = {"control": 0, "compare": Compare.LOG, "expected": known, "known": known, "id": new_id()}
    return Commit(run=run, events=events, **(settings | fields))


def committed(reply: Reply) -> Committed:
    assert isinstance(reply, Committed), reply
    return reply


def resent(commit: Commit) -> Commit:
    """The same commit, sent again because its reply was lost."""
    return msgspec.structs.replace(commit, resend=True)


async def fill(store: Store, run: str, events: int, *, at_once: int = 1) -> int:
    """Append so many facts, in commits of `at_once`; the version afterwards."""
    version = (await store.head(run))[0]
    index = Index(True)
    for start in range(0, events, at_once):
        batch = [b'{"fact":%d}' % (version + i + 1) for i in range(min(at_once, events - start))]
        reply = await store.commit(plain(run, *batch, known=version, compare=Compare.NONE, index=index))
        version = committed(reply).version
    return version


async def seen_by(feed: AsyncIterator[tuple[str, int]], wanted: dict[str, int]) -> dict[str, int]:
    """Follow the feed until each run in `wanted` was told with that version; everything told, with its last version."""
    told: dict[str, int] = {}
    with anyio.fail_after(WAIT_S):
        async for run, version in feed:
            told[run] = version
            if wanted.items() <= told.items():
                return told
    raise AssertionError("the feed ended")
