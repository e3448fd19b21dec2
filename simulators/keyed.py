"""Idempotency keys, lookup, a void that is atomic with execution, and requests with an expiry, in front of any rules.

Knows keys, requests and the journal. What an action does is the rules' matter; faults and connections are in
`entrance.py`.

A key is in one of four states: unknown, busy (its first request is being processed), settled (executed or refused, for
ever), voided (never executed, never will be). Voiding and executing exclude each other because both check and change
the key without a pause in between; whoever asks about a busy key waits until it is not.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

import anyio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from simulators.entrance import Arrival, BadRequestError, Entrance, OwnTime, Reply, check_credential, read_arrival
from simulators.faults import Fault
from simulators.journal import JournalError, Line
from simulators.shop import Action, Executed, Refused


@dataclass(frozen=True)
class Settled:
    """The final outcome of a key: the reply that every repetition gets."""

    payload_sha256: str
    status: int
    body: dict[str, Any]

    def described(self) -> dict[str, Any]:
        """As lookup and void tell it."""
        if self.status == 200:
            told: dict[str, Any] = {"state": "executed", "receipt": self.body["receipt"]}
        else:
            told = {"state": "refused", "error": self.body}
        return {**told, "status": self.status, "payload_sha256": self.payload_sha256}


@dataclass(frozen=True)
class Voided:
    """The key was never used for an execution and never will be."""


VOIDED = Voided()


class Rules(Protocol):
    """What a service does with an action; deterministic, so that a journal can be replayed."""

    def execute(self, action: Action) -> Executed | Refused:
        """Do it, or say by which rule not."""


class KeyedService:
    """Rules behind a key table. Rebuilt at start from the journal."""

    def __init__(self, rules: Rules, entrance: Entrance, *, can_void: bool = True, work_ms: int = 0) -> None:
        """`work_ms` is how long the service thinks before it executes, so that a key can be seen busy.

        Raises:
            JournalError: the journal's executions do not happen again under these rules.
        """
        self.rules = rules
        self.entrance = entrance
        self.can_void = can_void
        self._work_ms = work_ms
        self._keys: dict[str, Settled | Voided] = {}
        self._busy: dict[str, anyio.Event] = {}
        self._orders: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        for line in entrance.journal.lines:
            self._replay(line)

    def _replay(self, line: Line) -> None:
        self.entrance.recall(line)
        key: str | None = line.get("key")
        match line["event"]:
            case "executed":
                outcome = self.rules.execute(Action(line["action"], line["arguments"]))
                if not isinstance(outcome, Executed) or outcome.receipt != line["receipt"]:
                    where = f"{self.entrance.journal.path}:{line['n']}"
                    raise JournalError(f"{where}: does not happen again on this data; start with the data it began on")
                if key is not None:
                    self._keys[key] = Settled(line["payload_sha256"], 200, {"receipt": line["receipt"]})
            case "refused" if key is not None:
                self._keys[key] = Settled(line["payload_sha256"], 422, line["error"])
            case "voided" if key is not None:
                self._keys[key] = VOIDED

    async def process(self, arrival: Arrival, fault: Fault | None) -> Reply:
        """Do an arrival's work, if it is to be done, and return its reply once the journal holds it."""
        reply = self._known(arrival, fault)
        if reply is not None:
            await self.entrance.journal.durable()
            return reply
        if arrival.key is None:
            return await self._fresh(arrival, fault)
        free = self._busy[arrival.key] = anyio.Event()
        try:
            return await self._fresh(arrival, fault)
        finally:
            del self._busy[arrival.key]
            free.set()

    def _known(self, arrival: Arrival, fault: Fault | None) -> Reply | None:
        """The reply that the key alone decides, or None when this is the key's first request."""
        if arrival.key is None:
            return None
        if arrival.key in self._busy:
            return self._turn_away(
                arrival, fault, 409, code="in_progress", message="its first request is being processed"
            )
        known = self._keys.get(arrival.key)
        match known:
            case None:
                return None
            case Voided():
                return self._turn_away(arrival, fault, 410, code="voided", message="the key was voided")
            case Settled():
                if known.payload_sha256 != arrival.payload_sha256:
                    body = {"code": "key_reused", "message": "the key was used with another payload"}
                    self.entrance.note("key_reused", arrival, fault, error=body)
                    return Reply(422, body)
                self.entrance.note("replayed", arrival, fault, status=known.status)
                return Reply(known.status, known.body, replay=True)
            case _:
                assert_never(known)

    async def _fresh(self, arrival: Arrival, fault: Fault | None) -> Reply:
        action = _parsed(arrival)
        if action is None:
            reply = self._turn_away(arrival, fault, 400, code="malformed", message="the body must be a JSON object")
        elif self._work_ms:
            async with self._orders[action.target]:
                await anyio.sleep(self._work_ms / 1000)
                reply = self._perform(action, arrival, fault)
        else:
            reply = self._perform(action, arrival, fault)
        await self.entrance.journal.durable()
        return reply

    def _perform(self, action: Action, arrival: Arrival, fault: Fault | None) -> Reply:
        """Expiry, rules, key table and journal line in one step without a pause."""
        not_after_ms = arrival.not_after_ms if self.can_void else None
        if not_after_ms is not None and self.entrance.clock() > not_after_ms:
            body: dict[str, Any] = {"code": "expired", "message": "the request's X-Not-After has passed"}
            self.entrance.note("expired", arrival, fault, arguments=action.arguments, error=body)
            return Reply(412, body)
        outcome = self.rules.execute(action)
        match outcome:
            case Executed(receipt):
                reply = Reply(200, {"receipt": receipt})
                self.entrance.note("executed", arrival, fault, arguments=action.arguments, receipt=receipt)
            case Refused(rule, message):
                reply = Reply(422, {"code": "policy", "rule": rule.value, "message": message})
                self.entrance.note("refused", arrival, fault, arguments=action.arguments, error=reply.body)
            case _:
                assert_never(outcome)
        if arrival.key is not None:
            self._keys[arrival.key] = Settled(arrival.payload_sha256, reply.status, reply.body)
        return reply

    def _turn_away(self, arrival: Arrival, fault: Fault | None, status: int, *, code: str, message: str) -> Reply:
        body = {"code": code, "message": message}
        self.entrance.note("rejected", arrival, fault, error=body)
        return Reply(status, body)

    async def lookup(self, key: str) -> Reply:
        """What became of a key; waits while it is busy."""
        await self._settled(key)
        known = self._keys.get(key)
        match known:
            case None:
                return Reply(404, {"state": "not_found"})
            case Voided():
                return Reply(200, {"state": "voided"})
            case Settled():
                return Reply(200, known.described())
            case _:
                assert_never(known)

    async def void(self, key: str) -> Reply:
        """Make sure that the key is never executed, or say what it was used for."""
        await self._settled(key)
        known = self._keys.get(key)
        if isinstance(known, Settled):
            return Reply(200, known.described())
        if known is None:
            self._keys[key] = VOIDED
            self.entrance.note("voided", Arrival("void", b"", key), None)
        await self.entrance.journal.durable()
        return Reply(200, {"state": "voided"})

    async def _settled(self, key: str) -> None:
        """Return when the key is not busy and everything said of it is on disk; until the next pause it stays so."""
        while True:
            while (busy := self._busy.get(key)) is not None:
                await busy.wait()
            await self.entrance.journal.durable()
            if key not in self._busy:
                return


def _parsed(arrival: Arrival) -> Action | None:
    try:
        arguments = json.loads(arrival.raw)
    except (ValueError, RecursionError):
        return None
    return Action(arrival.action, arguments) if isinstance(arguments, dict) else None


def keyed_routes(service: KeyedService, actions: Collection[str]) -> list[Route]:
    """Writes, lookup by key, and void where the service offers it."""
    entrance = service.entrance

    async def act(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in actions:
            raise BadRequestError(404, "unknown_action", f"no action {name!r}; one of {', '.join(actions)}")
        check_credential(request, entrance.credential)
        return await entrance.admit(await read_arrival(request, name), service.process)

    def about_key(ask: Callable[[str], Awaitable[Reply]], action: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            check_credential(request, entrance.credential)
            return (await ask(request.path_params["key"])).response()

        answer.__name__ = action
        return answer

    routes = [
        Route("/actions/{name}", act, methods=["POST"]),
        Route("/keys/{key:path}", about_key(service.lookup, "lookup"), methods=["GET"]),
    ]
    if service.can_void:
        routes.insert(0, Route("/keys/{key:path}/void", about_key(service.void, "void"), methods=["POST"]))
    return routes


def shared_routes(entrance: Entrance, kind: str) -> list[Route]:
    """What every simulated service offers: its journal, for the independent check only, and a sign of life."""

    async def journal(request: Request) -> Response:
        await entrance.journal.durable()
        return JSONResponse(entrance.journal.lines)

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok", "kind": kind})

    return [Route("/journal", journal), Route("/healthz", healthz)]


def assembled(routes: list[Route], entrance: Entrance) -> Starlette:
    """An application whose late requests live as long as it does."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            entrance.tasks = tasks
            yield
            tasks.cancel_scope.cancel()

    def bad_request(request: Request, error: Exception) -> Response:
        if not isinstance(error, BadRequestError):
            raise error
        return error.reply.response()

    return Starlette(
        routes=routes,
        middleware=[Middleware(OwnTime, clock=entrance.clock)],
        exception_handlers={BadRequestError: bad_request},
        lifespan=lifespan,
    )
