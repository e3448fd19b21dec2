"""The live part of a snapshot: everything of a run's state but its attempts and what is derived from them.

Knows how a RunState is taken apart and put together again. Does not know where it is kept, nor how settled attempts
are chunked (snapshots.py). Pure.
"""

from collections.abc import Iterable

import msgspec

from admission import events as ev
from admission.records import Alarm, Attempt, Child, Gate, Handled, Refusal, Result, Revision, Update
from admission.state import RunState
from admission.vocabulary import AttemptState

_FAILED, _REVOKED, _SUCCEEDED = AttemptState.FAILED, AttemptState.REVOKED, AttemptState.SUCCEEDED


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a state but its attempts and what is derived from them."""

    run_id: str
    version: int
    control: int
    time: int
    principal: str
    follows: str
    started_at: int
    head: int
    cancelled: bool
    finished: str
    spent: int
    reserved: int
    revisions: dict[int, Revision]
    updates: dict[int, Update]
    gates: dict[str, Gate]
    children: dict[str, Child]
    contracts: dict[str, ev.ContractFacts]
    results: dict[str, Result]
    refusals: dict[str, Refusal]
    alarms: dict[str, Alarm]
    checkpoints: dict[str, ev.Checkpoint]
    checkpoint_hashes: dict[str, str]
    requests: dict[str, Handled]
    current: dict[str, str]
    adopted: dict[str, str]
    artifacts: dict[str, ev.ArtifactRef]
    relaunches: dict[str, int]


def live_part(run: RunState) -> Live:
    """The part of a snapshot that is written whole each time."""
    return Live(**{name: getattr(run, name) for name in Live.__struct_fields__})


def restore(live: Live, attempts: Iterable[Attempt]) -> RunState:
    """The state from its live part and its attempts in the order of their numbers."""
    run = RunState(live.run_id)
    for name in Live.__struct_fields__:
        value = getattr(live, name)
        setattr(run, name, dict(value) if isinstance(value, dict) else value)
    by_id, slots, conflicts, targets = run.attempts, run.slots, run.conflicts, run.targets
    for row in attempts:  # tens of thousands of them, so what is looked up for each is looked up once
        state, row_id, slot = row.state, row.id, row.slot
        by_id[row_id] = row
        if row.contradicted and slot not in slots:
            slots[slot] = row_id
            if row.conflict_key:
                conflicts.setdefault(row.conflict_key, slot)
        if state is _FAILED:
            run.generations[slot] = row.generation + 1
            continue
        if state is _REVOKED:
            continue
        slots[slot] = row_id
        if row.conflict_key:
            conflicts[row.conflict_key] = slot
        if state is _SUCCEEDED:
            touched = f"{row.service}:{row.target}"
            before = targets.get(touched)
            if before is None or by_id[before].settled < row.settled:
                targets[touched] = row_id
        else:
            run.open_attempts[row_id] = None
    return run
