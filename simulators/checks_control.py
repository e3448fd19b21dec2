"""Checks on the control side of a log: order, revisions, gates, children, requests (S1, S2, S8, S11, S12, S13).

Each check is given the replay as it stood before the event, and the event. It knows the protocol's text and nothing of
the code that is meant to keep it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simulators.checks_input import Entry, Json
from simulators.checks_replay import EVENT_TYPES, TERMINAL_TASKS, Run, World, use_of_request

OVER = TERMINAL_TASKS | {"ended", "stop_confirmed"}
REDIRECTS = ("correct", "replace")


@dataclass(frozen=True)
class Violation:
    """A broken promise. `position` is a log position, or a journal's line where no log position is concerned."""

    check: str
    detail: str
    position: int
    run: str = ""

    def as_json(self) -> Json:
        """The form in which it leaves the program."""
        return {"check": self.check, "detail": self.detail, "position": self.position, "run": self.run}


def broken(check: str, entry: Entry, detail: str) -> Violation:
    """A violation that one event shows."""
    return Violation(check, detail, entry.n, entry.run)


def check_log(world: World, run: Run, entry: Entry) -> Iterator[Violation]:
    """The log itself: gapless, begins with the start, speaks only of what it has introduced."""
    if entry.n != run.last_n + 1:
        yield broken("LOG", entry, f"position {entry.n} follows {run.last_n}: the log has a gap or a repetition")
    if entry.type not in EVENT_TYPES:
        yield broken("LOG", entry, f"event type {entry.type!r} is unknown, so this log cannot be judged")
    if run.started == (entry.type == "run_started"):
        yield broken("LOG", entry, f"{entry.type} stands {'after' if run.started else 'before'} the run's start")
    if entry.type == "effect_admitted":
        if entry.text("attempt") in run.attempts:
            yield broken("LOG", entry, f"attempt {entry.text('attempt')} is admitted twice")
        if entry.text("contract") not in run.contracts:
            yield broken("LOG", entry, f"contract {entry.text('contract')} was not noted before")
    elif "attempt" in entry.event and entry.text("attempt") not in run.attempts:
        yield broken("LOG", entry, f"{entry.type} of attempt {entry.text('attempt')}, which was never admitted")
    elif entry.type == "try_recorded" and entry.number("n") not in run.attempts[entry.text("attempt")].tries:
        yield broken("LOG", entry, f"try {entry.number('n')} of {entry.text('attempt')} was recorded but never granted")


def check_s1(world: World, run: Run, entry: Entry) -> Iterator[Violation]:
    """Revisions are 1..n in the order of the control channel, at most one active for a scope."""
    match entry.type:
        case "update_recorded":
            if run.updates and entry.number("seq") != run.updates[-1][0] + 1:
                yield broken("S1", entry, f"update {entry.number('seq')} follows update {run.updates[-1][0]}")
        case "revision_accepted":
            n, seq = entry.number("n"), entry.number("seq")
            if n != run.head + 1:
                yield broken("S1", entry, f"revision {n} follows revision {run.head}")
            if not run.updates or run.updates[-1][0] != seq or run.updates[-1][1] not in REDIRECTS:
                yield broken("S1", entry, f"revision {n} does not follow from update {seq} right before it")
            elif any(r.seq >= seq for r in run.revisions.values()):
                yield broken("S1", entry, f"update {seq} had already made a revision")
        case "scope_opened":
            scope, n = entry.text("scope"), entry.number("revision")
            newest = run.target(scope)
            if newest != n:
                yield broken("S1", entry, f"{scope} opened for revision {n}; the newest that affects it is {newest}")
            elif (scope, n) in run.opened or n == 1:
                yield broken("S1", entry, f"{scope} opened twice for revision {n}")
            if run.cancelled or run.finished:
                yield broken("S1", entry, f"{scope} opened after the end of the run")


def check_s2(world: World, run: Run, entry: Entry) -> Iterator[Violation]:
    """Nothing is admitted or sent for a gate that is closed for its revision, held, or sealed."""
    if entry.type == "effect_admitted":
        shut = run.shut(entry.text("scope"), entry.number("revision"))
        if shut:
            yield broken("S2", entry, f"{entry.text('attempt')} admitted although {shut}")
    elif entry.type == "try_granted" and entry.text("attempt") in run.attempts:
        attempt = run.attempts[entry.text("attempt")]
        shut = run.shut(attempt.scope, attempt.revision)
        if shut:
            yield broken("S2", entry, f"try {entry.number('n')} of {attempt.name} granted although {shut}")
        elif attempt.state == "revoked":
            yield broken("S2", entry, f"try {entry.number('n')} of {attempt.name} granted after it was revoked")


def check_s8(world: World, run: Run, entry: Entry) -> Iterator[Violation]:
    """A result is adopted only from a current, claimed child, under the revision and goal in force for it, once."""
    if entry.type != "result_filed" or entry.text("disposition") != "adopted":
        return
    result, child = entry.text("result"), run.children.get(entry.text("child"))
    if child is None:
        yield broken("S8", entry, f"result {result} adopted from child {entry.text('child')}, which was never planned")
        return
    scope, revision = entry.text("scope"), entry.number("revision")
    why = []
    if (scope, revision) != (child.scope, child.revision):
        why.append(f"it is stamped {scope}/{revision}, its child {child.scope}/{child.revision}")
    shut = run.shut(child.scope, child.revision)
    if shut:
        why.append(shut)
    in_force = run.revisions.get(child.revision)
    if in_force and in_force.goal_hash != child.goal_hash:
        why.append("its child was told another goal than the revision's")
    if child.lost:
        why.append("its child had been given up as lost")
    if not child.task or entry.text("task") != child.task or (child.mode == "mediated" and not child.claimed):
        why.append(f"task {entry.text('task')} is not the one that claimed the child")
    if child.id in run.adopted:
        why.append("a result of this child had been adopted already")
    if why:
        yield broken("S8", entry, f"result {result} of child {child.id} adopted although " + "; ".join(why))


def check_s11(world: World, run: Run, entry: Entry) -> Iterator[Violation]:
    """A launched child is over only when a terminal state was seen; an autonomous one holds the gate until then."""
    told: list[tuple[str, str]] = []
    if entry.type == "child_planned" and entry.text("follows", ""):
        told.append((entry.text("follows"), entry.text("follows_state", "")))
    elif entry.type == "checkpoint_written":
        children = entry.object("checkpoint").get("children", [])
        told.extend((str(c.get("child")), str(c.get("state"))) for c in children)
    for child_id, state in told:
        known = world.child(child_id)
        never_sent = known is not None and state == "ended" and not known.launched and not known.task
        if state in OVER and not never_sent and not (known and known.seen_terminal):
            yield broken("S11", entry, f"child {child_id} is called {state}, but no terminal state of it was ever seen")
    alive = [c for c in run.children.values() if c.mode == "autonomous" and not c.seen_terminal]
    if entry.type == "scope_opened":
        scope, n = entry.text("scope"), entry.number("revision")
        for child in alive:
            if child.revision < n and run.opens(scope, n, child.scope):
                detail = f"{scope} opened for revision {n} before autonomous child {child.id} was seen to end"
                yield broken("S11", entry, detail)
    elif entry.type == "run_finished" and entry.text("phase") in ("completed", "failed"):
        for child in alive:
            yield broken("S11", entry, f"the run finished before autonomous child {child.id} was seen to end")


def check_s12(world: World, run: Run, entry: Entry) -> Iterator[Violation]:
    """Decisions of an old lease holder never stand after those of a newer one."""
    if "epoch" in entry.event and entry.number("epoch") < run.epoch:
        yield broken("S12", entry, f"{entry.type} under epoch {entry.number('epoch')} after epoch {run.epoch}")


def check_s13(world: World, run: Run, entry: Entry) -> Iterator[Violation]:
    """One request id changes state once. The start of a run and its record in the control channel are one change."""
    if "request_id" not in entry.event:
        return
    request, use = entry.text("request_id"), use_of_request(entry)
    before = run.requests.get(request, [])
    start = {"run_started", "update_recorded (start)"}
    if before and (use in before or not {use, *before} <= start):
        yield broken("S13", entry, f"request {request} had already changed state ({', '.join(before)})")


CONTROL_CHECKS = (check_log, check_s1, check_s2, check_s8, check_s11, check_s12, check_s13)
