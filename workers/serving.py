"""One agent as a process: a socket, uvicorn, a log that shows no grant, and a line that says where it listens.

Knows how the process starts and ends. Does not know A2A (agent.py does) or what the agent is for.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from dataclasses import dataclass

import uvicorn

from admission.wire import blot
from workers.agent import Limits, make_app, make_card
from workers.work import AgentFunction

GRACE_S = 3
BACKLOG = 512


class GrantlessFormatter(logging.Formatter):
    """Formats like its parent, then blots out everything that looks like a grant, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        """The line without grants."""
        return blot(super().format(record))


class AnnouncingServer(uvicorn.Server):
    """uvicorn that prints one JSON line once it accepts connections."""

    def __init__(self, config: uvicorn.Config, line: dict[str, str]) -> None:
        super().__init__(config)
        self._line = line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then say so."""
        await super().startup(sockets)
        sys.stdout.write(json.dumps(self._line) + "\n")
        sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen; port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 0


def listen(address: Address) -> tuple[socket.socket, str]:
    """A bound socket and the URL it answers at. Raises OSError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named as TCP, or Nagle stays on
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address.host, address.port))
        bound.listen(BACKLOG)
    except BaseException:
        bound.close()
        raise
    host = f"[{address.host}]" if family == socket.AF_INET6 else address.host
    return bound, f"http://{host}:{bound.getsockname()[1]}"


def quiet_log() -> None:
    """Warnings and worse to stderr, without grants."""
    # The SDK traces every call unless it is told not to; a worker has nobody to send traces to.
    os.environ.setdefault("OTEL_INSTRUMENTATION_A2A_SDK_ENABLED", "false")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(GrantlessFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def serve(function: AgentFunction, *, kind: str, name: str, address: Address, limits: Limits | None = None) -> None:
    """Run one agent until SIGINT or SIGTERM. Raises OSError when it cannot listen there."""
    quiet_log()
    bound, url = listen(address)
    card = make_card(name, url, description=f"A {kind} agent that works for one revision of a run at a time.")
    app = make_app(function, card=card, limits=limits, on_stuck=lambda _: os._exit(1))
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=GRACE_S, timeout_keep_alive=75
    )
    AnnouncingServer(config, {"kind": kind, "name": name, "url": url}).run(sockets=[bound])
