"""What stands around a worker in its tests: a gateway that says what it is told to say, and A2A's own client.

Knows the gateway's HTTP as workers see it, and how a worker's process is started and ended. Knows no rule of regate.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import uvicorn
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.helpers.proto_helpers import new_data_part
from a2a.types import (
    AgentCard,
    CancelTaskRequest,
    GetTaskRequest,
    Message,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    Task,
    TaskState,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from admission.wire import EXTENSION, Grant, Stamp, launch_metadata, sign_grant

TERMINAL = {
    TaskState.TASK_STATE_COMPLETED,
    TaskState.TASK_STATE_FAILED,
    TaskState.TASK_STATE_CANCELED,
    TaskState.TASK_STATE_REJECTED,
}
KEY = b"a key that only these tests know"
DEADLINE_S = 10.0


async def until(predicate: Any, *, deadline_s: float = DEADLINE_S) -> None:
    """Wait until `predicate()` holds."""
    with anyio.fail_after(deadline_s):
        while not predicate():  # noqa: ASYNC110 - what is waited for happens in other processes
            await anyio.sleep(0.005)


@dataclass
class Asked:
    """One ask as it reached the gateway."""

    at_s: float
    grant: str
    body: dict[str, Any]

    @property
    def action(self) -> str:
        return str(self.body["action"])


@dataclass
class FakeGateway:
    """Answers DONE unless `script[action]` holds answers, which are used up one by one."""

    url: str = ""
    gate: str = "open"
    current: bool = True
    revision: int = 1
    version: int = 1
    claim: str | None = None
    effect_delay_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    answered: list[Asked] = field(default_factory=list)
    claims: dict[str, str] = field(default_factory=dict)
    script: dict[str, list[dict[str, Any] | int]] = field(default_factory=dict)
    watchers: int = 0
    closing: bool = False
    _changed: anyio.Event = field(default_factory=anyio.Event)

    def turn(self, **more: Any) -> None:
        """Change how the gate stands; those who wait hear of it."""
        for name, value in more.items():
            setattr(self, name, value)
        self.version += 1
        self._changed.set()
        self._changed = anyio.Event()

    def actions(self) -> list[str]:
        return [asked.action for asked in self.asked]

    async def effects(self, request: Request) -> JSONResponse:
        asked = Asked(time.monotonic(), request.headers["authorization"].removeprefix("Bearer "), await request.json())
        self.asked.append(asked)
        await anyio.sleep(self.effect_delay_s)
        answers = self.script.get(asked.action)
        answer = answers.pop(0) if answers else {"verdict": "done"}
        if isinstance(answer, int):
            return JSONResponse({"title": "no", "status": answer, "detail": f"refused with {answer}"}, answer)
        self.answered.append(asked)
        number = len(self.answered)
        row = {
            "attempt": f"r1-e{number}",
            "revision_in_force": self.revision,
            "blocks": None,
            "detail": "",
            "target": asked.body["arguments"].get("order_id"),
            "observed_result": {"receipt": f"shop-{number}"},
        }
        return JSONResponse(row | answer)

    async def claimed(self, request: Request) -> JSONResponse:
        task = (await request.json())["task"]
        grant = request.headers["authorization"]
        first = self.claims.setdefault(grant, task)
        claim = self.claim or ("claimed" if first == task else "duplicate")
        return JSONResponse({"claim": claim, "revision_in_force": self.revision})

    async def news(self, request: Request) -> JSONResponse:
        asked = request.query_params
        limit_s = int(asked.get("wait_ms", "0")) / 1000
        self.watchers += 1
        with anyio.move_on_after(limit_s):
            while (
                not self.closing
                and asked.get("gate") == self.gate
                and asked.get("current") == str(self.current).lower()
            ):
                await self._changed.wait()
        self.watchers -= 1
        return JSONResponse(
            {"gate": self.gate, "current": self.current, "revision_in_force": self.revision, "version": self.version}
        )

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/effects", self.effects, methods=["POST"]),
                Route("/v1/claims", self.claimed, methods=["POST"]),
                Route("/v1/gate", self.news),
            ]
        )


@asynccontextmanager
async def fake_gateway() -> AsyncIterator[FakeGateway]:
    """The gateway, served by a real uvicorn in this process."""
    gateway = FakeGateway()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        gateway.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        config = uvicorn.Config(gateway.app(), log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: server._serve([bound]))
            await until(lambda: server.started)
            try:
                yield gateway
            finally:
                gateway.turn(closing=True)
                server.should_exit = True


@dataclass
class Running:
    """A process that announced itself, and where its stderr goes."""

    url: str
    kind: str
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> int:
        """SIGTERM, then wait; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(15)


@contextmanager
def running(arguments: list[str], log: Path) -> Iterator[Running]:
    """Start a Python program that prints one JSON line with its URL; end it at the end."""
    with log.open("wb") as errors:
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=errors)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            told = json.loads(line)
            yield Running(told["url"], told["kind"], process, log)
        finally:
            process.kill()
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()


@dataclass(frozen=True)
class Child:
    """One child to launch, and the brief it gets."""

    gateway: str
    id: str = "c1"
    revision: int = 1
    actions: tuple[dict[str, Any], ...] = ()
    brief: str = ""

    @property
    def stamp(self) -> Stamp:
        return Stamp("run1", "orders", self.id, self.revision, "goalhash")

    @property
    def grant(self) -> str:
        stamp = self.stamp
        return sign_grant(Grant(stamp.run, stamp.scope, stamp.child, stamp.revision, expires_ms=2**42), KEY)

    def request(self, **changes: Any) -> SendMessageRequest:
        """The launching request; changes replace fields of it or of its message."""
        brief = {
            "run": "run1",
            "scope": "orders",
            "revision": self.revision,
            "goal_hash": "goalhash",
            "goal": "put the order right",
            "requirements": [],
            "brief": self.brief,
            "actions": list(self.actions),
            "done": [],
            "artifacts": [],
            "pending": [],
            "follows": None,
        }
        message = Message(
            message_id=self.id,
            role=Role.ROLE_USER,
            parts=[new_data_part(changes.pop("data", brief))],
            context_id=changes.pop("context_id", "x1"),
            task_id=changes.pop("task_id", ""),
            extensions=changes.pop("extensions", [EXTENSION]),
        )
        metadata = launch_metadata(self.stamp, grant=self.grant, gateway=self.gateway)
        request = SendMessageRequest(
            message=message,
            metadata=changes.pop("metadata", metadata),
            configuration=SendMessageConfiguration(return_immediately=changes.pop("return_immediately", True)),
        )
        assert not changes
        return request


def step(action: str, order: str = "#W1", **more: Any) -> dict[str, Any]:
    """One action of a plan on the shop."""
    return {"service": "shop", "action": action, "arguments": {"order_id": order, **more}, "occurrence": 1}


@dataclass
class Peer:
    """A client of one agent."""

    card: AgentCard
    client: Client
    streams: Client

    async def launch(self, request: SendMessageRequest) -> Task:
        """Send; returns the first task that is answered."""
        async for event in self.client.send_message(request):
            assert event.HasField("task")
            return event.task
        raise AssertionError("no answer")

    async def task(self, task_id: str) -> Task:
        return await self.client.get_task(GetTaskRequest(id=task_id))

    async def cancel(self, task_id: str) -> Task:
        return await self.client.cancel_task(CancelTaskRequest(id=task_id))

    async def ended(self, task_id: str, *, deadline_s: float = DEADLINE_S) -> Task:
        """The task, once it is in a terminal state."""
        with anyio.fail_after(deadline_s):
            while True:
                task = await self.task(task_id)
                if task.status.state in TERMINAL:
                    return task
                await anyio.sleep(0.01)


@asynccontextmanager
async def peer(url: str) -> AsyncIterator[Peer]:
    """A2A's own client for the agent at `url`."""
    timeout = httpx.Timeout(connect=5, read=45, write=10, pool=10)
    async with httpx.AsyncClient(timeout=timeout, limits=httpx.Limits(max_connections=200)) as http:
        card = await A2ACardResolver(http, url).get_agent_card()
        yield Peer(
            card,
            ClientFactory(ClientConfig(streaming=False, httpx_client=http)).create(card),
            ClientFactory(ClientConfig(streaming=True, httpx_client=http)).create(card),
        )
