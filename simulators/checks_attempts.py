"""Checks on attempts and checkpoints that the log alone shows (S5, S10, S14, S15, S16).

Each is given the replay as it stood before the event. Knows no journal: what really happened is for another file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from simulators.checks_control import Violation, broken
from simulators.checks_input import Entry, Json
from simulators.checks_replay import OPEN, Attempt, Run, World, below


def check_s5(world: World, run: Run, entry: Entry) -> Iterator[Violation]:
    """When a scope opens, nothing of an older revision is still on its way in it."""
    if entry.type != "scope_opened":
        return
    for attempt in run.passed_by(entry.text("scope"), entry.number("revision")):
        if attempt.state in ("admitted", "sending") and not attempt.blocks_slot:
            detail = f"{entry.text('scope')} opened for revision {entry.number('revision')} while {attempt.name} was"
            yield broken("S5", entry, f"{detail} {attempt.state}")


def check_s16(world: World, run: Run, entry: Entry) -> Iterator[Violation]:
    """No gate opens past an unknown outcome, except where the contract blocks only the slot, and then it is named."""
    if entry.type != "scope_opened":
        return
    _, checkpoint = run.checkpoints.get(entry.text("checkpoint"), ("", {}))
    named = {str(p.get("attempt")) for p in checkpoint.get("pending", [])}
    for attempt in run.passed_by(entry.text("scope"), entry.number("revision")):
        if attempt.state == "unknown" and not attempt.blocks_slot:
            yield broken("S16", entry, f"{entry.text('scope')} opened while the outcome of {attempt.name} was unknown")
        elif attempt.state in OPEN and attempt.blocks_slot and attempt.id not in named:
            yield broken("S16", entry, f"{entry.text('scope')} opened past {attempt.name}, not named in its checkpoint")


def _reserved(run: Run) -> int:
    return sum(a.cost for a in run.attempts.values() if a.state == "succeeded" or a.state in OPEN)


def check_s10(world: World, run: Run, entry: Entry) -> Iterator[Violation]:
    """What was spent and what is reserved never exceed the budget of the newest goal."""
    limit = run.revisions[run.head].budget if run.head in run.revisions else None
    if limit is None or entry.type not in ("effect_admitted", "scope_opened"):
        return
    wanted = _reserved(run) + (entry.number("cost") if entry.type == "effect_admitted" else 0)
    if wanted > limit:
        yield broken("S10", entry, f"{entry.type} brings spent and reserved to {wanted}, the budget is {limit}")


def check_s14(world: World, run: Run, entry: Entry) -> Iterator[Violation]:
    """One key belongs to one slot and generation; a new generation, or a new try, only where it can double nothing."""
    if entry.type == "effect_admitted":
        yield from _keys(world, run, entry)
    attempt = run.attempts.get(str(entry.event.get("attempt")))
    if attempt is None:
        return
    if entry.type == "try_granted":
        yield from _tries(attempt, entry)
    elif entry.type == "effect_classified" and entry.text("finding") == "not_executed":
        basis, kind = entry.text("basis"), attempt.facts.get("contract_class")
        promised = {
            "gave_up": False,
            "voided": kind == "VOID",
            "not_after_passed": kind == "NOT_AFTER" or attempt.fact("not_after_max_age_ms") > 0,
        }
        if not promised.get(basis, True):
            yield broken("S14", entry, f"{attempt.name} called not executed on {basis}, no proof in class {kind}")


def _keys(world: World, run: Run, entry: Entry) -> Iterator[Violation]:
    key, slot, generation = entry.text("key"), entry.text("slot"), entry.number("generation")
    name, root = entry.text("attempt"), world.root(run.id)
    identity = (root, slot, generation)
    if world.keys.get(key, identity) != identity:
        yield broken("S14", entry, f"{name} has key {key} for {identity}, but the key belongs to {world.keys[key]}")
    elif world.identities.get(identity, key) != key:
        yield broken("S14", entry, f"{name} has key {key} for {identity}, which has key {world.identities[identity]}")
    earlier = world.of_slot(run.id, slot)
    if earlier and generation > max(a.generation for a in earlier) + 1:
        yield broken("S14", entry, f"{name} skips to generation {generation} of slot {slot}")
    for other in earlier:
        if other.state not in ("failed", "revoked"):
            detail = f"{name} takes slot {slot} (generation {generation})"
            yield broken("S14", entry, f"{detail} while {other.name} of generation {other.generation} is {other.state}")
        elif other.tries and other.generation >= generation:
            yield broken("S14", entry, f"{name} takes generation {generation} of {slot}, used up by {other.name}")


def _tries(attempt: Attempt, entry: Entry) -> Iterator[Violation]:
    n = entry.number("n")
    told = f"try {n} of {attempt.name} granted"
    if n != len(attempt.tries) + 1:
        yield broken("S14", entry, f"{told} after {len(attempt.tries)} tries")
    doubtful = any(t.outcome != "not_executed" for t in attempt.tries.values())
    if attempt.state in ("succeeded", "unknown", "failed"):
        yield broken("S14", entry, f"{told} although it was {attempt.state}")
    if not attempt.tries:
        return
    if doubtful and attempt.facts.get("dedupes") is not True:
        yield broken("S14", entry, f"{told}, but its service does not dedupe and an earlier one is open")
    if n > attempt.fact("tries_max", 1):
        yield broken("S14", entry, f"{told}, its contract permits {attempt.fact('tries_max', 1)}")
    fenced = attempt.fact("not_after_max_age_ms")
    late = fenced + attempt.fact("clock_skew_ms") if fenced else attempt.fact("late_arrival_max_ms")
    limit = attempt.fact("retention_ms") - late
    age = entry.at - min(t.at for t in attempt.tries.values())
    if doubtful and age >= limit:
        yield broken("S14", entry, f"{told} when its key was {age} ms old; {limit} ms is the limit")


def check_s15(world: World, run: Run, entry: Entry) -> Iterator[Violation]:
    """A checkpoint is written once, right before its opening, and tells what had succeeded at the position it names."""
    before = run.previous
    if entry.type == "scope_opened":
        scope, n, name = entry.text("scope"), entry.number("revision"), entry.text("checkpoint")
        _, written = run.checkpoints.get(name, ("", {}))
        if before is None or before.type != "checkpoint_written" or before.object("checkpoint").get("id") != name:
            yield broken("S15", entry, f"{scope} opened without its checkpoint {name} written right before")
        elif (written.get("scope"), written.get("revision")) != (scope, n) or before.commit != entry.commit:
            yield broken("S15", entry, f"checkpoint {name} is not of this opening of {scope} for revision {n}")
    elif before is not None and before.type == "checkpoint_written":
        yield broken("S15", entry, f"the checkpoint at {before.n} is not followed by its opening")
    if entry.type == "checkpoint_written":
        yield from _checkpoint(world, run, entry)


def _checkpoint(world: World, run: Run, entry: Entry) -> Iterator[Violation]:
    checkpoint = entry.object("checkpoint")
    name, scope = str(checkpoint.get("id")), str(checkpoint.get("scope"))
    if name in run.checkpoints:
        yield broken("S15", entry, f"checkpoint {name} is written a second time")
    if canonical_hash(checkpoint) != entry.text("hash"):
        yield broken("S15", entry, f"the hash of checkpoint {name} is not that of its content")
    yield from _predecessor(world, run, entry)
    exact_at = checkpoint.get("position", entry.n)
    late = [a for a in run.attempts.values() if a.state == "succeeded" and a.settled_at > exact_at]
    if exact_at >= entry.n:
        yield broken("S15", entry, f"checkpoint {name} names position {exact_at}, which had not come yet")
    done = {(a.id, a.slot): a for a in run.attempts.values() if a.state == "succeeded" and a not in late}
    listed = {(str(e.get("attempt")), str(e.get("slot"))): e for e in checkpoint.get("effects_done", [])}
    inherited = {(a.id, a.slot) for a in world.attempts() if a.run != run.id}
    own = {ref for ref in listed if ref in done or ref not in inherited}
    of_scope = {ref for ref, a in done.items() if a.scope == scope}
    if own not in (of_scope, {ref for ref, a in done.items() if below(a.scope, scope)}, set(done)):
        yield broken("S15", entry, f"checkpoint {name} lists {sorted(own)} as done; {sorted(done)} had succeeded")
    for ref in own & set(done):
        if listed[ref].get("revision") != done[ref].revision:
            yield broken("S15", entry, f"checkpoint {name} tells another revision of {done[ref].name}")


def _predecessor(world: World, run: Run, entry: Entry) -> Iterator[Violation]:
    checkpoint = entry.object("checkpoint")
    name, before = str(checkpoint.get("id")), str(checkpoint.get("predecessor", ""))
    if before:
        hashes = {other.checkpoints[before][0] for other in world.runs.values() if before in other.checkpoints}
        if checkpoint.get("predecessor_hash") not in hashes:
            yield broken("S15", entry, f"checkpoint {name} names predecessor {before} with another hash than it has")
    elif any(c.get("scope") == checkpoint.get("scope") for _, c in run.checkpoints.values()):
        yield broken("S15", entry, f"checkpoint {name} does not name its predecessor")


def canonical_hash(value: Json) -> str:
    """sha256 over sorted keys, no spaces, UTF-8."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


ATTEMPT_CHECKS = (check_s5, check_s10, check_s14, check_s15, check_s16)
