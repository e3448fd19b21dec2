"""What a story does with a running stack: it starts and changes runs, waits for log entries, asks the gateway, checks.

Knows the orchestrator's API, the gateway's routes and the checker's command line. Does not know processes (stack.py).
A story waits for what the log says, never for a time to pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx

from admission.wire import Grant, sign_grant
from tests.scenario.stack import Stack

Entry = dict[str, Any]
WAIT_S = 20.0
POLL_S = 0.02
CHECK_LIMIT_S = 60.0
OPEN_PHASES = ("running", "redirecting", "paused", "blocked", "cancelling")


def refund(order: str, amount_cents: int = 100) -> dict[str, Any]:
    """A planned refund."""
    arguments = {"order_id": order, "amount_cents": amount_cents, "payment_method_id": "card-1"}
    return {"service": "payments", "action": "refund", "arguments": arguments}


def mail(to: str, *, service: str = "mail", template: str = "notice") -> dict[str, Any]:
    """A planned message."""
    return {"service": service, "action": "send_message", "arguments": {"to": to, "template": template}}


def cancel_order(order: str, reason: str = "no longer needed") -> dict[str, Any]:
    """A planned cancellation in the shop."""
    return {
        "service": "shop", "action": "cancel_pending_order", "arguments": {"order_id": order, "reason": reason},
    }  # fmt: skip


def scope(*actions: dict[str, Any], agent: str = "plan", needs: tuple[str, ...] = ()) -> dict[str, Any]:
    """One branch of a plan."""
    plan: dict[str, Any] = {"agent": agent, "actions": list(actions)}
    if not actions:
        plan = {"agent": agent, "brief": "do what is asked"}
    return plan | ({"needs": list(needs)} if needs else {})


def goal(**scopes: dict[str, Any]) -> dict[str, Any]:
    """A whole goal."""
    return {"text": "settle the orders", "requirements": [], "plan": scopes}


def some(prefix: str) -> str:
    """A name that nothing else in this stack has."""
    return f"{prefix}-{uuid.uuid4().hex[:8]}"


class Story:
    """One test's view of a stack."""

    def __init__(self, stack: Stack, http: httpx.AsyncClient) -> None:
        self.stack = stack
        self.http = http

    # -- changing a run -----------------------------------------------------------------------------------------------

    async def start(self, **scopes: dict[str, Any]) -> str:
        """Start a run on these scopes; its id."""
        reply = await self.http.post("/v1/runs", json={"goal": goal(**scopes), "request_id": uuid.uuid4().hex})
        assert reply.status_code == 201, reply.text
        return str(reply.json()["run"]["run"])

    async def revise(self, run: str, *, kind: str = "correct", **more: Any) -> httpx.Response:
        """Send a revision: `plan` holds the scopes, other fields go as they are."""
        plan = more.pop("plan", {})
        text = more.pop("text", "")
        new = {"plan": plan} | ({"text": text} if text else {})
        return await self.http.post(f"/v1/runs/{run}/revisions", json={"kind": kind, "goal": new, **more})

    async def corrected(self, run: str, **scopes: dict[str, Any]) -> int:
        """Change these scopes; the number of the revision now in force."""
        reply = await self.revise(run, plan=scopes)
        assert reply.status_code == 200, reply.text
        return int(reply.json()["in_force"])

    async def steer(self, run: str, verb: str, **more: Any) -> httpx.Response:
        """Pause, resume or cancel."""
        return await self.http.post(f"/v1/runs/{run}/{verb}", json={"reason": "a test asks", **more})

    async def insist(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """POST with a request id, again until somebody answers: that is what request ids are for."""
        with anyio.fail_after(WAIT_S * 2):
            while True:
                try:
                    reply = await self.http.post(path, json=dict(body))
                    if reply.status_code != 503:
                        return reply
                except httpx.TransportError:
                    pass
                await anyio.sleep(POLL_S * 2)

    # -- looking at it ------------------------------------------------------------------------------------------------

    async def view(self, run: str) -> dict[str, Any]:
        """The run's view."""
        return dict((await self._patiently(f"/v1/runs/{run}")).json())

    async def log(self, run: str, after: int = 0) -> list[Entry]:
        """The run's events, each with its `position`, its commit, and the store's time when it was appended."""
        found: list[Entry] = []
        while True:
            query = {"after": found[-1]["n"] if found else after, "limit": 1000}
            page = (await self._patiently(f"/v1/runs/{run}/log", query)).json()
            found += page["entries"]
            if page["cursor"] is None:
                return [
                    {**e["event"], "position": e["n"], "appended_at": e["at"], "commit": e["commit"]} for e in found
                ]

    async def _patiently(self, path: str, query: Mapping[str, Any] | None = None) -> httpx.Response:
        """GET, again while nobody answers: a test may just have killed whom it asks."""
        with anyio.fail_after(WAIT_S):
            while True:
                try:
                    reply = await self.http.get(path, params=query)
                    if reply.status_code != 503:
                        assert reply.status_code == 200, reply.text
                        return reply
                except httpx.TransportError:
                    pass
                await anyio.sleep(POLL_S * 2)

    async def wait_log(
        self, run: str, holds: Callable[[list[Entry]], Any], *, seconds: float = WAIT_S, what: str = ""
    ) -> list[Entry]:
        """Wait until `holds(entries)`; the entries. On failure, says how the log stood and who complained."""
        entries: list[Entry] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            entries += await self.log(run, entries[-1]["position"] if entries else 0)
            if holds(entries):
                return entries
            await anyio.sleep(POLL_S)
        tail = "\n".join(json.dumps(_short(entry)) for entry in entries[-25:])
        raise AssertionError(f"waited {seconds} s in vain {what} in run {run}:\n{tail}\n{self.stack.said()}")

    async def wait_event(self, run: str, kind: str, *, count: int = 1, **fields: Any) -> Entry:
        """Wait for the `count`-th event of this type with these fields; that event."""

        def there(entries: list[Entry]) -> bool:
            return len(select(entries, kind, **fields)) >= count

        entries = await self.wait_log(run, there, what=f"for {kind} {fields}")
        return select(entries, kind, **fields)[count - 1]

    async def wait_end(self, run: str, phase: str = "completed", *, seconds: float = WAIT_S) -> dict[str, Any]:
        """Wait until the run has ended, as it should; its view."""

        def ended(entries: list[Entry]) -> bool:
            return bool(select(entries, "run_finished"))

        await self.wait_log(run, ended, seconds=seconds, what="for the end")
        view = await self.view(run)
        assert view["state"] == phase, view
        return view

    async def wait_view(
        self, run: str, holds: Callable[[dict[str, Any]], Any], *, seconds: float = WAIT_S
    ) -> dict[str, Any]:
        """Wait until `holds(view)`."""
        until = time.monotonic() + seconds
        view: dict[str, Any] = {}
        while time.monotonic() < until:
            view = await self.view(run)
            if holds(view):
                return view
            await anyio.sleep(POLL_S)
        raise AssertionError(f"waited {seconds} s in vain: {json.dumps(view, indent=1)[-6000:]}\n{self.stack.said()}")

    async def child_at_work(self, run: str, name: str, *, revision: int = 1) -> dict[str, Any]:
        """Wait until a scope's child has claimed its task; its row."""
        planned = await self.wait_event(run, "child_planned", scope=name, revision=revision)
        await self.wait_event(run, "child_claimed", child=planned["child"])
        return child_of(await self.view(run), planned["child"])

    # -- asking the gateway in a child's name -------------------------------------------------------------------------

    def grant_for(self, child: Mapping[str, Any], /, **fields: Any) -> str:
        """A grant like the one that the child has, or with other fields."""
        key = fields.pop("key", self.stack.grant_key)
        grant = {
            "run": child["run"], "scope": child["scope"], "child": child["child"], "revision": child["revision"],
            "expires_ms": time.time_ns() // 1_000_000 + 3_600_000,
        }  # fmt: skip
        return sign_grant(Grant(**{**grant, **fields}), key)

    async def ask(
        self, child: Mapping[str, Any], action: Mapping[str, Any], *, grant: str = "", timeout: float = 30.0
    ) -> httpx.Response:
        """Ask for an effect as the child would."""
        headers = {"Authorization": f"Bearer {grant or self.grant_for(child)}"}
        url = f"{self.stack.url('gateway')}/v1/effects"
        async with httpx.AsyncClient(trust_env=False, timeout=timeout) as http:
            return await http.post(url, json={"task": child["task"], **action}, headers=headers)

    async def at_gateway(self, path: str, *, grant: str = "") -> httpx.Response:
        """GET something from the gateway."""
        headers = {"Authorization": f"Bearer {grant}"} if grant else {}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            return await http.get(f"{self.stack.url('gateway')}{path}", headers=headers)

    # -- the end of every story ---------------------------------------------------------------------------------------

    async def checker(self) -> dict[str, Any]:
        """What the independent checker says of all runs of this stack and all journals; there must be no violation."""
        folder = self.stack.folder / "export"
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "simulators.checker", "-o", "json"]
        for run in await self._all_runs():
            lines: list[dict[str, Any]] = [{"run": run}]
            for entry in await self.log(run):
                position, at, commit = (entry.pop(name) for name in ("position", "appended_at", "commit"))
                lines.append({"n": position, "at": at, "commit": commit, "event": entry})
            (folder / f"{run}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            command += ["--log", str(folder / f"{run}.jsonl")]
        for service in self.stack.spec.services:
            command += ["--journal", f"{service}={self.stack.journal(service)}"]
        done = await anyio.run_process(command, check=False, stderr=subprocess.STDOUT)
        said = done.stdout.decode()
        assert done.returncode == 0, f"{said}\n{self.stack.said()}"
        verdict: dict[str, Any] = json.loads(said)
        return verdict

    async def _all_runs(self) -> list[str]:
        found: list[str] = []
        cursor = ""
        while True:
            page = (await self._patiently("/v1/runs", {"limit": 100, "cursor": cursor})).json()
            found += [row["run"] for row in page["runs"]]
            if page["cursor"] is None:
                return found
            cursor = page["cursor"]


def select(entries: list[Entry], kind: str, **fields: Any) -> list[Entry]:
    """The events of a type with these fields."""
    return [e for e in entries if e["type"] == kind and all(e.get(name) == value for name, value in fields.items())]


def child_of(view: Mapping[str, Any], child: str) -> dict[str, Any]:
    """A child's row in a view."""
    return next(dict(row) for row in view["children"] if row["child"] == child)


def children_in(view: Mapping[str, Any], name: str, revision: int | None = None) -> list[dict[str, Any]]:
    """The children of a scope, oldest first."""
    return [c for c in view["children"] if c["scope"] == name and revision in (None, c["revision"])]


def effects_on(view: Mapping[str, Any], target: str) -> list[dict[str, Any]]:
    """The attempts on a target, oldest first."""
    return [dict(row) for row in view["effects"] if row["target"] == target]


def _short(entry: Entry) -> dict[str, Any]:
    kept = "position at type child scope revision attempt state outcome finding reason detail".split()
    return {name: entry[name] for name in kept if name in entry}


@asynccontextmanager
async def told_on(stack: Stack) -> AsyncIterator[Story]:
    """A story on a stack whose parts all run."""
    stack.ensure(*stack.spec.services, "plan", "gateway", "orchestrator")
    headers = {"Authorization": f"Bearer {stack.token}"}
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=stack.url("api"), headers=headers, trust_env=False, timeout=30, limits=limits
    ) as http:
        yield Story(stack, http)
