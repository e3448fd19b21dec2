"""Checks of the log against what the services recorded (S3, S4, S6, S7), and the counts that a run promises to be zero.

Which attempt an effect belongs to: by its key; where a service was given none, each effect takes one granted try of an
attempt with that operation and target, best by receipt, then by payload, then by time. Service clocks are compared with
the store's clock only for "after the gate opened" and "after the gate closed", which needs one machine (or a margin).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from simulators.checks_control import Violation
from simulators.checks_input import Effect, Journal, Json
from simulators.checks_replay import OPEN, Attempt, Try, World

#: Contract classes that can work without a key.
KEYLESS = ("OPAQUE", "GW_ACK", "NOT_AFTER")


@dataclass
class Matched:
    """Which effects belong to which attempt, and which belong to none."""

    pairs: list[tuple[Effect, Attempt]] = field(default_factory=list)
    strays: list[tuple[Effect, str]] = field(default_factory=list)

    def of(self) -> dict[tuple[str, str], list[Effect]]:
        """(run, attempt id) -> its effects."""
        found: dict[tuple[str, str], list[Effect]] = defaultdict(list)
        for effect, attempt in self.pairs:
            found[attempt.run, attempt.id].append(effect)
        return found


def match_effects(world: World, journals: Iterable[Journal]) -> Matched:
    """Give every recorded effect to the attempt it came from."""
    matched = Matched()
    by_key: dict[str, list[Attempt]] = defaultdict(list)
    by_intent: dict[tuple[str, str, str], list[Attempt]] = defaultdict(list)
    for attempt in world.attempts():
        by_key[attempt.key].append(attempt)
        if attempt.facts.get("contract_class") in KEYLESS:
            by_intent[attempt.service, attempt.operation, attempt.target].append(attempt)
    for journal in journals:
        unkeyed = []
        for effect in journal.effects:
            if effect.key is None:
                unkeyed.append(effect)
                continue
            owners = [a for a in by_key.get(effect.key, ()) if a.service == journal.service]
            granted = [a for a in owners if a.tries]
            if granted:
                matched.pairs.append((effect, granted[-1]))
            else:
                why = "has a key that was never granted a try" if owners else "has a key that no log knows"
                matched.strays.append((effect, why))
        _match_unkeyed(unkeyed, by_intent, matched)
    return matched


def _match_unkeyed(
    effects: list[Effect], by_intent: dict[tuple[str, str, str], list[Attempt]], matched: Matched
) -> None:
    ranked: list[tuple[int, int, int, Effect, Attempt, Try]] = []
    for effect in effects:
        targets = {str(v) for v in effect.arguments.values() if isinstance(v, str | int)} | {""}
        for target in targets:
            for attempt in by_intent.get((effect.service, effect.action, target), ()):
                tries = attempt.tries.values()
                ranked.extend((_rank(effect, attempt, t), effect.n, -t.at, effect, attempt, t) for t in tries)
    ranked.sort(key=lambda row: row[:3])
    used: set[tuple[str, str, int]] = set()
    placed: set[int] = set()
    for _, _, _, effect, attempt, one in ranked:
        this_try = (attempt.run, attempt.id, one.n)
        if effect.n not in placed and this_try not in used:
            placed.add(effect.n)
            used.add(this_try)
            matched.pairs.append((effect, attempt))
    for effect in effects:
        if effect.n not in placed:
            matched.strays.append((effect, "has no key, and there is no granted try left for it"))


def _rank(effect: Effect, attempt: Attempt, one: Try) -> int:
    """How badly an effect fits a try; small is good."""
    told = one.observed.get("receipt", one.observed) if isinstance(one.observed, dict) else one.observed
    if one.outcome == "ok" and effect.receipt is not None and told == effect.receipt:
        return 0
    ok = one.outcome == "ok"
    in_time = one.at <= effect.at_ms and (not ok or effect.at_ms <= one.ended_at)
    misfit = 1 + 4 * (attempt.input_ref != effect.payload_sha256) + 2 * (not in_time) + (not ok)
    # A service that said no is believed as long as any other try can explain the effect.
    return misfit + (100 if one.outcome == "not_executed" else 0)


def check_s3(matched: Matched) -> Iterator[Violation]:
    """Everything a service did was granted first."""
    for effect, why in matched.strays:
        yield Violation("S3", f"{effect.service} journal line {effect.n}: {effect.action} {why}", effect.n)


def slots_done(world: World, matched: Matched) -> dict[tuple[str, str], list[tuple[Effect, Attempt]]]:
    """(root run, slot) -> what was executed for it."""
    done: dict[tuple[str, str], list[tuple[Effect, Attempt]]] = defaultdict(list)
    for effect, attempt in matched.pairs:
        done[world.root(attempt.run), attempt.slot].append((effect, attempt))
    return done


def check_s4(world: World, matched: Matched) -> Iterator[Violation]:
    """At most one effect a slot in the whole lineage, and one intent for a conflict key."""
    intents: dict[tuple[str, str], dict[str, Attempt]] = defaultdict(dict)
    for (root, slot), found in slots_done(world, matched).items():
        first = found[0][1]
        for effect, attempt in found[1:]:
            again, before = f"journal line {effect.n}, by {attempt.name}", f"line {found[0][0].n}, by {first.id}"
            detail = f"slot {slot} took effect again in {effect.service} {again}; first in {before}"
            yield Violation("S4", detail, attempt.position, attempt.run)
        if first.conflict_key:
            intents[root, first.conflict_key].setdefault(slot.partition("#")[0], first)
    for (_, conflict_key), slots in intents.items():
        for attempt in list(slots.values())[1:]:
            detail = f"{attempt.name} took effect although another action had taken {conflict_key}"
            yield Violation("S4", detail, attempt.position, attempt.run)


def check_s6(world: World, matched: Matched, services: Iterable[str]) -> Iterator[Violation]:
    """What the log calls succeeded is in the journal; what it calls failed or revoked is not (unless by a person)."""
    given, effects = set(services), matched.of()
    for attempt in world.attempts():
        if attempt.service not in given:
            continue
        found = effects.get((attempt.run, attempt.id), [])
        if attempt.state == "succeeded" and not found:
            yield Violation("S6", f"{attempt.name} succeeded, but is not in the journal", attempt.position, attempt.run)
        elif attempt.state in ("failed", "revoked") and found and not attempt.by_operator:
            detail = f"{attempt.name} is called {attempt.state}, but {attempt.service} journal line {found[0].n} has it"
            yield Violation("S6", detail, attempt.position, attempt.run)


def landed_after_opening(effect: Effect, attempt: Attempt, margin_ms: int) -> bool:
    """Whether an effect landed when its scope was already open for a newer revision, against its contract."""
    opened = attempt.passed
    return opened is not None and not attempt.blocks_slot and effect.at_ms > opened.at + margin_ms


def check_s7(matched: Matched, margin_ms: int) -> Iterator[Violation]:
    """Nothing of an older revision lands after its scope opened for a newer, unless only its slot is blocked."""
    for effect, attempt in matched.pairs:
        opened = attempt.passed
        if opened and landed_after_opening(effect, attempt, margin_ms):
            late = effect.at_ms - opened.at
            detail = f"{attempt.name} landed {late} ms after {attempt.scope} was opened for revision {opened.revision}"
            yield Violation("S7", detail, opened.position, attempt.run)


def check_payloads(world: World, journals: Iterable[Journal]) -> Iterator[Violation]:
    """S14, the service's half: a key never reaches it with a second payload."""
    for journal in journals:
        for n, key in journal.reused_keys:
            if key in world.keys:
                yield Violation("S14", f"{journal.service} journal line {n}: key {key} came with another payload", n)


def check_given(world: World, services: Iterable[str]) -> Iterator[Violation]:
    """A service that was called and whose journal is not here leaves promises unchecked, which is no pass."""
    calls = Counter(a.service for a in world.attempts() if a.tries)
    for service, count in sorted(calls.items()):
        if service not in set(services):
            detail = f"{count} attempts were sent to {service}, whose journal was not given (--journal {service}=FILE)"
            yield Violation("JOURNAL", detail, 0)


def check_hidden(world: World) -> Iterator[Violation]:
    """An attempt that is still being sent when its run has finished is an unknown that nobody is told of."""
    for attempt in world.attempts():
        run = world.runs[attempt.run]
        if run.finished and attempt.state in ("admitted", "sending"):
            detail = f"{attempt.name} was {attempt.state}, and not called unknown, when the run ended {run.finished}"
            yield Violation("HIDDEN", detail, attempt.position, attempt.run)


def promises(
    world: World, matched: Matched, violations: list[Violation], *, margin_ms: int, services: Iterable[str]
) -> Json:
    """The counts: each has to be zero; late landings and unresolved outcomes are legal and listed."""
    counts = Counter(v.check for v in violations)
    effects = matched.of()
    stale = {(a.run, a.id) for e, a in matched.pairs if landed_after_opening(e, a, margin_ms)}
    stale |= {(a.run, a.id) for a in world.attempts() if any(granted_late(a, t) for t in a.tries.values())}
    contradicted = [
        a for a in world.attempts()
        if a.state in ("failed", "revoked") and not a.by_operator and effects.get((a.run, a.id))
    ]  # fmt: skip
    late = [_landing(e, a) for e, a in matched.pairs if _is_late(e, a) and (a.run, a.id) not in stale]
    return {
        "duplicate_effects": counts["S4"],
        "stale_effects": len(stale),
        "late_landings": late,
        "hidden_unknowns": counts["HIDDEN"] + len(contradicted),
        "unresolved": [_unresolved(a, effects, set(services)) for a in world.attempts() if a.state in OPEN],
    }


def granted_late(attempt: Attempt, one: Try) -> bool:
    """Whether a send was permitted after the gate of its revision had closed."""
    return attempt.closed is not None and one.position > attempt.closed.position


def _is_late(effect: Effect, attempt: Attempt) -> bool:
    return attempt.closed is not None and effect.at_ms > attempt.closed.at


def _landing(effect: Effect, attempt: Attempt) -> Json:
    closed, opened = attempt.closed, attempt.passed
    assert closed is not None
    row: dict[str, Any] = _row(attempt)
    row |= {
        "journal_line": effect.n,
        "landed_at_ms": effect.at_ms,
        "closed_by": f"revision {closed.revision}" if closed.revision else "cancel",
        "after_close_ms": effect.at_ms - closed.at,
        "before_open_ms": opened.at - effect.at_ms if opened else None,
    }
    return row


def _unresolved(attempt: Attempt, effects: dict[tuple[str, str], list[Effect]], services: set[str]) -> Json:
    journal = "executed" if effects.get((attempt.run, attempt.id)) else "absent"
    return {**_row(attempt), "why": attempt.why, "journal": journal if attempt.service in services else "not given"}


def _row(attempt: Attempt) -> Json:
    return {
        "run": attempt.run,
        "attempt": attempt.id,
        "scope": attempt.scope,
        "revision": attempt.revision,
        "service": attempt.service,
        "operation": attempt.operation,
        "target": attempt.target,
        "operation_id": attempt.key,
        "outcome": attempt.state,
        "unknown_blocks": "slot" if attempt.blocks_slot else "scope",
    }
