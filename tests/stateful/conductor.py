"""Performs what the agenda lists, in the small world: children that work or do not, services that answer.

Knows: how an action becomes commands, as the conductor of the product does it. Does not know what should come of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from admission import agenda as ag
from admission import commands as cmd
from admission.records import Attempt
from admission.vocabulary import Basis, ChildMode, ContractClass, Finding, Method, TaskState, TryOutcome
from tests.stateful.world import Found, Send, Services
from tests.unit.rules_stage import Stage, claim, stamp_of


@dataclass
class Task:
    """What an A2A server knows of one child."""

    id: str
    state: TaskState = TaskState.SUBMITTED
    obeys: bool = True


@dataclass
class World:
    """The run under test, and everything outside of it."""

    stage: Stage
    services: Services
    sends: list[Send] = field(default_factory=list)
    tasks: dict[str, Task] = field(default_factory=dict)

    # -- gateways ------------------------------------------------------------------------------------------------------

    def permitted(self, attempt_id: str) -> None:
        """A try was granted: its request is with a gateway from now on."""
        row = self.stage.run.attempts[attempt_id]
        last = row.tries[-1]
        self.sends.append(
            Send(row.id, last.n, row.key, row.slot, self.stage.run.facts_of(row), row.not_after, last.granted_at)
        )

    def record(self, send: Send, outcome: TryOutcome, basis: Basis, *, retry_in: int = 0) -> None:
        retry_at = self.stage.now + retry_in if retry_in else 0
        said = cmd.RecordTry(attempt=send.attempt, n=send.n, outcome=outcome, basis=basis, retry_at=retry_at)
        assert self.stage.do(said).accepted, "evidence is never refused"

    def arrives(self, send: Send, willing: str, *, reply: bool, retry_in: int = 0) -> None:
        """A request reaches its service; its gateway, if it waits and the reply is not lost, records the answer."""
        if send.facts.dedupes and self.stage.now - send.granted_at > send.facts.late_arrival_max_ms:
            self.sends.remove(send)  # assumed, not proven: nothing lives longer on the wire than the contract says
            return
        self.sends.remove(send)
        answer = self.services.arrive(send, self.stage.now, willing=willing)
        if reply and send.gateway_waits:
            again = retry_in if answer.outcome is TryOutcome.NOT_EXECUTED else 0
            self.record(send, answer.outcome, answer.basis, retry_in=again)
        elif send.gateway_waits:
            self.record(send, TryOutcome.IN_DOUBT, Basis.GAVE_UP, retry_in=retry_in)

    # -- the conductor -------------------------------------------------------------------------------------------------

    def perform(self, action: ag.Action, *, mode: ChildMode = ChildMode.MEDIATED, reached: bool = True) -> None:
        """One action. `reached` False: what had to be asked outside did not answer."""
        stage = self.stage
        match action:
            case ag.Plan(scope=scope, revision=revision):
                stage.ok(cmd.PlanChild(scope=scope, revision=revision, mode=mode))
            case ag.Launch(child=child):
                stage.ok(cmd.StartLaunch(child=child))
                if reached:
                    task = self.tasks.setdefault(child, Task(f"task-{child}"))
                    stage.do(cmd.BindChild(child=child, task=task.id))
            case ag.FindTask(child=child):
                if reached and child in self.tasks:
                    stage.do(cmd.BindChild(child=child, task=self.tasks[child].id))
            case ag.Stop(child=child):
                self._stop(child, reached=reached)
            case ag.Observe(child=child):
                if reached and child in self.tasks:
                    stage.do(cmd.RecordSeen(child=child, state=self.tasks[child].state))
            case ag.Collect(child=child):
                row = stage.run.children[child]
                stage.do(cmd.FileResult(child=child, task=row.task, stamp=stamp_of(row)))
            case ag.Ask(attempt=attempt):
                self.ask(stage.run.attempts[attempt], reached=reached)
            case ag.Commit(command=command):
                stage.ok(command)
            case _:
                assert_never(action)

    def _stop(self, child: str, *, reached: bool) -> None:
        self.stage.ok(cmd.RequestStop(child=child, reason="asked"))
        task = self.tasks.get(child)
        if not reached or task is None:
            self.stage.do(cmd.RecordStop(child=child, refused=False, detail="nobody answers"))
        elif task.obeys:
            if task.state in (TaskState.SUBMITTED, TaskState.WORKING):
                task.state = TaskState.CANCELED
        else:
            self.stage.do(cmd.RecordStop(child=child, refused=True, detail="not cancelable"))

    def ask(self, row: Attempt, *, reached: bool) -> None:
        """Find out what became of an attempt, as its contract allows."""
        facts = self.stage.run.facts_of(row)
        if row.tries and all(t.outcome is TryOutcome.NOT_EXECUTED for t in row.tries):
            self._classify(row, Found(Finding.NOT_EXECUTED, Basis.NOTHING_WRITTEN), 0)
            return
        method = {
            ContractClass.VOID: Method.VOID,
            ContractClass.LOOKUP: Method.LOOKUP,
            ContractClass.NOT_AFTER: Method.LOOKUP,
        }
        if facts.contract_class not in method:
            self._classify(row, Found(Finding.UNKNOWN, Basis.GAVE_UP), 0)
            return
        how = method[facts.contract_class]
        started = int(self.stage.ok(cmd.StartReconcile(attempt=row.id, method=how, epoch=1)).detail["started"])
        if not reached:
            return
        if how is Method.VOID:
            self._classify(row, self.services.void(row.key), started)
            return
        found = self.services.look_up(row.key, facts, self.stage.now, row.not_after)
        self._classify(row, found, started)
        if facts.contract_class is ContractClass.LOOKUP and self.stage.run.attempts[row.id].open:
            self._classify(row, Found(Finding.UNKNOWN, Basis.GAVE_UP), started)

    def _classify(self, row: Attempt, found: Found, started: int) -> None:
        self.stage.do(
            cmd.Classify(
                attempt=row.id, finding=found.finding, basis=found.basis, epoch=1, started=started,
                clock_before_ms=found.clock_before_ms,
            )
        )  # fmt: skip

    # -- children ------------------------------------------------------------------------------------------------------

    def work(self, child: str, state: TaskState) -> None:
        """The child's agent reaches a state of its own accord."""
        task = self.tasks.get(child)
        if task is not None and task.state in (TaskState.SUBMITTED, TaskState.WORKING):
            task.state = state

    def claims(self, child: str, task: str) -> None:
        row = self.stage.run.children[child]
        if self.stage.do(claim(row, task)).accepted:
            self.tasks.setdefault(child, Task(task))
