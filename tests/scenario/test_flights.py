"""Flights without HTTP before them: moments that a request cannot be made to hit at will."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream

from admission.answers import EffectAnswer
from admission.commands import Admit, Command, RecordTry
from admission.contracts import parse_contract
from admission.dispatch import Dispatcher
from admission.flights import Answered, Flights, GateShut, Ledger, Wanted
from admission.memory import MemoryStore
from admission.services import Service
from admission.state import RunState
from admission.storage import Commit, Reply, StoreBehind, StoreUnavailable
from admission.vocabulary import AttemptState, Basis, TryOutcome, Verdict
from tests.contract.raw_service import Arrival, Behaviour, answering, raw_service, reply
from tests.scenario.gateway_stage import ORDER, RUN, SCOPE, TASK, Stage, contract_text, gateway_stage

pytestmark = pytest.mark.anyio
RECEIPT = reply(200, {"receipt": {"effect": "e-1"}})


class Between:
    """A desk that another stands behind, for tests that come in between."""

    def __init__(self, desk: Ledger) -> None:
        self._desk = desk

    async def submit(
        self, run: str, command: Command, *, fence: int | None = None, blobs: Mapping[str, bytes] | None = None
    ) -> Answered:
        return await self._desk.submit(run, command, fence=fence, blobs=blobs)

    async def resend(self, commit: Commit) -> None:
        await self._desk.resend(commit)

    async def current(self, run: str) -> RunState:
        return await self._desk.current(run)

    def now_ms(self) -> int:
        return self._desk.now_ms()


class LateAnswers(Between):
    """A desk whose first admission is committed at once and answered when the test says so."""

    def __init__(self, desk: Ledger) -> None:
        super().__init__(desk)
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


class FailingRecords(Between):
    """A desk at which records fail in these ways, one after the other."""

    def __init__(self, desk: Ledger, *failures: Exception) -> None:
        super().__init__(desk)
        self.failures = list(failures)

    async def submit(
        self, run: str, command: Command, *, fence: int | None = None, blobs: Mapping[str, bytes] | None = None
    ) -> Answered:
        if isinstance(command, RecordTry) and self.failures:
            raise self.failures.pop(0)
        return await self._desk.submit(run, command, fence=fence, blobs=blobs)


class OnTheWay:
    """The way to a store: the first admission is held up on it, and answers to sending it again are lost, until `free`.

    `later`: commits that were sent after it and that the store or the way has answered.
    """

    def __init__(self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._store, self._real = store, store.commit
        self._held: Commit | None = None
        self.free = False
        self.later = 0
        monkeypatch.setattr(store, "commit", self.commit)

    async def commit(self, commit: Commit) -> Reply:
        mine = any(b"effect_admitted" in event for event in commit.events)
        if self._held is None and mine:
            self._held = commit
            raise StoreUnavailable("silence")
        if self._held is not None and commit.id == self._held.id and not self.free:
            self.later += 1
            raise StoreUnavailable("silence")
        reply = await self._real(commit)
        self.later += self._held is not None
        return reply

    def arrive(self) -> None:
        """What was held up reaches the store."""
        assert self._held is not None
        self._store.apply(self._held, resend=False)

    async def reached(self, later: int) -> None:
        with anyio.fail_after(10):
            while self.later < later:  # noqa: ASYNC110 - the store rings no bell in a test
                await anyio.sleep(0.01)


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


# --- what this gateway alone knows


async def test_an_outcome_is_recorded_whatever_kept_it_from_the_log(tmp_path: Path) -> None:
    async with raw_service(answering(RECEIPT)) as service, gateway_stage(service.url, tmp_path) as (stage, _):
        desk = FailingRecords(stage.desk, RuntimeError("a bug"), UnicodeEncodeError("utf-8", "x", 0, 1, "a bug"))
        async with Dispatcher() as dispatcher, Flights(desk, dispatcher, gateway="g9/1") as flights:
            answer = await flights.ask(wanted(stage, flights, service.url))
            assert (answer.verdict, answer.outcome) == (Verdict.IN_DOUBT, AttemptState.SENDING.value)
            assert flights.count == 1, "it counts until it is recorded"
            run = await stage.wait_for(lambda run: not run.open_attempts)
        assert desk.failures == []
        assert [a.state for a in run.attempts.values()] == [AttemptState.SUCCEEDED]
        assert len(service.arrivals) == 1


async def test_a_store_that_lost_data_ends_the_recording_and_all_sending(tmp_path: Path) -> None:
    async with raw_service(answering(RECEIPT)) as service, gateway_stage(service.url, tmp_path) as (stage, _):
        desk = FailingRecords(stage.desk, StoreBehind("the log is shorter than it was"))
        async with Dispatcher() as dispatcher, Flights(desk, dispatcher, gateway="g9/1") as flights:
            for _ in range(2):
                with pytest.raises(GateShut, match="lost acknowledged data"):
                    await flights.ask(wanted(stage, flights, service.url))


# --- permits whose commit was not answered


@pytest.mark.parametrize("arrives", ["late", "never"])
async def test_a_permit_that_nobody_heard_of_is_disavowed_whenever_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrives: str
) -> None:
    async with raw_service(answering(RECEIPT)) as service, gateway_stage(service.url, tmp_path) as (stage, _):
        way = OnTheWay(stage.store, monkeypatch)
        async with Dispatcher() as dispatcher, Flights(stage.desk, dispatcher, gateway="g9/1") as flights:
            ask = wanted(stage, flights, service.url)
            with pytest.raises(GateShut, match="store is not available"):
                await flights.ask(ask)
            await way.reached(1)
            assert await stage.attempts() == [], "whoever looks now sees no permit"
            if arrives == "late":
                way.arrive()
            way.free = True
            run = await stage.wait_for(lambda run: bool(run.attempts) and not run.open_attempts)
            [attempt] = run.attempts.values()
            assert [(t.outcome, t.basis) for t in attempt.tries] == [
                (TryOutcome.NOT_EXECUTED, Basis.NOTHING_WRITTEN)
            ]  # fmt: skip
            assert service.arrivals == []
            assert (await flights.ask(ask)).verdict is Verdict.DONE
        assert len(service.arrivals) == 1


async def test_an_unanswered_permit_counts_against_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with raw_service(answering(RECEIPT)) as service, gateway_stage(service.url, tmp_path) as (stage, _):
        way = OnTheWay(stage.store, monkeypatch)
        async with (
            Dispatcher() as dispatcher,
            Flights(stage.desk, dispatcher, gateway="g9/1", flights_max=1) as flights,
        ):
            ask = wanted(stage, flights, service.url)
            with pytest.raises(GateShut, match="store is not available"):
                await flights.ask(ask)
            await way.reached(1)
            with pytest.raises(GateShut, match="1 effects are in hand"):
                await flights.ask(ask)
            way.free = True
            await stage.wait_for(lambda run: bool(run.attempts) and not run.open_attempts)


class SecondWaits(Between):
    """A desk that keeps the second admission waiting, and then has no store for it."""

    def __init__(self, desk: Ledger) -> None:
        super().__init__(desk)
        self.admissions = 0
        self.release = anyio.Event()
        self.resent = 0

    async def submit(
        self, run: str, command: Command, *, fence: int | None = None, blobs: Mapping[str, bytes] | None = None
    ) -> Answered:
        self.admissions += isinstance(command, Admit)
        if isinstance(command, Admit) and self.admissions == 2:
            await self.release.wait()
            raise StoreUnavailable("silence")
        return await self._desk.submit(run, command, fence=fence, blobs=blobs)

    async def resend(self, commit: Commit) -> None:
        await self._desk.resend(commit)
        self.resent += 1


async def test_a_permit_is_disavowed_after_another_flight_of_its_slot_has_landed(tmp_path: Path) -> None:
    async with raw_service(answering(RECEIPT)) as service, gateway_stage(service.url, tmp_path) as (stage, _):
        desk = SecondWaits(stage.desk)
        async with (
            Dispatcher() as dispatcher,
            Flights(desk, dispatcher, gateway="g9/1") as flights,
            anyio.create_task_group() as tasks,
        ):
            ask = wanted(stage, flights, service.url)
            stage.store.faults.unknown_outcomes = 1
            with pytest.raises(GateShut, match="store is not available"):
                await flights.ask(ask)

            async def second() -> None:
                with pytest.raises(GateShut, match="store is not available"):
                    await flights.ask(ask)

            tasks.start_soon(second)
            with anyio.fail_after(10):
                while not (desk.resent and desk.admissions == 2):  # noqa: ASYNC110 - nothing rings here
                    await anyio.sleep(0.01)
            await anyio.wait_all_tasks_blocked()
            [attempt] = await stage.attempts()
            assert [t.outcome for t in attempt.tries] == [TryOutcome.GRANTED], "it may be on its way to the second"
            desk.release.set()
            run = await stage.wait_for(lambda run: not run.open_attempts)
            assert [t.outcome for t in run.attempts[attempt.id].tries] == [TryOutcome.NOT_EXECUTED]
        assert service.arrivals == []
