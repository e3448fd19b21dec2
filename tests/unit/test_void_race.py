"""A void and a request that arrives in the very moment of it: one of the two wins, never both."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from simulators.connections import Connections
from simulators.entrance import Arrival, Entrance, wall_clock
from simulators.faults import FaultSchedule
from simulators.journal import Journal
from simulators.retail import RetailService
from simulators.service import load_database

pytestmark = pytest.mark.anyio


def pending_order() -> str:
    orders = load_database(None).tables["orders"].values()
    return next(str(order["order_id"]) for order in orders if order["status"] == "pending")


@pytest.mark.parametrize("ask", ["void", "lookup"])
async def test_a_request_that_arrives_while_the_journal_is_being_written_is_waited_for(
    ask: str, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    entrance = Entrance(journal, FaultSchedule(), Connections(), wall_clock, wall_clock)
    service = RetailService(load_database(None), entrance, work_ms=50)
    body = json.dumps({"order_id": pending_order(), "reason": "no longer needed"}).encode()
    arrival = Arrival("cancel_pending_order", body, "k", payload_sha256="p")
    write = journal.durable
    arrived = False

    async def durable() -> None:
        nonlocal arrived
        if not arrived:
            arrived = True
            group.start_soon(service.process, arrival, None)
            await anyio.sleep(0.01)
        await write()

    journal.durable = durable  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        answer = await getattr(service, ask)("k")
    events = [line["event"] for line in journal.lines]
    assert answer.body["state"] == "executed"
    assert events == ["executed"]
