"""decide, fold and agenda in a small world: safety after every step, and in the end nothing is stuck.

The world executes, loses, delays, repeats and forgets as hypothesis likes; the auditor checks the invariants on the log
and on the services' truth table. Then everything heals: gateways wake, services and children answer, and the agenda is
performed until nothing is left. The run must have come to an end, or wait for a person in plain sight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from admission import agenda as ag
from admission import commands as cmd
from admission import events as ev
from admission.agenda import agenda, index_of
from admission.live import live_part, restore
from admission.rules import decide
from admission.standing import attention_since, phase, waiting
from admission.state import RunState, fold
from admission.vocabulary import (
    TERMINAL_PHASES,
    AttemptState,
    Basis,
    ChildMode,
    Finding,
    RunPhase,
    TaskState,
    TryOutcome,
    UpdateKind,
    slot_of,
)
from tests import seeds
from tests.stateful.auditor import Auditor
from tests.stateful.conductor import Task, World
from tests.stateful.world import CONTRACTS, Services
from tests.unit.rules_stage import RUN, Stage, action, plan, stamp_of

seeds.load()

N = st.integers(0, 11)
YES = st.booleans()
SCOPES = ("a", "b", "p", "p/q")
ROUNDS_MAX = 3_000


def _goal(budget: int | None) -> ev.Goal:
    actions = tuple(action("o0", operation=c.operation, occurrence=2) for c in CONTRACTS[:1])
    plans = {"a": plan(actions=actions), "b": plan(needs=("a",)), "p": plan(), "p/q": plan()}
    return ev.Goal(text="go", plan=plans, budget_effects=budget)


class Protocol(RuleBasedStateMachine):
    """One run, from its start until everything has healed."""

    @initialize(budget=st.sampled_from([None, 2, 5]), autonomous=st.sampled_from([None, None, "a", "p"]))
    def start(self, budget: int | None, autonomous: str | None) -> None:
        self.stage = Stage()
        self.services = Services()
        self.world = World(self.stage, self.services)
        self.auditor = Auditor(self.services)
        self.shadow = RunState(RUN)
        self.autonomous = autonomous
        self.requests = 0
        self.stale: RunState | None = None
        self.asked: list[cmd.Command] = []
        self.stage.ok(cmd.Start(run=RUN, principal="ann", request_id="start", goal=_goal(budget)))

    # -- checking ------------------------------------------------------------------------------------------------------

    @invariant()
    def the_log_keeps_the_invariants(self) -> None:
        for entry in self.stage.log[self.shadow.version :]:
            before = dict(self.shadow.attempts)
            fold(self.shadow, self.shadow.version + 1, entry)
            self.auditor.read(entry, before, self.shadow.attempts)
        self.auditor.compare(self.shadow.attempts)
        assert not self.shadow.alarms, "a contradiction, though every service told the truth"
        unknown = [a for a in self.shadow.attempts.values() if a.state is AttemptState.UNKNOWN]
        if unknown:
            assert attention_since(self.shadow) is not None, "S16: an unknown that nobody is shown"

    # -- people --------------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_blocked_is_shown(self) -> None:
        if phase(self.stage.run) in (RunPhase.BLOCKED, RunPhase.CANCELLED_UNRESOLVED):
            assert waiting(self.stage.run), "a run that waits for a person, and nobody is told"

    @rule()
    def somebody_keeps_a_copy(self) -> None:
        """As another process does, which does not see what is appended from now on."""
        self.stale = restore(live_part(self.stage.run), list(self.stage.run.attempts.values()))

    @invariant()
    def opening_from_an_old_copy_is_opening_from_the_log(self) -> None:
        """OpenScope compares the control version alone: while that stands, what an old copy opens, the log opens."""
        run, stale = self.stage.run, self.stale
        if stale is None or stale.control != run.control:
            return
        for scope, gate in stale.gates.items():
            opening = cmd.OpenScope(scope=scope, revision=gate.target, epoch=1)
            if decide(stale, opening, stale.time).accepted:
                assert decide(run, opening, run.time).accepted, f"{scope} opens only for whoever has not seen the rest"

    def _request(self, again: bool) -> str:
        self.requests += 0 if again and self.requests else 1
        return f"r{self.requests}"

    @rule(n=N, again=YES, expected=YES)
    def correct(self, n: int, again: bool, expected: bool) -> None:
        scope = SCOPES[n % 4]
        changed = ev.Goal(text="", plan={scope: plan(brief=f"brief {len(self.stage.log)}")})
        self._ask(
            cmd.Revise(
                kind=UpdateKind.CORRECT, request_id=self._request(again and expected), goal=changed,
                expected_revision=self.stage.run.head if expected else None,
            )
        )  # fmt: skip

    @rule(n=N)
    def replace(self, n: int) -> None:
        fresh = ev.Goal(text=f"new {n}", plan={"a": plan(), f"n{n % 2}": plan(needs=("a",))}, budget_effects=4 + n)
        if n < 4:
            self._ask(cmd.Revise(kind=UpdateKind.REPLACE, request_id=self._request(False), goal=fresh))

    @rule(kind=st.sampled_from([cmd.Pause, cmd.Resume, cmd.Resume]), again=YES)
    def hold_or_release(self, kind: type[Any], again: bool) -> None:
        self._ask(kind(request_id=self._request(again)))

    @precondition(lambda self: len(self.stage.log) > 40)
    @rule(n=N)
    def cancel(self, n: int) -> None:
        if n == 0:
            self._ask(cmd.Cancel(request_id=self._request(False)))

    @rule(n=N)
    def an_operator_decides_rightly(self, n: int) -> None:
        """Only where nothing can arrive any more: people can be wrong, but this one looks first."""
        flying = {s.attempt for s in self.world.sends}
        rows = [a for a in self.stage.run.attempts.values() if a.state is AttemptState.UNKNOWN and a.id not in flying]
        if rows:
            row = rows[n % len(rows)]
            said = {"reason": "looked", "evidence": "the service's own list", "by": "op"}
            happened = self.services.happened(row.key)
            self._ask(cmd.Resolve(attempt=row.id, happened=happened, request_id=self._request(False), **said))

    @rule(n=N)
    def a_request_is_sent_again(self, n: int) -> None:
        """However late: what was carried out is answered, and not carried out twice (S13)."""
        if self.asked:
            command = self.asked[n % len(self.asked)]
            assert self.stage.do(command).events == ()

    def _ask(self, command: Any) -> None:
        if self.stage.do(command).accepted:
            self.asked.append(command)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _child(self, n: int) -> Any:
        rows = list(self.stage.run.children.values())
        return rows[-1 - n % min(4, len(rows))] if rows else None

    @rule(n=N, duplicate=st.sampled_from([False, False, False, True]))
    def a_worker_claims(self, n: int, duplicate: bool) -> None:
        child = self._child(n)
        if child is not None:
            self.world.claims(child.id, f"other-{child.id}" if duplicate else child.task or f"task-{child.id}")

    @rule(n=N, order=N, contract=st.sampled_from(CONTRACTS), occurrence=st.sampled_from([1, 1, 1, 2, 0]), words=YES)
    def a_worker_asks_for_an_effect(
        self, n: int, order: int, contract: ev.ContractFacts, occurrence: int, words: bool
    ) -> None:
        child = self._child(n)
        if child is None:
            return
        name = f"o{order % 3}"
        slot = slot_of("shop", contract.operation, name, {"words": words and order > 6}, occurrence=occurrence)
        answer = self.stage.do(
            cmd.Admit(
                child=child.id, scope=child.scope, revision=child.revision, task=child.task, service="shop",
                operation=contract.operation, target=name, slot=slot, input_ref=f"bytes {slot}", contract=contract,
                gateway=f"g{n % 2}", occurrence=occurrence, conflict_key=f"{contract.operation}:{name}",
            )
        )  # fmt: skip
        if answer.accepted:
            self.world.permitted(str(answer.detail["attempt"]))

    @rule(n=N, state=st.sampled_from([TaskState.WORKING, TaskState.COMPLETED, TaskState.COMPLETED, TaskState.FAILED]))
    def an_agent_goes_on(self, n: int, state: TaskState) -> None:
        child = self._child(n)
        if child is not None:
            self.world.work(child.id, state)

    @rule(n=N)
    def an_agent_will_not_be_stopped(self, n: int) -> None:
        child = self._child(n)
        if child is not None and child.id in self.world.tasks:
            self.world.tasks[child.id].obeys = False

    @rule(n=N, stamped=YES, own=YES)
    def a_result_comes_unasked(self, n: int, stamped: bool, own: bool) -> None:
        child = self._child(n)
        if child is not None and child.task:
            stamp = stamp_of(child) if stamped else None
            task = child.task if own else f"other-{child.id}"
            self.stage.do(cmd.FileResult(child=child.id, task=task, stamp=stamp))

    @rule(n=N)
    def a_task_is_gone(self, n: int) -> None:
        child = self._child(n)
        if child is not None and n % 3 == 0:
            self.stage.do(cmd.DeclareLost(child=child.id, detail="task not found"))

    # -- the wire ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.sends)
    @rule(n=N, willing=st.sampled_from(["ok", "ok", "no", "busy"]), reply=YES, retry=st.sampled_from([0, 0, 800]))
    def a_request_arrives(self, n: int, willing: str, reply: bool, retry: int) -> None:
        self.world.arrives(self.world.sends[n % len(self.world.sends)], willing, reply=reply, retry_in=retry)

    @precondition(lambda self: self.world.sends)
    @rule(n=N, how=st.sampled_from(["times out", "times out", "crashes", "never wrote", "is lost"]))
    def a_gateway(self, n: int, how: str) -> None:
        send = self.world.sends[n % len(self.world.sends)]
        if how == "crashes":
            send.gateway_waits = False
        elif not send.gateway_waits:
            return
        elif how == "never wrote":
            self.world.sends.remove(send)
            self.world.record(send, TryOutcome.NOT_EXECUTED, Basis.NOTHING_WRITTEN, retry_in=800 if n % 2 else 0)
        else:
            self.world.record(send, TryOutcome.IN_DOUBT, Basis.GAVE_UP, retry_in=800 if n % 2 else 0)
            if how == "is lost":
                self.world.sends.remove(send)

    @rule(n=N)
    def a_gateway_wants_to_try_again(self, n: int) -> None:
        rows = [a for a in self.stage.run.attempts.values() if a.state is AttemptState.SENDING]
        rows = rows or list(self.stage.run.attempts.values())
        if rows:
            row = rows[-1 - n % len(rows)]
            if self.stage.do(cmd.GrantTry(attempt=row.id, n=len(row.tries) + 1, gateway=f"g{n % 2}")).accepted:
                self.world.permitted(row.id)

    # -- the conductor -------------------------------------------------------------------------------------------------

    def _mode(self, scope: str) -> ChildMode:
        return ChildMode.AUTONOMOUS if scope == self.autonomous else ChildMode.MEDIATED

    def _perform(self, todo: ag.Action, *, reached: bool = True) -> None:
        scope = todo.scope if isinstance(todo, ag.Plan) else ""
        self.world.perform(todo, mode=self._mode(scope), reached=reached)

    @rule(n=N, reached=st.sampled_from([True, True, True, False]))
    def the_conductor_acts(self, n: int, reached: bool) -> None:
        actions = agenda(self.stage.run, self.stage.now, epoch=1).actions
        if actions:
            self._perform(actions[n % len(actions)], reached=reached)

    @rule(n=N)
    def the_conductor_works_through_its_list(self, n: int) -> None:
        for todo in agenda(self.stage.run, self.stage.now, epoch=1).actions[: 2 + n]:
            if todo in agenda(self.stage.run, self.stage.now, epoch=1).actions:
                self._perform(todo)

    @rule(n=N, finding=st.sampled_from(Finding), basis=st.sampled_from(Basis))
    def a_hasty_conductor_claims_to_know(self, n: int, finding: Finding, basis: Basis) -> None:
        """It has asked nobody. "Executed" is left out: found is found, and only a service that lies would say so."""
        rows = [a for a in self.stage.run.attempts.values() if a.open]
        if rows and finding is not Finding.EXECUTED:
            row = rows[n % len(rows)]
            self.stage.do(
                cmd.Classify(attempt=row.id, finding=finding, basis=basis, epoch=1, clock_before_ms=self.stage.now)
            )

    @rule(n=N, back=st.sampled_from([0, 0, 1, 2]))
    def a_conductor_with_an_old_list_acts(self, n: int, back: int) -> None:
        """What it wants may have been right a moment ago: every precondition is derived again."""
        scope = list(self.stage.run.gates)[n % len(self.stage.run.gates)]
        gate = self.stage.run.gates[scope]
        self.stage.do(cmd.OpenScope(scope=scope, revision=gate.target - back, epoch=1))
        self.stage.do(cmd.PlanChild(scope=scope, revision=gate.target - back, mode=self._mode(scope)))
        child = self._child(n)
        if child is not None:
            self.stage.do(cmd.StartLaunch(child=child.id))
        self.stage.do(cmd.Finish(epoch=1))

    @rule(ms=st.sampled_from([1, 60, 300, 1_600, 6_000, 20_000, 90_000, 590_000]))
    def time_passes(self, ms: int) -> None:
        self.stage.now += ms

    # -- healing -------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """From here on everything answers. A run that then neither ends nor shows why is stuck."""
        if not hasattr(self, "stage") or self.stage.run.head == 0:
            return
        if phase(self.stage.run) is RunPhase.PAUSED or any(g.holds for g in self.stage.run.gates.values()):
            self.stage.do(cmd.Resume(request_id="heal"))
        for send in list(self.world.sends):
            self.world.arrives(send, "ok", reply=True)
        for _ in range(ROUNDS_MAX):
            if not self._heal_once():
                break
        else:
            raise AssertionError(f"goes round in circles: {self.stage.agenda()}, {phase(self.stage.run)}")
        self.the_log_keeps_the_invariants()
        end, shown = phase(self.stage.run), attention_since(self.stage.run)
        assert end in TERMINAL_PHASES or (
            end in (RunPhase.BLOCKED, RunPhase.CANCELLED_UNRESOLVED) and shown is not None
        ), f"stuck: {end}, attention {shown}, agenda {self.stage.agenda()}"
        assert index_of(self.stage.run).attention_ms == shown

    def _heal_once(self) -> bool:
        """One round: children work, the conductor performs what is listed, or the clock moves to what is due."""
        run, before = self.stage.run, len(self.stage.log)
        for child_id, task in self.world.tasks.items():
            self._well_behaved(child_id, task)
        for todo in self._useful(agenda(run, self.stage.now, epoch=1).actions):
            if todo in agenda(run, self.stage.now, epoch=1).actions:
                self._perform(todo)
        if len(self.stage.log) > before:
            return True
        due = agenda(run, self.stage.now, epoch=1).due_ms
        if due is None or self._only_asks_in_vain(due):
            return False
        self.stage.now = due
        return True

    def _well_behaved(self, child_id: str, task: Task) -> None:
        row = self.stage.run.children[child_id]
        task.obeys = True
        if self.stage.run.is_current(row) and not row.claimed and row.mode is ChildMode.MEDIATED:
            self.world.claims(child_id, task.id)
        self.world.work(child_id, TaskState.COMPLETED)

    def _useful(self, actions: Sequence[ag.Action]) -> list[ag.Action]:
        """Everything but questions that the service has answered with "I cannot say" before."""
        return [a for a in actions if not (isinstance(a, ag.Ask) and self._in_vain(a.attempt))]

    def _in_vain(self, attempt_id: str) -> bool:
        row = self.stage.run.attempts[attempt_id]
        return row.state is AttemptState.UNKNOWN and "LOOKUP" in row.operation and not self.services.happened(row.key)

    def _only_asks_in_vain(self, due: int) -> bool:
        actions = agenda(self.stage.run, due, epoch=1).actions
        later = agenda(self.stage.run, due, epoch=1).due_ms
        return later is None and not self._useful([a for a in actions if not isinstance(a, ag.Observe)])


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=4_000 if seeds.LONG else 200, stateful_step_count=120 if seeds.LONG else 50
)
