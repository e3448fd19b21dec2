"""The API over real HTTP, on whichever store a test brings; and a run brought into a state through the desk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from admission import commands as cmd
from admission.desk import Desk
from admission.run_machine import RUN_MACHINE
from admission.storage import Store, StoreBehind
from admission.vocabulary import Basis, Blocks, ChildMode, ContractClass, Finding, TryOutcome, digest, slot_of
from orchestrator.api import api_app
from orchestrator.serving import bind, http_server
from orchestrator.settings import Listen
from tests.contract.store_room import new_id
from tests.unit.rules_stage import facts

TOKEN = "token-of-the-test"
GOAL: dict[str, Any] = {
    "text": "send it to the cottage",
    "requirements": [{"id": "where", "text": "to the cottage"}, {"id": "who", "text": "tell her"}],
    "plan": {"order": {"agent": "plan", "brief": "send"}, "mail": {"agent": "plan", "brief": "tell"}},
}
CHANGE: dict[str, Any] = {"plan": {"order": {"agent": "plan", "brief": "send it elsewhere"}}}


@dataclass
class Room:
    """The API, a client that has the token, and the desk behind it."""

    http: httpx.AsyncClient
    desk: Desk[Any, Any, Any, Any]
    store: Store
    alarms: list[StoreBehind] = field(default_factory=list)

    async def start(self, **more: Any) -> dict[str, Any]:
        reply = await self.http.post("/v1/runs", json={"goal": GOAL, **more})
        assert reply.status_code == 201, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    async def view(self, run: str) -> dict[str, Any]:
        reply = await self.http.get(f"/v1/runs/{run}")
        assert reply.status_code == 200, reply.text
        view: dict[str, Any] = reply.json()
        return view

    async def child(self, run: str, scope: str = "order") -> str:
        """A child of the open scope that has claimed its task `t-SCOPE`."""
        gate = (await self.desk.current(run)).gates[scope]
        plan = cmd.PlanChild(scope=scope, revision=gate.cur, mode=ChildMode.MEDIATED)
        child = str((await self.desk.submit(run, plan)).decision.detail["child"])
        await self.desk.submit(run, cmd.StartLaunch(child=child))
        claim = cmd.ClaimChild(child=child, scope=scope, revision=gate.cur, task=f"t-{scope}")
        assert (await self.desk.submit(run, claim)).decision.accepted
        return child

    async def effect(self, run: str, child: str, target: str, *, frozen: bytes = b'{"to": "her"}') -> str:
        """An admitted effect whose first try is on the wire."""
        row = (await self.desk.current(run)).children[child]
        admit = cmd.Admit(
            child=child, scope=row.scope, revision=row.revision, task=row.task, service="mail", operation="send",
            target=target, slot=slot_of("mail", "send", target, {}), input_ref=digest(frozen), gateway="g/1",
            contract=facts(
                ContractClass.OPAQUE, service="mail", operation="send", dedupes=False, tries_max=1,
                unknown_blocks=Blocks.SLOT, timeout_ms=1,
            ),
        )  # fmt: skip
        decision = (await self.desk.submit(run, admit, blobs={digest(frozen): frozen})).decision
        assert decision.accepted, decision
        return str(decision.detail["attempt"])

    async def lost(self, run: str, attempt: str) -> None:
        """Its reply was lost, and it cannot be asked."""
        record = cmd.RecordTry(
            attempt=attempt, n=1, outcome=TryOutcome.IN_DOUBT, basis=Basis.GAVE_UP, detail="no answer"
        )
        await self.desk.submit(run, record)
        give_up = cmd.Classify(attempt=attempt, finding=Finding.UNKNOWN, basis=Basis.GAVE_UP, epoch=0)
        assert (await self.desk.submit(run, give_up)).decision.accepted


@asynccontextmanager
async def api_room(store: Store, **parts: Any) -> AsyncIterator[Room]:
    """The API on a free port, until the block is left."""
    alarms: list[StoreBehind] = []
    async with AsyncExitStack() as stack:
        desk = await stack.enter_async_context(Desk(store, RUN_MACHINE, new_id=new_id))
        app = api_app(desk, store, TOKEN, new_id=new_id, alarm=alarms.append, **({"agents": {"plan"}} | parts))
        listen = Listen("127.0.0.1", 0)
        bound, url = bind(listen)
        await stack.enter_async_context(http_server(app, bound, listen))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, headers=headers, timeout=30))
        yield Room(http, desk, store, alarms)
