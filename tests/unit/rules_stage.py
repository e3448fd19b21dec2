"""A run on a bench: decide and fold by hand, with a clock that the test turns.

Knows: how to bring a run, its children and its attempts into a state by the commands that the product uses.
Does not know: what the rules should answer; the tests say that.
"""

from __future__ import annotations

from typing import Any

from admission import commands as cmd
from admission import events as ev
from admission.agenda import Action, agenda
from admission.records import Attempt, Child
from admission.rules import decide
from admission.standing import phase
from admission.state import RunState, fold
from admission.table import Decision
from admission.vocabulary import (
    Basis,
    Blocks,
    ChildMode,
    ContractClass,
    Disposition,
    Finding,
    Method,
    RunPhase,
    TaskState,
    TryOutcome,
    UpdateKind,
    short_hash,
    slot_of,
)
from admission.wire import Stamp

RUN = "run1"
GATEWAY = "gateway-1"


def plan(
    agent: str = "hands", *, brief: str = "", actions: tuple[ev.PlannedAction, ...] = (), needs: tuple[str, ...] = ()
):
    return ev.ScopePlan(agent=agent, brief=brief, actions=actions, needs=needs)


def goal(*scopes: str, text: str = "ship it", budget: int | None = None, **plans: ev.ScopePlan) -> ev.Goal:
    """A goal with plain scopes by position and special ones by name."""
    return ev.Goal(text=text, plan={s: plan() for s in scopes} | plans, budget_effects=budget)


def action(target: str, *, occurrence: int = 1, operation: str = "refund") -> ev.PlannedAction:
    return ev.PlannedAction(service="shop", action=operation, arguments={"order": target}, occurrence=occurrence)


def facts(contract_class: ContractClass = ContractClass.VOID, **given: Any) -> ev.ContractFacts:
    """A contract: deduping, three tries, a key that lives for an hour."""
    fields: dict[str, Any] = {
        "service": "shop", "operation": "refund", "version": "1", "schema_hash": "0" * 16, "dedupes": True,
        "tries_max": 3, "timeout_ms": 1_000, "retention_ms": 3_600_000, "late_arrival_max_ms": 60_000,
        "unknown_blocks": Blocks.SCOPE,
    }  # fmt: skip
    fields |= {"contract_class": contract_class, **given}
    # A contract that says something else has another hash, as contracts.py makes it.
    fields["schema_hash"] = given.get("schema_hash", short_hash(*(f"{k}={fields[k]}" for k in sorted(fields))))
    return ev.ContractFacts(**fields)


class Stage:
    """One run: its log, its folded state, and the store's time in ms."""

    def __init__(self, first: ev.Goal | None = None, *, run: str = RUN) -> None:
        self.run = RunState(run)
        self.log: list[ev.Event] = []
        self.now = 1_000_000
        self.requests = 0
        if first is not None:
            self.ok(cmd.Start(run=run, principal="ann", request_id="start", goal=first, by="ann"))

    # -- the two pure functions ----------------------------------------------------------------------------------------

    def decide(self, command: cmd.Command) -> Decision:
        """What a command would lead to; nothing is appended."""
        return decide(self.run, command, self.now)

    def fold(self, *events: ev.Event) -> None:
        """Append events and fold them."""
        for event in events:
            self.log.append(event)
            fold(self.run, self.run.version + 1, event)

    def do(self, command: cmd.Command) -> Decision:
        """Decide, append, fold: as if the commit had succeeded at once."""
        decision = self.decide(command)
        self.fold(*decision.events)
        return decision

    def ok(self, command: cmd.Command) -> Decision:
        """A command that must be accepted."""
        decision = self.do(command)
        assert decision.accepted, f"{type(command).__name__} was answered {decision.verdict}: {decision.detail}"
        return decision

    # -- people --------------------------------------------------------------------------------------------------------

    def request_id(self) -> str:
        self.requests += 1
        return f"request-{self.requests}"

    def revise(
        self, new: ev.Goal, *, kind: UpdateKind = UpdateKind.CORRECT, remove: tuple[str, ...] = (), **more: Any
    ) -> Decision:
        """A correction that is accepted, under a fresh request id."""
        fields: dict[str, Any] = {"request_id": self.request_id(), "by": "ann", **more}
        return self.ok(cmd.Revise(kind=kind, goal=new, remove=remove, **fields))

    def change(self, *scopes: str) -> Decision:
        """Give these scopes another brief, so that exactly they (and what hangs on them) are affected."""
        brief = f"brief {self.run.head + 1}"
        return self.revise(ev.Goal(text="", plan={s: plan(brief=brief) for s in scopes}))

    def pause(self) -> Decision:
        return self.ok(cmd.Pause(request_id=self.request_id(), by="ann"))

    def resume(self) -> Decision:
        return self.ok(cmd.Resume(request_id=self.request_id(), by="ann"))

    def cancel(self) -> Decision:
        return self.ok(cmd.Cancel(request_id=self.request_id(), by="ann"))

    def open(self, scope: str) -> Decision:
        return self.ok(cmd.OpenScope(scope=scope, revision=self.run.gates[scope].target, epoch=1))

    # -- children ------------------------------------------------------------------------------------------------------

    def planned(self, scope: str, mode: ChildMode = ChildMode.MEDIATED) -> Child:
        answer = self.ok(cmd.PlanChild(scope=scope, revision=self.run.gates[scope].cur, mode=mode))
        return self.run.children[str(answer.detail["child"])]

    def launched(self, scope: str, mode: ChildMode = ChildMode.MEDIATED) -> Child:
        child = self.planned(scope, mode)
        self.ok(cmd.StartLaunch(child=child.id))
        return self.run.children[child.id]

    def running(self, scope: str, mode: ChildMode = ChildMode.MEDIATED) -> Child:
        """A child that is bound and, unless it is autonomous, has claimed."""
        child = self.launched(scope, mode)
        self.ok(cmd.BindChild(child=child.id, task=f"task-{child.id}"))
        if mode is ChildMode.MEDIATED:
            self.ok(claim(child, f"task-{child.id}"))
        return self.run.children[child.id]

    def seen(self, child: Child, state: TaskState, detail: str = "") -> Decision:
        return self.do(cmd.RecordSeen(child=child.id, state=state, detail=detail))

    def file(self, child: Child, /, **more: Any) -> Decision:
        """The child's result arrives with a good stamp, unless told otherwise."""
        row = self.run.children[child.id]
        fields: dict[str, Any] = {"child": child.id, "task": row.task, "stamp": stamp_of(row), **more}
        return self.do(cmd.FileResult(**fields))

    def finished(self, scope: str) -> Child:
        """A child that did its work and whose result was adopted."""
        child = self.running(scope)
        self.seen(child, TaskState.COMPLETED)
        assert self.file(child).verdict is Disposition.ADOPTED
        return self.run.children[child.id]

    # -- effects -------------------------------------------------------------------------------------------------------

    def ask(self, child: Child, target: str = "o1", /, **more: Any) -> Decision:
        """A worker asks for an effect."""
        return self.do(self.asking(child, target, **more))

    def asking(self, child: Child, target: str = "o1", /, **more: Any) -> cmd.Admit:
        row = self.run.children[child.id]
        occurrence = int(more.get("occurrence", 1))
        operation = str(more.get("operation", "refund"))
        slot = slot_of("shop", operation, target, {"order": target}, occurrence=occurrence)
        fields: dict[str, Any] = {
            "child": row.id, "scope": row.scope, "revision": row.revision, "task": row.task, "service": "shop",
            "operation": operation, "target": target, "slot": slot, "input_ref": f"bytes-of-{target}",
            "contract": facts(operation=operation), "gateway": GATEWAY, "by": "worker",
        }  # fmt: skip
        return cmd.Admit(**(fields | more))

    def sent(self, child: Child, target: str = "o1", **more: Any) -> Attempt:
        """An attempt whose first try was granted."""
        answer = self.ask(child, target, **more)
        assert answer.accepted, answer
        return self.run.attempts[str(answer.detail["attempt"])]

    def record(self, attempt: Attempt, outcome: TryOutcome, *, n: int = 1, retry_in: int = 0, **more: Any) -> Decision:
        basis = {TryOutcome.OK: Basis.REPLY, TryOutcome.NOT_EXECUTED: Basis.SERVICE_REFUSED}.get(outcome, Basis.GAVE_UP)
        retry_at = self.now + retry_in if retry_in else 0
        fields: dict[str, Any] = {"basis": basis, "observed": {"reply": outcome.value}, **more}
        return self.do(cmd.RecordTry(attempt=attempt.id, n=n, outcome=outcome, retry_at=retry_at, **fields))

    def done(self, child: Child, target: str = "o1", **more: Any) -> Attempt:
        attempt = self.sent(child, target, **more)
        self.record(attempt, TryOutcome.OK)
        return self.run.attempts[attempt.id]

    def grant(self, attempt: Attempt, n: int, gateway: str = GATEWAY) -> Decision:
        return self.do(cmd.GrantTry(attempt=attempt.id, n=n, gateway=gateway))

    def question(self, attempt: Attempt, method: Method = Method.VOID) -> int:
        """Write down that a service is asked; the position of that."""
        return int(self.ok(cmd.StartReconcile(attempt=attempt.id, method=method, epoch=1)).detail["started"])

    def classify(self, attempt: Attempt, finding: Finding, basis: Basis, **more: Any) -> Decision:
        return self.do(cmd.Classify(attempt=attempt.id, finding=finding, basis=basis, epoch=1, **more))

    def unknown(self, child: Child, target: str = "o1", **more: Any) -> Attempt:
        """An attempt of which nobody can say what became of it."""
        fields: dict[str, Any] = {"contract": facts(ContractClass.OPAQUE, dedupes=False, tries_max=1), **more}
        attempt = self.sent(child, target, **fields)
        self.record(attempt, TryOutcome.IN_DOUBT)
        answer = self.classify(attempt, Finding.UNKNOWN, Basis.GAVE_UP, detail="nobody can be asked")
        assert answer.accepted, answer
        return self.run.attempts[attempt.id]

    def voided(self, attempt: Attempt) -> None:
        """The service says: not executed, and never will be."""
        started = self.question(attempt)
        assert self.classify(attempt, Finding.NOT_EXECUTED, Basis.VOIDED, started=started).accepted

    # -- reading -------------------------------------------------------------------------------------------------------

    def phase(self) -> RunPhase:
        return phase(self.run)

    def attempt(self, attempt: Attempt) -> Attempt:
        return self.run.attempts[attempt.id]

    def child(self, child: Child) -> Child:
        return self.run.children[child.id]

    def agenda(self, later_ms: int = 0) -> tuple[Action, ...]:
        return agenda(self.run, self.now + later_ms, epoch=1).actions


def claim(child: Child, task: str) -> cmd.ClaimChild:
    return cmd.ClaimChild(child=child.id, scope=child.scope, revision=child.revision, task=task)


def stamp_of(child: Child, /, **other: Any) -> Stamp:
    fields: dict[str, Any] = {
        "run": RUN,
        "scope": child.scope,
        "child": child.id,
        "revision": child.revision,
        "goal_hash": child.goal_hash,
    }
    return Stamp(**(fields | other))
