"""What is said about one run of `retail`: where the change hit it, and whether it came out right.

Pure: a case, the run's log, the lines of its shop's own journal and the shop's hash go in, a verdict comes out. Knows
logs through the independent checker's reading of them, and nothing of the rules that wrote them. A run that ends with
something unknown is `blocked`; it is never called passed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from simulators.checker import check
from simulators.checks_input import Effect, Entry, Journal
from simulators.checks_replay import Attempt, Run, World
from simulators.retail_cases import Case
from simulators.shop import Action, Database
from simulators.tasks import EXECUTED, OracleAnswer, OracleContradictionError, oracle

Line = dict[str, Any]
COMPLETED, BLOCKED_PHASE = "completed", "blocked"
IN_HAND = ("admitted", "sending")
#: The service's clock and the store's are the same machine's, read in whole milliseconds.
CLOCK_MARGIN_MS = 2


class Outcome(StrEnum):
    """How a run is counted."""

    PASSED = "passed"
    BLOCKED = "blocked"
    VIOLATED = "violated"


class Hit(StrEnum):
    """Where the redirect found the scope that it redirects, by the positions in the log."""

    BEFORE = "before_anything"
    IN_FLIGHT = "in_flight"
    BETWEEN = "between_two"
    AFTER = "after_all"
    UNKNOWN = "while_unknown"
    MISSED = "not_redirected"


@dataclass(frozen=True)
class Evidence:
    """What is known of a run when it has ended. `journal`: all lines of its shop; `unresolved`: as the API lists them.

    `phase` is the run's last; `trouble` is not empty when the driver itself could not do its part.
    """

    run: str
    log: Sequence[Entry]
    journal: Sequence[Line]
    shop_hash: str
    phase: str
    unresolved: Sequence[Mapping[str, Any]] = ()
    trouble: str = ""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one run. `needs_occurrence`: wanted actions that were done before, and that another write to the
    same order followed, so that the gate asked whether they are meant once more."""

    case: Case
    run: str
    outcome: Outcome
    hit: Hit
    violations: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)


def judge(case: Case, database: Database, evidence: Evidence) -> Verdict:
    """The verdict. `database` is what the shop began with."""
    if not evidence.log:
        trouble = evidence.trouble or "the run has no log"
        return Verdict(case, evidence.run, Outcome.VIOLATED, Hit.MISSED, (trouble,))
    seen = _Seen(case, evidence)
    violations = [evidence.trouble] if evidence.trouble else []
    violations += _ended(seen)
    violations += _redirected(seen)
    violations += _kept_scope(seen)
    violations += _unasked(seen)
    violations += _after_the_gate(seen)
    violations += _listed(seen)
    violations += _checked(seen)
    if not seen.unknown:
        violations += _as_the_oracle(seen, database)
    else:
        violations += _at_most_once(seen)
    outcome = Outcome.VIOLATED if violations else Outcome.BLOCKED if seen.unknown else Outcome.PASSED
    unknown = tuple(f"{a.operation} {a.target} ({a.id}): {a.why or 'no reason given'}" for a in seen.unknown)
    return Verdict(case, evidence.run, outcome, seen.hit, tuple(violations), unknown, seen.counts())


class _Seen:
    """A run's evidence, replayed once and sorted for the questions below."""

    def __init__(self, case: Case, evidence: Evidence) -> None:
        self.case = case
        self.evidence = evidence
        world = World([list(evidence.log)])
        self.world = world
        self.run: Run = world.runs[evidence.log[0].run]
        self.change: Entry | None = None
        self.at_change: dict[str, str] = {}
        for entry in evidence.log:
            if entry.type == "revision_accepted" and self.change is None:
                self.change = entry
                self.at_change = {a.id: a.state for a in self.run.attempts.values() if a.scope == case.redirected}
            world.apply(entry)
        self.attempts = list(self.run.attempts.values())
        self.unknown = [a for a in self.attempts if a.state == "unknown"]
        self.by_key = {a.key: a for a in self.attempts}
        self.lines = customer_lines(evidence.journal, self.by_key, _places(case))
        self.executed = [line for line in self.lines if line["event"] == "executed"]
        self.hit = self._hit()

    def _hit(self) -> Hit:
        states = self.at_change
        if self.change is None:
            return Hit.MISSED
        if any(state in IN_HAND for state in states.values()):
            return Hit.IN_FLIGHT
        if "unknown" in states.values():
            return Hit.UNKNOWN
        if not states:
            return Hit.BEFORE
        admitted = {self.run.attempts[name].slot for name in states}
        mine = {slot for slot in self.case.slots(1) if slot in self._slots_of_redirected()}
        return Hit.BETWEEN if mine - admitted else Hit.AFTER

    def _slots_of_redirected(self) -> set[str]:
        actions = {action.identity for action in self.case.first[self.case.redirected]}
        return {slot for slot, action in self.case.slots(1).items() if action.identity in actions}

    def landed_before(self) -> list[Action]:
        """What the journal shows as executed under attempts of revision 1, in the journal's order."""
        return [
            Action(line["action"], line["arguments"])
            for line in self.executed
            if (attempt := self.by_key.get(line["key"])) is not None and attempt.revision == 1
        ]

    def counts(self) -> dict[str, int]:
        """Numbers for the table."""
        entries = Counter(entry.type for entry in self.evidence.log)
        late = [a for line in self.executed if (a := self.by_key.get(line["key"])) and _is_late(a, line)]
        voided = {line["key"] for line in self.lines if line["event"] == "voided"}
        reasons = [e.event.get("reason") for e in self.evidence.log if e.type == "effect_refused"]
        return {
            "attempts": len(self.attempts),
            "executed": len(self.executed),
            "tries": sum(len(a.tries) for a in self.attempts),
            "late_landings": len(late),
            "voided": len(voided & set(self.by_key)),
            "asked_services": entries["reconcile_started"],
            "superseded": reasons.count("superseded") + reasons.count("not_current"),
            "needs_occurrence": reasons.count("needs_occurrence"),
            "refused_by_shop": sum(1 for line in self.lines if line["event"] == "refused"),
            "dropped_results": sum(1 for e in self.evidence.log if e.event.get("disposition") == "dropped"),
        }


def _is_late(attempt: Attempt, line: Line) -> bool:
    return attempt.closed is not None and int(line["at_ms"]) > attempt.closed.at


def _places(case: Case) -> set[str]:
    plans = (*case.first.values(), *case.second.values())
    return {action.target for plan in plans for action in plan}


def customer_lines(journal: Iterable[Line], keys: Iterable[str], targets: set[str]) -> list[Line]:
    """The lines that carry a key of the run, or name something that its case is about."""
    known = set(keys)
    found = []
    for line in journal:
        arguments = line.get("arguments") or {}
        target = str(arguments.get("order_id") or arguments.get("user_id") or "")
        if line.get("key") in known or target in targets:
            found.append(line)
    return found


# --- the run as such -------------------------------------------------------------------------------------------------


def _ended(seen: _Seen) -> Iterator[str]:
    phase = seen.evidence.phase
    if phase == COMPLETED and not seen.unknown:
        return
    if phase == BLOCKED_PHASE and seen.unknown:
        return
    open_ones = ", ".join(f"{a.name} is {a.state}" for a in seen.attempts if a.state in (*IN_HAND, "unknown"))
    yield f"stuck: the run is {phase}, open: {open_ones or 'nothing'}"


def _redirected(seen: _Seen) -> Iterator[str]:
    if seen.change is None:
        yield "the change was never accepted"
        return
    affected = seen.change.texts("affects")
    if affected != (seen.case.redirected,):
        yield f"the change names only {seen.case.redirected}, but affected {', '.join(affected)}"


def _kept_scope(seen: _Seen) -> Iterator[str]:
    """The scope that the change leaves alone keeps its child and its task, and its result is adopted."""
    kept = seen.case.kept
    if kept is None:
        return
    log = seen.evidence.log
    children = [e.text("child") for e in log if e.type == "child_planned" and e.text("scope") == kept]
    if len(children) != 1:
        yield f"scope {kept} was left alone, but had {len(children)} children"
        return
    child = children[0]
    tasks = {e.text("task") for e in log if e.type in ("child_bound", "child_claimed") and e.text("child") == child}
    if len(tasks) != 1:
        yield f"the child of {kept} had {len(tasks)} A2A tasks"
    if any(e.type == "stop_requested" and e.text("child") == child for e in log):
        yield f"the child of {kept} was asked to stop"
    filed = [e for e in log if e.type == "result_filed" and e.text("scope") == kept]
    adopted = [e for e in filed if e.text("disposition") == "adopted" and e.text("task") in tasks]
    if not adopted and not any(a.scope == kept for a in seen.unknown):
        yield f"the result of {kept}'s child was not adopted"


def _unasked(seen: _Seen) -> Iterator[str]:
    """Every attempt is one that its revision plans."""
    slots = {1: set(seen.case.slots(1)), 2: set(seen.case.slots(2))}
    for attempt in seen.attempts:
        if attempt.slot not in slots.get(attempt.revision, set()):
            yield f"{attempt.name} is in no plan of its revision"


def _after_the_gate(seen: _Seen) -> Iterator[str]:
    """No retracted action is admitted, and none sent, once the change is in the log."""
    if seen.change is None:
        return
    retracted = set(seen.case.slots(1)) - set(seen.case.slots(2))
    for attempt in seen.attempts:
        stale = attempt.revision == 1 and attempt.scope == seen.case.redirected
        if attempt.position > seen.change.n and (attempt.slot in retracted or stale):
            yield f"{attempt.name} was admitted at {attempt.position}, after the gate closed at {seen.change.n}"
        for one in attempt.tries.values():
            if stale and one.position > seen.change.n:
                yield f"{attempt.name} was sent at {one.position}, after the gate closed at {seen.change.n}"


def _listed(seen: _Seen) -> Iterator[str]:
    """Every unknown is listed with one line that says why."""
    listed = {str(row.get("id")): str(row.get("why") or "") for row in seen.evidence.unresolved}
    for attempt in seen.unknown:
        why = listed.get(attempt.id)
        if why is None:
            yield f"{attempt.name} is unknown, but not listed"
        elif not why or "\n" in why:
            yield f"{attempt.name} is listed without one line that says why"


# --- the run against its shop ----------------------------------------------------------------------------------------


def _checked(seen: _Seen) -> Iterator[str]:
    """What the independent checker says of the log and the journal."""
    services = sorted({a.service for a in seen.attempts} | {seen.case.service})
    journals = [_journal(name, seen.lines if name == seen.case.service else []) for name in services]
    found = check([list(seen.evidence.log)], journals, margin_ms=CLOCK_MARGIN_MS)
    for violation in found["violations"]:
        yield f"checker {violation['check']} at {violation['position']}: {violation['detail']}"
    for name in ("duplicate_effects", "stale_effects", "hidden_unknowns"):
        if found[name]:
            yield f"checker: {found[name]} {name}"


def _journal(service: str, lines: Iterable[Line]) -> Journal:
    journal = Journal(service)
    for line in lines:
        if line["event"] == "key_reused" and line.get("key"):
            journal.reused_keys.append((int(line["n"]), str(line["key"])))
        if line["event"] == "executed":
            journal.effects.append(
                Effect(
                    service=service,
                    n=int(line["n"]),
                    at_ms=int(line["at_ms"]),
                    key=line.get("key") or None,
                    action=str(line["action"]),
                    arguments=dict(line["arguments"]),
                    payload_sha256=str(line.get("payload_sha256") or ""),
                    receipt=line.get("receipt"),
                )
            )
    return journal


def _as_the_oracle(seen: _Seen, database: Database) -> Iterator[str]:
    """Outcomes and database are those of a faultless shop: first what landed before the change, then what is wanted."""
    case = seen.case
    landed = seen.landed_before()
    try:
        answer = oracle(database.of_customer(case.user_id), landed, case.wanted())
    except OracleContradictionError as error:
        yield f"oracle: {error}"
        return
    yield from _exactly_once(seen, landed, answer)
    yield from _refused_rightly(seen, answer)
    if answer.database_hash != seen.evidence.shop_hash:
        yield f"oracle: the shop's data of {case.user_id} is not what the landed and the wanted actions lead to"


def _exactly_once(seen: _Seen, landed: Sequence[Action], answer: OracleAnswer) -> Iterator[str]:
    before = Counter(action.identity for action in landed)
    wanted = Counter(action.identity for action, outcome in answer.outcomes if outcome == EXECUTED)
    done = Counter(Action(line["action"], line["arguments"]).identity for line in seen.executed)
    for identity in sorted(set(before) | set(wanted) | set(done)):
        due = max(before[identity], wanted[identity])
        if done[identity] < due:
            yield f"{identity} took effect {done[identity]} times instead of {due}"
        elif done[identity] > due:
            yield f"{identity} took effect {done[identity]} times, only {due} were due"


def _refused_rightly(seen: _Seen, answer: OracleAnswer) -> Iterator[str]:
    """A wanted action that the shop must refuse: it said so, under the rule of the oracle, and the log knows it."""
    refusals: defaultdict[str, set[str]] = defaultdict(set)
    for line in seen.lines:
        if line["event"] == "refused" and line.get("key"):
            refusals[line["key"]].add(str((line.get("error") or {}).get("rule")))
    slots = _in_order(seen.case)
    for (action, outcome), slot in zip(answer.outcomes, slots, strict=True):
        if outcome == EXECUTED:
            continue
        tried = [a for a in seen.attempts if a.slot == slot]
        if not tried:
            yield f"{action.identity} was never tried (the shop would refuse it: {outcome})"
            continue
        last = tried[-1]
        rules = refusals[last.key]
        if last.state != "failed" or rules != {outcome}:
            said = ", ".join(sorted(rules)) or "nothing"
            yield f"{last.name} is {last.state} and the shop refused {said}, where the oracle has {outcome}"


def _in_order(case: Case) -> list[str]:
    """The slots of `case.wanted()`, one for one."""
    rest: defaultdict[str, list[str]] = defaultdict(list)
    for slot, action in case.slots(2).items():
        rest[action.identity].append(slot)
    return [rest[action.identity].pop(0) for action in case.wanted()]


def _at_most_once(seen: _Seen) -> Iterator[str]:
    """Of a blocked run: nothing took effect twice, and what is unknown could not have been found out by asking."""
    plans = (seen.case.first, seen.case.second)
    most: Counter[str] = Counter()
    for plan in plans:
        most |= Counter(action.identity for actions in plan.values() for action in actions)
    done = Counter(Action(line["action"], line["arguments"]).identity for line in seen.executed)
    for identity, times in sorted(done.items()):
        if times > most[identity]:
            yield f"{identity} took effect {times} times, at most {most[identity]} were ever asked for"
    for attempt in seen.unknown:
        told = [line["event"] for line in seen.lines if line.get("key") == attempt.key]
        if "executed" in told or "refused" in told:
            yield f"{attempt.name} is unknown although the shop, when asked, would say what became of it"
