"""A difficult child as a process: its card, its server, and a line that says where it listens.

Knows A2A's routes and uvicorn. Does not know what the child does.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import uvicorn
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore
from a2a.types import AgentCapabilities, AgentCard, AgentExtension, AgentInterface, AgentSkill
from starlette.applications import Starlette

from admission.wire import EXTENSION
from simulators.children.behaviours import KINDS, DifficultChild, Tempo

CLOSE_LIMIT_S = 1.0
GRACE_S = 1


def child_card(kind: str, url: str, *, speaks_extension: bool) -> AgentCard:
    """The card of a child at `url`; it says that it is revision-aware, unless it is autonomous."""
    extensions = [AgentExtension(uri=EXTENSION, required=True)] if speaks_extension else []
    return AgentCard(
        name=kind,
        description=f"A simulated child: {kind}.",
        version="1",
        supported_interfaces=[AgentInterface(url=f"{url}/rpc", protocol_binding="JSONRPC", protocol_version="1.0")],
        capabilities=AgentCapabilities(streaming=True, extensions=extensions),
        default_input_modes=["application/json"],
        default_output_modes=["application/json"],
        skills=[AgentSkill(id="work", name=kind, description="misbehaves", tags=["simulated"])],
    )


def child_app(executor: DifficultChild, card: AgentCard) -> Starlette:
    """The ASGI application of one child."""
    handler = DefaultRequestHandler(agent_executor=executor, task_store=InMemoryTaskStore(), agent_card=card)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            executor.tasks = tasks
            try:
                yield
            finally:
                executor.close()
                tasks.cancel_scope.cancel()
                with anyio.move_on_after(CLOSE_LIMIT_S, shield=True):
                    await handler.aclose()

    return Starlette(
        routes=[*create_agent_card_routes(card), *create_jsonrpc_routes(handler, "/rpc")], lifespan=lifespan
    )


class _Announcing(uvicorn.Server):
    line = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.line, flush=True)


def serve(kind: str, tempo: Tempo, *, port: int = 0) -> None:
    """Run one child on the loopback interface until SIGINT or SIGTERM. Raises OSError when the port is taken."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as bound:  # else Nagle stays on
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
        bound.listen(128)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        executor = KINDS[kind](tempo)
        app = child_app(executor, child_card(kind, url, speaks_extension=executor.speaks_extension))
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=GRACE_S)
        server = _Announcing(config)
        server.line = json.dumps({"kind": kind, "url": url})
        server.run(sockets=[bound])
