"""One small redirected run, and a process that is killed at a named point of it.

Knows the scenario, what must have come out of it whoever died, and how a case is named. Does not know which cases are
run (test_crash_sweep.py). Nothing here is left to chance that the case's number does not fix, but the order in which
processes come to run.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from tests.scenario.stack import MAIL, ServiceSpec, Stack, StackSpec
from tests.scenario.story import Entry, Story, effects_on, goal, mail, refund, scope, select

ROLES = ("orchestrator", "gateway", "plan")
CUSTOMERS = ("ansel_broome_11", "britta_quillon_18", "corin_maddock_25", "delphine_ashgrove_32", "edda_tarrant_39")
PATIENCE_S = 60.0
POLL_S = 0.03
#: The moments at which the goal changes: the first event of this type in the scope that is corrected.
MOMENTS = ("child_planned", "child_claimed", "effect_admitted", "try_recorded")


def sweep_spec(seed: int) -> StackSpec:
    """The stack of a sweep: two services with a mixture of faults, and a mail service that loses every reply."""
    faults = ("--faults", "mixed", "--seed", str(seed))
    return StackSpec(
        services={
            "payments": ServiceSpec("payments", {"timeout_ms": 1_500}, faults),
            "shop": ServiceSpec("retail", {"timeout_ms": 1_500}, faults),
            "mail": ServiceSpec("mail", dict(MAIL.contract), ("--fault", "send_message:lose::1000000")),
        },
        points=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """Kill `role` at the `n`-th time that it reaches `point`. Without a point, nobody is killed."""

    number: int
    role: str = ""
    point: str = ""
    n: int = 0

    def __str__(self) -> str:
        return f"{self.number}:{self.role}:{self.point}:{self.n}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that `str` names."""
        number, role, point, n = text.split(":")
        return cls(int(number), role, point, int(n))


@dataclass(frozen=True, slots=True)
class Told:
    """How a case went: whether the process was killed, and what was reached by whom."""

    case: Case
    killed: bool
    hits: Counter[tuple[str, str]]


class Scenario:
    """The run of one case: an order is settled in two scopes, and the plan of one of them is corrected on the way."""

    def __init__(self, story: Story, case: Case) -> None:
        self.story = story
        self.case = case
        chance = random.Random(case.number)
        name = f"case-{case.number}"
        self.first, self.retracted, self.wanted = (f"{name}-{part}" for part in ("first", "retracted", "wanted"))
        self.to = f"{name}@example.com"
        self.customer = CUSTOMERS[case.number % len(CUSTOMERS)]
        self.street = f"{case.number} Weir Lane"
        self.moment = chance.choice(MOMENTS)

    async def play(self) -> Told:
        """Start the run, redirect it, kill and restart whom the case names, and check what came out."""
        stack = self.story.stack
        before = _hits(stack)
        order = stack.points / f"{self.case.role}.kill"
        if self.case.role:
            order.write_text(f"{self.case.point}:{self.case.n}")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._revive)
            run = await self._redirected()
            what = f"for the end of {self.case}"
            entries = await self.story.wait_log(run, _both_adopted, seconds=PATIENCE_S, what=what)
            await self._came_out_right(run, entries)
            await self._settle_the_mail(run)
            killed = bool(self.case.role) and not order.exists()
            order.unlink(missing_ok=True)
            await self.story.checker()
            tasks.cancel_scope.cancel()
        (stack.points / f"{self.case.role}.killed").unlink(missing_ok=True)
        await anyio.to_thread.run_sync(stack.ensure, *ROLES)
        return Told(self.case, killed, _hits(stack) - before)

    async def _revive(self) -> None:
        """Start again whoever died, as a supervisor would."""
        stack = self.story.stack
        while True:
            for role in ROLES:
                if not stack.parts[role].alive:
                    with anyio.CancelScope(shield=True):
                        await anyio.to_thread.run_sync(stack.restart, role)
            await anyio.sleep(POLL_S)

    async def _redirected(self) -> str:
        """The run, once its second revision is in force. Everything is sent until it is answered."""
        a = scope(refund(self.first), mail(self.to), refund(self.retracted))
        body = {"goal": goal(a=a, b=scope(self._address())), "request_id": f"start-{self.case.number}"}
        reply = await self.story.insist("/v1/runs", body)
        assert reply.status_code in (200, 201), reply.text
        run = str(reply.json()["run"]["run"])
        await self.story.wait_log(run, self._moment_came, seconds=PATIENCE_S, what=f"for {self.moment}")
        change = {"plan": {"a": scope(refund(self.wanted), mail(self.to))}}
        body = {"kind": "correct", "goal": change, "request_id": f"change-{self.case.number}", "reason": "a new plan"}
        reply = await self.story.insist(f"/v1/runs/{run}/revisions", body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["in_force"] == 2
        return run

    def _moment_came(self, entries: list[Entry]) -> bool:
        if self.moment != "try_recorded":
            return bool(select(entries, self.moment, scope="a")) or (
                self.moment == "child_claimed" and bool(select(entries, self.moment))
            )
        return bool(select(entries, self.moment))

    def _address(self) -> dict[str, Any]:
        arguments = {
            "user_id": self.customer, "address1": self.street, "address2": "", "city": "Port Alder", "state": "ME",
            "country": "USA", "zip": "04097",
        }  # fmt: skip
        return {"service": "shop", "action": "modify_user_address", "arguments": arguments}

    async def _came_out_right(self, run: str, entries: list[Entry]) -> None:
        """What was wanted took effect once, what was taken back at most once; only the mail may be open."""
        stack, story = self.story.stack, self.story
        done = {target: len(stack.effects("payments", target)) for target in (self.first, self.retracted, self.wanted)}
        moved = len(stack.effects("shop", self.street))
        mails = len(stack.effects("mail", self.to))
        counts = {**done, "address": moved, "mail": mails}
        assert (done[self.wanted], moved) == (1, 1), counts
        assert max(done[self.first], done[self.retracted], mails) <= 1, counts
        view = await story.wait_view(run, lambda view: not _in_flight(view), seconds=PATIENCE_S)
        open_effects = [row for row in view["unresolved"] if row["kind"] == "effect"]
        assert all(row["what"].startswith("mail.") and row["blocks"] == "slot" for row in open_effects), open_effects
        for target, count in done.items():
            succeeded = [row for row in effects_on(view, target) if row["outcome"] == "succeeded"]
            assert len(succeeded) == count, (target, counts, effects_on(view, target))
        adopted = {e["scope"]: e["revision"] for e in select(entries, "result_filed", disposition="adopted")}
        assert adopted == {"a": 2, "b": 1}, adopted

    async def _settle_the_mail(self, run: str) -> None:
        """Somebody looks into the mail service's journal and says what is there; then the run completes."""
        for turn in range(4):
            view = await self.story.wait_view(
                run, lambda view: view["state"] == "completed" or _open_mail(view), seconds=PATIENCE_S
            )
            if view["state"] == "completed":
                return
            happened = bool(self.story.stack.effects("mail", self.to))
            body = {
                "happened": happened, "reason": "looked into the journal", "evidence": "its lines",
                "request_id": f"settle-{self.case.number}-{turn}",
            }  # fmt: skip
            reply = await self.story.insist(f"/v1/effects/{_open_mail(view)}/resolve", body)
            assert reply.status_code == 200, reply.text
        raise AssertionError(f"{self.case}: the mail is open for ever")


def _both_adopted(entries: list[Entry]) -> bool:
    adopted = select(entries, "result_filed", disposition="adopted")
    return {("a", 2), ("b", 1)} <= {(e["scope"], e["revision"]) for e in adopted}


def _in_flight(view: dict[str, Any]) -> list[str]:
    return [row["attempt"] for row in view["effects"] if row["outcome"] in ("admitted", "sending")]


def _open_mail(view: dict[str, Any]) -> str:
    return next((row["id"] for row in view["unresolved"] if row["kind"] == "effect"), "")


def _hits(stack: Stack) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for role in ROLES:
        path: Path = stack.points / f"{role}.hits"
        if path.exists():
            found.update((role, name) for name in path.read_text().split())
    return found
