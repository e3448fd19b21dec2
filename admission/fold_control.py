"""Folds of control events: what starting, revising, holding, cancelling, opening and finishing do to a run. Pure.

Accepting a revision closes the gates it affects, revokes what was admitted and not sent, marks what was sent, and wants
the children stopped: all derived here, at the event's own position.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from admission import events as ev
from admission.records import Gate, Handled, Revision, Update
from admission.run_state import Folder, RunState
from admission.vocabulary import AttemptState, Basis, ChildState, Disposition, UpdateKind, within


def _run_started(run: RunState, n: int, e: ev.RunStarted) -> None:
    run.set("principal", e.principal)
    run.set("follows", e.follows)
    run.set("started_at", e.at)
    run.set("head", 1)
    scopes = tuple(e.goal.plan)
    run.put(
        run.updates, 1, Update(seq=1, kind=UpdateKind.START, by=e.by, at=e.at, position=n, text=e.goal.text, revision=1)
    )
    changed = tuple(r.id for r in e.goal.requirements)
    revision = Revision(
        n=1, seq=1, goal=e.goal, goal_hash=e.goal_hash, affects=scopes, changed=changed, kept=(), at=e.at, position=n,
        by=e.by, opened=scopes,
    )  # fmt: skip
    run.put(run.revisions, 1, revision)
    for scope in scopes:
        run.put(run.gates, scope, Gate(cur=1, target=1))
    run.put(run.requests, e.request_id, Handled(payload_hash=e.payload_hash, position=n, answer={"revision": 1}))


def _update_recorded(run: RunState, n: int, e: ev.UpdateRecorded) -> None:
    update = Update(
        seq=e.seq, kind=e.kind, by=e.by, at=e.at, position=n, text=e.text, reason=e.reason, revision=run.head
    )
    run.put(run.updates, e.seq, update)
    answer = {"seq": e.seq, "kind": e.kind.value, "revision": run.head}
    run.put(run.requests, e.request_id, Handled(payload_hash=e.payload_hash, position=n, answer=answer))


def _closing(run: RunState, scopes: Iterable[str], *, revision: int, at: int, n: int, why: str) -> None:
    """Revoke what was not yet sent, mark what was, and want the children of older revisions stopped."""
    touched = set(scopes)
    for attempt_id in list(run.open_attempts):
        attempt = run.attempts[attempt_id]
        if attempt.scope not in touched:
            continue
        if attempt.state is AttemptState.ADMITTED:
            run.settle(attempt, AttemptState.REVOKED, n, basis=Basis.NEVER_GRANTED, why=why)
        else:
            run.put(run.attempts, attempt_id, replace(attempt, reconcile=revision))
    for child in list(run.children.values()):
        if child.scope not in touched or child.settled:
            continue
        if child.state is ChildState.PLANNED:
            run.end_child(child, ChildState.ENDED, at, detail=f"never launched: {why}")
        else:
            run.put(run.children, child.id, replace(child, stop_wanted=True, stop_reason=why, reconcile=revision))
    for result in list(run.results.values()):
        if result.scope in touched and result.disposition is Disposition.PARKED:
            run.put(run.results, result.id, replace(result, disposition=Disposition.DROPPED, reason=why))


def _revision_accepted(run: RunState, n: int, e: ev.RevisionAccepted) -> None:
    run.set("head", e.n)
    update = run.updates[e.seq]
    run.put(run.updates, e.seq, replace(update, revision=e.n))
    for request, handled in run.requests.items():
        if handled.position == n - 1:  # the update in the same commit: sent again, it names the revision it made
            run.put(run.requests, request, replace(handled, answer={**handled.answer, "revision": e.n}))
            break
    revision = Revision(
        n=e.n, seq=e.seq, goal=e.goal, goal_hash=e.goal_hash, affects=e.affects, changed=e.changed, kept=e.kept,
        at=e.at, position=n, by=e.by,
    )  # fmt: skip
    run.put(run.revisions, e.n, revision)
    touched = [s for s in run.gates if any(within(s, prefix) for prefix in e.affects)]
    for scope in touched:
        gate = run.gates[scope]
        closed_at = e.at if gate.cur == gate.target else gate.closed_at
        run.put(run.gates, scope, replace(gate, target=e.n, closed_at=closed_at))
        run.put(run.relaunches, scope, 0)
        run.drop(run.silences, scope)
    held = next((g.holds for g in run.gates.values() if g.holds), ())
    for scope in e.goal.plan:
        if scope not in run.gates:
            run.put(run.gates, scope, Gate(cur=0, target=e.n, holds=held, closed_at=e.at))
    _closing(run, touched, revision=e.n, at=e.at, n=n, why=f"superseded by revision {e.n}")


def _run_held(run: RunState, n: int, e: ev.RunHeld) -> None:
    for scope in e.scopes:
        gate = run.gates[scope]
        if e.hold not in gate.holds:
            run.put(run.gates, scope, replace(gate, holds=(*gate.holds, e.hold)))
    for attempt_id in list(run.open_attempts):
        attempt = run.attempts[attempt_id]
        if attempt.scope in e.scopes and attempt.state is AttemptState.ADMITTED:
            run.settle(attempt, AttemptState.REVOKED, n, basis=Basis.NEVER_GRANTED, why="held before it was sent")


def _run_released(run: RunState, n: int, e: ev.RunReleased) -> None:
    for scope in e.scopes:
        gate = run.gates[scope]
        run.put(run.gates, scope, replace(gate, holds=tuple(h for h in gate.holds if h != e.hold)))


def _run_cancelled(run: RunState, n: int, e: ev.RunCancelled) -> None:
    run.set("cancelled", True)
    for scope, gate in list(run.gates.items()):
        run.put(run.gates, scope, replace(gate, sealed=True, closed_at=e.at))
    _closing(run, list(run.gates), revision=run.head, at=e.at, n=n, why="the run was cancelled")


def _checkpoint_written(run: RunState, n: int, e: ev.CheckpointWritten) -> None:
    run.put(run.checkpoints, e.checkpoint.id, e.checkpoint)
    run.put(run.checkpoint_hashes, e.checkpoint.id, e.hash)


def _scope_opened(run: RunState, n: int, e: ev.ScopeOpened) -> None:
    gate = run.gates[e.scope]
    run.put(run.gates, e.scope, replace(gate, cur=e.revision, closed_at=0))
    revision = run.revisions[e.revision]
    run.put(run.revisions, e.revision, replace(revision, opened=(*revision.opened, e.scope)))
    run.put(run.relaunches, e.scope, 0)


def _run_finished(run: RunState, n: int, e: ev.RunFinished) -> None:
    run.set("finished", e.phase)


#: Which function folds which event.
CONTROL: dict[type[ev.Event], Folder] = {
    ev.RunStarted: _run_started,
    ev.UpdateRecorded: _update_recorded,
    ev.RevisionAccepted: _revision_accepted,
    ev.RunHeld: _run_held,
    ev.RunReleased: _run_released,
    ev.RunCancelled: _run_cancelled,
    ev.CheckpointWritten: _checkpoint_written,
    ev.ScopeOpened: _scope_opened,
    ev.RunFinished: _run_finished,
}
