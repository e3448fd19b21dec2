"""Drives one run of `retail` over the API: start it, change it at its moment, see it to its end, gather the evidence.

Knows the API's routes and what moments look like in a log. Does not judge: that is `retail_verdict`. All waits are
bounded; what does not come in time is said in the evidence and never passed over.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx

from simulators.checks_input import Entry
from simulators.retail_cases import Case, MomentKind
from simulators.retail_stack import Stack
from simulators.retail_verdict import BLOCKED_PHASE, Evidence, Line

HTTP_LIMIT_S = 30.0
MOMENT_LIMIT_S = 20.0
RUN_LIMIT_S = 75.0
QUIET_LIMIT_S = 20.0
LOG_WAIT_MS = 1_000
LOG_PAGE_ENTRIES = 1_000
QUIET_POLL_S = 0.1
#: Answers of a server that is busy or away are asked for again so often.
ASKS_MAX = 5
IDLE_CONNECTIONS_MAX = 100


class ApiError(Exception):
    """The API answered something that the driver cannot go on with; the message holds its words."""


@dataclass
class Api:
    """The orchestrator's API, as people use it."""

    http: httpx.AsyncClient
    stack: Stack
    #: Prefix of request ids: the same round, sent again, is the same requests.
    name: str

    async def get(self, path: str, **query: Any) -> Any:
        """A GET, asked again when the connection breaks off."""
        return await self._ask("GET", f"{self.stack.url}{path}", headers=self._token, params=query)

    async def shop_hash(self, service: str, user_id: str) -> str:
        """The hash of a customer's part of a shop's database."""
        url = f"{self.stack.shops[service]}/database/hash"
        return str((await self._ask("GET", url, params={"user_id": user_id}))["sha256"])

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """A change; it carries a request id, so that sending it again is safe."""
        return await self._ask("POST", f"{self.stack.url}{path}", headers=self._token, json=body)

    @property
    def _token(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.stack.token}"}

    async def _ask(self, method: str, url: str, **more: Any) -> Any:
        for ask in range(1, ASKS_MAX + 1):
            try:
                answer = await self.http.request(method, url, **more)
            except httpx.HTTPError as error:
                if ask == ASKS_MAX:
                    raise ApiError(f"{method} {url}: {type(error).__name__} {error}") from None
            else:
                if answer.status_code < 400:
                    return answer.json()
                if answer.status_code != 503 or ask == ASKS_MAX:
                    raise ApiError(f"{method} {url}: {answer.status_code} {answer.text[:500]}")
            await anyio.sleep(0.1 * ask)
        raise AssertionError("the loop returns or raises")


def client() -> httpx.AsyncClient:
    """An HTTP client for many runs at once."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=IDLE_CONNECTIONS_MAX)
    return httpx.AsyncClient(timeout=HTTP_LIMIT_S, limits=limits, trust_env=False)


async def drive(api: Api, case: Case) -> Evidence:
    """One run from its start to its end. What goes wrong on the way stands in the evidence's `trouble`."""
    driven = _Driven(api, case)
    try:
        await driven.start()
        await driven.change()
        await driven.until_over()
        await driven.until_quiet()
    except ApiError as error:
        driven.trouble = driven.trouble or str(error)
    return await driven.evidence()


@dataclass
class _Driven:
    api: Api
    case: Case
    run: str = ""
    log: list[Entry] = field(default_factory=list)
    trouble: str = ""
    phase: str = "none"

    @property
    def _request(self) -> str:
        return f"{self.api.name}-{self.case.task_id}"

    async def start(self) -> None:
        body = {"goal": self.case.goal(), "request_id": f"{self._request}-start"}
        self.run = (await self.api.post("/v1/runs", body))["run"]["run"]

    async def _read_on(self, wait_ms: int) -> bool:
        """Take in what is new in the log; whether there was anything."""
        after = self.log[-1].n if self.log else 0
        path = f"/v1/runs/{self.run}/log"
        page = (await self.api.get(path, after=after, limit=LOG_PAGE_ENTRIES, wait_ms=wait_ms))["entries"]
        self.log += [Entry(self.run, row["n"], row["at"], str(row["commit"]), row["event"]) for row in page]
        return bool(page)

    async def change(self) -> None:
        """Wait for the moment, then send the change. If the moment does not come, it is sent all the same."""
        with anyio.move_on_after(MOMENT_LIMIT_S):
            while not moment_has_come(self.case, self.log):
                await self._read_on(LOG_WAIT_MS)
        body = {**self.case.change(), "reason": "the customer changed their mind", "request_id": self._request}
        await self.api.post(f"/v1/runs/{self.run}/revisions", body)

    async def until_over(self) -> None:
        """Follow the log until the run has finished, or is blocked by something that nobody can find out."""
        with anyio.move_on_after(RUN_LIMIT_S):
            while True:
                news = await self._read_on(LOG_WAIT_MS)
                finished = next((e for e in reversed(self.log) if e.type == "run_finished"), None)
                if finished is not None:
                    self.phase = finished.text("phase")
                    return
                if not news and await self._is_blocked_for_good():
                    self.phase = BLOCKED_PHASE
                    return
        view = await self.api.get(f"/v1/runs/{self.run}")
        self.phase = str(view["state"])

    async def _is_blocked_for_good(self) -> bool:
        """Blocked, nothing on the wire, all other scopes done, and the shop will never have an answer for what is open.

        An answer may still come while a late request is on its way, or while the shop knows the key and is asked again.
        """
        view = await self.api.get(f"/v1/runs/{self.run}")
        if view["state"] != BLOCKED_PHASE:
            return False
        unknown = [row for row in view["effects"] if row["outcome"] == "unknown"]
        if any(row["outcome"] in ("admitted", "sending") for row in view["effects"]):
            return False
        stuck = {row["scope"] for row in unknown}
        if any(not scope["done"] and name not in stuck for name, scope in view["scopes"].items()):
            return False
        keys = {row["operation_id"] for row in unknown}
        lines = self._shop_lines()
        settled = {line["key"] for line in lines if line["event"] in ("executed", "refused", "voided")}
        return bool(unknown) and not keys & settled and not late_pending(lines, keys)

    async def until_quiet(self) -> None:
        """Wait until no late request of this run is still on its way to the shop, and take in the rest of the log."""
        with anyio.move_on_after(QUIET_LIMIT_S) as limit:
            while late_pending(self._shop_lines(), self._keys()):  # noqa: ASYNC110 - it happens in another process
                await anyio.sleep(QUIET_POLL_S)
        if limit.cancelled_caught:
            self.trouble = self.trouble or f"the shop was not quiet after {QUIET_LIMIT_S:.0f} s"
        await self._read_on(0)

    def _keys(self) -> set[str]:
        return {e.text("key") for e in self.log if e.type == "effect_admitted"}

    def _shop_lines(self) -> list[Line]:
        return read_lines(self.api.stack.journals[self.case.service])

    async def evidence(self) -> Evidence:
        """What is known of the run now."""
        unresolved: list[Any] = []
        shop_hash = ""
        try:
            if self.run:
                unresolved = (await self.api.get(f"/v1/runs/{self.run}/unresolved"))["unresolved"]
                await self._read_on(0)
            shop_hash = await self.api.shop_hash(self.case.service, self.case.user_id)
        except (ApiError, KeyError) as error:
            self.trouble = self.trouble or f"the evidence could not be gathered: {error}"
        lines = self._shop_lines()
        return Evidence(self.run, self.log, lines, shop_hash, self.phase, unresolved, self.trouble)


# --- logs and journals -----------------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[Line]:
    """A journal's lines; one without its end is not there yet."""
    data = path.read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def late_pending(lines: list[Line], keys: set[str]) -> bool:
    """Whether a request with one of these keys was dropped to arrive late, and has not arrived.

    When it does, its line has no fault of its own; so have only void's lines.
    """
    due: Counter[str] = Counter()
    for line in lines:
        key = line.get("key")
        if key in keys and line["event"] == "dropped" and line.get("fault") == "late":
            due[key] += 1
        elif key in keys and line.get("fault") is None and line["event"] != "voided":
            due[key] -= 1
    return any(count > 0 for count in due.values())


def moment_has_come(case: Case, log: list[Entry]) -> bool:
    """Whether the log has reached the case's moment, or can no longer reach it."""
    mine: list[str] = []
    settled: set[str] = set()
    for entry in log:
        if entry.type == "effect_admitted" and entry.text("scope") == case.redirected:
            mine.append(entry.text("attempt"))
        elif _settles(entry):
            settled.add(str(entry.event.get("attempt")))
        elif entry.type in ("run_finished", "effect_classified"):
            return True  # over, or held up by something unknown: the moment is not sure to come any more
    match case.moment.kind:
        case MomentKind.BEFORE:
            return bool(log)
        case MomentKind.IN_FLIGHT:
            return len(mine) >= case.moment.k
        case MomentKind.BETWEEN:
            return len(mine) >= case.moment.k and mine[case.moment.k - 1] in settled


def _settles(entry: Entry) -> bool:
    if entry.type != "try_recorded":
        return entry.type == "effect_classified" and entry.text("finding") != "unknown"
    outcome = entry.text("outcome")
    return outcome == "ok" or (outcome == "not_executed" and not entry.number("retry_at", 0))
