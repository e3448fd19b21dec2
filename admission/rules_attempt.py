"""Rules of effects: admitting, sending again, recording, asking, classifying, deciding by hand. Pure.

The append of EffectAdmitted is the moment at which an effect is allowed; TryGranted is the last commit before bytes
leave. Nothing here ever turns "I do not know" into "it did not happen": NOT_EXECUTED needs a basis that the contract
under which the attempt was admitted allows (protocol section 6).
"""

from typing import Any

import msgspec

from admission import commands as cmd
from admission import events as ev
from admission.records import Attempt
from admission.rules_run import payload_hash, request_reused, request_seen
from admission.standing import in_doubt
from admission.state import RunState, refusal_key
from admission.table import Answer, Machine, Row
from admission.vocabulary import (
    AttemptState,
    Basis,
    ContractClass,
    Finding,
    GateState,
    Method,
    TryOutcome,
    Verdict,
    canonical,
    digest,
    idempotency_key,
    scope_prefixes,
)

A = AttemptState
_NONE = "none"
FREE, TAKEN, DONE = "free", "taken", "done"

#: Subtracted from a key's retention on top of lateness, for what clocks and queues may add (ms).
KEY_MARGIN_MS = 1_000


# --- admission -------------------------------------------------------------------------------------------------------


def refused_by_contract(run: RunState, command: cmd.Admit) -> bool:
    """The gateway found that the contract does not allow this call."""
    return bool(command.refusal)


def superseded(run: RunState, command: cmd.Admit) -> bool:
    """A gate on the way is closed or sealed, or stands at another revision than the child."""
    own = run.gates.get(command.scope)
    if own is None or run.finished or own.cur != command.revision or own.target != command.revision:
        return True
    return any(
        run.gates[s].state in (GateState.CLOSED, GateState.SEALED)
        for s in scope_prefixes(command.scope)
        if s in run.gates
    )


def held(run: RunState, command: cmd.Admit) -> bool:
    """A gate on the way is held."""
    return any(run.gates[s].holds for s in scope_prefixes(command.scope) if s in run.gates)


def not_the_current_child(run: RunState, command: cmd.Admit) -> bool:
    """The log does not say that this child, in this task, may act."""
    child = run.children.get(command.child)
    if child is None or (child.scope, child.revision) != (command.scope, command.revision):
        return True
    return not run.is_current(child) or not child.claimed or child.task != command.task


def target_changed_since(run: RunState, command: cmd.Admit) -> bool:
    """It was done, but a later effect changed the target: doing it again may be meant, so it must be said."""
    done = run.attempts[run.slots[command.slot]]
    latest = run.attempts.get(run.targets.get(f"{command.service}:{command.target}", ""))
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
        generation=generation, key=idempotency_key(run.run_id, c.slot, generation), service=c.service,
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
        "key": idempotency_key(run.run_id, c.slot, generation),
        "not_after_max_age": c.contract.not_after_max_age_ms,
        "in_force": run.head,
    }


def _refuse_as(verdict: Verdict) -> Any:
    def refuse(run: RunState, c: cmd.Admit, at: int) -> tuple[ev.Event, ...]:
        if run.head == 0 or refusal_key(c.child, c.slot, verdict.value) in run.refusals:
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


# --- tries -----------------------------------------------------------------------------------------------------------


def gate_not_open(run: RunState, command: cmd.GrantTry) -> bool:
    """The gate is no longer open at the attempt's revision."""
    attempt = run.attempts[command.attempt]
    own = run.gates[attempt.scope]
    if own.cur != attempt.revision or run.finished:
        return True
    return any(run.gates[s].state is not GateState.OPEN for s in scope_prefixes(attempt.scope) if s in run.gates)


def not_the_next_try(run: RunState, command: cmd.GrantTry) -> bool:
    """Another gateway was granted that try, or the one before is still on the wire."""
    attempt = run.attempts[command.attempt]
    if command.n != len(attempt.tries) + 1:
        return True
    return any(t.outcome is TryOutcome.GRANTED for t in attempt.tries)


def must_not_be_sent_again(run: RunState, command: cmd.GrantTry) -> bool:
    """The contract does not deduplicate, the key is too old, tries are used up, or the key is being voided."""
    attempt = run.attempts[command.attempt]
    facts = run.facts_of(attempt)
    if command.n > facts.tries_max or attempt.voiding:
        return True
    if attempt.not_after and run.clock >= attempt.not_after:
        return True
    if all(t.outcome is TryOutcome.NOT_EXECUTED for t in attempt.tries):
        return False
    return not facts.dedupes or key_too_old(run, attempt, run.clock)


def key_too_old(run: RunState, attempt: Attempt, now: int) -> bool:
    """Whether a try sent now could arrive after the service has forgotten the key (protocol section 8, iii)."""
    facts = run.facts_of(attempt)
    lateness = facts.late_arrival_max_ms
    if facts.not_after_max_age_ms:
        lateness = facts.not_after_max_age_ms + facts.clock_skew_ms
    return now - attempt.tries[0].granted_at >= facts.retention_ms - lateness - KEY_MARGIN_MS


def _grant(run: RunState, c: cmd.GrantTry, at: int) -> tuple[ev.Event, ...]:
    attempt = run.attempts[c.attempt]
    return (ev.TryGranted(at=at, attempt=c.attempt, n=c.n, gateway=c.gateway, not_after=attempt.not_after),)


def _grant_detail(run: RunState, c: cmd.GrantTry) -> dict[str, Any]:
    return {"not_after": run.attempts[c.attempt].not_after, "in_force": run.head}


def _record(run: RunState, c: cmd.RecordTry, at: int) -> tuple[ev.Event, ...]:
    recorded = ev.TryRecorded(
        at=at, by=c.by, attempt=c.attempt, n=c.n, outcome=c.outcome, basis=c.basis, status=c.status,
        observed=c.observed, detail=c.detail, retry_at=c.retry_at,
    )  # fmt: skip
    return (recorded,)


def never_granted(run: RunState, command: cmd.RecordTry) -> bool:
    """No such try was granted: the report is not about anything this run sent."""
    tries = run.attempts[command.attempt].tries
    return command.outcome is TryOutcome.GRANTED or not 1 <= command.n <= len(tries)


# --- finding out -----------------------------------------------------------------------------------------------------


def not_conclusive(run: RunState, command: cmd.Classify) -> bool:
    """It says "not executed" on a basis that this attempt's contract does not make conclusive."""
    return command.finding is Finding.NOT_EXECUTED and not _conclusive(run, command)


def _conclusive(run: RunState, c: cmd.Classify) -> bool:
    attempt = run.attempts[c.attempt]
    facts = run.facts_of(attempt)
    if c.basis is Basis.NOTHING_WRITTEN or (c.basis is Basis.SERVICE_REFUSED and not c.started):
        return bool(attempt.tries) and all(t.outcome is TryOutcome.NOT_EXECUTED for t in attempt.tries)
    if c.started == 0 or c.started != attempt.asked_position:
        return False  # the question was not written down before it was asked, or another one was asked since
    match c.basis:
        case Basis.VOIDED:
            return facts.contract_class is ContractClass.VOID and attempt.asked_method is Method.VOID
        case Basis.SERVICE_REFUSED:
            return facts.dedupes  # the service holds its "no" under this key and will answer any late try with it
        case Basis.NOT_AFTER_PASSED:
            fence = attempt.not_after + facts.clock_skew_ms + facts.lookup_lag_ms
            covered = attempt.asked_covers == len(attempt.tries)
            return bool(attempt.not_after) and covered and c.clock_before_ms > fence
        case _:
            return False


def still_being_sent(run: RunState, command: cmd.Classify) -> bool:
    """It gives up on an attempt whose gateway still has time to report."""
    attempt = run.attempts[command.attempt]
    return command.finding is Finding.UNKNOWN and run.clock < attempt.reconcile_at


def it_was_executed(run: RunState, command: cmd.Classify) -> bool:
    """The service shows it as executed, against what is on record."""
    return command.finding is Finding.EXECUTED


def not_offered(run: RunState, command: cmd.StartReconcile) -> bool:
    """The attempt's contract does not offer that question."""
    facts = run.facts_of(run.attempts[command.attempt])
    offered = {ContractClass.VOID: set(Method), ContractClass.LOOKUP: {Method.LOOKUP},
               ContractClass.NOT_AFTER: {Method.LOOKUP}}  # fmt: skip
    return command.method not in offered.get(facts.contract_class, set())


def not_contradicted(run: RunState, command: cmd.Resolve) -> bool:
    """It is settled, and no evidence stands against that."""
    return not run.attempts[command.attempt].contradicted


def same_unknown(run: RunState, command: cmd.Classify) -> bool:
    """It is unknown already."""
    return command.finding is Finding.UNKNOWN


def _ask(run: RunState, c: cmd.StartReconcile, at: int) -> tuple[ev.Event, ...]:
    attempt = run.attempts[c.attempt]
    started = ev.ReconcileStarted(
        at=at,
        by=c.by,
        attempt=c.attempt,
        method=c.method,
        covers=len(attempt.tries),
        n=attempt.asked + 1,
        epoch=c.epoch,
    )
    return (started,)


def _classify(run: RunState, c: cmd.Classify, at: int) -> tuple[ev.Event, ...]:
    classified = ev.EffectClassified(
        at=at, by=c.by, attempt=c.attempt, finding=c.finding, basis=c.basis, started=c.started, epoch=c.epoch,
        observed=c.observed, detail=c.detail,
    )  # fmt: skip
    return (classified,)


def words_missing(run: RunState, command: cmd.Resolve) -> bool:
    """A decision by hand needs a name, a reason and what it rests on."""
    return not (command.by.strip() and command.reason.strip() and command.evidence.strip())


def _resolve(run: RunState, c: cmd.Resolve, at: int) -> tuple[ev.Event, ...]:
    resolved = ev.EffectResolved(
        at=at, by=c.by, attempt=c.attempt, happened=c.happened, request_id=c.request_id, payload_hash=payload_hash(c),
        reason=c.reason, evidence=c.evidence,
    )  # fmt: skip
    return (resolved,)


def _attempt_of(run: RunState, command: Any) -> str:
    attempt = run.attempts.get(command.attempt)
    return attempt.state.value if attempt else _NONE


def _attempt_detail(run: RunState, c: Any) -> dict[str, Any]:
    attempt = run.attempts.get(c.attempt)
    return {"outcome": attempt.state.value if attempt else None, "in_force": run.head}


_SETTLED = (A.SUCCEEDED, A.FAILED, A.REVOKED)
_SENT = (A.SENDING, A.UNKNOWN)

ATTEMPT = Machine(
    name="attempt",
    states=(_NONE, *A),
    commands={
        cmd.GrantTry: "a gateway wants to send the same bytes again",
        cmd.RecordTry: "a gateway saw how its send ended",
        cmd.StartReconcile: "the conductor is about to have the service asked",
        cmd.Classify: "the service was asked, or nothing more can be asked",
        cmd.Resolve: "an operator decides",
    },
    state_of=_attempt_of,
    rows=(
        Row(states=(_NONE,), on=cmd.GrantTry, says=Answer.NOT_FOUND),
        Row(states=(A.UNKNOWN, *_SETTLED), on=cmd.GrantTry, says=Answer.CLOSED, detail=_attempt_detail),
        Row(states=(A.ADMITTED, A.SENDING), on=cmd.GrantTry, guard=gate_not_open, says=Answer.CLOSED,
            detail=_attempt_detail),
        Row(states=(A.ADMITTED, A.SENDING), on=cmd.GrantTry, guard=not_the_next_try, says=Answer.NOT_YOURS,
            detail=_attempt_detail),
        Row(states=(A.ADMITTED, A.SENDING), on=cmd.GrantTry, guard=must_not_be_sent_again, says=Answer.NO_RETRY,
            detail=_attempt_detail),
        Row(states=(A.ADMITTED, A.SENDING), on=cmd.GrantTry, do=_grant, next=A.SENDING, says=Answer.ACCEPTED,
            accepted=True, detail=_grant_detail, sends="one more try: same key, same bytes"),
        Row(states=(_NONE,), on=cmd.RecordTry, says=Answer.NOT_FOUND),
        Row(states=tuple(A), on=cmd.RecordTry, guard=never_granted, says=Answer.NOT_FOUND),
        Row(states=tuple(A), on=cmd.RecordTry, do=_record,
            next="succeeded; failed if every try is closed as not executed; else same", says=Answer.ACCEPTED,
            accepted=True, records="evidence is never refused; against a settled outcome it raises an alarm"),
        Row(states=(_NONE,), on=cmd.StartReconcile, says=Answer.NOT_FOUND),
        Row(states=(A.ADMITTED, *_SETTLED), on=cmd.StartReconcile, says=Answer.ALREADY, detail=_attempt_detail),
        Row(states=_SENT, on=cmd.StartReconcile, guard=not_offered, says=Answer.INVALID, detail=_attempt_detail),
        Row(states=_SENT, on=cmd.StartReconcile, do=_ask, says=Answer.ACCEPTED, accepted=True,
            sends="lookup or void, asked by the gateway",
            detail=lambda run, c: {"started": run.version + 1}),
        Row(states=(_NONE,), on=cmd.Classify, says=Answer.NOT_FOUND),
        Row(states=(A.FAILED, A.REVOKED), on=cmd.Classify, guard=it_was_executed, do=_classify, says=Answer.ACCEPTED,
            accepted=True, records="an alarm: found after it was settled as not executed"),
        Row(states=(A.ADMITTED, *_SETTLED), on=cmd.Classify, says=Answer.ALREADY, detail=_attempt_detail),
        Row(states=_SENT, on=cmd.Classify, guard=not_conclusive, says=Answer.NOT_CONCLUSIVE, detail=_attempt_detail),
        Row(states=(A.SENDING,), on=cmd.Classify, guard=still_being_sent, says=Answer.NOT_CONCLUSIVE,
            detail=_attempt_detail),
        Row(states=(A.UNKNOWN,), on=cmd.Classify, guard=same_unknown, says=Answer.ALREADY, detail=_attempt_detail),
        Row(states=_SENT, on=cmd.Classify, do=_classify, next="succeeded, failed or unknown", says=Answer.ACCEPTED,
            accepted=True),
        Row(states=(_NONE,), on=cmd.Resolve, says=Answer.NOT_FOUND),
        Row(states=tuple(A), on=cmd.Resolve, guard=request_seen, says=Answer.REPEATED, accepted=True,
            detail=_attempt_detail),
        Row(states=tuple(A), on=cmd.Resolve, guard=request_reused, says=Answer.REUSED_ID, detail=_attempt_detail),
        Row(states=(A.ADMITTED, A.SENDING), on=cmd.Resolve, says=Answer.WRONG_STATE, detail=_attempt_detail),
        Row(states=_SETTLED, on=cmd.Resolve, guard=not_contradicted, says=Answer.WRONG_STATE, detail=_attempt_detail),
        Row(states=(A.UNKNOWN, *_SETTLED), on=cmd.Resolve, guard=words_missing, says=Answer.INVALID,
            detail=lambda run, c: {"faults": ["a decision needs who, --reason and --evidence"]}),
        Row(states=(A.UNKNOWN, *_SETTLED), on=cmd.Resolve, do=_resolve, next="succeeded or failed", says=Answer.ACCEPTED,
            accepted=True, records="basis operator, signed; later evidence that contradicts it raises an alarm"),
    ),
)  # fmt: skip
