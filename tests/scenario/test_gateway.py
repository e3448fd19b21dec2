"""Stories of one gateway: what workers are told, what the shop really did, and what the log says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import httpx
import pytest
from anyio.abc import SocketStream

from admission.client import EffectReply, GateClient, GateReply, GateUnavailable
from admission.commands import Cancel, Pause, Resume, Revise
from admission.events import encode
from admission.vocabulary import AttemptState, Basis, Blocks, Claim, GateState, TryOutcome, UpdateKind, Verdict
from tests.contract.raw_service import Arrival, raw_service, reply, until
from tests.scenario.gateway_stage import (
    CREDENTIAL,
    DELIVERED,
    ORDER,
    ORDER_TOO,
    RUN,
    TASK,
    gateway_stage,
    goal,
    shop_process,
)

pytestmark = pytest.mark.anyio
ACTION = "cancel_pending_order"
BECAUSE = "no longer needed"


async def cancel(client: GateClient, order: str = ORDER, reason: str = BECAUSE, *, task: str = TASK) -> EffectReply:
    return await client.effect("shop", ACTION, {"order_id": order, "reason": reason}, task=task)


def replacing() -> Revise:
    return Revise(kind=UpdateKind.REPLACE, request_id="r-2", goal=goal("leave them alone"), reason="changed my mind")


# --- the usual road --------------------------------------------------------------------------------------------------


async def test_an_effect_is_done_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    async with shop_process(tmp_path) as shop, gateway_stage(shop.url, tmp_path) as (stage, client):
        first = await cancel(client)
        assert first.verdict is Verdict.DONE
        assert (first.target, first.revision, first.child, first.outcome) == (ORDER, 1, stage.child, "succeeded")
        assert first.revision_in_force == 1
        assert first.observed_result is not None
        assert await stage.store.blob(RUN, first.input_ref) is not None
        [line] = shop.executed
        assert first.operation_id == line["key"]
        assert first.observed_result == line["receipt"]

        again = await cancel(client, reason="ordered by mistake")
        assert again.verdict is Verdict.DONE_BEFORE
        assert again.observed_result == first.observed_result
        assert again.attempt == first.attempt
        assert len(shop.executed) == 1
        written = b"".join(encode(event) for event in await stage.log())
        assert CREDENTIAL.encode() not in written


async def test_the_shop_says_no(tmp_path: Path) -> None:
    async with shop_process(tmp_path) as shop, gateway_stage(shop.url, tmp_path) as (stage, client):
        said = await cancel(client, DELIVERED)
        assert said.verdict is Verdict.FAILED
        assert said.observed_result is not None
        assert said.observed_result["code"] == "policy"
        assert shop.executed == []
        [attempt] = await stage.attempts()
        assert attempt.basis is Basis.SERVICE_REFUSED


async def test_the_contract_says_no(tmp_path: Path) -> None:
    async with shop_process(tmp_path) as shop, gateway_stage(shop.url, tmp_path) as (stage, client):
        said = await client.effect("shop", "give_away", {"order_id": ORDER, "reason": "x"}, task=TASK)
        assert said.verdict is Verdict.REFUSED
        assert said.detail == "only people may give things away"
        assert await stage.attempts() == []


async def test_a_lost_reply_is_tried_again_under_the_same_key(tmp_path: Path) -> None:
    async with (
        shop_process(tmp_path, "--fault", f"{ACTION}:lose::1") as shop,
        gateway_stage(shop.url, tmp_path) as (stage, client),
    ):
        assert (await cancel(client)).verdict is Verdict.DONE
        [attempt] = await stage.attempts()
        assert [t.outcome for t in attempt.tries] == [TryOutcome.IN_DOUBT, TryOutcome.OK]
        assert len(shop.executed) == 1
        assert {line["key"] for line in shop.lines("executed", "replayed")} == {attempt.key}


async def test_a_rejected_try_is_tried_again(tmp_path: Path) -> None:
    async with (
        shop_process(tmp_path, "--fault", f"{ACTION}:reject::1") as shop,
        gateway_stage(shop.url, tmp_path) as (stage, client),
    ):
        assert (await cancel(client)).verdict is Verdict.DONE
        [attempt] = await stage.attempts()
        assert [t.outcome for t in attempt.tries] == [TryOutcome.NOT_EXECUTED, TryOutcome.OK]
        assert len(shop.executed) == 1


# --- in doubt, and asking --------------------------------------------------------------------------------------------


async def test_without_tries_left_it_stays_in_doubt_and_can_be_looked_up(tmp_path: Path) -> None:
    async with (
        shop_process(tmp_path, "--fault", f"{ACTION}:lose::1") as shop,
        gateway_stage(shop.url, tmp_path, tries_max=1) as (stage, client),
    ):
        said = await cancel(client)
        assert said.verdict is Verdict.IN_DOUBT
        assert said.blocks is Blocks.SCOPE
        assert said.outcome == "sending"
        assert (await cancel(client)).verdict is Verdict.IN_DOUBT
        assert len(shop.lines("executed", "replayed")) == 1
        found = await stage.ask(said.attempt, "lookup")
        assert found["found"] == "executed"
        assert found["payload_matches"] is True
        assert found["clock_ms"] is not None


async def test_a_void_is_asked_through_the_internal_door_alone(tmp_path: Path) -> None:
    async with (
        shop_process(tmp_path, "--fault", f"{ACTION}:reset::1") as shop,
        gateway_stage(shop.url, tmp_path, tries_max=1) as (stage, client),
    ):
        said = await cancel(client)
        assert said.verdict is Verdict.IN_DOUBT
        assert (await stage.ask(said.attempt, "lookup"))["found"] == "not_found"
        assert (await stage.ask(said.attempt, "void"))["found"] == "voided"
        assert shop.executed == []
        body = {"run": RUN, "attempt": said.attempt, "method": "void"}
        refused = await stage.post("/v1/internal/ask", body)
        assert refused.status_code == 401
        assert refused.headers["content-type"] == "application/problem+json"


# --- the gate --------------------------------------------------------------------------------------------------------


async def test_after_a_redirect_nothing_is_sent(tmp_path: Path) -> None:
    async with shop_process(tmp_path) as shop, gateway_stage(shop.url, tmp_path) as (stage, client):
        await stage.do(replacing())
        said = await cancel(client)
        assert said.verdict is Verdict.SUPERSEDED
        assert said.revision_in_force == 2
        assert "2" in said.detail
        assert (await cancel(client)).detail
        assert shop.lines("executed", "rejected", "refused") == []


async def test_while_held_nothing_is_sent(tmp_path: Path) -> None:
    async with shop_process(tmp_path) as shop, gateway_stage(shop.url, tmp_path) as (stage, client):
        await stage.do(Pause(request_id="p"))
        assert (await cancel(client)).verdict is Verdict.HELD
        assert shop.executed == []
        await stage.do(Resume(request_id="q"))
        assert (await cancel(client)).verdict is Verdict.DONE


async def test_a_redirect_between_two_tries_stops_the_second(tmp_path: Path) -> None:
    rejected = anyio.Event()

    async def reject(stream: SocketStream, arrival: Arrival) -> bool:
        await stream.send(reply(503, {"code": "unavailable"}))
        rejected.set()
        return True

    async with raw_service(reject) as service, gateway_stage(service.url, tmp_path) as (stage, client):
        said: list[EffectReply] = []

        async def ask() -> None:
            said.append(await cancel(client))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await rejected.wait()
            await stage.do(replacing())
        assert len(service.arrivals) == 1
        assert said[0].verdict is Verdict.FAILED
        [attempt] = await stage.attempts()
        assert [t.outcome for t in attempt.tries] == [TryOutcome.NOT_EXECUTED]


async def test_the_watch_wakes_when_the_gate_changes(tmp_path: Path) -> None:
    async with gateway_stage("http://127.0.0.1:9", tmp_path) as (stage, client):
        known = await client.gate()
        assert (known.gate, known.current, known.revision_in_force) == (GateState.OPEN, True, 1)
        steps: list[tuple[Callable[[], Awaitable[object]], GateState, bool]] = [
            (lambda: stage.do(Pause(request_id="p")), GateState.HELD, True),
            (lambda: stage.do(Resume(request_id="q")), GateState.OPEN, True),
            (lambda: stage.do(replacing()), GateState.CLOSED, False),
            (lambda: stage.do(Cancel(request_id="c")), GateState.SEALED, False),
        ]
        for act, gate, current in steps:
            woken: list[GateReply] = []

            async def watch(known=known, woken=woken) -> None:
                woken.append(await client.gate(known, wait_ms=10_000))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                await anyio.wait_all_tasks_blocked()
                await act()
                with anyio.fail_after(1):
                    await until(lambda woken=woken: bool(woken))  # type: ignore[misc]
            [known] = woken
            assert (known.gate, known.current) == (gate, current)


async def test_the_watch_ends_when_its_time_is_up(tmp_path: Path) -> None:
    async with gateway_stage("http://127.0.0.1:9", tmp_path) as (_, client):
        known = await client.gate()
        with anyio.fail_after(3):
            assert await client.gate(known, wait_ms=100) == known


async def test_claims(tmp_path: Path) -> None:
    async with gateway_stage("http://127.0.0.1:9", tmp_path, claim=False) as (stage, client):
        assert (await cancel(client)).verdict is Verdict.NOT_CURRENT
        assert (await client.claim("task-1")).claim is Claim.CLAIMED
        assert (await client.claim("task-1")).claim is Claim.CLAIMED
        assert (await client.claim("task-2")).claim is Claim.DUPLICATE
        assert (await cancel(client, task="task-2")).verdict is Verdict.NOT_CURRENT
        await stage.do(replacing())
        claimed = await client.claim("task-1")
        assert (claimed.claim, claimed.revision_in_force) == (Claim.SUPERSEDED, 2)


# --- hanging up, and stopping ----------------------------------------------------------------------------------------


async def test_hanging_up_does_not_cancel_an_effect(tmp_path: Path) -> None:
    async with (
        shop_process(tmp_path, "--fault", f"{ACTION}:delay:700:1") as shop,
        gateway_stage(shop.url, tmp_path) as (stage, client),
    ):
        with anyio.move_on_after(0.3) as gone:
            await cancel(client)
        assert gone.cancelled_caught
        run = await stage.wait_for(lambda run: bool(run.attempts) and not run.open_attempts)
        [attempt] = run.attempts.values()
        assert attempt.state is AttemptState.SUCCEEDED
        assert [t.outcome for t in attempt.tries] == [TryOutcome.OK]


async def test_two_asks_at_once_send_once(tmp_path: Path) -> None:
    async with (
        shop_process(tmp_path, "--fault", f"{ACTION}:delay:500:1") as shop,
        gateway_stage(shop.url, tmp_path) as (stage, client),
    ):
        said: list[EffectReply] = []

        async def ask() -> None:
            said.append(await cancel(client))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(ask)
        verdicts = [s.verdict for s in said]
        assert verdicts.count(Verdict.DONE) == 1
        assert verdicts.count(Verdict.IN_FLIGHT) == 7
        assert len(shop.lines("executed", "replayed")) == 1
        assert {s.attempt for s in said} == {(await stage.attempts())[0].id}


async def test_a_gateway_that_stops_records_what_is_on_the_wire(tmp_path: Path) -> None:
    async with (
        shop_process(tmp_path, "--fault", f"{ACTION}:delay:700:1") as shop,
        gateway_stage(shop.url, tmp_path) as (stage, client),
    ):
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with anyio.move_on_after(0.3):
                    await cancel(client)

            tasks.start_soon(ask)
            await stage.wait_for(lambda run: bool(run.attempts))
            stage.server.should_exit = True
        run = await stage.wait_for(lambda run: not run.open_attempts)
        assert [a.state for a in run.attempts.values()] == [AttemptState.SUCCEEDED]
        assert len(shop.executed) == 1


# --- the store is away -----------------------------------------------------------------------------------------------


async def test_without_the_store_nothing_is_sent(tmp_path: Path) -> None:
    async with shop_process(tmp_path) as shop, gateway_stage(shop.url, tmp_path) as (stage, client):
        stage.store.faults.unavailable = True
        with pytest.raises(GateUnavailable, match="store is not available"):
            await cancel(client)
        assert shop.executed == []
        stage.store.faults.unavailable = False
        assert (await cancel(client)).verdict is Verdict.DONE
        assert len(shop.executed) == 1


async def test_an_outcome_that_cannot_be_recorded_is_kept_until_it_can(tmp_path: Path) -> None:
    arrived, release = anyio.Event(), anyio.Event()

    async def slow(stream: SocketStream, arrival: Arrival) -> bool:
        arrived.set()
        await release.wait()
        await stream.send(reply(200, {"receipt": {"effect": "e-1"}}))
        return True

    async with raw_service(slow) as service, gateway_stage(service.url, tmp_path) as (stage, client):
        said: list[EffectReply] = []

        async def ask() -> None:
            said.append(await cancel(client))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await arrived.wait()
            stage.store.faults.unavailable = True
            release.set()
        assert said[0].verdict is Verdict.IN_DOUBT
        assert "records the outcome" in said[0].detail
        stage.store.faults.unavailable = False
        run = await stage.wait_for(lambda run: not run.open_attempts)
        assert [a.state for a in run.attempts.values()] == [AttemptState.SUCCEEDED]
        assert (await cancel(client)).verdict is Verdict.DONE_BEFORE
        assert len(service.arrivals) == 1


async def test_a_permit_that_got_lost_is_disavowed_and_the_effect_done_once(tmp_path: Path) -> None:
    async with shop_process(tmp_path) as shop, gateway_stage(shop.url, tmp_path) as (stage, client):
        stage.store.faults.unknown_outcomes = 1
        lost = await stage.post(
            "/v1/effects",
            {"task": TASK, "service": "shop", "action": ACTION, "arguments": {"order_id": ORDER, "reason": BECAUSE}},
        )
        assert lost.status_code == 503
        assert lost.json()["status"] == 503
        assert (await cancel(client)).verdict is Verdict.DONE
        first, second = await stage.attempts()
        assert (first.state, first.basis) == (AttemptState.FAILED, Basis.NOTHING_WRITTEN)
        assert second.state is AttemptState.SUCCEEDED
        assert second.key != first.key
        assert [line["key"] for line in shop.executed] == [second.key]


async def test_a_lost_permit_is_disavowed_without_being_asked(tmp_path: Path) -> None:
    async with shop_process(tmp_path) as shop, gateway_stage(shop.url, tmp_path) as (stage, _):
        stage.store.faults.unknown_outcomes = 1
        body = {"task": TASK, "service": "shop", "action": ACTION, "arguments": {"order_id": ORDER, "reason": BECAUSE}}
        assert (await stage.post("/v1/effects", body)).status_code == 503
        run = await stage.wait_for(lambda run: bool(run.attempts) and not run.open_attempts)
        assert [a.basis for a in run.attempts.values()] == [Basis.NOTHING_WRITTEN]
        assert shop.executed == []


# --- the process and its neighbours ----------------------------------------------------------------------------------


async def test_health(tmp_path: Path) -> None:
    async with gateway_stage("http://127.0.0.1:9", tmp_path) as (stage, _):
        async with httpx.AsyncClient(base_url=stage.url, trust_env=False) as http:
            assert (await http.get("/healthz")).json()["status"] == "ok"
            assert (await http.get("/readyz")).status_code == 200
            stage.store.faults.unavailable = True
            assert (await http.get("/readyz")).status_code == 503
            assert (await http.get("/healthz")).status_code == 200


async def test_nobody_listens_at_the_service(tmp_path: Path, free_port: int) -> None:
    async with gateway_stage(f"http://127.0.0.1:{free_port}", tmp_path) as (stage, client):
        said = await cancel(client, ORDER_TOO)
        assert said.verdict is Verdict.FAILED
        [attempt] = await stage.attempts()
        assert {t.basis for t in attempt.tries} == {Basis.NOTHING_WRITTEN}
        assert len(attempt.tries) == 3
