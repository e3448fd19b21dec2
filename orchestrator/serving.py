"""Listeners and HTTP servers inside one process: sockets that answer fast, servers that start and stop together.

Knows sockets, TLS and uvicorn. Does not know what is served. Signals are not uvicorn's business here: the process has
several servers and one owner.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import uvicorn

from orchestrator.settings import Listen

BACKLOG = 1024
GRACE_S = 3
KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield


def bind(listen: Listen) -> tuple[socket.socket, str]:
    """A listening socket and the URL that it answers at. Raises OSError.

    The socket is named as TCP: asyncio sets TCP_NODELAY on connections of no other, and without it an answer in two
    parts waits 40 ms for an acknowledgement.
    """
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((listen.host, listen.port))
        bound.listen(BACKLOG)
    except BaseException:
        bound.close()
        raise
    host = f"[{listen.host}]" if family == socket.AF_INET6 else listen.host
    scheme = "https" if listen.cert else "http"
    return bound, listen.url or f"{scheme}://{host}:{bound.getsockname()[1]}"


@contextlib.asynccontextmanager
async def http_server(app: Any, bound: socket.socket, listen: Listen) -> AsyncIterator[None]:
    """Serve an application on a bound socket for the length of the block; leaving it ends requests, bounded."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_certfile=str(listen.cert) if listen.cert else None,
        ssl_keyfile=str(listen.key) if listen.key else None,
    )
    server = _Server(config)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_served, server, bound)
        while not server.started:
            await anyio.sleep(0.005)
            if server.should_exit:
                raise RuntimeError("the server could not start; its log says why")
        try:
            yield
        finally:
            server.should_exit = True


async def _served(server: _Server, bound: socket.socket) -> None:
    # Shielded: a cancelled uvicorn drops its connections and skips its application's shutdown.
    with anyio.CancelScope(shield=True):
        await server.serve(sockets=[bound])
    server.should_exit = True
