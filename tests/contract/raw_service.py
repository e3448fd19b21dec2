"""A service made of sockets, so that a test decides about every byte and knows every arrival.

Knows just enough HTTP to tell one request from the next. A behaviour gets the stream and the request that arrived, and
does with the connection what it likes; when it returns True, the connection is used for the next request.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import SocketAttribute, SocketStream


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as it came in. `connection` counts connections from 1."""

    connection: int
    line: str
    headers: dict[str, str]
    body: bytes


Behaviour = Callable[[SocketStream, Arrival], Awaitable[bool]]


@dataclass(slots=True)
class RawService:
    """Where it listens, what arrived, how many connections there were."""

    url: str = ""
    connections: int = 0
    arrivals: list[Arrival] = field(default_factory=list)
    closed: int = 0


def reply(status: int, body: Any = None, *, raw: bytes | None = None, headers: str = "") -> bytes:
    """The bytes of a whole answer."""
    content = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n{headers}\r\n"
    return head.encode() + content


def answering(answer: bytes) -> Behaviour:
    """Answer, and keep the connection."""

    async def behave(stream: SocketStream, arrival: Arrival) -> bool:
        await stream.send(answer)
        return True

    return behave


def reset(stream: SocketStream) -> None:
    """Close with RST instead of FIN."""
    raw = stream.extra(SocketAttribute.raw_socket)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _arrival(stream: SocketStream, connection: int, rest: bytes) -> tuple[Arrival, bytes] | None:
    try:
        while b"\r\n\r\n" not in rest:
            rest += await stream.receive()
        head, _, rest = rest.partition(b"\r\n\r\n")
        line, *fields = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (f.partition(":") for f in fields)}
        wanted = int(headers.get("content-length", "0"))
        while len(rest) < wanted:
            rest += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return None
    return Arrival(connection, line, headers, rest[:wanted]), rest[wanted:]


@asynccontextmanager
async def raw_service(behave: Behaviour, *, on_connect: Behaviour | None = None) -> AsyncIterator[RawService]:
    """A listening service. `on_connect` may end a connection before anything is read from it (by returning False)."""
    service = RawService()

    async def handle(stream: SocketStream) -> None:
        service.connections += 1
        number = service.connections
        async with stream:
            try:
                if on_connect and not await on_connect(stream, Arrival(number, "", {}, b"")):
                    return
                rest = b""
                while got := await _arrival(stream, number, rest):
                    arrival, rest = got
                    service.arrivals.append(arrival)
                    if not await behave(stream, arrival):
                        return
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass
            finally:
                service.closed += 1

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    service.url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        yield service
        tasks.cancel_scope.cancel()
    await listener.aclose()


async def until(holds: Callable[[], bool], *, seconds: float = 5.0) -> None:
    """Wait for a state of this process. Raises TimeoutError."""
    with anyio.fail_after(seconds):
        while not holds():  # noqa: ASYNC110 - the state is a plain value of a fake, which rings no bell
            await anyio.sleep(0.005)
