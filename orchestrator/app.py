"""One process of regate, put together: store, desk, gateway, API, conductor, as its roles ask.

Knows the order in which parts are started and stopped, and how the process says that it is ready and why it ends. It is
the only place that makes clocks, ids and keys. What the parts do is theirs.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import secrets
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import anyio
import anyio.abc

from admission.contracts import ContractError
from admission.desk import Desk
from admission.gateway import gateway_app
from admission.run_machine import RUN_MACHINE
from admission.services import ServiceError, load_services
from admission.state import FOLD_VERSION
from admission.storage import StoreBehind, StoreRefused, StoreUnavailable
from admission.wire import internal_token
from orchestrator.api import api_app
from orchestrator.conductor import Conductor
from orchestrator.courier import Courier
from orchestrator.endpoint import endpoint_token, forget_endpoint, write_endpoint
from orchestrator.serving import bind, http_server
from orchestrator.settings import Listen, Settings, SettingsError, grant_keys
from orchestrator.store_access import Opened, instance_slot, opened_store, shown

ROLES = frozenset({"orchestrator", "gateway"})
log = logging.getLogger("regate")


def new_id() -> str:
    """An id that nobody used before."""
    return uuid.uuid4().hex


def wall_ms() -> int:
    """The machine's clock, for people only: rules go by the store's."""
    return time.time_ns() // 1_000_000


def versions() -> dict[str, str]:
    """What runs here."""
    try:
        regate = version("regate")
    except PackageNotFoundError:
        regate = "unknown"
    return {"regate": regate, "python": platform.python_version(), "fold": FOLD_VERSION}


def announce(line: Mapping[str, Any]) -> None:
    """Say on stdout, in one JSON line, that the process is ready and where."""
    sys.stdout.write(json.dumps(dict(line)) + "\n")
    sys.stdout.flush()


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
    closing: anyio.Event = field(default_factory=anyio.Event)
    broken: list[StoreBehind] = field(default_factory=list)

    def alarm(self, error: StoreBehind) -> None:
        """Acknowledged data is missing: stop everything."""
        self.broken.append(error)
        self.closing.set()


async def serve(
    settings: Settings,
    roles: frozenset[str] = ROLES,
    *,
    gateway_url: str = "",
    ready: Callable[[Mapping[str, Any]], None] = announce,
) -> None:
    """Run the roles until SIGTERM or SIGINT.

    `gateway_url` is where workers find the gate when it is in another process. Raises StoreBehind when the store lost
    acknowledged data, StoreRefused, StoreUnavailable, SettingsError, ServiceError, ContractError, OSError.
    """
    if not roles or roles - ROLES:
        raise SettingsError(f"roles are {', '.join(sorted(ROLES))}, not {', '.join(sorted(roles)) or 'none'}")
    gateway_url = gateway_url or settings.gateway.url or ""
    if "gateway" not in roles and not gateway_url:
        raise SettingsError("an orchestrator without a gateway needs its address: --gateway-url, or [gateway] url")
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(opened_store(settings, new_id=new_id))
        for words in opened.warnings:
            log.warning("accepted as you said: %s", words)
        keys = grant_keys(settings.data_dir, os.environ, secrets.token_bytes)
        desk = await stack.enter_async_context(Desk(opened.store, RUN_MACHINE, new_id=new_id))
        process = _Process(
            settings=settings, roles=roles, gateway_url=gateway_url, opened=opened, desk=desk, keys=keys,
            incarnation=uuid.uuid4().hex[:12],
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
    settings = process.settings
    services = load_services(settings.services, file=settings.file, folder=settings.folder)
    for words in services.warnings:
        log.warning("%s", words)
    app = gateway_app(
        process.desk, services, process.keys, store=process.opened.store, name=socket.gethostname(),
        incarnation=process.incarnation,
    )  # fmt: skip
    bound, url = _bind(settings.gateway, "gateway")
    async with http_server(app, bound, settings.gateway):
        yield url


@asynccontextmanager
async def _api(process: _Process) -> AsyncIterator[str]:
    settings = process.settings
    token = endpoint_token(settings.data_dir, lambda: secrets.token_urlsafe(32))
    app = api_app(
        process.desk, process.opened.store, token, new_id=new_id, agents=frozenset(settings.agents),
        data_dir=settings.data_dir, doctor=_doctor(process), alarm=process.alarm, closing=process.closing,
    )  # fmt: skip
    bound, url = _bind(settings.api, "api")
    async with http_server(app, bound, settings.api):
        write_endpoint(settings.data_dir, url=url, token=token, gateway=process.gateway_url, pid=os.getpid())
        try:
            yield url
        finally:
            forget_endpoint(settings.data_dir, pid=os.getpid())


def _bind(listen: Listen, name: str) -> tuple[socket.socket, str]:
    try:
        return bind(listen)
    except OSError as error:
        words = f"[{name}] cannot listen on {listen.host}:{listen.port}: {error.strerror}; choose another, or port 0"
        raise SettingsError(words) from None


@asynccontextmanager
async def _conductor(process: _Process) -> AsyncIterator[None]:
    settings = process.settings
    instance, descriptor = instance_slot(settings.data_dir, socket.gethostname())
    conductor = Conductor(
        store=process.opened.store, desk=process.desk, courier=Courier(), gateway_url=process.gateway_url,
        agents=settings.agents, internal_token=internal_token(process.keys[0]), grant_key=process.keys[0],
        instance=instance, incarnation=process.incarnation,
    )  # fmt: skip
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_conducted, conductor, process)
            yield
            tasks.cancel_scope.cancel()
    finally:
        os.close(descriptor)


async def _conducted(conductor: Conductor, process: _Process) -> None:
    try:
        await conductor.run()
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
            "problems": problems,
            "machine_clock": {"machine_ms": wall_ms(), "store_ahead_ms": process.desk.now_ms() - wall_ms()},
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


EXIT_FAILED, EXIT_USAGE, EXIT_UNAVAILABLE = 1, 2, 5


def run_serve(settings: Settings, roles: frozenset[str] = ROLES, *, gateway_url: str = "") -> int:
    """Run the roles in this process until told to stop; the exit code. What is wrong is said on stderr."""
    quiet_log()
    try:
        anyio.run(lambda: serve(settings, roles, gateway_url=gateway_url))
    except BaseException as error:
        cause = innermost(error)
        match cause:
            case StoreBehind():
                say(f"ALARM: {cause} This process has stopped.")
                return EXIT_FAILED
            case SettingsError() | ServiceError() | ContractError():
                say(str(cause))
                return EXIT_USAGE
            case StoreRefused():
                say(str(cause))
                return EXIT_FAILED
            case StoreUnavailable():
                say(str(cause))
                return EXIT_UNAVAILABLE
            case KeyboardInterrupt():
                return 130
            case _:
                raise
    return 0


def innermost(error: BaseException) -> BaseException:
    """The first cause inside groups that task groups make."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def say(words: str) -> None:
    """Words for a person, on stderr."""
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def quiet_log() -> None:
    """Warnings and worse to stderr."""
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
