"""An API of a few canned answers, over real HTTP, that remembers what it was asked and can break connections.

Knows the routes' shapes as the command relies on them. Does not know runs: whatever it is told to answer, it answers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

TOKEN = "token-of-the-fake"
RUN = "0123456789ab"


@dataclass(frozen=True)
class Asked:
    """One request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    body: dict[str, Any]
    token: str


Answer = tuple[int, Any]


@dataclass
class FakeApi:
    """`answers`: (method, path) → status and JSON, or what makes them. `drops`: so many changes are cut off first."""

    url: str = ""
    answers: dict[tuple[str, str], Answer | Callable[[Asked], Answer]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    drops: int = 0

    def changes(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.method == "POST"]

    def answer(self, asked: Asked) -> Answer | None:
        """None: break the connection."""
        self.asked.append(asked)
        if asked.method == "POST" and self.drops:
            self.drops -= 1
            return None
        found = self.answers.get((asked.method, asked.path), (404, problem(404, f"nothing at {asked.path}")))
        return found(asked) if callable(found) else found

    def endpoint(self, data: Path, *, mode: int = 0o600, **more: Any) -> Path:
        """Write the endpoint file, as a server of that directory does."""
        data.mkdir(exist_ok=True)
        path = data / "endpoint.json"
        path.write_text(json.dumps({"url": self.url, "token": TOKEN, **more}))
        path.chmod(mode)
        return data


def problem(status: int, detail: str, **more: Any) -> dict[str, Any]:
    return {"type": "about:blank", "title": "Problem", "status": status, "detail": detail, **more}


def effect(number: int, outcome: str = "succeeded") -> dict[str, Any]:
    return {
        "attempt": f"{RUN}-e{number}", "run": RUN, "scope": "main", "revision": 1, "child": "c1", "service": "shop",
        "operation": "cancel", "target": "#1", "outcome": outcome, "input_ref": "ab" * 32,
        "operation_id": f"rg-{number}", "observed_result": {"n": number},
        "tries": [{"n": 1, "outcome": "ok"}], "why": "",
    }  # fmt: skip


def view(state: str = "running", revision: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "run": RUN, "state": state, "revision": {"in_force": revision}, "text": "a goal", "version": 7,
        "goal": {"text": "a goal", "plan": {"main": {"agent": "plan", "brief": "old", "needs": ["other"]}}},
        "revisions": [{"n": revision, "changed": {"scopes": ["main"]}, "kept": {"scopes": ["mail"]}, "text": "a goal"}],
        "scopes": {"main": {"gate": "open", "waits_for": []}}, "effects": [effect(1)], "unresolved": [], **more,
    }  # fmt: skip


def usual_answers() -> dict[tuple[str, str], Answer | Callable[[Asked], Answer]]:
    """One run with an effect, and every change accepted."""
    run = f"/v1/runs/{RUN}"
    changed = {"line": "it changed; next: nothing", "in_force": 1, "run": view()}
    pages: dict[tuple[str, str], Answer | Callable[[Asked], Answer]] = {
        ("GET", "/healthz"): (200, {"status": "ok"}),
        ("GET", "/v1/runs"): (200, {"runs": [view()], "cursor": None}),
        ("GET", run): (200, view()),
        ("GET", f"{run}/effects"): (200, {"run": RUN, "effects": [effect(1), effect(2)], "cursor": None}),
        ("GET", f"{run}/log"): (
            200,
            {
                "entries": [{"n": 1, "at": 1_796_076_072_048, "event": {"type": "run_started", "at": 1, "by": "x"}}],
                "updates": [{"seq": 1, "kind": "start", "revision": 1}],
                "cursor": None,
            },
        ),
        ("GET", f"/v1/effects/{RUN}-e1"): (200, effect(1)),
        ("GET", "/v1/attention"): (200, {"items": [{"kind": "effect", "id": f"{RUN}-e2", "run": RUN, "why": "lost"}]}),
        ("GET", "/v1/doctor"): (200, {"store": {"format": 1}, "problems": []}),
        ("POST", "/v1/runs"): (201, changed),
        ("POST", f"/v1/effects/{RUN}-e1/resolve"): (200, {**changed, "effect": effect(1)}),
    }
    for verb in ("revisions", "pause", "resume", "cancel"):
        pages["POST", f"{run}/{verb}"] = (200, changed)
    for short in ("last", "01"):
        pages["GET", f"/v1/runs/{short}/effects"] = (200, {"run": RUN, "effects": [], "cursor": None})
    return pages


def _handler(api: FakeApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            parts = urlsplit(self.path)
            token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
            answer = api.answer(Asked(self.command, parts.path, dict(parse_qsl(parts.query)), body, token))
            self.close_connection = answer is None
            if answer is None:
                return
            status, value = answer
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _serve  # noqa: N815 - named by the library

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Nothing: pytest shows what matters."""

    return Handler


@contextmanager
def fake_api() -> Iterator[FakeApi]:
    """A fake at work on a free port."""
    api = FakeApi(answers=usual_answers())
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(api)) as server:
        server.daemon_threads = True
        api.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()
