"""What the conductor does beside its outside acts: it keeps the cross-run indexes true whoever wrote last."""

import itertools
from typing import Any

import anyio
import pytest

from admission import commands as cmd
from admission import events as ev
from admission.desk import Desk
from admission.memory import MemoryStore
from admission.run_machine import RUN_MACHINE
from admission.storage import Commit, Compare, Reply
from admission.vocabulary import Basis, ChildMode, Finding, Method, TryOutcome, Verdict, partition_of, run_id_for
from orchestrator.conductor import Conductor
from orchestrator.courier import Courier
from tests.contract.test_run_snapshots import FACTS

pytestmark = pytest.mark.anyio

RUN = run_id_for("tests", "conductor")
#: An event of somebody else's that every copy has yet to see.
NOISE = ev.encode(ev.EffectRefused(
    at=1, child="c", scope="a", revision=1, in_force=1, slot="n#1", service="s", operation="o", target="t",
    input_ref="i", reason=Verdict.HELD,
))  # fmt: skip
WAIT_S = 10.0


def desk_of(store: MemoryStore) -> Desk[Any, Any, Any, Any]:
    names = itertools.count()
    return Desk(store, RUN_MACHINE, new_id=lambda: f"{id(names)}-{next(names)}")


def conductor_of(store: MemoryStore, desk: Desk[Any, Any, Any, Any]) -> Conductor:
    return Conductor(
        store=store, desk=desk, courier=Courier(), gateway_url="http://127.0.0.1:9", agents={}, internal_token="t",
        grant_key=b"k", instance="one", incarnation="1",
    )  # fmt: skip


async def admitted(desk: Desk[Any, Any, Any, Any]) -> str:
    """A run with one effect on the wire; the attempt."""
    goal = ev.Goal(text="buy", plan={"a": ev.ScopePlan(agent="plan")})
    await desk.submit(RUN, cmd.Start(run=RUN, principal="tests", request_id="start", goal=goal))
    planned = await desk.submit(RUN, cmd.PlanChild(scope="a", revision=1, mode=ChildMode.MEDIATED))
    child = str(planned.decision.detail["child"])
    await desk.submit(RUN, cmd.StartLaunch(child=child))
    await desk.submit(RUN, cmd.ClaimChild(child=child, scope="a", revision=1, task="t"))
    admit = cmd.Admit(
        child=child, scope="a", revision=1, task="t", service="shop", operation="buy", target="x", slot="s#1",
        input_ref="0" * 64, contract=FACTS, gateway="g/1",
    )  # fmt: skip
    return str((await desk.submit(RUN, admit)).decision.detail["attempt"])


async def test_an_alarm_that_a_gateway_raised_from_an_old_copy_reaches_the_list_for_people() -> None:
    time_ms = itertools.count(1_000, 5)
    store = MemoryStore(now_ms=lambda: next(time_ms))
    async with desk_of(store) as conductors, desk_of(store) as gateways:
        attempt = await admitted(conductors)
        await gateways.current(RUN)  # and from here on its copy is behind
        asked = await conductors.submit(RUN, cmd.StartReconcile(attempt=attempt, method=Method.VOID, epoch=1))
        voided = cmd.Classify(
            attempt=attempt, finding=Finding.NOT_EXECUTED, basis=Basis.VOIDED, epoch=1,
            started=int(asked.decision.detail["started"]),
        )  # fmt: skip
        assert (await conductors.submit(RUN, voided)).decision.accepted
        late = cmd.RecordTry(attempt=attempt, n=1, outcome=TryOutcome.OK, basis=Basis.REPLY, observed={})
        await gateways.submit(RUN, late)
        assert (await conductors.current(RUN)).alarms, "the service contradicted itself"
        assert await store.attention() == [], "the story needs a commit whose copy was behind"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(conductor_of(store, conductors).run)
            with anyio.fail_after(WAIT_S):
                while [run for run, _ in await store.attention()] != [RUN]:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            tasks.cancel_scope.cancel()


async def test_looking_at_a_run_that_never_stands_still_takes_one_question() -> None:
    """An API that looks before it redirects must not wait for a gap between other processes' effects."""
    store = MemoryStore(now_ms=lambda: 1_000)
    async with desk_of(store) as own, desk_of(store) as others:
        await admitted(others)
        await own.current(RUN)
        commits = 0
        real = store.commit

        async def overtaken(commit: Commit) -> Reply:
            nonlocal commits
            if commit.id.startswith(f"{own_names}-"):
                commits += 1
                await real(Commit(f"{RUN}", f"w{commits}", (NOISE,), 0, Compare.NONE, 0, 0))
            return await real(commit)

        own_names = str(own._new_id()).split("-")[0]
        store.commit = overtaken  # type: ignore[method-assign]
        with anyio.fail_after(WAIT_S):
            state = await own.current(RUN)
        assert (commits, state.version) == (1, await _version(store))


async def _version(store: MemoryStore) -> int:
    return (await store.head(RUN))[0]


async def test_a_run_whose_timer_was_rung_is_not_rung_for_ever() -> None:
    time_ms = itertools.count(1_000, 5)
    store = MemoryStore(now_ms=lambda: next(time_ms))
    async with desk_of(store) as conductors, desk_of(store) as gateways:
        attempt = await admitted(conductors)
        await gateways.current(RUN)
        await conductors.submit(RUN, cmd.Pause(request_id="p", by="ann"))
        await gateways.submit(
            RUN, cmd.RecordTry(attempt=attempt, n=1, outcome=TryOutcome.OK, basis=Basis.REPLY, observed={})
        )
        partition = partition_of(RUN, store.partitions)
        assert await store.due(partition, 0, 10) == [RUN], "the story needs a timer that was rung by hand"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(conductor_of(store, conductors).run)
            with anyio.fail_after(WAIT_S):
                while await store.due(partition, 0, 10):  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            tasks.cancel_scope.cancel()
