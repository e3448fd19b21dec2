"""One effect through the gateway against the same call made directly: alone, and by 32 callers.

Gateway and service are processes of their own. The service does what a service must before it says yes: it writes the
request into a journal and syncs it. Knows HTTP on both sides. Does not know what the gateway does inside.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import httpx
import uvicorn

from admission.client import GateClient
from admission.gateway import gateway_app
from admission.services import Service, Services
from admission.vocabulary import Verdict
from admission.wire import Grant, sign_grant
from benchmarks.parts_figures import Size, p50, p99
from benchmarks.parts_process import part, say, until_input_ends
from benchmarks.parts_run import RECEIPT, SCOPE, TASK, arguments, contract, new_id, start_run
from benchmarks.parts_store import desk_on

CALLERS = 32
GRANT_KEY = b"bench-key-of-32-bytes-0123456789"
GRANT_MS = 3_600_000

Call = Callable[[int], Awaitable[None]]


# --- the processes


async def _serve(app: Any) -> None:
    """Serve an application on a free loopback port until our input ends."""
    # Named as TCP: only then does asyncio switch off the wait for an ACK between a reply's head and body.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, ws="none"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve, [listener])
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await anyio.sleep(0.01)
        say(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        await until_input_ends()
        server.should_exit = True
    say(ended=True)


async def serve_service(settings: dict[str, Any]) -> None:
    """The part `service`: records every POST durably under its idempotency key and answers with a receipt."""
    journal = os.open(Path(settings["folder"]) / "service.journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    answer = json.dumps({"receipt": RECEIPT}).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        key = dict(scope["headers"]).get(b"idempotency-key", b"")
        os.write(journal, key + b" " + body + b"\n")
        os.fdatasync(journal)
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": answer})

    await _serve(app)


async def serve_gateway(settings: dict[str, Any]) -> None:
    """The part `gateway`: what a gateway process runs, on the store and the service that it is told."""
    async with desk_on(settings["store"]) as (store, desk):
        services = Services({"shop": Service("shop", settings["service"], contract())})
        await _serve(gateway_app(desk, services, [GRANT_KEY], store=store, name="bench", incarnation=new_id()))


# --- the measure


async def gateway(url: str, folder: Path, size: Size) -> dict[str, float]:
    """Added time of one effect, and the rate of 32 callers; the best round of each."""
    async with part("service", {"folder": str(folder)}) as service:
        async with part("gateway", {"store": url, "service": service.hello["url"]}) as gate:
            run = new_id()
            async with desk_on(url) as (_, desk):
                child = (await start_run(desk, run))[SCOPE]
                expires_ms = desk.now_ms() + GRANT_MS
            token = sign_grant(Grant(run, SCOPE, child, 1, expires_ms), GRANT_KEY)
            limits = httpx.Limits(max_connections=CALLERS, max_keepalive_connections=CALLERS)
            async with (
                httpx.AsyncClient(base_url=service.hello["url"], trust_env=False, limits=limits) as http,
                GateClient(gate.hello["url"], token, tries_max=1) as client,
            ):
                figures = await _compare(_directly(http), _through(client), size)
            await gate.end()
        await service.end()
    return figures


def _directly(http: httpx.AsyncClient) -> Call:
    async def call(n: int) -> None:
        reply = await http.post("/actions/refund", json=arguments(n), headers={"Idempotency-Key": f"direct-{n}"})
        assert reply.json()["receipt"], reply.text

    return call


def _through(client: GateClient) -> Call:
    async def call(n: int) -> None:
        reply = await client.effect("shop", "refund", arguments(n), task=TASK)
        assert reply.verdict is Verdict.DONE, reply

    return call


async def _compare(direct: Call, through: Call, size: Size) -> dict[str, float]:
    effect = 0
    best: dict[str, float] = {}
    for _ in range(max(size.rounds - 1, 1)):
        found: dict[str, list[float]] = {"direct": [], "gateway": []}
        until = perf_counter() + 2 * size.part_s
        for n in range(effect, effect + size.gateway_calls + 10):
            if perf_counter() > until:
                break
            for name, call in (("direct", direct), ("gateway", through)):
                begun = perf_counter()
                await call(n)
                if n >= effect + 10:  # the first ones connect and warm up
                    found[name].append((perf_counter() - begun) * 1e3)
        effect += size.gateway_calls + 10
        figures = {f"{name}_ms_{p}": of(ms) for name, ms in found.items() for p, of in (("p50", p50), ("p99", p99))}
        for p in ("p50", "p99"):
            figures[f"gateway_added_ms_{p}"] = figures[f"gateway_ms_{p}"] - figures[f"direct_ms_{p}"]
        if not best or figures["gateway_added_ms_p50"] < best["gateway_added_ms_p50"]:
            best = figures
    ratio = 0.0
    for _ in range(max(size.rounds - 1, 1)):
        direct_per_s, effect = await _rate(direct, effect, size.gateway_s)
        gateway_per_s, effect = await _rate(through, effect, size.gateway_s)
        if gateway_per_s / direct_per_s > ratio:
            ratio = gateway_per_s / direct_per_s
            best |= {"direct_32_per_s": direct_per_s, "gateway_32_per_s": gateway_per_s}
    return {**best, "gateway_over_direct_32": ratio}


async def _rate(call: Call, first: int, seconds: float) -> tuple[float, int]:
    """Calls a second of 32 closed loops, and the number of the next effect."""
    n = first
    begun = perf_counter()

    async def loop() -> None:
        nonlocal n
        while perf_counter() - begun < seconds:
            n += 1
            await call(n)

    async with anyio.create_task_group() as tasks:
        for _ in range(CALLERS):
            tasks.start_soon(loop)
    return (n - first) / (perf_counter() - begun), n
