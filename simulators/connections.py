"""Replies that never come: closing or resetting a client's connection in the middle of a request.

Knows uvicorn's protocol class and the socket under it. Does not know why a reply is withheld.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

Peer = tuple[str, int]


class Connections:
    """The open connections of one server by the peer's address, which is unique while a connection lives."""

    def __init__(self) -> None:
        self._transports: dict[Peer, asyncio.Transport] = {}

    def protocol(self) -> type[H11Protocol]:
        """A protocol class for `uvicorn.Config(http=...)` that reports its connections here."""
        transports = self._transports

        class Reporting(H11Protocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                if self.client is not None:
                    transports[self.client] = transport

            def connection_lost(self, exc: Exception | None) -> None:
                if self.client is not None:
                    transports.pop(self.client, None)
                super().connection_lost(exc)

        return Reporting

    def close(self, peer: Peer, *, reset: bool) -> None:
        """Close at once: with a reset (RST), or without a word (FIN)."""
        transport = self._transports.get(peer)
        if transport is None:
            return
        if reset:
            # Lingering for zero seconds makes the kernel send RST instead of FIN.
            linger: Any = transport.get_extra_info("socket")
            linger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


class NoReply(Response):
    """Stands where a response is expected and closes the connection instead."""

    def __init__(self, connections: Connections, *, reset: bool = False) -> None:
        super().__init__()
        self._connections = connections
        self._reset = reset

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Close the connection of this request; return when the server has noticed, or it would answer 500."""
        host, port = scope["client"]
        self._connections.close((host, port), reset=self._reset)
        while (await receive())["type"] != "http.disconnect":
            pass
