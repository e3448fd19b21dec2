"""One process of regate, put together: store, desk, gateway, API, conductor, as its roles ask.

Knows the order in which parts are started and stopped, and how the process says that it is ready. What the parts do is
theirs; clocks, ids and chance come from the main program (app.py). A role's libraries are loaded when the role is
started: a gateway needs neither FastAPI nor A2A, and is back in half the time.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc

from admission.desk import Desk
from admission.run_machine import RUN_MACHINE
from admission.state import FOLD_VERSION
from admission.storage import StoreBehind
from admission.wire import internal_token
from orchestrator.endpoint import endpoint_token, forget_endpoint, living_endpoint, write_endpoint
from orchestrator.serving import bind, http_server
from orchestrator.settings import Listen, Settings, SettingsError, grant_keys
from orchestrator.store_access import Opened, instance_slot, opened_store, shown
from orchestrator.store_settings import read_store_settings

if TYPE_CHECKING:
    from admission.flights import Flights

#: `orchestrator` is the conductor with the API; `api` is the API alone.
ROLES = frozenset({"orchestrator", "gateway", "api"})
#: How often it is looked whether the gateway has found acknowledged data missing.
BROKEN_POLL_S = 0.2
ROLES_DEFAULT = frozenset({"orchestrator", "gateway"})
log = logging.getLogger("regate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a process gets what only a main program may make."""

    new_id: Callable[[], str]
    new_key: Callable[[int], bytes]
    new_token: Callable[[], str]
    wall_ms: Callable[[], int]


def versions() -> dict[str, str]:
    """What runs here."""
    try:
        regate = version("regate")
    except PackageNotFoundError:
        regate = "unknown"
    return {"regate": regate, "python": platform.python_version(), "fold": FOLD_VERSION}


@dataclass(kw_only=True)
class _Process:
    """What the parts of one process share."""

    settings: Settings
    roles: frozenset[str]
    gateway_url: str
    opened: Opened
    desk: Desk[Any, Any, Any, Any]
    keys: list[bytes]
    incarnation: str
    sources: Sources
    closing: anyio.Event = field(default_factory=anyio.Event)
    broken: list[StoreBehind] = field(default_factory=list)

    def alarm(self, error: StoreBehind) -> None:
        """Acknowledged data is missing: stop everything."""
        self.broken.append(error)
        self.closing.set()


async def serve_roles(
    settings: Settings,
    roles: frozenset[str],
    *,
    sources: Sources,
    ready: Callable[[Mapping[str, Any]], None],
    gateway_url: str = "",
) -> None:
    """Run the roles until SIGTERM or SIGINT.

    `gateway_url` is where workers find the gate when it is in another process; `ready` is called once, with the line
    that says where this process is. Raises StoreBehind when the store lost
    acknowledged data, StoreRefused, StoreUnavailable, SettingsError, ServiceError, ContractError, OSError.
    """
    if not roles or roles - ROLES:
        raise SettingsError(f"roles are {', '.join(sorted(ROLES))}, not {', '.join(sorted(roles)) or 'none'}")
    gateway_url = gateway_url or settings.gateway.url or ""
    if "orchestrator" in roles and "gateway" not in roles and not gateway_url:
        raise SettingsError("an orchestrator without a gateway needs its address: --gateway-url, or [gateway] url")
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(opened_store(settings, new_id=sources.new_id))
        for words in opened.warnings:
            log.warning("accepted as you said: %s", words)
        keys = grant_keys(settings.data_dir, os.environ, sources.new_key)
        desk = await stack.enter_async_context(Desk(opened.store, RUN_MACHINE, new_id=sources.new_id))
        process = _Process(
            settings=settings, roles=roles, gateway_url=gateway_url, opened=opened, desk=desk, keys=keys,
            incarnation=sources.new_id()[:12],
            sources=sources,
        )  # fmt: skip
        await _served(process, ready)
    if process.broken:
        raise process.broken[0]


async def _served(process: _Process, ready: Callable[[Mapping[str, Any]], None]) -> None:
    """Everything above the store: leaving stops the API first, then the conductor, and the gateway last."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with AsyncExitStack() as stack:
            line: dict[str, Any] = {"role": ",".join(sorted(process.roles)), "url": None, "pid": os.getpid()}
            if "gateway" in process.roles:
                own = await stack.enter_async_context(_gateway(process))
                process.gateway_url = process.gateway_url or own
            if "orchestrator" in process.roles:
                await stack.enter_async_context(_conductor(process))
            if process.roles & {"orchestrator", "api"}:
                line["url"] = await stack.enter_async_context(_api(process))
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(_until_signal, signals, process)
            ready(line | {"gateway": process.gateway_url})
            await process.closing.wait()
            tasks.cancel_scope.cancel()


async def _until_signal(signals: AsyncIterator[signal.Signals], process: _Process) -> None:
    async for _ in signals:
        process.closing.set()


@asynccontextmanager
async def _gateway(process: _Process) -> AsyncIterator[str]:
    from admission.gateway import gateway_app
    from admission.services import load_services

    settings = process.settings
    services = load_services(settings.services, file=settings.file, folder=settings.folder)
    for words in services.warnings:
        log.warning("%s", words)
    app = gateway_app(
        process.desk, services, process.keys, store=process.opened.store, name=socket.gethostname(),
        incarnation=process.incarnation,
    )  # fmt: skip
    bound, url = _bind(settings.gateway, "gateway")
    async with http_server(app, bound, settings.gateway), anyio.create_task_group() as tasks:
        tasks.start_soon(_until_broken, app.state.gateway.flights, process)
        yield url
        tasks.cancel_scope.cancel()


async def _until_broken(flights: Flights, process: _Process) -> None:
    """A gateway that found data missing shuts its gate itself; the process that it runs in has to end as well."""
    while not flights.broken:  # noqa: ASYNC110 - a flag that the gateway's own room keeps
        await anyio.sleep(BROKEN_POLL_S)
    process.alarm(StoreBehind(flights.broken))


@asynccontextmanager
async def _api(process: _Process) -> AsyncIterator[str]:
    from orchestrator.api import api_app

    settings = process.settings
    token = endpoint_token(settings.data_dir, process.sources.new_token)
    app = api_app(
        process.desk, process.opened.store, token, new_id=process.sources.new_id, agents=frozenset(settings.agents),
        data_dir=settings.data_dir, doctor=_doctor(process), alarm=process.alarm, closing=process.closing,
    )  # fmt: skip
    bound, url = _bind(settings.api, "api")
    async with http_server(app, bound, settings.api):
        earlier = living_endpoint(settings.data_dir)
        write_endpoint(settings.data_dir, url=url, token=token, gateway=process.gateway_url, pid=os.getpid())
        try:
            yield url
        finally:
            forget_endpoint(settings.data_dir, pid=os.getpid(), earlier=earlier)


def _bind(listen: Listen, name: str) -> tuple[socket.socket, str]:
    try:
        return bind(listen)
    except OSError as error:
        words = f"[{name}] cannot listen on {listen.host}:{listen.port}: {error.strerror}; choose another, or port 0"
        raise SettingsError(words) from None


@asynccontextmanager
async def _conductor(process: _Process) -> AsyncIterator[None]:
    from orchestrator.conductor import Conductor
    from orchestrator.courier import Courier

    settings = process.settings
    instance, descriptor = instance_slot(settings.data_dir, socket.gethostname())
    conductor = Conductor(
        store=process.opened.store, desk=process.desk, courier=Courier(), gateway_url=process.gateway_url,
        agents=settings.agents, internal_token=internal_token(process.keys[0]), grant_key=process.keys[0],
        instance=instance, incarnation=process.incarnation,
    )  # fmt: skip
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_conducted, conductor.run, process)
            yield
            tasks.cancel_scope.cancel()
    finally:
        os.close(descriptor)


async def _conducted(run: Callable[[], Awaitable[None]], process: _Process) -> None:
    try:
        await run()
    except* StoreBehind as group:
        process.alarm(_first(group))


def _first(group: BaseExceptionGroup[StoreBehind]) -> StoreBehind:
    inner = group.exceptions[0]
    return inner if isinstance(inner, StoreBehind) else _first(inner)


def _doctor(process: _Process) -> Callable[[], Any]:
    async def doctor() -> dict[str, Any]:
        opened, settings = process.opened, process.settings
        server = opened.server
        problems = list(opened.warnings)
        machine_ms = process.sources.wall_ms()
        return {
            "server": {
                "url": shown(opened.url),
                "embedded": server is not None,
                "version": server.version if server else None,
                "binary": server.binary if server else None,
                "server_pid": server.pid if server else None,
                "data_dir": str(settings.data_dir),
                "durable": not problems,
            },
            "redis": await read_store_settings(opened.url),
            "problems": problems,
            "machine_clock": {"machine_ms": machine_ms, "store_ahead_ms": process.desk.now_ms() - machine_ms},
            "versions": versions(),
            "process": {
                "pid": os.getpid(),
                "roles": sorted(process.roles),
                "gateway": process.gateway_url,
                "settings": settings.file,
                "agents": dict(settings.agents),
                "services": {name: table.get("url") for name, table in settings.services.items()},
            },
        }

    return doctor
