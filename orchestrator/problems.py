"""What goes wrong in the API, as problem+json (RFC 9457), and the two layers that every request passes first.

Knows statuses, tokens and body sizes. Does not know runs. Every answer that is no success is a problem document:
`type`, `title`, `status`, `detail` (what to do), and what helps a program: `in_force`, `known`, `errors`, `faults`.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES_MAX = 1024 * 1024
PROBLEM_TYPE = "application/problem+json"
#: Answered without a token: whether the process lives is no secret.
OPEN_PATHS = frozenset({"/healthz"})


class Problem(Exception):
    """A request that cannot be done. `code` names the kind for programs."""

    def __init__(self, status: int, code: str, detail: str, **more: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.more = more

    def body(self) -> dict[str, Any]:
        """The document."""
        return {
            "type": f"urn:regate:problem:{self.code}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            **self.more,
        }

    def headers(self) -> dict[str, str]:
        """Headers that belong to the status."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": "1"} if self.status == 503 else {}


def malformed(errors: Sequence[str]) -> Problem:
    """A body whose fields are wrong; each error is `place: words`."""
    pairs = [error.partition(": ") for error in errors]
    fields = [{"field": place, "detail": words or place} for place, _, words in pairs]
    return Problem(422, "malformed", "; ".join(errors[:5]), errors=fields)


class Entrance:
    """Lets a request in that carries the token and whose body is not too large. The body is read before it goes on."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        if scope["path"] not in OPEN_PATHS and not self._may(headers.get(b"authorization", b"")):
            words = "send `Authorization: Bearer TOKEN`; the token stands in endpoint.json in the data directory"
            await _answer(send, Problem(401, "unauthorized", words))
            return
        length = headers.get(b"content-length", b"")
        body = None if length.isdigit() and int(length) > BODY_BYTES_MAX else await _read(receive)
        if body is None:
            await _answer(send, Problem(413, "too-large", f"a body has at most {BODY_BYTES_MAX} bytes"))
            return
        await self._app(scope, _replayed(body, receive), send)

    def _may(self, header: bytes) -> bool:
        kind, _, value = header.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(value.strip(), self._token)


async def _read(receive: Receive) -> bytes | None:
    """The body; None when it is too large. A client that went away has an empty one, and nobody to be answered."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > BODY_BYTES_MAX:
            return None
        if not message.get("more_body"):
            return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _answer(send: Send, problem: Problem) -> None:
    body = json.dumps(problem.body()).encode()
    headers = {"content-type": PROBLEM_TYPE, "content-length": str(len(body)), "connection": "close"}
    headers |= {name.lower(): value for name, value in problem.headers().items()}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
