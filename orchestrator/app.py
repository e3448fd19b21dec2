"""The main program of `regate serve`: options become settings, and the process its clock, its ids and its exit code.

Knows what each kind of failure means for the exit code. It is the only place that makes clocks, ids and keys. How the
parts of a process are put together is in process.py.
"""

from __future__ import annotations

import gc
import json
import logging
import secrets
import sys
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from admission.contracts import ContractError
from admission.services import ServiceError
from admission.storage import StoreBehind, StoreRefused, StoreUnavailable
from orchestrator.process import ROLES_DEFAULT, Sources, serve_roles
from orchestrator.settings import ListenTable, Settings, SettingsError, find_settings, parse_listen

EXIT_FAILED, EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_INTERRUPTED = 1, 2, 5, 130
#: Acknowledged data is missing: a supervisor must not start the process again as if nothing had happened.
EXIT_ALARM = 70


def serve(
    *,
    config: Path | None = None,
    data: Path | None = None,
    roles: Collection[str] = ROLES_DEFAULT,
    redis_url: str | None = None,
    allow_volatile: bool = False,
    assume_durable: bool = False,
    listen: str | None = None,
    gateway_listen: str | None = None,
    gateway_url: str = "",
) -> int:
    """`regate serve`: run roles in this process until SIGTERM or Ctrl-C; the exit code. Reasons are said on stderr.

    What is None is taken from the settings: `config`, else DATA/regate.toml, else ./regate.toml, else defaults.
    """
    try:
        settings = find_settings(config, data, here=Path.cwd())
        settings = _with_store(settings, redis_url, allow_volatile=allow_volatile, assume_durable=assume_durable)
        settings = with_listeners(settings, api=listen, gateway=gateway_listen)
    except SettingsError as error:
        say(str(error))
        return EXIT_USAGE
    return run_roles(settings, frozenset(roles), gateway_url=gateway_url)


#: Objects made before the cyclic collector looks at the young ones. A run's rows are many and stay; with the default of
#: 700 it walks over them again and again, for a fifth of the time of a commit.
COLLECT_AFTER = 50_000


def calm_collector() -> None:
    """Leave what is loaded now out of collections for good, and collect less often."""
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)


def run_roles(settings: Settings, roles: frozenset[str], *, gateway_url: str = "") -> int:
    """Run the roles in this process until told to stop; the exit code. What is wrong is said on stderr."""
    quiet_log()
    calm_collector()
    try:
        anyio.run(_serve, settings, roles, gateway_url)
    except BaseException as error:
        code = explained(error)
        if code is None:
            raise
        return code
    return 0


async def _serve(settings: Settings, roles: frozenset[str], gateway_url: str) -> None:
    await serve_roles(settings, roles, sources=sources(), ready=announce, gateway_url=gateway_url)


def explained(error: BaseException) -> int | None:
    """Say why a program ends, and with which exit code; None for what is not a reason but a fault."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    match error:
        case StoreBehind():
            say(f"ALARM: {error} This process has stopped.")
            return EXIT_ALARM
        case SettingsError() | ServiceError() | ContractError():
            say(str(error))
            return EXIT_USAGE
        case StoreRefused():
            say(str(error))
            return EXIT_FAILED
        case StoreUnavailable():
            say(str(error))
            return EXIT_UNAVAILABLE
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED
        case _:
            return None


def _with_store(settings: Settings, url: str | None, *, allow_volatile: bool, assume_durable: bool) -> Settings:
    if url is not None and not url.startswith(("redis://", "rediss://", "unix://")):
        raise SettingsError("--redis-url begins with redis://, rediss:// or unix://")
    return replace(
        settings,
        store_url=url or settings.store_url,
        allow_volatile=settings.allow_volatile or allow_volatile,
        assume_durable=settings.assume_durable or assume_durable,
    )


def with_listeners(settings: Settings, *, api: str | None = None, gateway: str | None = None) -> Settings:
    """The settings with other addresses to listen on. Raises SettingsError."""
    for name, text in (("api", api), ("gateway", gateway)):
        if text is None:
            continue
        told = settings.api if name == "api" else settings.gateway
        certificate = {"tls_cert": str(told.cert), "tls_key": str(told.key)} if told.cert else {}
        table = ListenTable(listen=text, url=told.url, **certificate)
        listener = parse_listen(table, name, place=("command line", ""), folder=settings.folder)
        settings = replace(settings, api=listener) if name == "api" else replace(settings, gateway=listener)
    return settings


# --- clock, ids, chance, words ---------------------------------------------------------------------------------------


def new_id() -> str:
    """An id that nobody used before."""
    return uuid.uuid4().hex


def wall_ms() -> int:
    """The machine's clock, for people only: rules go by the store's."""
    return time.time_ns() // 1_000_000


def sources() -> Sources:
    """The real clock and real chance."""
    return Sources(
        new_id=new_id, new_key=secrets.token_bytes, new_token=lambda: secrets.token_urlsafe(32), wall_ms=wall_ms
    )


def announce(line: Mapping[str, Any]) -> None:
    """Say on stdout, in one JSON line, that the process is ready and where."""
    sys.stdout.write(json.dumps(dict(line)) + "\n")
    sys.stdout.flush()


def say(words: str) -> None:
    """Words for a person, on stderr."""
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def quiet_log() -> None:
    """Warnings and worse to stderr."""
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
