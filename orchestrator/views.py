"""What people are shown of a run: its folded state as plain JSON values. Pure.

Knows every field of every row that is shown, and says in words why an attempt is unknown and what would settle it. Does
not know HTTP or terminals, and decides nothing: phase, blocking and attention come from admission/standing.py, so that
what is shown is what the rules go by.
"""

from collections import Counter
from typing import Any

import msgspec

from admission.events import goal_dict
from admission.records import Attempt, Child, Gate, Result, Revision
from admission.rules_child import missing_needs
from admission.standing import (
    RELAUNCHES_MAX,
    blocking_attempts,
    blocking_children,
    exhausted,
    phase,
)
from admission.state import RunState
from admission.vocabulary import (
    OPEN_ATTEMPTS,
    AttemptState,
    Blocks,
    ChildMode,
    ChildState,
    ContractClass,
    GateState,
    TryOutcome,
)

#: A run's view holds at most so many effects, the newest; `/effects` has all of them in pages.
EFFECTS_SHOWN_MAX = 1_000
#: Asked to stop, and not seen to end.
STOP_OPEN = (ChildState.STOP_REQUESTED, ChildState.STOP_REFUSED, ChildState.UNREACHABLE)


def run_view(run: RunState, *, effects_max: int = EFFECTS_SHOWN_MAX) -> dict[str, Any]:
    """Everything of a run that fits on a page."""
    shown = list(run.attempts.values())[-effects_max:] if effects_max else []
    view = run_row(run)
    view.update(
        {
            "goal": goal_dict(run.revisions[run.head].goal) if run.head else None,
            "goal_hash": run.revisions[run.head].goal_hash if run.head else "",
            "revisions": [revision_row(run, r) for r in run.revisions.values()],
            "updates": [msgspec.to_builtins(u) for u in run.updates.values()],
            "scopes": {name: scope_row(run, name) for name in run.gates},
            "children": [child_row(run, child) for child in run.children.values()],
            "effects": [effect_row(run, attempt) for attempt in shown],
            "refusals": refusal_rows(run),
            "results": [result_row(result) for result in run.results.values()],
            "artifacts": [msgspec.to_builtins(ref) for ref in run.artifacts.values()],
            "checkpoints": checkpoint_rows(run),
            "unresolved": unresolved_rows(run),
            "alarms": [msgspec.to_builtins(alarm) for alarm in run.alarms.values()],
        }
    )
    return view


def run_row(run: RunState) -> dict[str, Any]:
    """A run on one line of a list."""
    limit = run.budget_limit
    counts = Counter(attempt.state.value for attempt in run.attempts.values())
    return {
        "run": run.run_id,
        "state": phase(run).value,
        "revision": {
            "in_force": run.head,
            "targets": {name: gate.target for name, gate in run.gates.items()},
        },
        "text": run.revisions[run.head].goal.text if run.head else "",
        "version": run.version,
        "control_version": run.control,
        "follows": run.follows or None,
        "started_at": run.started_at,
        "updated_at": run.time,
        "effects_total": len(run.attempts),
        "effect_counts": dict(sorted(counts.items())),
        "unresolved_total": len(unresolved_rows(run)),
        "budget": {
            "limit": limit,
            "spent": run.spent,
            "reserved": run.reserved,
            "left": None if limit is None else max(0, limit - run.spent - run.reserved),
        },
    }


# --- revisions, scopes -----------------------------------------------------------------------------------------------


def revision_status(run: RunState, revision: Revision) -> str:
    """accepted (recorded, not all its gates opened yet), active, superseded, or skipped (never opened anywhere)."""
    if revision.n < run.head:
        return "superseded" if revision.opened else "skipped"
    reached = all(run.gates[s].cur == revision.n for s in run.gates if run.gates[s].target == revision.n)
    return "active" if reached else "accepted"


def revision_row(run: RunState, revision: Revision) -> dict[str, Any]:
    """One revision: what it changed, what it kept, how far it came."""
    plan = revision.goal.plan
    return {
        "n": revision.n,
        "status": revision_status(run, revision),
        "text": revision.goal.text,
        "goal_hash": revision.goal_hash,
        "at": revision.at,
        "by": revision.by,
        "position": revision.position,
        "kind": run.updates[revision.seq].kind.value,
        "reason": run.updates[revision.seq].reason,
        "requirements": {r.id: r.text for r in revision.goal.requirements},
        "changed": {"requirements": list(revision.changed), "scopes": list(revision.affects)},
        "kept": {
            "requirements": list(revision.kept),
            "scopes": [name for name in plan if name not in revision.affects],
        },
        "opened": list(revision.opened),
        "still_in_force_for": [
            name for name, gate in run.gates.items() if gate.cur == gate.target == revision.n and name in plan
        ],
    }


def change_row(view: dict[str, Any]) -> dict[str, Any]:
    """What the newest revision of a view changed, removed and kept; what was finished before it, what is still open."""
    row = view["revisions"][-1]
    there = {r["id"] for r in view["goal"].get("requirements", [])} | set(view["goal"]["plan"])
    named = dict.fromkeys((*row["changed"]["requirements"], *row["changed"]["scopes"]))
    effects = [effect for effect in view["effects"] if effect["scope"] in row["changed"]["scopes"]]
    return {
        "changed": {kind: [name for name in names if name in there] for kind, names in row["changed"].items()},
        "removed": [name for name in named if name not in there],
        "kept": row["kept"],
        "finished_before": [effect for effect in effects if effect["outcome"] == AttemptState.SUCCEEDED],
        "open": [effect for effect in effects if effect["outcome"] in OPEN_ATTEMPTS],
    }


def scope_row(run: RunState, name: str) -> dict[str, Any]:
    """One branch of the plan: its gate, who works in it, and what it waits for."""
    gate = run.gates[name]
    plan = run.revisions[run.head].goal.plan.get(name)
    return {
        "gate": gate.state.value,
        "cur": gate.cur,
        "target": gate.target,
        "holds": list(gate.holds),
        "closed_at": gate.closed_at or None,
        "child": run.current.get(name),
        "agent": plan.agent if plan else None,
        "removed": plan is None,
        "done": run.scope_done(name),
        "waits_for": _waits_for(run, name, gate),
        "relaunches": run.relaunches.get(name, 0),
    }


def _waits_for(run: RunState, name: str, gate: Gate) -> list[str]:
    """What keeps the scope from going on, one phrase each."""
    if gate.state is GateState.CLOSED:
        waits = [f"the outcome of {a.id} ({a.service}.{a.operation})" for a in blocking_attempts(run, name)]
        waits += [f"child {c.id} to be seen to end (it acts past the gate)" for c in blocking_children(run, name)]
        return waits or ["the conductor, to open it"]
    if gate.state is GateState.HELD:
        return ["resume"]
    if gate.state is GateState.OPEN and not run.finished:
        if exhausted(run, name):
            return [f"a person: its child failed more than {RELAUNCHES_MAX} times"]
        return [f"the artifact {need}" for need in missing_needs(run, name)]
    return []


# --- children, results, refusals, checkpoints ------------------------------------------------------------------------


def child_row(run: RunState, child: Child) -> dict[str, Any]:
    """One child. `stop.requested_at` says that it was asked, `state` and `ended_at` what was seen."""
    return {
        "child": child.id,
        "run": run.run_id,
        "scope": child.scope,
        "revision": child.revision,
        "n": child.n,
        "agent": child.agent,
        "mode": child.mode.value,
        "state": child.state.value,
        "current": run.is_current(child),
        "task": child.task or None,
        "task_state": child.task_state.value if child.task_state else None,
        "context": child.context,
        "claimed": child.claimed,
        "goal_hash": child.goal_hash,
        "planned_at": child.planned_at,
        "launched_at": child.launched_at or None,
        "launches": child.launches,
        "stop": {
            "wanted": child.stop_wanted,
            "reason": child.stop_reason,
            "requested_at": child.stop_at or None,
            "times": child.stops,
            "detail": child.stop_detail,
        },
        "ended_at": child.ended_at or None,
        "detail": child.detail,
        "follows": child.follows or None,
        "follows_state": child.follows_state or None,
        "succeeded_by": child.succeeded_by or None,
        "needs_reconciliation": child.reconcile or None,
        "result": child.result or None,
        "disposition": run.results[child.result].disposition.value if child.result in run.results else None,
    }


def result_row(result: Result) -> dict[str, Any]:
    """What a child delivered, and what became of it."""
    row: dict[str, Any] = msgspec.to_builtins(result)
    row.setdefault("reason", "")
    row.setdefault("artifacts", [])
    row.setdefault("summary", {})
    return {"result": row.pop("id"), **row}


def refusal_rows(run: RunState) -> list[dict[str, Any]]:
    """The first refusal per child, slot and reason."""
    return [{"run": run.run_id, **msgspec.to_builtins(refusal)} for refusal in run.refusals.values()]


def checkpoint_rows(run: RunState) -> list[dict[str, Any]]:
    """What was true when each scope went on."""
    rows = []
    for checkpoint in run.checkpoints.values():
        limit = checkpoint.budget_limit
        left = None if limit is None else limit - checkpoint.budget_spent - checkpoint.budget_reserved
        row: dict[str, Any] = msgspec.to_builtins(checkpoint)
        for name in ("predecessor", "predecessor_hash"):
            row.setdefault(name, "")
        rows.append(
            {
                "checkpoint": row.pop("id"), "hash": run.checkpoint_hashes.get(checkpoint.id, ""), **row,
                "pending_operations": [
                    run.attempts[p.attempt].key for p in checkpoint.pending if p.attempt in run.attempts
                ],
                "budget_left": left,
            }
        )  # fmt: skip
    return rows


# --- effects ---------------------------------------------------------------------------------------------------------


def effect_row(run: RunState, attempt: Attempt) -> dict[str, Any]:
    """One attempt, as every output shows it."""
    facts = run.facts_of(attempt)
    return {
        "attempt": attempt.id,
        "run": run.run_id,
        "scope": attempt.scope,
        "revision": attempt.revision,
        "child": attempt.child,
        "slot": attempt.slot,
        "operation_id": attempt.key,
        "service": attempt.service,
        "operation": attempt.operation,
        "target": attempt.target,
        "input_ref": attempt.input_ref,
        "outcome": attempt.state.value,
        "basis": attempt.basis.value if attempt.basis else None,
        "observed_result": attempt.observed,
        "tries": [_try_row(t) for t in attempt.tries],
        "unknown_blocks": facts.unknown_blocks.value,
        "why": why(run, attempt),
        "needs_reconciliation": attempt.reconcile or None,
        "asked": {
            "times": attempt.asked,
            "method": attempt.asked_method.value if attempt.asked_method else None,
            "last_at": attempt.asked_at or None,
        },
        "contract": {"class": facts.contract_class.value, "version": facts.version, "hash": facts.schema_hash},
        "generation": attempt.generation,
        "admitted_at": attempt.at,
        "unknown_since": attempt.unknown_at or None,
        "not_after": attempt.not_after or None,
        "resolved_by": attempt.resolved_by or None,
        "contradicted": attempt.contradicted,
        "admitted_at_position": attempt.position,
        "settled_at_position": attempt.settled or None,
    }


def _try_row(t: Any) -> dict[str, Any]:
    return {
        "n": t.n,
        "gateway": t.gateway,
        "granted_at": t.granted_at,
        "outcome": t.outcome.value,
        "basis": t.basis.value if t.basis else None,
        "status": t.status or None,
        "detail": t.detail,
    }


def why(run: RunState, attempt: Attempt) -> str:
    """One line: for an unknown attempt what happened, what would settle it, and what it blocks until then."""
    if attempt.state is not AttemptState.UNKNOWN:
        return attempt.why
    facts = run.facts_of(attempt)
    tail = (
        f"until then {attempt.scope} does not go on"
        if facts.unknown_blocks is Blocks.SCOPE
        else "until then only this action is blocked"
    )
    return f"{_what_happened(attempt)}; {_what_settles(attempt, facts.contract_class)}; {tail}"


def _what_happened(attempt: Attempt) -> str:
    last = next((t for t in reversed(attempt.tries) if t.outcome is not TryOutcome.NOT_EXECUTED), None)
    if last is None or last.outcome is TryOutcome.GRANTED:
        return f"it was permitted, and the gateway never said how the call of {attempt.service} ended"
    return f"{attempt.service} was called and gave no usable answer" + (f" ({last.detail})" if last.detail else "")


def _what_settles(attempt: Attempt, contract_class: ContractClass) -> str:
    service = attempt.service
    asked = f"asked {attempt.asked} time{'s' if attempt.asked != 1 else ''} so far"
    by_hand = f"`regate effect resolve {attempt.id}` by somebody who looked"
    match contract_class:
        case ContractClass.VOID:
            return f"it is settled when {service} answers the void of its key ({asked})"
        case ContractClass.NOT_AFTER:
            lookup = f"a lookup at {service} after its deadline has passed there ({asked})"
            return f"it is settled by {lookup}, or by {by_hand}"
        case ContractClass.LOOKUP:
            return (
                f"{service} can be looked up ({asked}) but cannot void, so 'not found' proves nothing: "
                f"it is settled when a lookup finds it, or by {by_hand}"
            )
        case ContractClass.KEY | ContractClass.GW_ACK | ContractClass.OPAQUE:
            return f"{service} cannot be asked afterwards: it is settled by {by_hand}"


# --- what is not settled ---------------------------------------------------------------------------------------------


def unresolved_rows(run: RunState) -> list[dict[str, Any]]:
    """Everything whose outcome is open and that time alone may not settle, with what it is waiting for."""
    rows = []
    for attempt_id in run.open_attempts:
        attempt = run.attempts[attempt_id]
        if attempt.state is AttemptState.UNKNOWN:
            rows.append(
                {
                    "kind": "effect", "id": attempt.id, "run": run.run_id, "scope": attempt.scope,
                    "revision": attempt.revision, "state": attempt.state.value, "since": attempt.unknown_at,
                    "what": f"{attempt.service}.{attempt.operation} on {attempt.target}",
                    "why": why(run, attempt), "blocks": run.facts_of(attempt).unknown_blocks.value,
                }
            )  # fmt: skip
    rows += [_open_child_row(run, child) for child in run.children.values() if _child_is_open(run, child)]
    return rows


def _child_is_open(run: RunState, child: Child) -> bool:
    if child.mode is ChildMode.AUTONOMOUS and child.state is ChildState.LOST:
        return any(child.id == other.id for other in blocking_children(run, child.scope))
    return child.state in STOP_OPEN


def _open_child_row(run: RunState, child: Child) -> dict[str, Any]:
    if child.mode is ChildMode.MEDIATED:
        blocks, tail = "nothing", "it holds no gate open: nothing it asks for is admitted any more"
    else:
        blocks, tail = "scope", f"it acts past the gate, so {child.scope} waits until it is seen to end"
    match child.state:
        case ChildState.STOP_REFUSED:
            words = f"its agent refused to stop it ({child.stop_detail})"
        case ChildState.UNREACHABLE:
            words = f"its agent could not be reached ({child.stop_detail})"
        case ChildState.LOST:
            words = f"it was lost before it was seen to end ({child.detail})"
        case _:
            words = "it was asked to stop and was not seen to end"
    return {
        "kind": "child", "id": child.id, "run": run.run_id, "scope": child.scope, "revision": child.revision,
        "state": child.state.value, "since": child.stop_at or child.ended_at, "blocks": blocks,
        "what": f"{child.agent}, task {child.task}", "why": f"{words}; {tail}",
    }  # fmt: skip
