"""Flights without HTTP before them: moments that a request cannot be made to hit at will."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream

from admission.answers import EffectAnswer
from admission.commands import Admit, Command
from admission.contracts import parse_contract
from admission.dispatch import Dispatcher
from admission.flights import Answered, Flights, GateShut, Ledger, Wanted
from admission.services import Service
from admission.state import RunState
from admission.vocabulary import AttemptState, TryOutcome, Verdict
from tests.contract.raw_service import Arrival, Behaviour, answering, raw_service, reply
from tests.scenario.gateway_stage import ORDER, RUN, SCOPE, TASK, Stage, contract_text, gateway_stage

pytestmark = pytest.mark.anyio
RECEIPT = reply(200, {"receipt": {"effect": "e-1"}})


class LateAnswers:
    """A desk whose first admission is committed at once and answered when the test says so."""

    def __init__(self, desk: Ledger) -> None:
        self._desk = desk
        self.committed = anyio.Event()
        self.release = anyio.Event()

    async def submit(
        self, run: str, command: Command, *, fence: int | None = None, blobs: Mapping[str, bytes] | None = None
    ) -> Answered:
        answered = await self._desk.submit(run, command, fence=fence, blobs=blobs)
        if isinstance(command, Admit) and not self.committed.is_set():
            self.committed.set()
            await self.release.wait()
        return answered

    async def current(self, run: str) -> RunState:
        return await self._desk.current(run)

    def now_ms(self) -> int:
        return self._desk.now_ms()


def wanted(stage: Stage, flights: Flights, url: str) -> Wanted:
    contract = parse_contract(contract_text(3), "shop.yaml")
    operation = contract.operations["cancel_pending_order"]
    prepared = operation.prepare({"order_id": ORDER, "reason": "no longer needed"})
    admit = Admit(
        child=stage.child, scope=SCOPE, revision=1, task=TASK, service="shop", operation=operation.name,
        target=prepared.target, slot=prepared.slot, input_ref=prepared.input_ref, contract=operation.facts,
        gateway=flights.gateway,
    )  # fmt: skip
    return Wanted(RUN, admit, Service("shop", url, contract), operation, prepared)


def held_back(arrived: anyio.Event, release: anyio.Event) -> Behaviour:
    async def behave(stream: SocketStream, arrival: Arrival) -> bool:
        arrived.set()
        await release.wait()
        await stream.send(RECEIPT)
        return True

    return behave


async def test_a_permit_on_its_way_to_another_flight_is_not_disavowed(tmp_path: Path) -> None:
    async with raw_service(answering(RECEIPT)) as service, gateway_stage(service.url, tmp_path) as (stage, _):
        desk = LateAnswers(stage.desk)
        async with Dispatcher() as dispatcher, Flights(desk, dispatcher, gateway="g9/1") as flights:
            ask = wanted(stage, flights, service.url)
            said: list[EffectAnswer] = []

            async def first() -> None:
                said.append(await flights.ask(ask))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first)
                await desk.committed.wait()
                assert (await flights.ask(ask)).verdict is Verdict.IN_FLIGHT
                desk.release.set()
        assert [answer.verdict for answer in said] == [Verdict.DONE]
        [attempt] = await stage.attempts()
        assert [t.outcome for t in attempt.tries] == [TryOutcome.OK]
        assert len(service.arrivals) == 1


async def test_leaving_waits_for_what_is_on_the_wire_even_when_cancelled(tmp_path: Path) -> None:
    arrived, release = anyio.Event(), anyio.Event()
    async with (
        raw_service(held_back(arrived, release)) as service,
        gateway_stage(service.url, tmp_path) as (stage, _),
    ):
        async with anyio.create_task_group() as tasks:

            async def gateway() -> None:
                async with Dispatcher() as dispatcher, Flights(stage.desk, dispatcher, gateway="g9/1") as flights:
                    await flights.ask(wanted(stage, flights, service.url))

            tasks.start_soon(gateway)
            await arrived.wait()
            tasks.cancel_scope.cancel()
            release.set()
        [attempt] = await stage.attempts()
        assert attempt.state is AttemptState.SUCCEEDED


async def test_leaving_does_not_wait_for_ever_and_claims_nothing(tmp_path: Path) -> None:
    arrived, release = anyio.Event(), anyio.Event()
    async with (
        raw_service(held_back(arrived, release)) as service,
        gateway_stage(service.url, tmp_path) as (stage, _),
    ):
        async with Dispatcher() as dispatcher, anyio.create_task_group() as tasks:
            async with Flights(stage.desk, dispatcher, gateway="g9/1", drain_max_s=0.1) as flights:
                refused: list[str] = []

                async def ask() -> None:
                    try:
                        await flights.ask(wanted(stage, flights, service.url))
                    except GateShut as shut:
                        refused.append(str(shut))

                tasks.start_soon(ask)
                await arrived.wait()
        assert refused == ["this gateway was stopped before the outcome was known"]
        [attempt] = await stage.attempts()
        assert attempt.state is AttemptState.SENDING
        assert [t.outcome for t in attempt.tries] == [TryOutcome.GRANTED]


async def test_no_more_effects_than_the_limit(tmp_path: Path) -> None:
    arrived, release = anyio.Event(), anyio.Event()
    async with (
        raw_service(held_back(arrived, release)) as service,
        gateway_stage(service.url, tmp_path) as (stage, _),
    ):
        async with (
            Dispatcher() as dispatcher,
            Flights(stage.desk, dispatcher, gateway="g9/1", flights_max=1) as flights,
            anyio.create_task_group() as tasks,
        ):
            ask = wanted(stage, flights, service.url)
            tasks.start_soon(flights.ask, ask)
            await arrived.wait()
            with pytest.raises(GateShut, match="1 effects are in hand"):
                await flights.ask(ask)
            release.set()
        assert len(service.arrivals) == 1
