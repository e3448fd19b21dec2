"""Runs one simulated service in this process: port, journal, clock and faults from its settings.

Knows uvicorn and files. Prints one line of JSON when it listens: `{"kind", "url", "journal"}`. Safe to kill.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, assert_never

import uvicorn
from starlette.applications import Starlette

from simulators.connections import Connections
from simulators.entrance import Entrance, drifting, wall_clock
from simulators.faults import FaultRule, FaultSchedule, Profile
from simulators.journal import Journal
from simulators.keyed import KeyedService
from simulators.mail import MailService, mail_app
from simulators.payments import Payments, payments_app
from simulators.retail import RetailService, retail_app
from simulators.shop import Database, DataError

HOST = "127.0.0.1"
DATABASE_NAMES = ("db.json", "shop.json")
SHUTDOWN_GRACE_S = 1


class ServiceKind(StrEnum):
    """The services there are."""

    RETAIL = "retail"
    PAYMENTS = "payments"
    MAIL = "mail"


@dataclass(frozen=True)
class ServiceSettings:
    """How to run one service. `data` None means the data set that comes with the package; port 0 means a free one."""

    kind: ServiceKind
    journal: Path
    data: Path | None = None
    port: int = 0
    profile: Profile = Profile.NONE
    seed: int = 0
    rules: tuple[FaultRule, ...] = ()
    can_void: bool = True
    credential: str | None = None
    clock_skew_ms: int = 0
    clock_drift_ppm: int = 0
    work_ms: int = 0


def load_database(data: Path | None) -> Database:
    """Read a database file, a folder that holds `db.json` or `shop.json`, or (None) the package's own.

    Raises:
        DataError: nothing there, or not a database; the message names the file.
    """
    if data is None:
        with as_file(files("simulators") / "data" / "shop.json") as own:
            return _read_database(own)
    if data.is_dir():
        for name in DATABASE_NAMES:
            if (data / name).is_file():
                return _read_database(data / name)
        raise DataError(f"{data} holds neither {' nor '.join(DATABASE_NAMES)}")
    return _read_database(data)


def _read_database(path: Path) -> Database:
    try:
        tables: Any = json.loads(path.read_bytes())
    except OSError as failure:
        raise DataError(f"{path} cannot be read: {failure.strerror}") from failure
    except ValueError as damage:
        raise DataError(f"{path} is not JSON: {damage}") from damage
    if not isinstance(tables, dict):
        raise DataError(f"{path}: expected an object with orders, products, users")
    try:
        return Database(tables)
    except DataError as wrong:
        raise DataError(f"{path}: {wrong}") from wrong


def build(settings: ServiceSettings, connections: Connections) -> Starlette:
    """The application of one service, its state rebuilt from its journal.

    Raises:
        DataError: the data set cannot be used.
        JournalError: the journal cannot be used.
    """
    database = load_database(settings.data) if settings.kind is ServiceKind.RETAIL else None
    entrance = Entrance(
        Journal(settings.journal),
        FaultSchedule(settings.profile, seed=settings.seed, rules=settings.rules),
        connections,
        wall_clock,
        drifting(wall_clock, skew_ms=settings.clock_skew_ms, drift_ppm=settings.clock_drift_ppm),
        settings.credential,
    )
    match settings.kind:
        case ServiceKind.RETAIL:
            assert database is not None
            return retail_app(RetailService(database, entrance, can_void=settings.can_void, work_ms=settings.work_ms))
        case ServiceKind.PAYMENTS:
            paying = KeyedService(Payments(), entrance, can_void=settings.can_void, work_ms=settings.work_ms)
            return payments_app(paying)
        case ServiceKind.MAIL:
            return mail_app(MailService(entrance))
        case _:
            assert_never(settings.kind)


def serve(settings: ServiceSettings) -> None:
    """Run until told to stop (SIGTERM, Ctrl-C) or killed.

    Raises:
        DataError, JournalError: see `build`.
        OSError: the port is taken.
    """
    connections = Connections()
    app = build(settings, connections)
    listener = _listen(settings.port)
    hello = {
        "kind": settings.kind.value,
        "url": f"http://{HOST}:{listener.getsockname()[1]}",
        "journal": str(settings.journal),
    }
    config = uvicorn.Config(
        app,
        http=connections.protocol(),
        ws="none",
        log_level="warning",
        access_log=False,
        # The service's own clock goes into Date; see `entrance.OwnTime`.
        date_header=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )
    _Announcing(config, json.dumps(hello)).run(sockets=[listener])


def _listen(port: int) -> socket.socket:
    # Named as TCP, since asyncio sets TCP_NODELAY on no other; without it a reply in two parts waits 40 ms for an ACK.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOST, port))
    listener.listen(512)
    return listener


class _Announcing(uvicorn.Server):
    """Prints a line once requests are answered."""

    def __init__(self, config: uvicorn.Config, line: str) -> None:
        super().__init__(config)
        self._line = line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if not self.should_exit:
            print(self._line, flush=True)
