"""A run on the bench: its goal, contract and children, a long history, and the commands that callers send.

Knows the commands of the rules. Does not know what is measured.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from admission import events as ev
from admission.agenda import index_of
from admission.commands import Admit, ClaimChild, Command, PlanChild, RecordTry, Start, StartLaunch
from admission.contracts import Contract, Prepared, parse_contract
from admission.desk import Answer, Desk
from admission.rules import decide
from admission.run_machine import RUN_MACHINE
from admission.state import RunState, fold
from admission.storage import Commit, Committed, Compare, Index, Store
from admission.table import Decision
from admission.vocabulary import Basis, ChildMode, TryOutcome

RunDesk = Desk[RunState, Command, ev.Event, Decision]

SCOPE, TASK, GATEWAY = "orders", "task-1", "bench/1"
HISTORY_COMMIT_EVENTS = 2_000

CONTRACT = """\
service: shop
version: "1"
operations:
  refund:
    request: {method: POST, path: "/actions/refund"}
    arguments: {order_id: string, amount: number, payment_method: string, reason: string}
    target: order_id
    generated: [reason]
    class: VOID
    idempotency: {header: Idempotency-Key, retention_ms: 86400000}
    lookup: {path: "/keys/{key}"}
    void: {path: "/keys/{key}/void"}
    not_after: {header: X-Not-After, max_age_ms: 30000, clock_skew_ms: 2000}
    refused_statuses: [422]
    unavailable_statuses: [503, 410, 412]
    timeout_ms: 5000
    tries_max: 3
"""


def new_id() -> str:
    """An id that nobody else has."""
    return uuid.uuid4().hex


@lru_cache(maxsize=1)
def contract() -> Contract:
    """What the service on the bench promises."""
    return parse_contract(CONTRACT, "shop.yaml")


def arguments(n: int) -> dict[str, Any]:
    """Arguments that make effect `n` an intent of its own."""
    return {
        "order_id": f"#W{n:08}", "amount": 12.5 + n, "payment_method": "credit_card_4466831",
        "reason": "no longer needed",
    }  # fmt: skip


@lru_cache(maxsize=200_000)
def prepared(n: int) -> Prepared:
    """Effect `n` as the gateway freezes it. Kept, because what callers do before the clock runs takes time too."""
    return contract().operations["refund"].prepare(arguments(n), occurrence=1)


RECEIPT = {"id": "rf-00000001", "order_id": "#W00000001", "amount": 12.5, "state": "recorded"}


@dataclass(frozen=True, slots=True)
class Wish:
    """An admission that a caller asks for, and the frozen bytes that travel with it."""

    admit: Admit
    blobs: dict[str, bytes]


class Caller:
    """Makes the wishes of one child, each another intent. `first` keeps callers of one run apart."""

    def __init__(self, child: str, *, scope: str = SCOPE, revision: int = 1, first: int = 0) -> None:
        self.child = child
        self.scope = scope
        self.revision = revision
        self._n = first
        self._facts = contract().operations["refund"].facts

    def wish(self) -> Wish:
        """The next one."""
        self._n += 1
        request = prepared(self._n)
        admit = Admit(
            by=self.child, child=self.child, scope=self.scope, revision=self.revision, task=TASK, service="shop",
            operation="refund", target=request.target, slot=request.slot, input_ref=request.input_ref,
            contract=self._facts, gateway=GATEWAY,
        )  # fmt: skip
        return Wish(admit, {request.input_ref: request.frozen})

    def wishes(self, count: int) -> list[Wish]:
        """The next ones, made before the clock runs."""
        return [self.wish() for _ in range(count)]


def record(attempt: str) -> RecordTry:
    """Its first try was done."""
    return RecordTry(
        by=GATEWAY, attempt=attempt, n=1, outcome=TryOutcome.OK, basis=Basis.REPLY, status=200, observed=RECEIPT
    )


def goal(*scopes: str, words: str = "refund what was asked for") -> ev.Goal:
    """A goal of these scopes."""
    return ev.Goal(text=words, plan={scope: ev.ScopePlan(agent="hands", brief=words) for scope in scopes})


def first_child(scope: str, revision: int = 1) -> PlanChild:
    """The command that plans a scope's child."""
    return PlanChild(by="bench", scope=scope, revision=revision, mode=ChildMode.MEDIATED)


def launch(child: str, scope: str, revision: int = 1) -> tuple[StartLaunch, ClaimChild]:
    """What makes a planned child one that may act."""
    return StartLaunch(by="bench", child=child), ClaimChild(child=child, scope=scope, revision=revision, task=TASK)


async def accepted(desk: RunDesk, run: str, command: Command) -> Decision:
    """A command that must be accepted."""
    answer: Answer[Decision] = await desk.submit(run, command)
    if not answer.decision.accepted:
        raise RuntimeError(f"{type(command).__name__} was answered {answer.decision.verdict}: {answer.decision.detail}")
    return answer.decision


async def start_run(desk: RunDesk, run: str, *scopes: str) -> dict[str, str]:
    """Start a run; the child of each scope may act at once."""
    wanted = scopes or (SCOPE,)
    await accepted(desk, run, Start(run=run, principal="bench", request_id=run, goal=goal(*wanted)))
    return {scope: await start_child(desk, run, scope, 1) for scope in wanted}


async def start_child(desk: RunDesk, run: str, scope: str, revision: int) -> str:
    """Plan, launch and claim the child of an open scope."""
    child = str((await accepted(desk, run, first_child(scope, revision))).detail["child"])
    for command in launch(child, scope, revision):
        await desk.submit(run, command)
    return child


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one commit."""

    events: tuple[bytes, ...]
    control: int
    index: Index


@dataclass(frozen=True, slots=True)
class History:
    """A run's log: made once, written to any number of stores."""

    run: str
    child: str
    batches: Sequence[Batch]

    async def write(self, store: Store, *, version: int = 0, upto: int | None = None) -> int:
        """Append batches from a version on, the last one ending at `upto` or after; the log's version then."""
        seen = 0
        for batch in self.batches:
            seen += len(batch.events)
            if seen <= version:
                continue
            commit = Commit(
                run=self.run, id=new_id(), events=batch.events, control=batch.control, compare=Compare.NONE,
                expected=0, known=version, index=batch.index,
            )  # fmt: skip
            reply = await store.commit(commit)
            if not isinstance(reply, Committed):
                raise RuntimeError(f"a commit of the history was answered {reply}")
            version = reply.version
            if upto is not None and version >= upto:
                break
        return version


def history(run: str, *, events: int = 0, operations: int = 0) -> History:
    """A log that is about so many events long, or holds so many operations, all of them settled."""
    state = RunState(run)
    at = 1_700_000_000_000
    batches: list[Batch] = []
    pending: list[bytes] = []
    control = 0

    def do(command: Command) -> Decision:
        nonlocal control, at
        at += 1
        decision = decide(state, command, at)
        if not decision.accepted:
            raise RuntimeError(f"{type(command).__name__} was answered {decision.verdict}: {decision.detail}")
        for event in decision.events:
            fold(state, state.version + 1, event)
            pending.append(RUN_MACHINE.encode(event))
            control += ev.is_control(event)
        return decision

    def close() -> None:
        nonlocal control
        if pending:
            batches.append(Batch(tuple(pending), control, index_of(state)))
        pending.clear()
        control = 0

    do(Start(run=run, principal="bench", request_id=run, goal=goal(SCOPE)))
    child = str(do(first_child(SCOPE)).detail["child"])
    for command in launch(child, SCOPE):
        do(command)
    for wish in _endless(Caller(child)):
        if state.version >= events and len(state.attempts) >= operations:
            break
        do(record(str(do(wish.admit).detail["attempt"])))
        if len(pending) >= HISTORY_COMMIT_EVENTS // (10 if events and events < 20_000 else 1):
            close()
    close()
    return History(run, child, batches)


def _endless(caller: Caller) -> Iterator[Wish]:
    while True:
        yield caller.wish()
