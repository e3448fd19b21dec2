"""Rules of admission: whether a worker's wish becomes an attempt. Pure.

The append of EffectAdmitted is the moment at which an effect is allowed. A slot names an intent: while an attempt holds
it, or an effect stands in it, the same intent is not admitted again, whichever child, worker or revision asks.
"""

from functools import lru_cache
from typing import Any

import msgspec

from admission import commands as cmd
from admission import events as ev
from admission.records import Attempt, Gate
from admission.standing import in_doubt
from admission.state import RunState, refusal_key
from admission.table import Machine, Row
from admission.vocabulary import AttemptState, Verdict, canonical, digest, idempotency_key, scope_prefixes

#: So many refusals of a run are kept as rows; further ones are only answered.
REFUSALS_MAX = 1_000

FREE, TAKEN, DONE = "free", "taken", "done"

# Pure functions of a few strings, asked again for each effect and again after each conflict.
_prefixes = lru_cache(maxsize=4_096)(scope_prefixes)
_key = lru_cache(maxsize=4_096)(idempotency_key)


def refused_by_contract(run: RunState, command: cmd.Admit) -> bool:
    """The gateway found that the contract does not allow this call."""
    return bool(command.refusal)


def superseded(run: RunState, command: cmd.Admit) -> bool:
    """A gate on the way is closed or sealed, or stands at another revision than the child."""
    own = run.gates.get(command.scope)
    if own is None or own.sealed or run.finished or own.cur != command.revision or own.target != command.revision:
        return True
    return any(gate.sealed or gate.cur != gate.target for gate in _gates_above(run, command.scope))


def held(run: RunState, command: cmd.Admit) -> bool:
    """A gate on the way is held."""
    own = run.gates.get(command.scope)
    return bool(own and own.holds) or any(gate.holds for gate in _gates_above(run, command.scope))


def _gates_above(run: RunState, scope: str) -> list[Gate]:
    if "/" not in scope:
        return []
    return [run.gates[s] for s in _prefixes(scope)[:-1] if s in run.gates]


def not_the_current_child(run: RunState, command: cmd.Admit) -> bool:
    """The log does not say that this child, in this task, may act."""
    child = run.children.get(command.child)
    if child is None or (child.scope, child.revision) != (command.scope, command.revision):
        return True
    return not run.is_current(child) or not child.claimed or child.task != command.task


def target_changed_since(run: RunState, command: cmd.Admit) -> bool:
    """It was done, but a later effect changed the target: doing it again may be meant, so it must be said."""
    done = run.attempts[run.slots[command.slot]]
    latest: Attempt | None = run.attempts.get(run.targets.get(f"{command.service}:{command.target}", ""))
    if latest is None or done.revision == command.revision or _intent(latest.slot) == _intent(done.slot):
        return False  # under one revision a repeated ask is a child that starts over, not a wish
    return latest.settled > done.settled


def _intent(slot: str) -> str:
    """A slot without its occurrence."""
    return slot.rsplit("#", 1)[0]


def being_sent(run: RunState, command: cmd.Admit) -> bool:
    """The attempt that has the slot is on the wire and nothing is in doubt about it yet."""
    return not in_doubt(run.attempts[run.slots[command.slot]])


def outcome_is_unknown(run: RunState, command: cmd.Admit) -> bool:
    """It could not be found out what became of the attempt that has the slot."""
    attempt = run.attempts[run.slots[command.slot]]
    return attempt.state is AttemptState.UNKNOWN or attempt.contradicted


def same_intent_elsewhere(run: RunState, command: cmd.Admit) -> bool:
    """Another slot has the same conflict key: the same intent in other words."""
    if not command.conflict_key:
        return False
    return _intent(run.conflicts.get(command.conflict_key, command.slot)) != _intent(command.slot)


def occurrence_not_allowed(run: RunState, command: cmd.Admit) -> bool:
    """A repetition that the revision in force does not plan; a worker cannot invent one."""
    if command.occurrence == 1:
        return False
    plan = run.goal_of(command.scope)
    return (
        command.occurrence < 1
        or plan is None
        or not any(
            action.service == command.service
            and action.action == command.operation
            and action.occurrence >= command.occurrence
            and command.target in (str(value) for value in action.arguments.values())
            for action in plan.actions
        )
    )


def budget_reached(run: RunState, command: cmd.Admit) -> bool:
    """Spent, reserved and this would exceed the limit. Unknown attempts keep their reserve."""
    limit = run.budget_limit
    return limit is not None and run.spent + run.reserved + command.contract.cost > limit


@lru_cache(maxsize=1_024)
def contract_ref(facts: ev.ContractFacts) -> str:
    """Under which name a run keeps a contract's facts."""
    content = digest(canonical(msgspec.to_builtins(facts)))
    return f"{facts.service}.{facts.operation}@{facts.version}:{content[:12]}"


def _admit(run: RunState, c: cmd.Admit, at: int) -> tuple[ev.Event, ...]:
    ref = contract_ref(c.contract)
    noted: tuple[ev.Event, ...] = ()
    if run.contracts.get(ref) != c.contract:
        noted = (ev.ContractNoted(at=at, ref=ref, facts=c.contract),)
    attempt = f"{run.run_id}-e{len(run.attempts) + 1}"
    generation = run.generations.get(c.slot, 1)
    admitted = ev.EffectAdmitted(
        at=at, by=c.by, attempt=attempt, scope=c.scope, revision=c.revision, child=c.child, slot=c.slot,
        generation=generation, key=_key(run.run_id, c.slot, generation), service=c.service,
        operation=c.operation, target=c.target, contract=ref, input_ref=c.input_ref, cost=c.contract.cost,
        conflict_key=c.conflict_key,
    )  # fmt: skip
    age = c.contract.not_after_max_age_ms
    granted = ev.TryGranted(at=at, attempt=attempt, n=1, gateway=c.gateway, not_after=at + age if age else 0)
    return (*noted, admitted, granted)


def _admitted(run: RunState, c: cmd.Admit) -> dict[str, Any]:
    generation = run.generations.get(c.slot, 1)
    return {
        "attempt": f"{run.run_id}-e{len(run.attempts) + 1}",
        "key": _key(run.run_id, c.slot, generation),
        "not_after_max_age": c.contract.not_after_max_age_ms,
        "in_force": run.head,
    }


def _refuse_as(verdict: Verdict) -> Any:
    def refuse(run: RunState, c: cmd.Admit, at: int) -> tuple[ev.Event, ...]:
        if run.head == 0 or len(run.refusals) >= REFUSALS_MAX:
            return ()  # nobody reads a thousand of them, and a worker that has gone wild must not fill the log
        if refusal_key(c.child, c.slot, verdict.value) in run.refusals:
            return ()  # repeats are counted in the trace; the first one is the row that people look for
        refused = ev.EffectRefused(
            at=at, by=c.by, child=c.child, scope=c.scope, revision=c.revision, in_force=run.head, slot=c.slot,
            service=c.service, operation=c.operation, target=c.target, input_ref=c.input_ref, reason=verdict,
            detail=c.refusal or _refusal_words(run, c, verdict),
        )  # fmt: skip
        return (refused,)

    refuse.__name__ = f"refuse as {verdict.value}"
    return refuse


def _refusal_words(run: RunState, c: cmd.Admit, verdict: Verdict) -> str:
    match verdict:
        case Verdict.SUPERSEDED if run.cancelled:
            return "the run was cancelled"
        case Verdict.SUPERSEDED if run.finished:
            return "the run has ended"
        case Verdict.SUPERSEDED:
            in_force = run.gates[c.scope].target if c.scope in run.gates else run.head
            return f"revision {c.revision} is no longer in force here; revision {in_force} is"
        case Verdict.HELD:
            return "the run is paused; ask again when it is resumed"
        case Verdict.NOT_CURRENT:
            return "this task is not the child that works for the scope now"
        case Verdict.CONFLICTS_WITH:
            return f"the same intent stands under {run.conflicts[c.conflict_key]}"
        case Verdict.NEEDS_OCCURRENCE:
            return "done before, and its target was changed since: the plan must list it as a further occurrence"
        case Verdict.IN_DOUBT:
            return f"it is not known what became of {run.slots[c.slot]}, which is the same intent"
        case Verdict.BUDGET:
            return f"budget of {run.budget_limit} effects: {run.spent} spent, {run.reserved} reserved"
        case _:
            return verdict.value


def _refused(run: RunState, c: cmd.Admit) -> dict[str, Any]:
    gate = run.gates.get(c.scope)
    return {"in_force": gate.target if gate and not gate.sealed else run.head}


def _holder(run: RunState, c: cmd.Admit) -> dict[str, Any]:
    attempt = run.attempts[run.slots[c.slot]]
    facts = run.facts_of(attempt)
    return {
        "attempt": attempt.id, "in_force": run.head, "blocks": facts.unknown_blocks.value, "why": attempt.why,
        "observed": attempt.observed, "outcome": attempt.state.value,
    }  # fmt: skip


def _slot_of(run: RunState, command: cmd.Admit) -> str:
    holder = run.slots.get(command.slot)
    if holder is None:
        return FREE
    attempt = run.attempts[holder]
    return TAKEN if attempt.open or attempt.contradicted else DONE


_SLOTS = (FREE, TAKEN, DONE)


def _refusing(guard: Any, verdict: Verdict, states: tuple[str, ...] = _SLOTS, detail: Any = _refused) -> Row:
    return Row(states=states, on=cmd.Admit, guard=guard, do=_refuse_as(verdict), says=verdict, detail=detail,
               records="the first refusal per child, slot and reason")  # fmt: skip


SLOT = Machine(
    name="slot",
    states=_SLOTS,
    commands={cmd.Admit: "a worker asks for an effect"},
    state_of=_slot_of,
    rows=(
        _refusing(superseded, Verdict.SUPERSEDED),
        _refusing(held, Verdict.HELD),
        _refusing(not_the_current_child, Verdict.NOT_CURRENT),
        _refusing(refused_by_contract, Verdict.REFUSED),
        _refusing(target_changed_since, Verdict.NEEDS_OCCURRENCE, (DONE,), _holder),
        Row(states=(DONE,), on=cmd.Admit, says=Verdict.DONE_BEFORE, detail=_holder),
        Row(states=(TAKEN,), on=cmd.Admit, guard=being_sent, says=Verdict.IN_FLIGHT, detail=_holder),
        _refusing(outcome_is_unknown, Verdict.IN_DOUBT, (TAKEN,), _holder),
        Row(states=(TAKEN,), on=cmd.Admit, says=Verdict.IN_DOUBT, detail=_holder),
        _refusing(same_intent_elsewhere, Verdict.CONFLICTS_WITH, (FREE,)),
        _refusing(occurrence_not_allowed, Verdict.NEEDS_OCCURRENCE, (FREE,)),
        _refusing(budget_reached, Verdict.BUDGET, (FREE,)),
        Row(states=(FREE,), on=cmd.Admit, do=_admit, next=TAKEN, says=Verdict.IN_FLIGHT, accepted=True,
            detail=_admitted, sends="the first try, with the derived key and the frozen bytes",
            records="attempt, slot, reserve, permit for try 1"),
    ),
)  # fmt: skip
