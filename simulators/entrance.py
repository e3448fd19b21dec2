"""What every service does with a write around its own rules: read it, choose its fault, send or withhold the reply.

Knows requests, faults, the service's clock and its journal. Does not know shops or mail.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any, Protocol

import anyio
import anyio.abc
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from simulators.connections import Connections, NoReply
from simulators.faults import Fault, FaultKind, FaultSchedule
from simulators.journal import Journal, Line

BODY_MAX_BYTES = 256 * 1024
KEY_MAX_CHARS = 255


class Clock(Protocol):
    """Tells the time in milliseconds since the epoch."""

    def __call__(self) -> int: ...


def wall_clock() -> int:
    """The machine's time."""
    return time.time_ns() // 1_000_000


def drifting(clock: Clock, *, skew_ms: int = 0, drift_ppm: int = 0) -> Clock:
    """A clock that is off by `skew_ms` now and runs away from there by `drift_ppm` millionths of the time passed."""
    start = clock()

    def now() -> int:
        real = clock()
        return real + skew_ms + (real - start) * drift_ppm // 1_000_000

    return now


@dataclass(frozen=True)
class Arrival:
    """One write as it came in: its idempotency key, and the time after which it must not be done."""

    action: str
    raw: bytes
    key: str | None = None
    not_after_ms: int | None = None
    payload_sha256: str = ""

    @property
    def subject(self) -> str:
        """What a repetition shares with it: the key, or without one the payload."""
        return self.key or self.payload_sha256


@dataclass(frozen=True)
class Reply:
    """A status and a JSON body on their way to the client."""

    status: int
    body: dict[str, Any]
    replay: bool = False

    def response(self) -> Response:
        """As HTTP."""
        return JSONResponse(self.body, self.status, headers={"Idempotent-Replay": "true"} if self.replay else None)


class BadRequestError(Exception):
    """The request cannot be read; carries the reply that says why."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.reply = Reply(status, {"code": code, "message": message})


async def read_arrival(request: Request, action: str) -> Arrival:
    """Read body and headers of a write.

    Raises:
        BadRequestError: the body is larger than `BODY_MAX_BYTES`, or a header is malformed.
    """
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > BODY_MAX_BYTES:
            raise BadRequestError(413, "too_large", f"a body has at most {BODY_MAX_BYTES} bytes")
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= KEY_MAX_CHARS:
        raise BadRequestError(400, "malformed", f"Idempotency-Key has 1 to {KEY_MAX_CHARS} characters")
    not_after = request.headers.get("x-not-after")
    if not_after is not None and not (not_after.isascii() and not_after.isdigit() and len(not_after) <= 16):
        raise BadRequestError(400, "malformed", "X-Not-After is a time in milliseconds since the epoch")
    return Arrival(
        action,
        bytes(raw),
        key,
        int(not_after) if not_after is not None else None,
        hashlib.sha256(raw).hexdigest(),
    )


def check_credential(request: Request, credential: str | None) -> None:
    """Compare the bearer token with the one the service was started with, if any.

    Raises:
        BadRequestError: missing or wrong.
    """
    if credential is None:
        return
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {credential}".encode()):
        raise BadRequestError(401, "unauthorized", "this service wants `Authorization: Bearer` with its credential")


@dataclass
class Entrance:
    """Everything a service needs around its rules. `tasks` is set while the service runs; late requests live in it."""

    journal: Journal
    schedule: FaultSchedule
    connections: Connections
    wall: Clock
    clock: Clock
    credential: str | None = None
    tasks: anyio.abc.TaskGroup | None = field(default=None)

    def note(self, event: str, arrival: Arrival, fault: Fault | None, **more: object) -> None:
        """Append a journal line about an arrival. `at_ms` is the machine's time, `clock_ms` the service's own."""
        line: Line = {
            "at_ms": self.wall(),
            "clock_ms": self.clock(),
            "event": event,
            "key": arrival.key,
            "action": arrival.action,
            "payload_sha256": arrival.payload_sha256,
            "fault": fault.kind.value if fault else None,
            **more,
        }
        self.journal.append(line)

    def recall(self, line: Line) -> None:
        """At a restart: count the arrival this line tells of, so that explicit faults do not begin anew."""
        if line.get("fault") is not None:
            self.schedule.seen(line["action"], subject=line["key"] or line["payload_sha256"])

    async def admit(self, arrival: Arrival, process: Callable[[Arrival, Fault | None], Awaitable[Reply]]) -> Response:
        """Let the arrival in with whatever its fault does to it. `process` does the work and its journal lines durably.

        A late arrival is processed with no fault of its own: nobody waits for its reply.
        """
        fault = self.schedule.next(arrival.action, subject=arrival.subject, payload_sha256=arrival.payload_sha256)
        match fault.kind:
            case FaultKind.NONE:
                return (await process(arrival, fault)).response()
            case FaultKind.DELAY:
                reply = await process(arrival, fault)
                await anyio.sleep(fault.ms / 1000)
                return reply.response()
            case FaultKind.LOSE:
                await process(arrival, fault)
                return NoReply(self.connections)
            case FaultKind.REJECT:
                body = {"code": "unavailable", "message": "rejected before any work"}
                self.note("rejected", arrival, fault, error=body)
                await self.journal.durable()
                return Reply(503, body).response()
            case FaultKind.RESET:
                self.note("dropped", arrival, fault)
                return NoReply(self.connections, reset=True)
            case FaultKind.LATE:
                self.note("dropped", arrival, fault, late_ms=fault.ms)
                if self.tasks is None:
                    raise RuntimeError("the service is not running")
                self.tasks.start_soon(self._later, arrival, fault.ms, process)
                return NoReply(self.connections)

    async def _later(
        self, arrival: Arrival, ms: int, process: Callable[[Arrival, Fault | None], Awaitable[Reply]]
    ) -> None:
        await anyio.sleep(ms / 1000)
        await process(arrival, None)


class OwnTime:
    """Puts the service's clock on every reply: `X-Clock` in milliseconds, and `Date`."""

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on, with two headers more."""

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                now = self._clock()
                date = formatdate(now / 1000, usegmt=True)
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-clock", str(now).encode()),
                    (b"date", date.encode()),
                ]
            await send(message)

        await self._app(scope, receive, stamped)
