"""A run's snapshots hold all of it: whoever loads, works on, and leaves another snapshot behind loses no attempt.

A row that is left out of a snapshot would free its slot, and the same intent would be sent a second time.
"""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from admission import commands as cmd
from admission import events as ev
from admission.desk import Desk
from admission.live import live_part
from admission.memory import MemoryStore
from admission.run_machine import RUN_MACHINE
from admission.snapshots import CHUNK_ROWS, TAIL_EVENTS_MIN
from admission.state import FOLD_VERSION, RunState
from admission.vocabulary import Basis, ChildMode, ContractClass, TryOutcome, run_id_for

pytestmark = pytest.mark.anyio

RUN = run_id_for("tests", "snapshots")
FACTS = ev.ContractFacts(
    service="shop", operation="buy", version="1", contract_class=ContractClass.VOID, schema_hash="f" * 16, dedupes=True,
    tries_max=3, retention_ms=10**9,
)  # fmt: skip
NAMES = itertools.count()


@asynccontextmanager
async def desk_on(store: MemoryStore, *, snapshots: bool = True) -> AsyncIterator[Desk[Any, Any, Any, Any]]:
    machine = RUN_MACHINE if snapshots else replace(RUN_MACHINE, snapshots=None)
    async with Desk(store, machine, new_id=lambda: f"n{next(NAMES)}") as desk:
        yield desk


async def begun(desk: Desk[Any, Any, Any, Any]) -> str:
    """A run with a child at work; the child."""
    goal = ev.Goal(text="buy", plan={"a": ev.ScopePlan(agent="plan")})
    await desk.submit(RUN, cmd.Start(run=RUN, principal="tests", request_id="start", goal=goal))
    planned = await desk.submit(RUN, cmd.PlanChild(scope="a", revision=1, mode=ChildMode.MEDIATED))
    child = str(planned.decision.detail["child"])
    await desk.submit(RUN, cmd.StartLaunch(child=child))
    await desk.submit(RUN, cmd.ClaimChild(child=child, scope="a", revision=1, task="t"))
    return child


async def bought(desk: Desk[Any, Any, Any, Any], child: str, numbers: range) -> None:
    """So many effects; every seventh was refused, and every hundredth is left in the air."""
    for n in numbers:
        admit = cmd.Admit(
            child=child, scope="a", revision=1, task="t", service="shop", operation="buy", target=f"item-{n % 50}",
            slot=f"slot-{n}#1", input_ref="0" * 64, contract=FACTS, gateway="g/1",
            conflict_key=f"ck-{n}" if n % 5 else "",
        )  # fmt: skip
        admitted = (await desk.submit(RUN, admit)).decision
        assert admitted.accepted, admitted
        if n % 100 == 0:
            continue
        refused = n % 7 == 0
        await desk.submit(
            RUN,
            cmd.RecordTry(
                attempt=str(admitted.detail["attempt"]), n=1,
                outcome=TryOutcome.NOT_EXECUTED if refused else TryOutcome.OK,
                basis=Basis.SERVICE_REFUSED if refused else Basis.REPLY, observed={"n": n},
            ),
        )  # fmt: skip


def everything(run: RunState) -> dict[str, Any]:
    """All of a state, with what is derived from it."""
    derived = ("open_attempts", "slots", "generations", "conflicts", "targets")
    return {
        "live": live_part(run),
        "attempts": dict(run.attempts.items()),
        **{name: dict(getattr(run, name)) for name in derived},
    }


async def test_whoever_loads_a_snapshot_and_leaves_another_loses_nothing() -> None:
    store = MemoryStore(now_ms=lambda: 1_000)
    count = CHUNK_ROWS + TAIL_EVENTS_MIN
    async with desk_on(store) as desk:
        child = await begun(desk)
        await bought(desk, child, range(count))
    written = await store.snapshot(RUN, FOLD_VERSION)
    assert written is not None, "the story needs a snapshot"
    for lap in (1, 2, 3):
        async with desk_on(store) as desk:
            await bought(desk, child, range(lap * count, (lap + 1) * count))
        later = await store.snapshot(RUN, FOLD_VERSION)
        assert later != written, "the story needs another snapshot in each lap"
        written = later
        async with desk_on(store) as loads, desk_on(store, snapshots=False) as folds:
            from_snapshot, from_log = everything(await loads.current(RUN)), everything(await folds.current(RUN))
            assert from_snapshot == from_log


async def test_an_intent_that_a_snapshot_holds_is_still_done_before() -> None:
    store = MemoryStore(now_ms=lambda: 1_000)
    count = CHUNK_ROWS + TAIL_EVENTS_MIN
    async with desk_on(store) as desk:
        child = await begun(desk)
        await bought(desk, child, range(count))
    async with desk_on(store) as desk:
        again = cmd.Admit(
            child=child, scope="a", revision=1, task="t", service="shop", operation="buy", target="item-1",
            slot="slot-1#1", input_ref="0" * 64, contract=FACTS, gateway="g/1", conflict_key="ck-1",
        )  # fmt: skip
        answer = (await desk.submit(RUN, again)).decision
        assert (answer.verdict.value, answer.detail["observed"]) == ("done_before", {"n": 1})
