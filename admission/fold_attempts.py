"""Folds of effects: admitted, granted, recorded, asked about, classified, decided by hand. Pure.

Facts (tries) are taken in any order and any number of times; a fact against a settled outcome raises an alarm and
changes nothing.
"""

from msgspec.structs import replace

from admission import events as ev
from admission.records import Alarm, Attempt, Handled, Refusal, Try
from admission.run_state import Folder, RunState, refusal_key
from admission.vocabulary import AttemptState, Basis, Finding, Method, TryOutcome, Verdict

#: A granted try is given its contract's time-out plus this long to be recorded before the conductor asks (ms).
RECORD_MARGIN_MS = 500


def _contract_noted(run: RunState, n: int, e: ev.ContractNoted) -> None:
    run.book(run.contracts, e.ref, e.facts)


def _effect_admitted(run: RunState, n: int, e: ev.EffectAdmitted) -> None:
    attempt = Attempt(
        id=e.attempt, no=len(run.attempts) + 1, scope=e.scope, revision=e.revision, child=e.child, slot=e.slot,
        generation=e.generation, key=e.key, service=e.service, operation=e.operation, target=e.target,
        contract=e.contract, input_ref=e.input_ref, cost=e.cost, state=AttemptState.ADMITTED, position=n, at=e.at,
        conflict_key=e.conflict_key,
    )  # fmt: skip
    run.book(run.attempts, e.attempt, attempt)
    run.book(run.open_attempts, e.attempt, None)
    run.book(run.slots, e.slot, e.attempt)
    if e.conflict_key and e.conflict_key not in run.conflicts:
        run.book(run.conflicts, e.conflict_key, e.slot)
    run.set("reserved", run.reserved + e.cost)


def _try_granted(run: RunState, n: int, e: ev.TryGranted) -> None:
    attempt = run.attempts[e.attempt]
    tries = (*attempt.tries, Try(n=e.n, gateway=e.gateway, granted_at=e.at))
    due = e.at + run.facts_of(attempt).timeout_ms + RECORD_MARGIN_MS
    row = replace(
        attempt, state=AttemptState.SENDING, tries=tries, not_after=attempt.not_after or e.not_after, reconcile_at=due
    )
    run.book(run.attempts, attempt.id, row)


def _try_recorded(run: RunState, n: int, e: ev.TryRecorded) -> None:
    attempt = run.attempts[e.attempt]
    before = next((t for t in attempt.tries if t.n == e.n), None)
    if before is None or before.outcome is TryOutcome.OK or e.outcome is TryOutcome.GRANTED:
        return
    if before.outcome is TryOutcome.NOT_EXECUTED and e.outcome is TryOutcome.IN_DOUBT:
        return  # an older fact, overtaken by a better one
    done = replace(before, outcome=e.outcome, basis=e.basis, status=e.status, detail=e.detail)
    row = replace(attempt, tries=tuple(done if t.n == e.n else t for t in attempt.tries))
    closed = all(t.outcome is TryOutcome.NOT_EXECUTED for t in row.tries)
    if not attempt.open:
        run.book(run.attempts, attempt.id, row)
        if e.outcome is TryOutcome.OK and attempt.state is not AttemptState.SUCCEEDED:
            _contradict(run, row, n, e.at, "then the service said it was done")
        elif closed and attempt.state is AttemptState.SUCCEEDED and before.outcome is not e.outcome:
            _contradict(run, row, n, e.at, "then every send turned out not to have been executed")
    elif e.outcome is TryOutcome.OK:
        run.settle(row, AttemptState.SUCCEEDED, n, basis=e.basis, observed=e.observed)
    elif closed and (not e.retry_at or attempt.state is AttemptState.UNKNOWN):
        run.settle(row, AttemptState.FAILED, n, basis=e.basis, observed=e.observed, why=e.detail)
        if e.basis is not Basis.SERVICE_REFUSED:
            _want_again(run, row)
    elif before.outcome is not e.outcome:
        due = e.retry_at + RECORD_MARGIN_MS if e.retry_at else e.at
        observed = e.observed or row.observed
        run.book(run.attempts, attempt.id, replace(row, reconcile_at=due, why=e.detail, observed=observed))


def _contradict(run: RunState, attempt: Attempt, n: int, at: int, words: str) -> None:
    """Evidence against a settled outcome: that stays, flagged, and its slot is blocked until a person decides."""
    alarm = Alarm(attempt=attempt.id, detail=f"recorded as {attempt.state.value}, {words}", at=at, position=n)
    run.put(run.alarms, f"{attempt.id}:{n}", alarm)
    row = replace(attempt, contradicted=True)
    run.book(run.attempts, row.id, row)
    run.book(run.disputed, row.slot, None)
    run.derive(row)


def _effect_refused(run: RunState, n: int, e: ev.EffectRefused) -> None:
    refusal = Refusal(
        child=e.child, scope=e.scope, revision=e.revision, in_force=e.in_force, slot=e.slot, service=e.service,
        operation=e.operation, target=e.target, input_ref=e.input_ref, reason=e.reason.value, detail=e.detail, at=e.at,
        position=n,
    )  # fmt: skip
    run.book(run.refusals, refusal_key(e.child, e.slot, e.reason.value), refusal)


def _reconcile_started(run: RunState, n: int, e: ev.ReconcileStarted) -> None:
    attempt = run.attempts[e.attempt]
    row = replace(
        attempt, asked=e.n, asked_method=e.method, asked_position=n, asked_covers=e.covers, asked_at=e.at,
        voiding=attempt.voiding or e.method is Method.VOID,
    )  # fmt: skip
    run.book(run.attempts, attempt.id, row)


def _want_again(run: RunState, attempt: Attempt) -> None:
    """Something that a child had to leave open turned out not to have happened: its scope is not done after all.

    The result stays on record; the scope gets another child, for which everything done is done before.
    """
    for scope, result_id in list(run.adopted.items()):
        result = run.results[result_id]
        asked = refusal_key(result.child, attempt.slot, Verdict.IN_DOUBT.value) in run.refusals
        if (attempt.child == result.child or asked) and run.gates[scope].cur == result.revision:
            run.drop(run.adopted, scope)
            run.put(run.relaunches, scope, run.relaunches.get(scope, 0) + 1)


def _effect_classified(run: RunState, n: int, e: ev.EffectClassified) -> None:
    attempt = run.attempts[e.attempt]
    if not attempt.open:
        if e.finding is Finding.EXECUTED and attempt.state is not AttemptState.SUCCEEDED:
            _contradict(run, attempt, n, e.at, "then it was found at the service")
        return
    if e.finding is Finding.EXECUTED:
        run.settle(attempt, AttemptState.SUCCEEDED, n, basis=e.basis, observed=e.observed)
    elif e.finding is Finding.NOT_EXECUTED:
        run.settle(attempt, AttemptState.FAILED, n, basis=e.basis, observed=e.observed, why=e.detail)
        if e.basis is not Basis.SERVICE_REFUSED:
            _want_again(run, attempt)
    else:
        row = replace(attempt, state=AttemptState.UNKNOWN, unknown_at=e.at, why=e.detail, basis=e.basis)
        run.book(run.attempts, attempt.id, row)


def _effect_resolved(run: RunState, n: int, e: ev.EffectResolved) -> None:
    attempt = run.attempts[e.attempt]
    state = AttemptState.SUCCEEDED if e.happened else AttemptState.FAILED
    if attempt.contradicted:
        _decide_contradiction(run, attempt, n, e)
    else:
        run.settle(attempt, state, n, basis=Basis.OPERATOR, resolved_by=e.by, why=e.reason)
    if not e.happened:
        _want_again(run, run.attempts[e.attempt])
    answer = {"attempt": e.attempt, "outcome": state.value}
    run.put(run.requests, e.request_id, Handled(payload_hash=e.payload_hash, position=n, answer=answer))


def _decide_contradiction(run: RunState, attempt: Attempt, n: int, e: ev.EffectResolved) -> None:
    """A person decided between the recorded outcome and the evidence against it; the alarm has been answered."""
    for key, alarm in list(run.alarms.items()):
        if alarm.attempt == attempt.id:
            run.drop(run.alarms, key)
    was_done = attempt.state is AttemptState.SUCCEEDED
    state = AttemptState.SUCCEEDED if e.happened else AttemptState.FAILED
    row = replace(
        attempt, contradicted=False, state=state, basis=Basis.OPERATOR, resolved_by=e.by, why=e.reason, settled=n
    )
    run.book(run.attempts, attempt.id, row)
    run.set("spent", run.spent + attempt.cost * (int(e.happened) - int(was_done)))
    run.derive(row)


#: Which function folds which event.
ATTEMPTS: dict[type[ev.Event], Folder] = {
    ev.ContractNoted: _contract_noted,
    ev.EffectAdmitted: _effect_admitted,
    ev.TryGranted: _try_granted,
    ev.TryRecorded: _try_recorded,
    ev.EffectRefused: _effect_refused,
    ev.ReconcileStarted: _reconcile_started,
    ev.EffectClassified: _effect_classified,
    ev.EffectResolved: _effect_resolved,
}
