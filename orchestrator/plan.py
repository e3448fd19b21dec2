"""Revision and checkpoint in, brief out: what a child is told when it is launched. Pure.

A brief carries the goal in force for its scope, what is done already, artifacts by reference, what is still open, and
which child it follows. It holds no grant: that travels in metadata which A2A servers do not keep.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from admission.events import ArtifactRef
from admission.records import Attempt, Child
from admission.rules_gate import checkpoint_for
from admission.state import RunState
from admission.vocabulary import AttemptState
from admission.wire import Stamp

#: Artifacts up to this size are put into the brief; larger ones only by reference.
INLINE_BYTES_MAX = 16 * 1024
#: A brief lists at most so many effects that are done, the newest; the gate knows all of them.
DONE_MAX = 200


def stamp_for(run: RunState, child: Child) -> Stamp:
    """What the child's result must echo."""
    return Stamp(run=run.run_id, scope=child.scope, child=child.id, revision=child.revision, goal_hash=child.goal_hash)


def needed_artifacts(run: RunState, scope: str) -> tuple[ArtifactRef, ...]:
    """The artifacts of other scopes that the scope's plan needs, once they are adopted."""
    plan = run.goal_of(scope)
    found: list[ArtifactRef] = []
    for need in plan.needs if plan else ():
        producer, _, name = need.partition(":")
        result = run.results.get(run.adopted.get(producer, ""))
        found += [a for a in result.artifacts if not name or a.name == name] if result else []
    return tuple(found)


def _done(attempt: Attempt) -> dict[str, Any]:
    return {
        "attempt": attempt.id, "service": attempt.service, "operation": attempt.operation, "target": attempt.target,
        "revision": attempt.revision, "slot": attempt.slot, "receipt": attempt.observed,
    }  # fmt: skip


def brief_for(run: RunState, child: Child, contents: Mapping[str, Any]) -> dict[str, Any]:
    """The brief of a child. `contents` maps an artifact's hash to its content where that is small enough."""
    plan = run.goal_of(child.scope)
    assert plan is not None, "a child is launched only for a scope that its revision plans"
    goal = run.revisions[child.revision].goal
    done = [a for a in run.attempts.values() if a.scope == child.scope and a.state is AttemptState.SUCCEEDED]
    pending = checkpoint_for(run, child.scope).pending
    artifacts = [
        {"name": a.name, "blob": a.blob, "size_bytes": a.size_bytes}
        | ({"content": contents[a.blob]} if a.blob in contents else {})
        for a in needed_artifacts(run, child.scope)
    ]
    return {
        "run": run.run_id,
        "scope": child.scope,
        "revision": child.revision,
        "goal_hash": child.goal_hash,
        "goal": goal.text,
        "requirements": [{"id": r.id, "text": r.text} for r in goal.requirements],
        "brief": plan.brief,
        "actions": [msgspec.to_builtins(a) for a in plan.actions],
        "done": [_done(attempt) for attempt in done[-DONE_MAX:]],
        "done_total": len(done),
        "pending": msgspec.to_builtins(pending),
        "artifacts": artifacts,
        "follows": child.follows or None,
    }
