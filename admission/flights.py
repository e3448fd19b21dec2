"""One effect from the worker's wish to its recorded outcome.

Theory of operation. A flight submits the admission; if it comes back with the permit for try 1, it sends, records, and
while the contract allows another try, asks for the next permit (same key, same bytes, the gate checked again) and sends
once more. A flight belongs to the gateway, not to the request that started it: a worker that hangs up, and a gateway
that is told to stop, both leave it running to its record. What the gateway alone knows is never dropped: if a record is
not taken after a send, whatever the reason, it is offered again until it is, and while it waits it counts against the
limit of flights, so memory is bounded. A permit that was granted but never used (its commit's reply was lost) is
disavowed by the only one who can: this incarnation, which knows what it sent. To look for the permit would prove
nothing, since its commit may still be under way; so that very commit is sent again until the store has answered it.

Knows commands, dispatching, and how to name the answer. Does not know HTTP, grants, or the rules that decide.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import anyio
import anyio.abc

from admission.answers import EffectAnswer, answer_of, words_of
from admission.commands import Admit, Command, GrantTry, RecordTry
from admission.contracts import Operation, Prepared
from admission.copies import OutcomeUnknown
from admission.dispatch import Dispatcher, TryResult
from admission.events import EffectRefused, TryGranted
from admission.points import point
from admission.services import Service
from admission.state import RunState
from admission.storage import Commit, StoreBehind, StoreUnavailable
from admission.table import Decision
from admission.vocabulary import AttemptState, Basis, Blocks, TryOutcome, Verdict

FLIGHTS_MAX = 1_000
DRAIN_MAX_S = 20.0
#: Pauses before try 2, 3, ...; the last one repeats.
BACKOFF_MS = (100, 400, 1_600)
STORE_BACKOFF_FIRST_S = 0.05
STORE_BACKOFF_MAX_S = 2.0

_log = logging.getLogger(__name__)


class Answered(Protocol):
    """What the desk answers: a decision that the store has confirmed."""

    @property
    def decision(self) -> Decision:
        """The verdict with its detail."""


class Ledger(Protocol):
    """The part of the desk that the gateway uses."""

    async def submit(
        self, run: str, command: Command, *, fence: int | None = None, blobs: Mapping[str, bytes] | None = None
    ) -> Answered:
        """Decide a command; raises OutcomeUnknown or another StoreUnavailable when the store does not answer."""

    async def resend(self, commit: Commit) -> None:
        """Have the outcome of a commit known that was not answered; raises StoreUnavailable when it still is not."""

    async def current(self, run: str) -> RunState:
        """The run, caught up with the store."""

    def now_ms(self) -> int:
        """The store's time."""


class GateShut(Exception):
    """No verdict can be given now, and nothing was sent for this request. The message says why."""


class FlightFault(Exception):
    """A fault of regate itself ended a flight; it is in the process's log. Asking again is safe: the slot dedupes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An effect that a worker asks for, named, frozen, and with the service that would do it.

    `about` is the attempt that an earlier answer left open, if the worker asks again because of that.
    """

    run: str
    admit: Admit
    service: Service
    operation: Operation
    prepared: Prepared
    about: str = ""


@dataclass(slots=True)
class _Waiter:
    """Where a request waits for its flight; the first settlement counts."""

    done: anyio.Event = field(default_factory=anyio.Event)
    answer: EffectAnswer | None = None
    error: Exception | None = None

    def settle(self, answer: EffectAnswer | None = None, error: Exception | None = None) -> None:
        """Answer the request, if it was not answered yet."""
        if not self.done.is_set():
            self.answer, self.error = answer, error
            self.done.set()


@dataclass(frozen=True, slots=True)
class _Permit:
    """One try that this gateway may make."""

    attempt: str
    n: int
    key: str
    not_after_ms: int
    in_force: int


class Flights:
    """All effects that this gateway has in hand. Use as `async with`; leaving it waits for what is on the wire."""

    def __init__(
        self,
        desk: Ledger,
        dispatcher: Dispatcher,
        *,
        gateway: str,
        flights_max: int = FLIGHTS_MAX,
        drain_max_s: float = DRAIN_MAX_S,
        backoff_ms: tuple[int, ...] = BACKOFF_MS,
    ) -> None:
        """`gateway` names this incarnation: it must differ after every start, since permits are held by it."""
        self.gateway = gateway
        self.broken = ""
        self._desk = desk
        self._dispatcher = dispatcher
        self._flights_max = flights_max
        self._drain_max_s = drain_max_s
        self._backoff_ms = backoff_ms
        self._closing = False
        self._tasks: anyio.abc.TaskGroup | None = None
        self._booked = 0
        self._doubts = 0
        self._landed = anyio.Event()
        self._scopes: set[anyio.CancelScope] = set()
        self._aloft: Counter[tuple[str, str]] = Counter()
        #: Tries whose dispatch began and whose record is not yet in the log. Never disavowed.
        self._unrecorded: set[tuple[str, int]] = set()

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._tasks is not None
        self._closing = True
        with anyio.move_on_after(self._drain_max_s, shield=True):
            if self._booked:
                await self._landed.wait()
        for scope in list(self._scopes):
            scope.cancel()
        self._tasks.cancel_scope.cancel()
        return await self._tasks.__aexit__(kind, error, trace)

    @property
    def count(self) -> int:
        """How many flights there are, those that wait to be recorded included."""
        return self._booked

    async def ask(self, wanted: Wanted) -> EffectAnswer:
        """The gate's answer about one effect. The effect goes on if the caller is cancelled.

        Raises GateShut, FlightFault.
        """
        if self._tasks is None or self._closing:
            raise GateShut("this gateway is stopping; ask another one, or again later")
        if self.broken:
            raise GateShut(self.broken)
        if self.count + self._doubts >= self._flights_max:
            raise GateShut(f"{self._flights_max} effects are in hand already; ask again later")
        waiter = _Waiter()
        self._booked += 1
        self._tasks.start_soon(self._fly, wanted, waiter)
        await waiter.done.wait()
        if waiter.error is not None:
            raise waiter.error
        assert waiter.answer is not None
        return waiter.answer

    async def _fly(self, wanted: Wanted, waiter: _Waiter) -> None:
        slot = (wanted.run, wanted.prepared.slot)
        with anyio.CancelScope(shield=True) as scope:
            self._scopes.add(scope)
            self._aloft[slot] += 1
            try:
                waiter.settle(await self._flight(wanted, waiter))
            except StoreUnavailable:
                waiter.settle(error=GateShut("the store is not available, so nothing is sent; ask again later"))
            except StoreBehind as error:
                self.broken = f"the store lost acknowledged data; this gateway sends nothing any more: {error}"
                _log.critical(self.broken)
                waiter.settle(error=GateShut(self.broken))
            except Exception as error:  # noqa: BLE001 - one flight's fault must not end the others
                _log.exception("an effect of run %s ended in an unforeseen way", wanted.run)
                waiter.settle(error=FlightFault(f"a fault of the gateway itself ({type(error).__name__}); see its log"))
            finally:
                self._scopes.discard(scope)
                self._booked -= 1
                if self._closing and not self._booked:
                    self._landed.set()
                self._aloft[slot] -= 1
                if not self._aloft[slot]:
                    del self._aloft[slot]
        waiter.settle(error=GateShut("this gateway was stopped before the outcome was known"))

    async def _flight(self, wanted: Wanted, waiter: _Waiter) -> EffectAnswer:
        told = await self._refused_meanwhile(wanted) if wanted.about else None
        if told is not None:
            return told
        decision = await self._admission(wanted)
        waits = not decision.accepted and decision.verdict in (Verdict.IN_FLIGHT, Verdict.IN_DOUBT)
        if waits and await self._disavow(wanted.run, wanted.prepared.slot, own_flights=1):
            decision = await self._admission(wanted)
        if not decision.accepted:
            return await self._refusal(wanted, decision)
        granted = next(event for event in decision.events if isinstance(event, TryGranted))
        detail = decision.detail
        permit = _Permit(str(detail["attempt"]), 1, str(detail["key"]), granted.not_after, int(detail["in_force"]))
        return await self._tries(wanted, permit, waiter)

    async def _refused_meanwhile(self, wanted: Wanted) -> EffectAnswer | None:
        """The refusal that an attempt turned out to have met after its worker was told to ask again.

        Without it the slot, free again, would be filled by another attempt each time that the worker asks.
        """
        state = await self._desk.current(wanted.run)
        row, admit = state.attempts.get(wanted.about), wanted.admit
        if row is None or (row.slot, row.child, row.revision) != (admit.slot, admit.child, admit.revision):
            return None
        child = state.children.get(row.child)
        if child is None or not state.is_current(child) or state.slots.get(row.slot) is not None:
            return None
        if row.state is not AttemptState.FAILED or row.basis is not Basis.SERVICE_REFUSED or row.contradicted:
            return None
        return answer_of(row, Verdict.FAILED, in_force=state.head, detail=row.why)

    async def _admission(self, wanted: Wanted) -> Decision:
        prepared = wanted.prepared
        try:
            answered = await self._desk.submit(wanted.run, wanted.admit, blobs={prepared.input_ref: prepared.frozen})
        except OutcomeUnknown as doubt:
            self._disavow_later(wanted, doubt.commit)
            raise
        return answered.decision

    async def _tries(self, wanted: Wanted, permit: _Permit, waiter: _Waiter) -> EffectAnswer:
        """Send, record, and send again while the contract and the gate allow it."""
        tries_max = wanted.operation.facts.tries_max
        while True:
            self._unrecorded.add((permit.attempt, permit.n))
            result = await self._dispatcher.send(
                wanted.service, wanted.operation, wanted.prepared.request, key=permit.key,
                not_after_ms=permit.not_after_ms,
            )  # fmt: skip
            pause_ms = 0
            if result.again and permit.n < tries_max and not self._closing:
                pause_ms = self._backoff_ms[min(permit.n, len(self._backoff_ms)) - 1]
            await self._record(wanted, permit, result, pause_ms=pause_ms, waiter=waiter)
            if not pause_ms:
                return await self._outcome(wanted, permit, result)
            await anyio.sleep(pause_ms / 1000)
            again = GrantTry(attempt=permit.attempt, n=permit.n + 1, gateway=self.gateway)
            try:
                decision = (await self._desk.submit(wanted.run, again)).decision
            except StoreUnavailable as error:
                if isinstance(error, OutcomeUnknown):
                    self._disavow_later(wanted, error.commit)
                return self._in_doubt(wanted, permit, "the store is not available; the outcome of its first try stands")
            if not decision.accepted:
                if result.outcome is TryOutcome.NOT_EXECUTED:
                    # It was recorded with the intention to try again; that intention ends here.
                    await self._record(wanted, permit, result, pause_ms=0, waiter=waiter)
                return await self._outcome(wanted, permit, result)
            not_after = int(decision.detail.get("not_after") or 0)
            in_force = int(decision.detail.get("in_force") or permit.in_force)
            permit = _Permit(permit.attempt, permit.n + 1, permit.key, not_after, in_force)

    async def _record(
        self, wanted: Wanted, permit: _Permit, result: TryResult, *, pause_ms: int, waiter: _Waiter
    ) -> None:
        """Put an outcome into the log, however long that takes: nobody else knows it."""
        retry_at = self._desk.now_ms() + pause_ms if pause_ms else 0
        command = RecordTry(
            by=self.gateway, attempt=permit.attempt, n=permit.n, outcome=result.outcome, basis=result.basis,
            status=result.status, observed=result.observed, detail=result.detail, retry_at=retry_at,
        )  # fmt: skip
        pause_s = STORE_BACKOFF_FIRST_S
        point("flight.record.before")
        while True:
            try:
                await self._desk.submit(wanted.run, command)
                break
            except StoreBehind:
                raise
            except StoreUnavailable:
                words = "it was sent, and this gateway records the outcome when the store is back; ask again then"
            except Exception:  # noqa: BLE001 - whatever it is, nobody else has this outcome
                _log.exception("run %s: an outcome of %s is not taken; it is offered again", wanted.run, permit.attempt)
                words = "it was sent, and a fault keeps this gateway from recording the outcome; it goes on trying"
            waiter.settle(self._in_doubt(wanted, permit, words))
            await anyio.sleep(pause_s)
            pause_s = min(pause_s * 2, STORE_BACKOFF_MAX_S)
        point("flight.record.after")
        self._unrecorded.discard((permit.attempt, permit.n))

    # -- permits that were never used ---------------------------------------------------------------------------------

    def _disavow_later(self, wanted: Wanted, commit: Commit) -> None:
        """A commit's reply was lost: it may grant us a try. Have it answered, and say that the try is not used."""
        if self._tasks is not None and not self._closing:
            self._doubts += 1
            self._tasks.start_soon(self._disavow_when_back, commit, wanted.prepared.slot)

    async def _disavow_when_back(self, commit: Commit, slot: str) -> None:
        pause_s, answered = STORE_BACKOFF_FIRST_S, False
        try:
            while not self._closing and not self.broken:
                await anyio.sleep(pause_s)
                pause_s = min(pause_s * 2, STORE_BACKOFF_MAX_S)
                try:
                    if not answered:
                        await self._desk.resend(commit)
                        answered = True
                    if self._aloft[(commit.run, slot)]:
                        continue  # the permit in the log may be one that is on its way to another flight
                    await self._disavow(commit.run, slot, own_flights=0)
                    return
                except StoreUnavailable:
                    continue
                except StoreBehind as error:
                    self.broken = f"the store lost acknowledged data; this gateway sends nothing any more: {error}"
                except Exception:  # noqa: BLE001 - it must not end the flights beside it
                    _log.exception("run %s: an unused permit is not disavowed yet; it is tried again", commit.run)
        finally:
            self._doubts -= 1

    async def _disavow(self, run: str, slot: str, *, own_flights: int) -> bool:
        """Record "nothing written" for tries of a slot that we were granted and never began. True if there were any.

        While another flight of the slot is aloft, a permit may be on its way to it, so nothing is said then.
        """
        if self._aloft[(run, slot)] > own_flights:
            return False
        state = await self._desk.current(run)
        attempt = state.attempts.get(state.slots.get(slot, ""))
        if attempt is None or not attempt.open or self._aloft[(run, slot)] > own_flights:
            return False
        unused = [
            t.n
            for t in attempt.tries
            if t.gateway == self.gateway
            and t.outcome is TryOutcome.GRANTED
            and (attempt.id, t.n) not in self._unrecorded
        ]
        for n in unused:
            words = "the permit was never used: the store's answer that granted it did not arrive"
            await self._desk.submit(
                run,
                RecordTry(
                    by=self.gateway, attempt=attempt.id, n=n, outcome=TryOutcome.NOT_EXECUTED,
                    basis=Basis.NOTHING_WRITTEN, detail=words,
                ),
            )  # fmt: skip
        return bool(unused)

    # -- answers ------------------------------------------------------------------------------------------------------

    async def _outcome(self, wanted: Wanted, permit: _Permit, result: TryResult) -> EffectAnswer:
        """The answer after the last try, as the log has it."""
        try:
            row = (await self._desk.current(wanted.run)).attempts[permit.attempt]
        except StoreUnavailable:
            return self._in_doubt(wanted, permit, "recorded, but the store is not available just now; ask again")
        verdict = {AttemptState.SUCCEEDED: Verdict.DONE, AttemptState.FAILED: Verdict.FAILED}.get(row.state)
        if row.contradicted:
            verdict = None
        blocks = None if verdict else wanted.operation.facts.unknown_blocks
        return answer_of(
            row, verdict or Verdict.IN_DOUBT, in_force=permit.in_force, blocks=blocks, detail=row.why or result.detail,
            observed=row.observed or result.observed,
        )  # fmt: skip

    def _in_doubt(self, wanted: Wanted, permit: _Permit, words: str) -> EffectAnswer:
        admit = wanted.admit
        return EffectAnswer(
            Verdict.IN_DOUBT, permit.in_force, permit.attempt, wanted.operation.facts.unknown_blocks, words,
            target=admit.target, input_ref=admit.input_ref, operation_id=permit.key, revision=admit.revision,
            child=admit.child, outcome=AttemptState.SENDING.value,
        )  # fmt: skip

    async def _refusal(self, wanted: Wanted, decision: Decision) -> EffectAnswer:
        """The answer when no try was granted, with the row of the attempt that has the slot, if one has."""
        detail = decision.detail
        verdict = Verdict(decision.verdict)
        in_force = int(detail.get("in_force") or 0)
        words = next((e.detail for e in decision.events if isinstance(e, EffectRefused)), "")
        words = words or str(detail.get("why") or "") or words_of(verdict, in_force)
        waiting = verdict in (Verdict.IN_DOUBT, Verdict.IN_FLIGHT)
        blocks = Blocks(detail["blocks"]) if waiting and detail.get("blocks") else None
        if detail.get("attempt"):
            row = (await self._desk.current(wanted.run)).attempts[str(detail["attempt"])]
            return answer_of(
                row, verdict, in_force=in_force, blocks=blocks, detail=words, observed=detail.get("observed")
            )
        admit = wanted.admit
        return EffectAnswer(
            verdict, in_force, detail=words, target=admit.target, input_ref=admit.input_ref, revision=admit.revision,
            child=admit.child,
        )  # fmt: skip
