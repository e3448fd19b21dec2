"""Rules of a scope's gate: when it may open, and the checkpoint that is written in the same commit. Pure.

Opening re-derives its precondition here, so that a decision made elsewhere, earlier, can never open a gate.
"""

from typing import Any

import msgspec

from admission import commands as cmd
from admission import events as ev
from admission.records import Gate
from admission.standing import blocking_attempts, blocking_children, budget_overdrawn
from admission.state import RunState
from admission.table import Answer, Machine, Row
from admission.vocabulary import AttemptState, GateState, canonical, digest


def not_its_target(run: RunState, command: cmd.OpenScope) -> bool:
    """A newer revision has retargeted the gate."""
    return run.gates[command.scope].target != command.revision


def something_open(run: RunState, command: cmd.OpenScope) -> bool:
    """An older revision's attempt is open, a child acts past the gate, or more is spent than the goal allows."""
    return bool(blocking_attempts(run, command.scope) or blocking_children(run, command.scope) or budget_overdrawn(run))


def standing_artifacts(run: RunState) -> tuple[ev.ArtifactRef, ...]:
    """The artifacts of results that count now: those of scopes whose result is of the revision they stand at."""
    done = [run.results[run.adopted[scope]] for scope in run.gates if scope in run.adopted and run.scope_done(scope)]
    return tuple(artifact for result in done for artifact in result.artifacts)


def checkpoint_for(run: RunState, scope: str) -> ev.Checkpoint:
    """What is true of a scope now: the goal it will go on under, what is done, what is still open, what is left."""
    gate = run.gates[scope]
    previous = [c for c in run.checkpoints.values() if c.scope == scope]
    own = [a for a in run.attempts.values() if a.scope == scope]
    done = tuple(
        ev.EffectRef(
            attempt=a.id, slot=a.slot, service=a.service, operation=a.operation, target=a.target, revision=a.revision,
        )
        for a in own if a.state is AttemptState.SUCCEEDED
    )  # fmt: skip
    pending = tuple(
        ev.PendingRef(
            attempt=a.id, slot=a.slot, service=a.service, operation=a.operation, target=a.target, revision=a.revision,
            why=a.why or a.state.value,
        )
        for a in own if a.open
    )  # fmt: skip
    old = tuple(
        ev.ChildRef(child=c.id, revision=c.revision, state=c.state.value)
        for c in run.children.values() if c.scope == scope and c.revision < gate.target
    )  # fmt: skip
    predecessor = previous[-1].id if previous else ""
    return ev.Checkpoint(
        id=f"{scope}@{gate.target}", scope=scope, revision=gate.target, goal_hash=run.revisions[gate.target].goal_hash,
        position=run.version, effects_done=done, artifacts=standing_artifacts(run), pending=pending, children=old,
        budget_limit=run.budget_limit, budget_spent=run.spent, budget_reserved=run.reserved, predecessor=predecessor,
        predecessor_hash=run.checkpoint_hashes.get(predecessor, ""),
    )  # fmt: skip


def _open(run: RunState, c: cmd.OpenScope, at: int) -> tuple[ev.Event, ...]:
    checkpoint = checkpoint_for(run, c.scope)
    written = ev.CheckpointWritten(
        at=at, by=c.by, checkpoint=checkpoint, hash=digest(canonical(msgspec.to_builtins(checkpoint)))
    )
    opened = ev.ScopeOpened(at=at, by=c.by, scope=c.scope, revision=c.revision, checkpoint=checkpoint.id, epoch=c.epoch)
    return (written, opened)


def _blockers(run: RunState, c: cmd.OpenScope) -> dict[str, Any]:
    return {
        "budget_overdrawn": budget_overdrawn(run),
        "attempts": [a.id for a in blocking_attempts(run, c.scope)],
        "children": [b.id for b in blocking_children(run, c.scope)],
    }


def _gate_of(run: RunState, command: Any) -> str:
    gate: Gate | None = run.gates.get(command.scope)
    return gate.state.value if gate else "none"


G = GateState

GATE = Machine(
    name="gate",
    states=("none", *G),
    commands={cmd.OpenScope: "the conductor has settled what was open"},
    state_of=_gate_of,
    rows=(
        Row(states=("none",), on=cmd.OpenScope, says=Answer.NOT_FOUND),
        Row(states=(G.OPEN, G.HELD), on=cmd.OpenScope, says=Answer.ALREADY),
        Row(states=(G.SEALED,), on=cmd.OpenScope, says=Answer.CLOSED),
        Row(states=(G.CLOSED,), on=cmd.OpenScope, guard=not_its_target, says=Answer.SKIPPED, detail=lambda r, c: {}),
        Row(states=(G.CLOSED,), on=cmd.OpenScope, guard=something_open, says=Answer.BLOCKED, detail=_blockers),
        Row(states=(G.CLOSED,), on=cmd.OpenScope, do=_open, next="open, or held while a hold remains",
            says=Answer.ACCEPTED, accepted=True, records="checkpoint, then the gate stands at the revision"),
    ),
)  # fmt: skip
