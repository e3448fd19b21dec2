"""A gateway on a stage: real HTTP before it, a real shop process behind it, the real desk and rules over MemoryStore.

Knows how to start and stop all of it, and how to bring a run to the point where a child may act.
"""

from __future__ import annotations

import json
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
import httpx
import uvicorn

from admission.client import GateClient
from admission.commands import Command, PlanChild, Start, StartLaunch
from admission.contracts import parse_contract
from admission.desk import Desk
from admission.events import Event, Goal, ScopePlan, decode
from admission.gateway import gateway_app
from admission.memory import MemoryStore
from admission.records import Attempt
from admission.run_machine import RUN_MACHINE
from admission.services import SecretReference, Service, Services
from admission.state import RunState
from admission.table import Decision
from admission.vocabulary import ChildMode
from admission.wire import Grant, internal_token, sign_grant

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
CREDENTIAL = "shop-credential-7"
RUN, SCOPE, TASK = "run1", "orders", "task-1"
ORDER, ORDER_TOO, DELIVERED = "#S40100", "#S40126", "#S40113"

_OPERATION = """\
    request: {{method: POST, path: "/actions/{name}"}}
    arguments: {{order_id: string, reason: string}}
    target: order_id
    generated: [reason]
    class: VOID
    idempotency: {{header: Idempotency-Key, retention_ms: 86400000}}
    lookup: {{path: "/keys/{{key}}"}}
    void: {{path: "/keys/{{key}}/void"}}
    not_after: {{header: X-Not-After, max_age_ms: 30000, clock_skew_ms: 2000}}
    refused_statuses: [422]
    unavailable_statuses: [503, 410, 412]
    timeout_ms: 3000
    tries_max: {tries_max}
"""


def contract_text(tries_max: int) -> str:
    """A contract of the shop with the one action that these stories use, and one that is forbidden."""
    action = _OPERATION.format(name="cancel_pending_order", tries_max=tries_max)
    forbidden = _OPERATION.format(name="give_away", tries_max=tries_max)
    forbidden += "    refuse: only people may give things away\n"
    return f'service: shop\nversion: "1"\noperations:\n  cancel_pending_order:\n{action}  give_away:\n{forbidden}'


@dataclass(slots=True)
class Shop:
    """A shop in a process of its own."""

    url: str
    journal: Path

    def lines(self, *events: str) -> list[dict[str, Any]]:
        """What the shop itself wrote down, of these kinds."""
        if not self.journal.exists():
            return []
        lines = [json.loads(line) for line in self.journal.read_text().splitlines() if line]
        return [line for line in lines if line["event"] in events]

    @property
    def executed(self) -> list[dict[str, Any]]:
        """What really happened."""
        return self.lines("executed")


@asynccontextmanager
async def shop_process(folder: Path, *options: str) -> AsyncIterator[Shop]:
    """Start a shop; it is killed at the end."""
    secret = folder / "shop-credential"
    secret.write_text(CREDENTIAL)
    command = [
        sys.executable, "-m", "simulators", "service", "retail", "--journal", str(folder / "shop.jsonl"),
        "--credential-file", str(secret), *options,
    ]  # fmt: skip
    async with await anyio.open_process(command, stdout=PIPE, stderr=None) as process:
        try:
            assert process.stdout is not None
            line = b""
            with anyio.fail_after(20):
                while not line.endswith(b"\n"):
                    line += await process.stdout.receive()
            hello = json.loads(line)
            yield Shop(hello["url"], Path(hello["journal"]))
        finally:
            process.kill()


@dataclass(slots=True)
class Stage:
    """Everything a story needs."""

    url: str
    store: MemoryStore
    desk: Desk[RunState, Command, Event, Decision]
    server: uvicorn.Server
    child: str = ""
    clients: list[GateClient] = field(default_factory=list)

    async def do(self, command: Command) -> Decision:
        """A command of a person or of the conductor."""
        decision = (await self.desk.submit(RUN, command)).decision
        assert decision.accepted, decision
        return decision

    async def run(self) -> RunState:
        """The run now."""
        return await self.desk.current(RUN)

    async def attempts(self) -> list[Attempt]:
        """All attempts of the run, oldest first."""
        return list((await self.run()).attempts.values())

    async def log(self) -> list[Event]:
        """The run's events."""
        return [decode(entry.data) for entry in await self.store.read(RUN, 0)]

    def token(self, *, key: bytes = KEY, revision: int = 1, expires_ms: int | None = None, child: str = "") -> str:
        """A grant for the stage's child."""
        expires = self.desk.now_ms() + 60_000 if expires_ms is None else expires_ms
        return sign_grant(Grant(RUN, SCOPE, child or self.child, revision, expires), key)

    async def post(self, path: str, body: Any, *, token: str | None = None) -> httpx.Response:
        """A request past the client, for what the client would not send."""
        headers = {"Authorization": f"Bearer {self.token() if token is None else token}"}
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=20) as http:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await http.post(path, content=content, headers=headers)

    async def ask(self, attempt: str, method: str) -> dict[str, Any]:
        """What the orchestrator asks through the internal door."""
        body = {"run": RUN, "attempt": attempt, "method": method}
        reply = await self.post("/v1/internal/ask", body, token=internal_token(KEY))
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    async def wait_for(self, holds: Callable[[RunState], bool], *, seconds: float = 10.0) -> RunState:
        """Wait for a state of the run. Raises TimeoutError."""
        with anyio.fail_after(seconds):
            while not holds(run := await self.run()):  # noqa: ASYNC110 - the log rings no bell in a test
                await anyio.sleep(0.01)
            return run


def goal(text: str = "tidy up the orders") -> Goal:
    """Two scopes, and what is wanted of them."""
    return Goal(text=text, plan={SCOPE: ScopePlan(agent="x", brief=text), "other": ScopePlan(agent="x", brief=text)})


@asynccontextmanager
async def gateway_stage(
    service_url: str, folder: Path, *, tries_max: int = 3, claim: bool = True
) -> AsyncIterator[tuple[Stage, GateClient]]:
    """A gateway over one service, a run with one launched (and claimed) child, and that child's client."""
    store = MemoryStore(now_ms=lambda: time.time_ns() // 1_000_000)
    contract = parse_contract(contract_text(tries_max), "services/shop.yaml")
    secret = SecretReference("env:SHOP", folder, {"SHOP": CREDENTIAL})
    services = Services({"shop": Service("shop", service_url, contract, secret)})
    async with Desk(store, RUN_MACHINE, new_id=lambda: uuid.uuid4().hex) as desk:
        app = gateway_app(desk, services, [KEY], store=store, name="g1", incarnation=uuid.uuid4().hex[:8])
        # Named as TCP: only then does asyncio switch off the wait for an ACK between a reply's head and body (40 ms).
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=10)
        server = uvicorn.Server(config)
        stage = Stage(f"http://127.0.0.1:{listener.getsockname()[1]}", store, desk, server)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [listener])
            with anyio.fail_after(10):
                while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                    await anyio.sleep(0.01)
            await stage.do(Start(run=RUN, principal="u", request_id="r-1", goal=goal()))
            planned = await stage.do(PlanChild(scope=SCOPE, revision=1, mode=ChildMode.MEDIATED))
            stage.child = planned.detail["child"]
            await stage.do(StartLaunch(child=stage.child))
            async with GateClient(stage.url, stage.token(), tries_max=3, backoff_first_s=0.05) as client:
                if claim:
                    await client.claim(TASK)
                yield stage, client
            store.faults.unavailable = False
            server.should_exit = True
