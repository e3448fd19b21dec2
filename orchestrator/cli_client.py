"""The command's way to the API: where it is, who asks, and what an answer means for the exit code.

Knows the endpoint file in the data directory, problem documents (RFC 9457), and that every change carries a request id,
which makes it safe to send again when the connection broke and nobody can tell whether it arrived. Does not know what
the answers look like when they are shown, and never speaks to the store.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from orchestrator.cli_output import CommandFailed, Exit
from orchestrator.dev_lock import is_supervised

ENDPOINT_FILE = "endpoint.json"
ENDPOINT_BYTES_MAX = 64 * 1024
DATA_DEFAULT = Path("regate-data")
CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 40.0
HEALTH_TIMEOUT_S = 2.0
#: Pauses before a request is sent again after a broken connection, in seconds.
RESEND_DELAYS_S = (0.1, 0.3, 1.0)
#: So long a server that its supervisor starts again is waited for.
RESTART_TIMEOUT_S = 10.0
RESTART_POLL_INTERVAL_S = 0.05
PAGE_ROWS = 200
ROWS_MAX = 10_000
#: The problem of a name that means several runs: the command was not precise, nothing stands against it.
AMBIGUOUS = "ambiguous"
UNAUTHORIZED = "unauthorized"
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an API is and what opens it. `data` is the directory it was found through, `pid` its process if known."""

    url: str
    token: str = field(repr=False)
    data: Path | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Where:
    """What the user said about where the API is. Flags go before variables, variables before ./regate-data."""

    url: str | None = None
    token: str | None = field(default=None, repr=False)
    data: Path | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)

    @property
    def directory(self) -> Path:
        """The data directory that is meant."""
        if self.data is not None:
            return self.data
        told = self.environment.get("REGATE_DATA")
        return Path(told) if told else DATA_DEFAULT

    def find(self) -> Endpoint | None:
        """The endpoint, None when its directory names none. Raises CommandFailed for one that cannot be used."""
        url = self.url or (None if self.data is not None else self.environment.get("REGATE_URL"))
        noted = read_endpoint(self.directory)
        if url is None:
            return noted if noted is None or self.token is None else Endpoint(noted.url, self.token, noted.data)
        check_url(url)
        token = self.token or self.environment.get("REGATE_TOKEN")
        # A noted token opens the noted address only: it must not travel to another one.
        if token is None and noted is not None and noted.url.rstrip("/") == url.rstrip("/"):
            return noted
        if token is None:
            raise CommandFailed(Exit.USAGE, f"no token for {url}: give --token, or set REGATE_TOKEN")
        return Endpoint(url.rstrip("/"), token)


def check_url(url: str) -> None:
    """Raises CommandFailed when this is no address of an API."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise CommandFailed(Exit.USAGE, f"{url!r} is no address: give http(s)://HOST[:PORT]")


def read_endpoint(directory: Path) -> Endpoint | None:
    """What a running server wrote down in its data directory, None when nothing is there. Raises CommandFailed."""
    path = directory / ENDPOINT_FILE
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = json.loads(file.read(ENDPOINT_BYTES_MAX))
        url, token, pid = str(content["url"]), str(content["token"]), content.get("pid")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CommandFailed(Exit.FAILED, f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CommandFailed(
            Exit.FAILED, f"{path} is damaged: restart the server of this directory, it writes the file anew"
        ) from None
    if mode & 0o077:
        raise CommandFailed(
            Exit.FAILED, f"{path} holds a token and others can read it: `chmod 600 {path}`, and restart the server"
        )
    check_url(url)
    return Endpoint(url.rstrip("/"), token, directory, pid if isinstance(pid, int) else None)


def how_to_start(directory: Path) -> str:
    """The command that starts what is missing."""
    where = "" if directory == DATA_DEFAULT else f" --data {shlex.quote(str(directory))}"
    return f"start one with `regate dev{where}` (everything on this machine) or `regate serve{where}`"


def unavailable(where: Where, detail: str) -> CommandFailed:
    """Nobody answers: says so, and how to start somebody; where `regate dev` runs, that it is the one to look at."""
    if where.url is None and is_supervised(where.directory):
        logs = where.directory / "logs"
        words = f"{detail}; it is being started again by this directory's `regate dev`: try again, or look in {logs}"
        return CommandFailed(Exit.UNAVAILABLE, words)
    return CommandFailed(Exit.UNAVAILABLE, f"{detail}; {how_to_start(where.directory)}, or name another with --url")


def is_alive(endpoint: Endpoint) -> bool:
    """Whether the API answers there. A noted process that is gone means no, whoever has its port now."""
    if endpoint.pid is not None and not _process_lives(endpoint.pid):
        return False
    try:
        reply = httpx.get(f"{endpoint.url}/healthz", timeout=HEALTH_TIMEOUT_S, trust_env=not _is_local(endpoint.url))
    except httpx.HTTPError:
        return False
    return reply.is_success


def restarted(directory: Path, say: Callable[[str], None] | None = None) -> Endpoint | None:
    """The endpoint of a server that `regate dev` is starting again, once it answers.

    None when no `regate dev` keeps this directory, or it did not succeed in time.
    """
    until = time.monotonic() + RESTART_TIMEOUT_S
    told = False
    while is_supervised(directory) and time.monotonic() < until:
        endpoint = read_endpoint(directory)
        if endpoint is not None and is_alive(endpoint):
            return endpoint
        if say is not None and not told:
            say(f"the server of {directory} is being started again by its `regate dev`: waiting for it")
            told = True
        time.sleep(RESTART_POLL_INTERVAL_S)
    return None


def _process_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _is_local(url: str) -> bool:
    return urlsplit(url).hostname in _LOOPBACK


def new_request_id() -> str:
    """A request id that nobody used before."""
    return f"cli-{uuid.uuid4().hex}"


class ApiRefused(CommandFailed):
    """The API said no. `problem` is its document."""

    def __init__(self, code: Exit, message: str, problem: Mapping[str, Any]) -> None:
        super().__init__(code, message)
        self.problem = problem


class Api:
    """One connection to the API. Every method raises CommandFailed with the exit code that the failure means."""

    def __init__(self, endpoint: Endpoint, where: Where) -> None:
        self._where = where
        self.endpoint = endpoint
        self._http = httpx.Client(
            base_url=endpoint.url,
            headers={"Authorization": f"Bearer {endpoint.token}", "Accept": "application/json"},
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=not _is_local(endpoint.url),  # a proxy of this machine's environment leads away from it
        )

    def __enter__(self) -> Api:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **query: object) -> Any:
        """The JSON at a path; query parameters that are None are left out."""
        return self._ask("GET", path, query=query, body=None)

    def change(self, path: str, body: Mapping[str, Any], *, request_id: str) -> Any:
        """Ask for a change. Sent again under the same request id after a broken connection, so it happens once."""
        return self._ask("POST", path, query={}, body={**body, "request_id": request_id})

    def pages(self, path: str, name: str, *, rows_max: int = ROWS_MAX, **query: object) -> Iterator[dict[str, Any]]:
        """Row after row of a list that comes in pages, at most `rows_max`."""
        cursor: object = None
        count = 0
        while count < rows_max:
            answer = self.get(path, limit=min(PAGE_ROWS, rows_max - count), cursor=cursor, **query)
            page = rows_in(answer, name)
            yield from page
            count += len(page)
            following = next_cursor(answer)
            if not page or following in (None, "", cursor):
                return
            cursor = following

    def _ask(self, method: str, path: str, *, query: Mapping[str, object], body: Mapping[str, Any] | None) -> Any:
        given = {k: _spelled(v) for k, v in query.items() if v is not None}
        delays = iter(RESEND_DELAYS_S)
        waited = False
        while True:
            try:
                reply = self._http.request(method, path, params=given, json=body)
            except (httpx.TimeoutException, httpx.TransportError) as error:
                delay = next(delays, None)
                if delay is None and not waited and self._is_back():
                    waited, delays = True, iter(RESEND_DELAYS_S)
                    continue
                if delay is None:
                    raise self._lost(error, body) from None
                time.sleep(delay)
                continue
            if reply.is_success:
                return _json_of(reply)
            raise self._refused(reply, body)

    def _is_back(self) -> bool:
        """Whether the server that we were asking was started again where it was."""
        found = restarted(self.endpoint.data) if self.endpoint.data is not None else None
        return found is not None and (found.url, found.token) == (self.endpoint.url, self.endpoint.token)

    def _lost(self, error: httpx.HTTPError, body: Mapping[str, Any] | None) -> CommandFailed:
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return unavailable(self._where, f"nobody answers at {self.endpoint.url}")
        return unavailable(
            self._where, f"the connection to {self.endpoint.url} broke before the answer{_resend_hint(body)}"
        )

    def _refused(self, reply: httpx.Response, body: Mapping[str, Any] | None) -> CommandFailed:
        problem = _problem_of(reply)
        status = reply.status_code
        words = problem_words(problem, status)
        if problem.get("code") == UNAUTHORIZED:
            words = (
                f"the token does not open {self.endpoint.url}: give the one in its data directory's endpoint.json "
                "with --token or REGATE_TOKEN"
            )
        elif status in (502, 503, 504):
            words += f"{_resend_hint(body)}; `regate doctor` says how the store is; one of your own is yours to start, "
            words += f"the embedded one is started again by its server, else {how_to_start(self._where.directory)}"
        code = Exit.USAGE if problem.get("code") == AMBIGUOUS else _EXITS.get(status, Exit.FAILED)
        return ApiRefused(code, words, problem)


_EXITS: Mapping[int, Exit] = {
    404: Exit.NOT_FOUND, 409: Exit.CONFLICT, 412: Exit.CONFLICT,
    400: Exit.USAGE, 405: Exit.USAGE, 413: Exit.USAGE, 415: Exit.USAGE, 422: Exit.USAGE,
    502: Exit.UNAVAILABLE, 503: Exit.UNAVAILABLE, 504: Exit.UNAVAILABLE,
}  # fmt: skip


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _resend_hint(body: Mapping[str, Any] | None) -> str:
    request_id = (body or {}).get("request_id")
    if not request_id:
        return ""
    return f"; whether the change was made is not known: the same command with --request-id {request_id} is safe"


def _json_of(reply: httpx.Response) -> Any:
    try:
        return reply.json()
    except ValueError:
        raise CommandFailed(
            Exit.FAILED, f"{reply.request.url.copy_with(query=None)} answered something that is not JSON: is it regate?"
        ) from None


def _problem_of(reply: httpx.Response) -> dict[str, Any]:
    with suppress(ValueError):
        content = reply.json()
        if isinstance(content, dict):
            return content
    return {}


def problem_words(problem: Mapping[str, Any], status: int) -> str:
    """A problem document as sentences: its detail or title, each fault, and the revision in force."""
    detail = problem.get("detail")
    if not isinstance(detail, str) or not detail:
        detail = str(problem.get("title") or f"the API answered with status {status}")
    words = detail.rstrip(".")
    faults = problem.get("faults") or problem.get("errors") or ()
    listed = [_fault_words(fault) for fault in faults] if isinstance(faults, list) else []
    words += "".join(f"\n  - {fault}" for fault in listed if fault not in detail)
    in_force = problem.get("in_force")
    # Of a goal that cannot be worked on, or a run that is not there, no revision needs to be told.
    if status in (409, 412) and in_force and f"revision {in_force}" not in words:
        words += f"; revision {in_force} is in force"
    return words


def _fault_words(fault: object) -> str:
    if isinstance(fault, dict):
        place = fault.get("field") or fault.get("pointer") or ".".join(str(step) for step in fault.get("loc", ()))
        words = fault.get("detail") or fault.get("msg") or fault.get("message") or json.dumps(fault)
        return f"{place}: {words}" if place else str(words)
    return str(fault)


def rows_in(answer: Any, name: str) -> list[dict[str, Any]]:
    """The rows of a list answer: the list itself, or what stands under `name`."""
    found = answer.get(name, answer.get("items", [])) if isinstance(answer, dict) else answer
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def next_cursor(answer: Any) -> object:
    """Where the next page begins, None on the last one."""
    return answer.get("cursor", answer.get("next_cursor")) if isinstance(answer, dict) else None


def part(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="")
