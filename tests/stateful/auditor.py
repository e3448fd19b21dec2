"""The safety invariants of docs/protocol.md section 5, checked on the log as it grows, without the rules' own help.

Knows: the events, and a gate model of its own. What became of an attempt is compared with the world's truth table.
Does not import rules, standing or agenda.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from admission import events as ev
from admission.records import Attempt
from admission.vocabulary import AttemptState, Basis, Blocks, ChildMode, Disposition, TryOutcome
from tests.stateful.world import LATE_MAX_MS, RETENTION_MS, Services

SETTLED = (AttemptState.SUCCEEDED, AttemptState.FAILED, AttemptState.REVOKED)


@dataclass
class Door:
    """One scope's gate, as the auditor sees it."""

    cur: int
    target: int
    held: bool = False


@dataclass
class Auditor:
    """Reads each event once, in order, with the folded attempts as they are after it."""

    services: Services
    head: int = 0
    limit: int | None = None
    goals: dict[int, ev.Goal] = field(default_factory=dict)
    sealed: bool = False
    ended: bool = False
    doors: dict[str, Door] = field(default_factory=dict)
    keys: dict[str, tuple[str, str]] = field(default_factory=dict)
    admitted: dict[str, ev.EffectAdmitted] = field(default_factory=dict)
    first_permit: dict[str, int] = field(default_factory=dict)
    newest_child: dict[str, ev.ChildPlanned] = field(default_factory=dict)
    planned: dict[str, ev.ChildPlanned] = field(default_factory=dict)
    ended_children: set[str] = field(default_factory=set)
    autonomous: dict[str, ev.ChildPlanned] = field(default_factory=dict)
    checkpoints: dict[str, ev.Checkpoint] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    last: ev.Event | None = None

    def may_act(self, scope: str, revision: int) -> bool:
        """S2: every door on the way is open, and the scope's own stands at this revision."""
        parts = scope.split("/")
        way = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        doors = [self.doors[s] for s in way if s in self.doors]
        own = self.doors[scope]
        return (
            not self.sealed and not self.ended and own.cur == own.target == revision
            and all(d.cur == d.target and not d.held for d in doors)
        )  # fmt: skip

    def planned_occurrences(self, event: ev.EffectAdmitted) -> set[int]:
        """The occurrences that the plan in force for the effect's scope lists for it."""
        plan = self.goals[event.revision].plan.get(event.scope, ev.ScopePlan(agent=""))
        mine = [a for a in plan.actions if a.action == event.operation and event.target in a.arguments.values()]
        return {n for a in mine for n in range(1, a.occurrence + 1)}

    def read(self, event: ev.Event, before: dict[str, Attempt], after: dict[str, Attempt]) -> None:
        """One event, with the attempts as folded before and after it."""
        match event:
            case ev.RunStarted(goal=goal):
                self.head, self.limit, self.goals = 1, goal.budget_effects, {1: goal}
                self.doors = {scope: Door(1, 1) for scope in goal.plan}
            case ev.UpdateRecorded(request_id=request):
                self.requests[request] = self.requests.get(request, 0) + 1
                assert self.requests[request] == 1, f"S13: request {request} changed the state twice"
            case ev.RevisionAccepted():
                self._accepted(event)
            case ev.RunHeld(scopes=scopes) | ev.RunReleased(scopes=scopes):
                for scope in scopes:
                    self.doors[scope].held = isinstance(event, ev.RunHeld)
            case ev.RunCancelled():
                self.sealed = True
            case ev.RunFinished():
                self.ended = True
            case ev.CheckpointWritten(checkpoint=written):
                self._checkpoint(written, before)
            case ev.ScopeOpened():
                self._opened(event, before)
            case ev.ChildPlanned():
                assert self.may_act(event.scope, event.revision), "S2: a child planned behind a closed gate"
                self.newest_child[event.scope] = event
                self.planned[event.child] = event
            case ev.LaunchStarted(child=child):
                assert self.may_act(self.planned[child].scope, self.planned[child].revision), "S2: launched while held"
                if self.planned[child].mode is ChildMode.AUTONOMOUS:
                    self.autonomous[child] = self.planned[child]
            case ev.ChildSeen(child=child, state=state):
                if state.value in ("completed", "failed", "canceled", "rejected"):
                    self.ended_children.add(child)
            case ev.ResultFiled(disposition=Disposition.ADOPTED):
                newest = self.newest_child[event.scope]
                assert newest.child == event.child, "S8: adopted from a child that was replaced"
                assert self.may_act(event.scope, event.revision), "S8: adopted while held or superseded"
            case ev.EffectAdmitted():
                self._admitted(event, before)
            case ev.TryGranted():
                self._granted(event, before)
            case _:
                pass
        self.last = event

    def _accepted(self, event: ev.RevisionAccepted) -> None:
        assert event.n == self.head + 1, "S1: revisions are 1..n in order"
        self.head, self.limit = event.n, event.goal.budget_effects
        self.goals[event.n] = event.goal
        held = any(door.held for door in self.doors.values())
        for scope, door in self.doors.items():
            if any(scope == p or scope.startswith(p + "/") for p in event.affects):
                door.target = event.n
        for scope in event.goal.plan:
            self.doors.setdefault(scope, Door(0, event.n, held))

    def _checkpoint(self, written: ev.Checkpoint, attempts: dict[str, Attempt]) -> None:
        assert written.id not in self.checkpoints, "S15: a checkpoint is written once"
        self.checkpoints[written.id] = written
        own = [a for a in attempts.values() if a.scope == written.scope]
        done = {a.id for a in own if a.state is AttemptState.SUCCEEDED}
        assert {e.attempt for e in written.effects_done} == done, "S15: its effects are those that succeeded"
        assert {p.attempt for p in written.pending} == {a.id for a in own if a.state not in SETTLED}, "S15: pending"

    def _opened(self, event: ev.ScopeOpened, attempts: dict[str, Attempt]) -> None:
        door = self.doors[event.scope]
        assert not self.sealed, "S2: opened after a cancel"
        assert event.revision == door.target > door.cur, "S1: opened for its target"
        assert isinstance(self.last, ev.CheckpointWritten), "S15: the checkpoint comes just before"
        assert self.last.checkpoint.id == event.checkpoint, "S15: and is the one named"
        for attempt in attempts.values():
            if attempt.scope == event.scope and attempt.revision < event.revision and attempt.state not in SETTLED:
                slot_only = attempt.operation.endswith(Blocks.SLOT.value)
                assert attempt.state is AttemptState.UNKNOWN, "S5: opened past an attempt that is being sent"
                assert slot_only, "S16: opened past an unknown that blocks its scope"
        for child in self.autonomous.values():
            if child.scope == event.scope and child.revision < event.revision:
                assert child.child in self.ended_children, "S11: opened past an agent that was not seen to end"
        door.cur = event.revision

    def _admitted(self, event: ev.EffectAdmitted, attempts: dict[str, Attempt]) -> None:
        assert self.may_act(event.scope, event.revision), "S2: admitted behind a closed gate"
        child = self.newest_child[event.scope]
        assert (child.child, child.revision) == (event.child, event.revision), "S2: admitted for another child"
        bytes_of = self.keys.setdefault(event.key, (event.slot, event.input_ref))
        assert bytes_of == (event.slot, event.input_ref), "S14: one key, one slot and payload"
        same = [a for a in attempts.values() if a.slot == event.slot]
        assert all(a.state in (AttemptState.FAILED, AttemptState.REVOKED) for a in same), "S4: the slot was taken"
        occurrence = int(event.slot.rsplit("#", 1)[1])
        assert occurrence == 1 or occurrence in self.planned_occurrences(event), "an occurrence that nobody planned"
        standing = [a for a in attempts.values() if a.state not in (AttemptState.FAILED, AttemptState.REVOKED)]
        words = {a.slot.rsplit("#", 1)[0] for a in standing if a.conflict_key == event.conflict_key}
        assert not event.conflict_key or words <= {event.slot.rsplit("#", 1)[0]}, "S4: the same intent in other words"
        if event.generation > 1:
            last = [a for a in same if a.generation == event.generation - 1]
            assert any(a.state is AttemptState.FAILED for a in last), "S14: the key grew without a conclusive no"
        assert self.limit is None or sum(a.cost for a in standing) + event.cost <= self.limit, "S10: over the budget"
        self.admitted[event.attempt] = event

    def _granted(self, event: ev.TryGranted, attempts: dict[str, Attempt]) -> None:
        admitted = self.admitted[event.attempt]
        assert self.may_act(admitted.scope, admitted.revision), "S2: a try permitted behind a closed gate"
        earlier = attempts[event.attempt].tries
        assert event.n == len(earlier) + 1, "two gateways were given one try"
        assert not any(t.outcome is TryOutcome.GRANTED for t in earlier), "sent again while it is on the wire"
        first = self.first_permit.setdefault(event.attempt, event.at)
        if any(t.outcome is not TryOutcome.NOT_EXECUTED for t in earlier):
            assert "OPAQUE" not in admitted.operation, "sent again to a service that does not dedupe"
            assert event.at - first < RETENTION_MS - LATE_MAX_MS, "S14: sent with a key that is too old"

    def compare(self, attempts: dict[str, Attempt]) -> None:
        """S3, S4 and S6: the log against the truth."""
        assert max(self.services.per_slot().values(), default=0) <= 1, "S4: one intent took effect twice"
        for key, slot, _ in self.services.effects:
            assert self.keys[key][0] == slot, "S3: an effect that is in no ledger"
        for attempt in attempts.values():
            happened = self.services.happened(attempt.key)
            if attempt.state is AttemptState.SUCCEEDED:
                assert happened, f"S6: {attempt.id} is recorded as done and never happened"
            if attempt.state is AttemptState.FAILED and attempt.basis is not Basis.OPERATOR:
                assert not happened, f"S6: {attempt.id} is recorded as not executed and happened ({attempt.basis})"
            if attempt.state is AttemptState.REVOKED:
                assert not attempt.tries, f"S6: {attempt.id} was revoked after it was permitted"
