"""One try on the wire, and the honest name for how it ended.

Theory of operation. A try ends in one of four ways that must never stand in for each other: done, with a receipt; the
service said that it did not do it; provably no byte of the request was written; in doubt, which is everything else.
Only the last costs something to find out, so only what is certain is called certain: a request is "not written" when
the connection never got to the start of its head, as the HTTP library's own trace says, and not because of the kind of
an exception. One try is one request: no retries, no redirects, no environment proxies, and a connection is reused only
where the contract dedupes, since a dropped idle connection looks like a lost reply.

Knows services' answers and the wire. Does not know runs, permits or what is done about an outcome. Credentials are
added here and nowhere else: they are in no message, and are blotted out of answers that echo them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

import anyio
import httpx

from admission.contracts import FINAL_STATUSES, Operation, Request
from admission.foreign_json import ForeignJsonError, read_object
from admission.points import point
from admission.services import CredentialError, Service, blot_credential
from admission.vocabulary import Basis, Method, TryOutcome

#: Answers are kept in the log as evidence, so a larger one is not taken.
ANSWER_MAX_BYTES = 32 * 1024
CONNECTIONS_MAX = 200
#: Idle connections are given up before servers commonly do (5 s), so that a request seldom meets a closing one.
IDLE_MAX_S = 2.0


@dataclass(frozen=True, slots=True)
class TryResult:
    """How one try ended. `again`: the contract lets the same bytes be sent again under the same key.

    `observed` is what the service said: its receipt, or its reason. `detail` is one line for people.
    """

    outcome: TryOutcome
    basis: Basis
    status: int = 0
    observed: dict[str, Any] | None = None
    detail: str = ""
    again: bool = False


class Found(StrEnum):
    """What a service says became of a request."""

    EXECUTED = "executed"
    REFUSED = "refused"
    NOT_FOUND = "not_found"
    VOIDED = "voided"
    UNREACHABLE = "unreachable"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class Asked:
    """The answer to a lookup or void. `clock_ms` is the service's clock in the answer, None if it showed none.

    A `Date` header has whole seconds and is rounded down, so the service's clock is never earlier than `clock_ms`.
    """

    found: Found
    status: int = 0
    observed: dict[str, Any] | None = None
    clock_ms: int | None = None
    payload_matches: bool | None = None
    detail: str = ""


@dataclass(slots=True)
class _Wire:
    """What happened to one request on the wire."""

    head_started: bool = False
    answered: bool = False
    status: int = 0
    headers: httpx.Headers | None = None
    body: bytes = b""
    trouble: str = ""
    #: The headers with the credential as they went out: what must not come back in an answer.
    sent: Mapping[str, str] = field(default_factory=dict, repr=False)

    def said(self) -> dict[str, Any] | None:
        """The JSON object that was answered, without our credential; None when it is none that we can keep."""
        try:
            # A doubled key makes an answer odd, not void: refused here, it would turn what was done into a doubt.
            said: dict[str, Any] = blot_credential(read_object(self.body, unique_keys=False), self.sent)
        except ForeignJsonError:
            return None
        return said

    async def trace(self, event: str, info: object) -> None:
        """Told by the HTTP library at each of its steps."""
        if event == "http11.send_request_headers.started":
            self.head_started = True


class Dispatcher:
    """Speaks to services. One for a process; `async with` closes its connections."""

    def __init__(self, *, connections_max: int = CONNECTIONS_MAX, answer_max_bytes: int = ANSWER_MAX_BYTES) -> None:
        self._answer_max_bytes = answer_max_bytes
        fresh = httpx.Limits(max_connections=connections_max, max_keepalive_connections=0)
        kept = httpx.Limits(max_connections=connections_max, max_keepalive_connections=32, keepalive_expiry=IDLE_MAX_S)
        self._fresh = httpx.AsyncHTTPTransport(retries=0, trust_env=False, http2=False, limits=fresh)
        self._kept = httpx.AsyncHTTPTransport(retries=0, trust_env=False, http2=False, limits=kept)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._fresh.aclose()
        await self._kept.aclose()

    async def send(
        self, service: Service, operation: Operation, request: Request, *, key: str, not_after_ms: int = 0
    ) -> TryResult:
        """Send a frozen request once. `not_after_ms` is the store's time; the service compares it with its own clock.

        The contract's inequality counts the clock skew once, so the value is sent as it is: a service whose clock is
        behind accepts it at most `clock_skew_ms` longer. Never raises for anything that the wire or the service does.
        """
        part = operation.part
        headers = {"Content-Type": "application/json"} if request.body else {}
        if part.idempotency is not None:
            headers[part.idempotency.header] = key
        if part.not_after is not None and not_after_ms:
            headers[part.not_after.header] = str(not_after_ms)
        wire = _Wire()
        point("dispatch.send.before")
        await self._exchange(
            wire, service, request.method, request.path, headers, body=request.body, timeout_ms=part.timeout_ms,
            reuse=operation.facts.dedupes,
        )  # fmt: skip
        point("dispatch.send.after")
        return _named(wire, operation)

    async def ask(
        self, service: Service, operation: Operation, method: Method, *, key: str, target: str, body_sha256: str = ""
    ) -> Asked:
        """Ask what became of a request, or have its key voided. `body_sha256` "" means: unknown, do not compare."""
        part = operation.part
        where = part.lookup if method is Method.LOOKUP else part.void
        if where is None:
            return Asked(Found.UNSUPPORTED, detail=f"the contract of {service.name} declares no {method}")
        path = operation.ask_path(where.path, key=key, target=target)
        verb = "GET" if method is Method.LOOKUP else "POST"
        wire = _Wire()
        point("dispatch.ask.before")
        await self._exchange(wire, service, verb, path, {}, body=b"", timeout_ms=part.timeout_ms, reuse=True)
        point("dispatch.ask.after")
        return _found(wire, body_sha256)

    async def _exchange(
        self,
        wire: _Wire,
        service: Service,
        method: str,
        path: str,
        headers: dict[str, str],
        *,
        body: bytes,
        timeout_ms: int,
        reuse: bool,
    ) -> None:
        """One request and its whole answer, within the time given. What happened is left in `wire`."""
        try:
            wire.sent = service.credential_headers()
        except CredentialError as error:
            wire.trouble = str(error)
            return
        seconds = timeout_ms / 1000
        transport = self._kept if reuse else self._fresh
        with anyio.move_on_after(seconds) as limit:
            try:
                request = httpx.Request(
                    method,
                    service.url + path,
                    headers={"Accept": "application/json", "Accept-Encoding": "identity", **headers, **wire.sent},
                    content=body,
                    extensions={
                        "trace": wire.trace,
                        "timeout": {"connect": seconds, "read": seconds, "write": seconds, "pool": seconds},
                    },
                )
                response = await transport.handle_async_request(request)
                try:
                    wire.status, wire.headers = response.status_code, response.headers
                    wire.body, wire.answered = await self._read(response)
                    if not wire.answered:
                        wire.trouble = f"its answer is larger than {self._answer_max_bytes} bytes"
                finally:
                    await response.aclose()
            except httpx.TimeoutException:
                wire.trouble = _late(timeout_ms)
            except httpx.ConnectError:
                wire.trouble = "no connection could be made"
            except Exception as error:  # noqa: BLE001 - after the first byte, every surprise means the same: in doubt
                # Only the kind is named: messages of the HTTP library can quote a header's value.
                wire.trouble = f"the exchange broke off ({type(error).__name__})"
        if limit.cancelled_caught:
            wire.trouble = _late(timeout_ms)

    async def _read(self, response: httpx.Response) -> tuple[bytes, bool]:
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > self._answer_max_bytes:
                return b"", False
        return bytes(body), True


def _late(timeout_ms: int) -> str:
    return f"no complete answer within {timeout_ms} ms"


def _named(wire: _Wire, operation: Operation) -> TryResult:
    """The name of a try's end. Read from the top, the first that holds."""
    part = operation.part
    again = part.tries_max > 1
    if not wire.head_started:
        detail = f"nothing was sent: {wire.trouble}"
        return TryResult(TryOutcome.NOT_EXECUTED, Basis.NOTHING_WRITTEN, detail=detail, again=again)
    if not wire.answered:
        detail = f"status {wire.status}, but {wire.trouble}" if wire.status else wire.trouble
        return TryResult(TryOutcome.IN_DOUBT, Basis.NO_ANSWER, wire.status, detail=detail, again=again)
    said = wire.said()
    if wire.status in part.refused_statuses:
        detail = f"the service refused it with status {wire.status}"
        observed = said if said is not None else {"status": wire.status}
        return TryResult(TryOutcome.NOT_EXECUTED, Basis.SERVICE_REFUSED, wire.status, observed, detail)
    if wire.status in part.unavailable_statuses:
        detail = f"the service did not take it, with status {wire.status}"
        observed = said if said is not None else {"status": wire.status}
        again = again and wire.status not in FINAL_STATUSES
        return TryResult(TryOutcome.NOT_EXECUTED, Basis.SERVICE_REFUSED, wire.status, observed, detail, again)
    if 200 <= wire.status < 300:
        if wire.status == 204 and not wire.body:
            said = {}
        if said is not None:
            return TryResult(TryOutcome.OK, Basis.REPLY, wire.status, _inner(said, "receipt"))
        detail = f"status {wire.status}, but the answer is not a JSON object"
    else:
        detail = f"status {wire.status}, which the contract does not say the meaning of"
    return TryResult(TryOutcome.IN_DOUBT, Basis.NO_ANSWER, wire.status, detail=detail, again=again)


def _found(wire: _Wire, body_sha256: str) -> Asked:
    clock_ms = _clock_ms(wire.headers)
    if not wire.answered:
        return Asked(Found.UNREACHABLE, wire.status, clock_ms=clock_ms, detail=wire.trouble)
    said = wire.said() or {}
    state = said.get("state")
    matches: bool | None = None
    seen = said.get("payload_sha256")
    if body_sha256 and isinstance(seen, str):
        matches = seen == body_sha256
    if wire.status == 200 and state == Found.EXECUTED:
        return Asked(Found.EXECUTED, wire.status, _inner(said, "receipt"), clock_ms, matches)
    if wire.status == 200 and state == Found.REFUSED:
        return Asked(Found.REFUSED, wire.status, _inner(said, "error"), clock_ms, matches)
    if wire.status == 200 and state == Found.VOIDED:
        return Asked(Found.VOIDED, wire.status, said, clock_ms, matches)
    if wire.status in (200, 404) and state == Found.NOT_FOUND:
        return Asked(Found.NOT_FOUND, wire.status, said, clock_ms)
    if wire.status in (404, 405, 501):
        # No state in it: the route does not exist, which says nothing about the request that is asked about.
        detail = f"the service has no such route (status {wire.status})"
        return Asked(Found.UNSUPPORTED, wire.status, clock_ms=clock_ms, detail=detail)
    return Asked(Found.UNREACHABLE, wire.status, clock_ms=clock_ms, detail=f"status {wire.status} without a state")


def _inner(said: dict[str, Any], name: str) -> dict[str, Any]:
    inner = said.get(name)
    return inner if isinstance(inner, dict) else said


def _clock_ms(headers: httpx.Headers | None) -> int | None:
    if headers is None:
        return None
    exact = headers.get("x-clock", "")
    if exact.isascii() and exact.isdigit() and len(exact) <= 16:
        return int(exact)
    try:
        return int(parsedate_to_datetime(headers.get("date", "")).timestamp() * 1000)
    except (ValueError, OverflowError):
        return None
