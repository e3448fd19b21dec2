"""Rules of effects: admitting, sending again, recording, asking, classifying, deciding by hand. Pure.

The append of EffectAdmitted is the moment at which an effect is allowed; TryGranted is the last commit before bytes
leave. Nothing here ever turns "I do not know" into "it did not happen": NOT_EXECUTED needs a basis that the contract
under which the attempt was admitted allows (protocol section 6).
"""

from typing import Any

from admission import commands as cmd
from admission import events as ev
from admission.records import Attempt
from admission.rules_run import payload_hash, request_reused, request_seen
from admission.state import RunState
from admission.table import Answer, Machine, Row
from admission.vocabulary import (
    AttemptState,
    Basis,
    ContractClass,
    Finding,
    GateState,
    Method,
    TryOutcome,
    scope_prefixes,
)

A = AttemptState
_NONE = "none"

#: Subtracted from a key's retention on top of lateness, for what clocks and queues may add (ms).
KEY_MARGIN_MS = 1_000


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


def key_forgotten(facts: ev.ContractFacts, attempt: Attempt) -> bool:
    """Whether the service may have forgotten the key when it was last asked: only "executed" then proves anything."""
    if not facts.dedupes or not attempt.tries:
        return False
    return attempt.asked_at - attempt.tries[0].granted_at >= facts.retention_ms - KEY_MARGIN_MS


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
    if key_forgotten(facts, attempt):
        return False  # a service that knows the key no more says the same of what it did and of what it never saw
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
        Row(states=(A.UNKNOWN, *_SETTLED), on=cmd.Resolve, do=_resolve, next="succeeded or failed",
            says=Answer.ACCEPTED, accepted=True,
            records="basis operator, signed; later evidence that contradicts it raises an alarm"),
    ),
)  # fmt: skip
