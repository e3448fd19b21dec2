"""The gateway's HTTP face: effects, claims, the gate, and the internal door.

Knows routes, grants, limits and how answers and problems look in JSON. What an effect goes through is in flights.py,
what may happen in rules.py, how a service is spoken to in dispatch.py. Nothing is taken from a worker on trust: run,
scope, child and revision come from its grant, never from the body. The internal door is for the orchestrator, which
decides what to ask but holds no credentials.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import anyio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from admission.commands import Admit, ClaimChild
from admission.contracts import OCCURRENCE_MAX, ArgumentsError, ArgumentsTooLarge, read_frozen
from admission.dispatch import Asked, Dispatcher
from admission.flights import FlightFault, Flights, GateShut, Ledger, Wanted
from admission.foreign_json import ForeignJsonError, read_object
from admission.gate_watch import WAIT_MAX_MS, GateWatch
from admission.services import Services
from admission.storage import Store, StoreBehind, StoreUnavailable
from admission.vocabulary import GateState, Method
from admission.wire import BadGrant, Grant, is_internal_token, read_grant

#: Arguments up to 64 kB, and room for the fields around them.
BODY_MAX_BYTES = 66 * 1024
TASK_MAX_CHARS = 256


class Problem(Exception):
    """A request that gets no verdict. Becomes problem+json (RFC 9457); `detail` says what to do."""

    def __init__(self, status: int, detail: str, *, title: str = "") -> None:
        super().__init__(detail)
        self.status = status
        self.title = title or HTTPStatus(status).phrase
        self.detail = detail

    def response(self) -> Response:
        """As HTTP."""
        body = {"type": "about:blank", "title": self.title, "status": self.status, "detail": self.detail}
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.status == 503:
            headers["Retry-After"] = "1"
        return JSONResponse(body, self.status, headers=headers, media_type="application/problem+json")


_T = TypeVar("_T")
Handler = Callable[[Request], Awaitable[Response]]


def _problems(handler: Handler) -> Handler:
    """Turn what can go wrong on the way into problem+json."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except Problem as problem:
            return problem.response()
        except GateShut as shut:
            return Problem(503, str(shut)).response()
        except FlightFault as fault:
            return Problem(500, str(fault)).response()
        except StoreUnavailable:
            return Problem(503, "the store is not available, so the gate stays shut; ask again later").response()
        except StoreBehind:
            return Problem(503, "the store lost acknowledged data; an operator must look (regate doctor)").response()

    return guarded


class Gateway:
    """The gateway of one process. `async with` it around serving `routes()`."""

    def __init__(
        self,
        desk: Ledger,
        services: Services,
        grant_keys: Sequence[bytes],
        *,
        store: Store,
        name: str,
        incarnation: str,
    ) -> None:
        """`grant_keys`: the current key, then the previous one. `incarnation` must differ after every start."""
        self._desk = desk
        self._services = services
        self._grant_keys = tuple(grant_keys)
        self._store = store
        self._dispatcher = Dispatcher()
        self.flights = Flights(desk, self._dispatcher, gateway=f"{name}/{incarnation}")
        self._watch = GateWatch(desk, store)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything that runs beside requests. Leaving it waits (bounded) for effects that are on the wire."""
        async with self._dispatcher, self.flights:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch.listen)
                yield
                tasks.cancel_scope.cancel()

    def routes(self) -> list[BaseRoute]:
        """The routes, without a prefix."""
        return [
            Route("/v1/effects", _problems(self.effects), methods=["POST"]),
            Route("/v1/claims", _problems(self.claims), methods=["POST"]),
            Route("/v1/gate", _problems(self.gate), methods=["GET"]),
            Route("/v1/internal/ask", _problems(self.ask), methods=["POST"]),
            Route("/healthz", self.healthz, methods=["GET"]),
            Route("/readyz", _problems(self.readyz), methods=["GET"]),
        ]

    # -- workers ------------------------------------------------------------------------------------------------------

    async def effects(self, request: Request) -> Response:
        """POST /v1/effects."""
        grant = self._grant(request)
        body = await _body(request)
        _only(body, {"task", "service", "action", "arguments", "occurrence", "about"})
        wanted = self._wanted(grant, body)
        answer = await self.flights.ask(wanted)
        _known_here(grant, answer.revision_in_force)
        fields = asdict(answer)
        fields["blocks"] = answer.blocks.value if answer.blocks else None
        return JSONResponse(fields)

    def _wanted(self, grant: Grant, body: dict[str, Any]) -> Wanted:
        task, name, action = (_text(body, field) for field in ("task", "service", "action"))
        arguments, occurrence = body.get("arguments", {}), body.get("occurrence", 1)
        if not isinstance(arguments, dict):
            raise Problem(422, "`arguments` must be a JSON object")
        if isinstance(occurrence, bool) or not isinstance(occurrence, int) or not 1 <= occurrence <= OCCURRENCE_MAX:
            raise Problem(422, f"`occurrence` must be a whole number from 1 to {OCCURRENCE_MAX}")
        service = self._services.get(name)
        if service is None:
            raise Problem(404, f"there is no service {name!r}; known: {', '.join(sorted(self._services.by_name))}")
        operation = service.contract.operations.get(action)
        if operation is None:
            known = ", ".join(sorted(service.contract.operations))
            raise Problem(404, f"the contract of {name!r} has no operation {action!r}; known: {known}")
        try:
            prepared = operation.prepare(arguments, occurrence=occurrence)
        except ArgumentsError as error:
            raise Problem(422, f"{name}.{action}: {error}") from None
        except ArgumentsTooLarge as error:
            raise Problem(413, f"{name}.{action}: {error}") from None
        admit = Admit(
            by=grant.child, child=grant.child, scope=grant.scope, revision=grant.revision, task=task, service=name,
            operation=action, target=prepared.target, slot=prepared.slot, input_ref=prepared.input_ref,
            contract=operation.facts, gateway=self.flights.gateway, occurrence=occurrence,
            conflict_key=prepared.conflict_key, refusal=operation.refusal,
        )  # fmt: skip
        about = _text(body, "about") if body.get("about") else ""
        return Wanted(grant.run, admit, service, operation, prepared, about)

    async def claims(self, request: Request) -> Response:
        """POST /v1/claims."""
        grant = self._grant(request)
        body = await _body(request)
        _only(body, {"task"})
        claim = ClaimChild(
            by=grant.child, child=grant.child, scope=grant.scope, revision=grant.revision, task=_text(body, "task")
        )
        decision = (await self._desk.submit(grant.run, claim)).decision
        in_force = int(decision.detail.get("in_force") or 0)
        _known_here(grant, in_force)
        return JSONResponse({"claim": decision.verdict.value, "revision_in_force": in_force})

    async def gate(self, request: Request) -> Response:
        """GET /v1/gate?version&wait_ms&gate&current: at once without `gate` and `current`, else when they changed."""
        grant = self._grant(request)
        query = request.query_params
        wait_ms = _number(query.get("wait_ms", "20000"), "wait_ms", most=WAIT_MAX_MS)
        known: tuple[GateState, bool] | None = None
        if "gate" in query and "current" in query:
            try:
                known = (GateState(query["gate"]), {"true": True, "false": False}[query["current"]])
            except (ValueError, KeyError):
                words = f"`gate` is one of {', '.join(GateState)}, and `current` is true or false"
                raise Problem(422, words) from None
        waiting = partial(self._watch.wait, grant, known=known, wait_ms=wait_ms)
        view = await _unless_gone(request, waiting)
        _known_here(grant, view.revision_in_force)
        return JSONResponse(asdict(view))

    def _grant(self, request: Request) -> Grant:
        try:
            return read_grant(_bearer(request), self._grant_keys, self._desk.now_ms())
        except BadGrant as error:
            raise Problem(401, str(error)) from None

    # -- the orchestrator ---------------------------------------------------------------------------------------------

    async def ask(self, request: Request) -> Response:
        """POST /v1/internal/ask: look an attempt up at its service, or have it voided."""
        if not is_internal_token(_bearer(request), self._grant_keys):
            raise Problem(401, "the internal door opens to the orchestrator's token only")
        body = await _body(request)
        _only(body, {"run", "attempt", "method"})
        run, attempt_id = _text(body, "run"), _text(body, "attempt")
        try:
            method = Method(_text(body, "method"))
        except ValueError:
            raise Problem(422, f"`method` is one of {', '.join(Method)}") from None
        attempt = (await self._desk.current(run)).attempts.get(attempt_id)
        if attempt is None:
            raise Problem(404, f"run {run!r} has no attempt {attempt_id!r}")
        service = self._services.get(attempt.service)
        operation = service.contract.operations.get(attempt.operation) if service else None
        if service is None or operation is None:
            raise Problem(404, f"{attempt.service}.{attempt.operation} is in no contract of this gateway any more")
        frozen = await self._store.blob(run, attempt.input_ref)
        seen = read_frozen(frozen).body_sha256 if frozen is not None else ""
        asked = await self._dispatcher.ask(
            service, operation, method, key=attempt.key, target=attempt.target, body_sha256=seen
        )
        return JSONResponse(_plain(asked))

    # -- whoever watches over the process -----------------------------------------------------------------------------

    async def healthz(self, request: Request) -> Response:
        """GET /healthz: the process answers."""
        return JSONResponse({"status": "ok", "gateway": self.flights.gateway, "effects_in_hand": self.flights.count})

    async def readyz(self, request: Request) -> Response:
        """GET /readyz: effects can be asked for."""
        if self.flights.broken:
            raise Problem(503, self.flights.broken)
        await self._store.now_ms()
        return JSONResponse({"status": "ready", "gateway": self.flights.gateway})


def gateway_app(
    desk: Ledger, services: Services, grant_keys: Sequence[bytes], *, store: Store, name: str, incarnation: str
) -> Starlette:
    """The gateway as an application of its own. See Gateway for the arguments; `desk` must be running."""
    gateway = Gateway(desk, services, grant_keys, store=store, name=name, incarnation=incarnation)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with gateway.running():
            yield

    app = Starlette(routes=gateway.routes(), lifespan=lifespan)
    app.state.gateway = gateway
    return app


def _known_here(grant: Grant, in_force: int) -> None:
    """Every run has a revision in force from its first event on: without one, it is in no log of this store.

    Looked at after the answer, which changed nothing: a look of its own would cost every effect a round trip.
    """
    if not in_force:
        words = "which this store does not hold: it comes from another store, or this one was emptied; nothing was sent"
        raise Problem(401, f"the grant is for run {grant.run[:TASK_MAX_CHARS]!r}, {words}")


def _plain(asked: Asked) -> dict[str, Any]:
    return {**asdict(asked), "found": asked.found.value}


def _bearer(request: Request) -> str:
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not value or not value.isascii():
        raise Problem(401, "send `Authorization: Bearer GRANT` with the grant that came with the task")
    return value.strip()


async def _body(request: Request) -> dict[str, Any]:
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > BODY_MAX_BYTES:
        raise Problem(413, f"a body has at most {BODY_MAX_BYTES} bytes")
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > BODY_MAX_BYTES:
                raise Problem(413, f"a body has at most {BODY_MAX_BYTES} bytes")
    except ClientDisconnect:
        raise Problem(400, "the request broke off") from None
    try:
        return read_object(bytes(raw))
    except ForeignJsonError as error:
        raise Problem(422, f"the body must be a JSON object: {error}") from None


def _only(body: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(body) - known)
    if unknown:
        raise Problem(422, f"unknown field {unknown[0][:64]!r}; known: {', '.join(sorted(known))}")


def _text(body: dict[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= TASK_MAX_CHARS:
        raise Problem(422, f"`{field}` must be a text of 1 to {TASK_MAX_CHARS} characters")
    return value


def _number(text: str, field: str, *, most: int) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 12:
        raise Problem(422, f"`{field}` must be a whole number")
    return min(int(text), most)


async def _unless_gone(request: Request, waiting: Callable[[], Awaitable[_T]]) -> _T:
    """Wait for something that changes nothing, but no longer than the one who asked: a wait holds a place here."""
    found: list[_T] = []
    failure: list[StoreUnavailable | StoreBehind] = []

    async def cancel_when_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_when_gone)
        try:
            found.append(await waiting())
        except (StoreUnavailable, StoreBehind) as error:
            failure.append(error)  # raised below: inside the group it would arrive wrapped
        tasks.cancel_scope.cancel()
    if failure:
        raise failure[0]
    if not found:
        raise Problem(400, "the request broke off")
    return found[0]
