"""The checker's own replay of run logs: a second reading of the protocol's text, written apart from the rules.

Theory. Events are applied in the order of the log; what a check asks is always the state just before an event. A gate
is not stored but asked for: a scope is under the newest revision that names it or something above it, and is open for
that revision once everything named above it has been opened for it, nothing holds it, and the run goes on. An attempt
that was admitted and not yet granted is revoked by whatever closes its gate; one that was granted stays open until
evidence settles it, and the first settlement stands. Nothing here judges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from simulators.checks_input import Entry, Json

OPEN = frozenset({"admitted", "sending", "unknown"})
TERMINAL_TASKS = frozenset({"completed", "failed", "canceled", "rejected"})

EVENT_TYPES = frozenset(
    "run_started update_recorded revision_accepted run_held run_released run_cancelled checkpoint_written scope_opened "
    "run_finished child_planned launch_started child_bound child_claimed stop_requested stop_answered child_seen "
    "child_lost result_filed contract_noted effect_admitted try_granted try_recorded effect_refused reconcile_started "
    "effect_classified effect_resolved".split()
)


def below(scope: str, prefix: str) -> bool:
    """Whether `scope` is `prefix` or lies under it."""
    return scope == prefix or scope.startswith(f"{prefix}/")


class Mark(NamedTuple):
    """Something that happened to a gate: which revision (0 for a cancel), where in the log, when."""

    revision: int
    position: int
    at: int


@dataclass
class Try:
    n: int
    position: int
    at: int
    outcome: str = "granted"
    observed: Any = None
    ended_at: int = 0


@dataclass
class Attempt:
    """One intention to act, and what the log says became of it."""

    run: str
    id: str
    scope: str
    revision: int
    slot: str
    generation: int
    key: str
    service: str
    operation: str
    target: str
    input_ref: str
    cost: int
    conflict_key: str
    position: int
    facts: Json
    state: str = "admitted"
    settled_at: int = 0
    by_operator: bool = False
    why: str = ""
    tries: dict[int, Try] = field(default_factory=dict)
    closed: Mark | None = None  # the first newer revision (or cancel) that took its gate away
    passed: Mark | None = None  # the first opening of its scope for a newer revision

    @property
    def blocks_slot(self) -> bool:
        return bool(self.facts.get("unknown_blocks", "scope") == "slot")

    @property
    def name(self) -> str:
        return f"{self.id} ({self.service}.{self.operation} {self.target}, revision {self.revision} of {self.scope})"

    def fact(self, name: str, default: int = 0) -> int:
        value = self.facts.get(name, default)
        return value if isinstance(value, int) else default


@dataclass
class Child:
    id: str
    scope: str
    revision: int
    mode: str
    goal_hash: str
    task: str = ""
    claimed: bool = False
    launched: bool = False
    lost: bool = False
    seen_terminal: bool = False


@dataclass(frozen=True)
class Revision:
    n: int
    seq: int
    affects: tuple[str, ...]
    goal_hash: str
    budget: int | None
    mark: Mark


@dataclass
class Run:
    """One run as its log tells it, up to the event before the one being checked."""

    id: str
    self_opening: frozenset[tuple[str, int]]  # (scope, revision) that the log, whole, opens by an event of its own
    follows: str = ""
    started: bool = False
    last_n: int = 0
    previous: Entry | None = None
    updates: list[tuple[int, str]] = field(default_factory=list)  # (seq, kind)
    revisions: dict[int, Revision] = field(default_factory=dict)
    opened: set[tuple[str, int]] = field(default_factory=set)
    holds: dict[str, set[str]] = field(default_factory=dict)
    cancelled: Mark | None = None
    finished: str = ""
    epoch: int = 0
    requests: dict[str, list[str]] = field(default_factory=dict)
    children: dict[str, Child] = field(default_factory=dict)
    adopted: set[str] = field(default_factory=set)
    contracts: dict[str, Json] = field(default_factory=dict)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    checkpoints: dict[str, tuple[str, Json]] = field(default_factory=dict)

    @property
    def head(self) -> int:
        return max(self.revisions, default=0)

    def target(self, scope: str) -> int:
        """The newest revision that names the scope or something above it; 1 when none does."""
        touching = (r.n for r in self.revisions.values() if any(below(scope, a) for a in r.affects))
        return max(touching, default=1)

    def _above(self, scope: str, revision: int) -> set[str]:
        affects = self.revisions[revision].affects if revision in self.revisions else ()
        return {name for name in affects if below(scope, name)}

    def is_opened(self, scope: str, revision: int) -> bool:
        """Whether the gate of the scope, and each above it that the revision closed, has been opened for it."""
        if revision == 1:
            return True
        own = {scope} if (scope, revision) in self.self_opening else set()
        needed = self._above(scope, revision) | own
        return bool(needed) and all((name, revision) in self.opened for name in needed)

    def opens(self, opening: str, revision: int, scope: str) -> bool:
        """Whether the opening of one scope opens the gate of `scope`: its own, or the last of those above it."""
        if (scope, revision) in self.self_opening or scope == opening:
            return scope == opening
        above = self._above(scope, revision)
        return opening in above and all(name == opening or (name, revision) in self.opened for name in above)

    def passed_by(self, scope: str, revision: int) -> Iterator[Attempt]:
        """Attempts of older revisions whose gate the opening of (scope, revision) opens."""
        for attempt in self.attempts.values():
            if attempt.revision < revision and self.opens(scope, revision, attempt.scope):
                yield attempt

    def shut(self, scope: str, revision: int) -> str | None:
        """Why the gate admits nothing of (scope, revision); None when it is open for it."""
        if self.finished:
            return f"the run had finished ({self.finished})"
        if self.cancelled:
            return f"the run was cancelled at {self.cancelled.position}"
        target = self.target(scope)
        if target > revision:
            where = self.revisions[target].mark.position
            return f"revision {target}, accepted at {where}, had closed the gate of {scope} on revision {revision}"
        if target < revision or not self.is_opened(scope, revision):
            return f"the gate of {scope} was never opened for revision {revision}"
        for hold, scopes in self.holds.items():
            if any(below(scope, held) for held in scopes):
                return f"hold {hold} was on {scope}"
        return None


class World:
    """All runs that were given, replayed together in the order of the store's clock."""

    def __init__(self, logs: Iterable[list[Entry]]) -> None:
        self.runs: dict[str, Run] = {}
        self.slots: dict[tuple[str, str], list[Attempt]] = {}
        self.keys: dict[str, tuple[str, str, int]] = {}  # key -> (root run, slot, generation), as first seen
        self.identities: dict[tuple[str, str, int], str] = {}
        for log in logs:
            openings = frozenset((e.text("scope"), e.number("revision")) for e in log if e.type == "scope_opened")
            self.runs[log[0].run] = Run(log[0].run, openings)

    def root(self, run_id: str) -> str:
        """The first run of a lineage: slots and keys belong to it."""
        seen: set[str] = set()
        while run_id in self.runs and self.runs[run_id].follows and run_id not in seen:
            seen.add(run_id)
            run_id = self.runs[run_id].follows
        return run_id.split(".", 1)[0]

    def attempts(self) -> Iterator[Attempt]:
        """Every attempt of every run."""
        for run in self.runs.values():
            yield from run.attempts.values()

    def child(self, child_id: str) -> Child | None:
        """A child of any run: a linked run's children follow those of its ancestor."""
        return next((run.children[child_id] for run in self.runs.values() if child_id in run.children), None)

    def of_slot(self, run_id: str, slot: str) -> list[Attempt]:
        """All attempts of a slot in the lineage of a run, in the order of their admission."""
        return self.slots.get((self.root(run_id), slot), [])

    def apply(self, entry: Entry) -> None:
        """Take one event in. An unknown type changes nothing here; a check names it."""
        run = self.runs[entry.run]
        _apply_control(run, entry)
        _apply_children(run, entry)
        _apply_attempts(run, entry)
        if entry.type == "effect_admitted":
            attempt = run.attempts[entry.text("attempt")]
            identity = (self.root(run.id), attempt.slot, attempt.generation)
            self.slots.setdefault(identity[:2], []).append(attempt)
            self.keys.setdefault(attempt.key, identity)
            self.identities.setdefault(identity, attempt.key)
        if "epoch" in entry.event:
            run.epoch = max(run.epoch, entry.number("epoch"))
        if "request_id" in entry.event:
            run.requests.setdefault(entry.text("request_id"), []).append(use_of_request(entry))
        run.last_n, run.previous = entry.n, entry


def use_of_request(entry: Entry) -> str:
    """What changed state in the name of a request id."""
    return "update_recorded (start)" if entry.event.get("kind") == "start" else entry.type


def _close(run: Run, mark: Mark, affected: Iterable[Attempt]) -> None:
    for attempt in affected:
        attempt.closed = attempt.closed or mark
        if attempt.state == "admitted":
            attempt.state = "revoked"


def _apply_control(run: Run, entry: Entry) -> None:
    mark = Mark(0, entry.n, entry.at)
    match entry.type:
        case "run_started":
            run.started, run.follows = True, entry.text("follows", "")
            run.revisions[1] = _revision(entry, n=1, seq=0)
        case "update_recorded":
            run.updates.append((entry.number("seq"), entry.text("kind")))
        case "revision_accepted":
            revision = _revision(entry, n=entry.number("n"), seq=entry.number("seq"))
            run.revisions[revision.n] = revision
            named = revision.affects
            older = (a for a in run.attempts.values() if a.revision < revision.n)
            _close(run, revision.mark, (a for a in older if any(below(a.scope, name) for name in named)))
        case "run_held":
            held = set(entry.texts("scopes"))
            run.holds.setdefault(entry.text("hold"), set()).update(held)
            for attempt in run.attempts.values():
                if attempt.state == "admitted" and any(below(attempt.scope, scope) for scope in held):
                    attempt.state = "revoked"
        case "run_released":
            left = run.holds.get(entry.text("hold"), set()) - set(entry.texts("scopes"))
            run.holds[entry.text("hold")] = left
        case "run_cancelled":
            run.cancelled = mark
            _close(run, mark, run.attempts.values())
        case "run_finished":
            run.finished = entry.text("phase")
        case "checkpoint_written":
            checkpoint = entry.object("checkpoint")
            run.checkpoints[str(checkpoint.get("id"))] = (entry.text("hash"), checkpoint)
        case "scope_opened":
            scope, n = entry.text("scope"), entry.number("revision")
            for attempt in run.passed_by(scope, n):
                attempt.passed = attempt.passed or Mark(n, entry.n, entry.at)
            run.opened.add((scope, n))


def _revision(entry: Entry, *, n: int, seq: int) -> Revision:
    budget = entry.object("goal").get("budget_effects")
    return Revision(
        n=n,
        seq=seq,
        affects=entry.texts("affects"),
        goal_hash=entry.text("goal_hash"),
        budget=budget if isinstance(budget, int) else None,
        mark=Mark(n, entry.n, entry.at),
    )


def _apply_children(run: Run, entry: Entry) -> None:
    if entry.type == "child_planned":
        run.children[entry.text("child")] = Child(
            id=entry.text("child"),
            scope=entry.text("scope"),
            revision=entry.number("revision"),
            mode=entry.text("mode"),
            goal_hash=entry.text("goal_hash"),
        )
        return
    child = run.children.get(str(entry.event.get("child")))
    if child is None:
        return
    match entry.type:
        case "launch_started":
            child.launched = True
        case "child_bound":
            child.task = child.task or entry.text("task")
        case "child_claimed" if entry.text("answer") == "claimed":
            child.task = child.task or entry.text("task")
            child.claimed = child.claimed or child.task == entry.text("task")
        case "child_seen" if entry.text("state") in TERMINAL_TASKS:
            child.seen_terminal = True
        case "child_lost":
            child.lost = True
        case "result_filed" if entry.text("disposition") == "adopted":
            run.adopted.add(child.id)


def _apply_attempts(run: Run, entry: Entry) -> None:
    if entry.type == "contract_noted":
        run.contracts[entry.text("ref")] = entry.object("facts")
        return
    if entry.type == "effect_admitted":
        run.attempts[entry.text("attempt")] = _attempt(run, entry)
        return
    attempt = run.attempts.get(str(entry.event.get("attempt")))
    if attempt is None:
        return
    match entry.type:
        case "try_granted":
            attempt.tries[entry.number("n")] = Try(entry.number("n"), entry.n, entry.at)
            if attempt.state in ("admitted", "revoked"):
                attempt.state = "sending"
        case "try_recorded":
            _record(attempt, entry)
        case "effect_classified":
            finding = entry.text("finding")
            _settle(attempt, {"executed": "succeeded", "not_executed": "failed"}.get(finding, "unknown"), entry)
        case "effect_resolved":
            if attempt.state in OPEN:
                attempt.by_operator = True
                _settle(attempt, "succeeded" if entry.event.get("happened") else "failed", entry)


def _attempt(run: Run, entry: Entry) -> Attempt:
    return Attempt(
        run=run.id,
        id=entry.text("attempt"),
        scope=entry.text("scope"),
        revision=entry.number("revision"),
        slot=entry.text("slot"),
        generation=entry.number("generation"),
        key=entry.text("key"),
        service=entry.text("service"),
        operation=entry.text("operation"),
        target=entry.text("target"),
        input_ref=entry.text("input_ref"),
        cost=entry.number("cost"),
        conflict_key=entry.text("conflict_key", ""),
        position=entry.n,
        facts=run.contracts.get(entry.text("contract"), {}),
    )


def _record(attempt: Attempt, entry: Entry) -> None:
    one = attempt.tries.get(entry.number("n"))
    if one is None:
        return
    outcome = entry.text("outcome")
    if one.outcome in ("granted", "in_doubt") or outcome == "ok":
        one.outcome, one.observed, one.ended_at = outcome, entry.event.get("observed"), entry.at
    if one.outcome == "ok":
        _settle(attempt, "succeeded", entry)
    elif all(t.outcome == "not_executed" for t in attempt.tries.values()) and not entry.number("retry_at", 0):
        # With a retry_at its gateway means to send it again, so it is still on its way.
        _settle(attempt, "failed", entry)


def _settle(attempt: Attempt, state: str, entry: Entry) -> None:
    if attempt.state in OPEN:
        attempt.state = state
        attempt.settled_at = entry.n
        attempt.why = entry.text("detail", "") or entry.text("reason", "")
