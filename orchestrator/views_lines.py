"""Sentences about a run: what a change did, what needs a person, and the control channel from its log. Pure.

Knows how to say it. Does not know how it is sent or shown, and reads nothing but states and events that it is given.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from admission import events as ev
from admission.standing import Waiting, blocking_attempts, phase, waiting
from admission.state import RunState
from admission.vocabulary import TERMINAL_TASKS, AttemptState, Claim, GateState, RunPhase, Verdict
from orchestrator.views import unresolved_rows

NAMED_MAX = 5


@dataclass(frozen=True, slots=True)
class Brief:
    """What a summary compares: a run at one moment. States are changed in place, so this is taken before a change."""

    phase: RunPhase = RunPhase.NONE
    in_force: int = 0
    version: int = 0
    done: int = 0
    in_flight: tuple[str, ...] = ()
    unresolved: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    stopping: int = 0
    all_done: bool = False
    held: bool = False


def brief_of(run: RunState) -> Brief:
    """The run now."""
    if not run.head:
        return Brief()
    sent = (AttemptState.ADMITTED, AttemptState.SENDING)
    head = run.revisions[run.head]
    closed = tuple(name for name, gate in run.gates.items() if gate.state is GateState.CLOSED)
    return Brief(
        phase=phase(run),
        in_force=run.head,
        version=run.version,
        done=sum(1 for a in run.attempts.values() if a.state is AttemptState.SUCCEEDED),
        in_flight=tuple(a for a in run.open_attempts if run.attempts[a].state in sent),
        unresolved=tuple(f"{row['what']} ({row['id']})" for row in unresolved_rows(run) if row["kind"] == "effect"),
        closed=closed,
        changed=tuple(dict.fromkeys((*head.changed, *head.affects))) if run.head > 1 else (),
        kept=tuple(name for name in head.goal.plan if name not in head.affects),
        waiting=tuple(a.id for name in closed for a in blocking_attempts(run, name)),
        stopping=sum(1 for c in run.children.values() if c.stop_wanted and not c.settled),
        held=any(gate.holds for gate in run.gates.values()),
        all_done=all(run.scope_done(name) for name in run.gates),
    )


def summary_line(before: Brief, after: Brief) -> str:
    """One line: what changed, from which state, what had completed, what is unresolved, what comes next."""
    parts = [f"{_what_changed(before, after)}, from {_state(before)}"]
    parts.append(f"{before.done} effect{'s' if before.done != 1 else ''} had completed" if before.done else
                 "no effect had completed")  # fmt: skip
    if after.in_flight:
        parts.append(f"{len(after.in_flight)} in flight ({_named(after.in_flight)})")
    parts.append(f"unresolved: {_named(after.unresolved)}" if after.unresolved else "nothing unresolved")
    return f"{'; '.join(parts)}; next: {_what_next(after)}"


def _state(brief: Brief) -> str:
    if brief.phase is RunPhase.NONE:
        return "nothing"
    return f"{brief.phase.value} under revision {brief.in_force}"


def _what_changed(before: Brief, after: Brief) -> str:
    if before.phase is RunPhase.NONE and after.in_force:
        return "started under revision 1"
    if after.in_force > before.in_force:
        kept = f", keeps {_named(after.kept)}" if after.kept else ""
        return f"revision {after.in_force} is in force, changes {_named(after.changed) or 'nothing by name'}{kept}"
    if after.phase is not before.phase:
        return f"now {after.phase.value}"
    if len(after.unresolved) < len(before.unresolved):
        gone = [name for name in before.unresolved if name not in after.unresolved]
        return f"settled {_named(gone)}"
    return "nothing changed" if after.version == before.version else "recorded"


def _what_next(after: Brief) -> str:
    match after.phase:
        case RunPhase.RUNNING:
            return "every branch is done, so the run is completed" if after.all_done else "the agents work"
        case RunPhase.PAUSED:
            return f"nothing new is sent until `regate run resume`{_settling(after)}"
        case RunPhase.REDIRECTING:
            waits = f"waits for the outcome of {_named(after.waiting)}, then " if after.waiting else ""
            children = "child" if after.stopping == 1 else "children"
            stops = f"{after.stopping} {children} asked to stop, " if after.stopping else ""
            resumed = ", and nothing is sent there before `regate run resume`" if after.held else ""
            return f"{stops}{waits}the gate of {_named(after.closed)} opens under revision {after.in_force}{resumed}"
        case RunPhase.BLOCKED:
            return "a person has to look: `regate attention`"
        case RunPhase.CANCELLING:
            return f"children are asked to stop{_settling(after)}"
        case RunPhase.CANCELLED_UNRESOLVED:
            return "what is unresolved is followed until it is settled: `regate attention`"
        case RunPhase.COMPLETED | RunPhase.FAILED | RunPhase.CANCELLED | RunPhase.NONE:
            return "nothing, the run has ended" if after.in_force else "nothing"


def _settling(after: Brief) -> str:
    count = len(after.in_flight)
    return f", {count} in flight followed to {'its' if count == 1 else 'their'} outcome" if count else ""


def _named(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:NAMED_MAX]) + (f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else "")


# --- what needs a person ---------------------------------------------------------------------------------------------


def attention_items(run: RunState) -> list[dict[str, Any]]:
    """What waits for a person in this run, oldest first, each with the command that shows or settles it."""
    told = {row["id"]: row for row in unresolved_rows(run)}
    items = []
    for entry in waiting(run):
        row = {
            "kind": entry.kind, "id": entry.id, "run": run.run_id, "scope": entry.scope, "revision": entry.revision,
            "since": entry.since, **_waiting_words(run, entry),
        }  # fmt: skip
        if entry.kind in ("effect", "child"):
            row |= told.get(entry.id, {})  # where there is more to say of it, it is said the same way everywhere
        items.append(row)
    return sorted(items, key=lambda item: int(item["since"] or 0))


def _waiting_words(run: RunState, entry: Waiting) -> dict[str, Any]:
    show, redirect = f"regate run show {run.run_id}", f"regate run redirect {run.run_id}"
    settle = f"regate effect resolve {entry.id} --happened|--did-not-happen --reason … --evidence …"
    if entry.kind in ("effect", "alarm"):
        attempt = run.attempts[entry.id]
        what, state = f"{attempt.service}.{attempt.operation} on {attempt.target}", attempt.state.value
        blocks, command = ("slot" if entry.kind == "alarm" else run.facts_of(attempt).unknown_blocks.value), settle
    elif entry.kind in ("child", "result"):
        child = run.children[entry.id]
        what, state, blocks, command = f"{child.agent}, task {child.task}", child.state.value, "scope", show
    else:
        state = {"budget": "overdrawn", "need": "not_delivered"}.get(entry.kind, "given_up")
        what, blocks, command = f"scope {entry.scope}", "scope", redirect
    return {"what": what, "state": state, "why": entry.why, "blocks": blocks, "command": command}


# --- the control channel ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Channel:
    """What is remembered while a log is read once."""

    updates: dict[int, dict[str, Any]] = field(default_factory=dict)
    by_revision: dict[int, dict[str, Any]] = field(default_factory=dict)
    children: dict[str, tuple[str, int]] = field(default_factory=dict)
    working: dict[str, str] = field(default_factory=dict)
    steered: dict[str, dict[str, Any]] = field(default_factory=dict)
    in_force: int = 0
    told_by: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def responsible(self, scope: str) -> dict[str, Any] | None:
        """The newest update that changed this scope, or cancelled everything."""
        for update in reversed(self.updates.values()):
            if update["cancels"] or _covers(update["affects"], scope):
                return update
        return None


def control_view(log: Iterable[tuple[int, ev.Event]]) -> list[dict[str, Any]]:
    """Every update in order: its revision, what it affects, who was told, who acknowledged, when its gates opened.

    "Told" is a child that was asked to stop because of it; of a pause and a resume, a child at work whose gate it held
    or released, which is how it learns of it. "Acknowledged" is what was seen afterwards: such a child ended, was
    answered "held" at the gate, or acted again, or a child of the new revision claimed its task. A request is never
    counted as its acknowledgement. `revision` is the one that the update made, else the one in force when it came.
    """
    channel = _Channel()
    for n, event in log:
        _read_control(channel, n, event)
        _read_children(channel, n, event)
    return list(channel.updates.values())


def _row(seq: int, kind: str, n: int, event: ev.Event) -> dict[str, Any]:
    return {
        "seq": seq, "kind": kind, "revision": None, "position": n, "at": event.at, "by": event.by, "text": "",
        "reason": "", "affects": [], "cancels": False, "told": [], "acknowledged": [], "opened": [],
    }  # fmt: skip


def _read_control(channel: _Channel, n: int, event: ev.Event) -> None:
    match event:
        case ev.RunStarted():
            row = _row(1, "start", n, event)
            row |= {"revision": 1, "text": event.goal.text, "affects": list(event.goal.plan)}
            channel.updates[1] = channel.by_revision[1] = row
            channel.in_force = 1
        case ev.UpdateRecorded():
            row = _row(event.seq, event.kind.value, n, event)
            row |= {"revision": channel.in_force, "text": event.text, "reason": event.reason}
            channel.updates[event.seq] = row
        case ev.RevisionAccepted():
            row = channel.updates[event.seq]
            row["revision"], row["affects"] = event.n, list(event.affects)
            channel.in_force = event.n
            for child in [c for c, scope in channel.working.items() if _covers(event.affects, scope)]:
                del channel.working[child]
            channel.by_revision[event.n] = row
        case ev.RunHeld() | ev.RunReleased():
            latest = next(reversed(channel.updates.values()), None)
            if latest is not None:
                how = "held" if isinstance(event, ev.RunHeld) else "released"
                latest[how] = list(event.scopes)
                _tell_working(channel, latest, how, n, event)
        case ev.RunCancelled():
            channel.updates[event.seq]["cancels"] = True
        case ev.ScopeOpened():
            opened = {"scope": event.scope, "checkpoint": event.checkpoint, "position": n, "at": event.at}
            channel.by_revision[event.revision]["opened"].append(opened)


def _read_children(channel: _Channel, n: int, event: ev.Event) -> None:
    match event:
        case ev.ChildPlanned():
            channel.children[event.child] = (event.scope, event.revision)
        case ev.ChildClaimed(answer=Claim.CLAIMED):
            scope, revision = channel.children[event.child]
            channel.working[event.child] = scope
            _acknowledge(channel.by_revision[revision], event.child, "claimed its task", n, event)
        case ev.StopRequested() if event.child not in channel.told_by:
            scope, _ = channel.children[event.child]
            update = channel.responsible(scope)
            if update is not None:
                channel.told_by[event.child] = update
                update["told"].append(_told(event.child, scope, "asked to stop", n, event))
        case ev.EffectRefused(reason=Verdict.HELD) if "held" in channel.steered.get(event.child, {}):
            _acknowledge(channel.steered.pop(event.child), event.child, "was answered `held` and waits", n, event)
        case ev.EffectAdmitted() if "released" in channel.steered.get(event.child, {}):
            _acknowledge(channel.steered.pop(event.child), event.child, "acts again", n, event)
        case ev.ChildSeen() if event.state in TERMINAL_TASKS and event.child not in channel.ended:
            channel.ended.add(event.child)
            channel.working.pop(event.child, None)
            if event.child in channel.told_by:
                _acknowledge(channel.told_by[event.child], event.child, f"seen {event.state.value}", n, event)


def _covers(scopes: Iterable[str], scope: str) -> bool:
    return any(scope == name or scope.startswith(name + "/") for name in scopes)


def _told(child: str, scope: str, how: str, n: int, event: ev.Event) -> dict[str, Any]:
    return {"child": child, "scope": scope, "how": how, "position": n, "at": event.at}


def _tell_working(
    channel: _Channel, update: dict[str, Any], how: str, n: int, event: ev.RunHeld | ev.RunReleased
) -> None:
    """The children that work behind the gates which were held or released."""
    for child, scope in channel.working.items():
        if _covers(event.scopes, scope):
            update["told"].append(_told(child, scope, how, n, event))
            channel.steered[child] = update


def _acknowledge(update: dict[str, Any], child: str, how: str, n: int, event: ev.Event) -> None:
    update["acknowledged"].append({"child": child, "how": how, "position": n, "at": event.at})


__all__ = ["Brief", "attention_items", "brief_of", "control_view", "summary_line"]
