"""The live part of a snapshot: everything of a run's state but its attempts and what is derived from them.

Knows how a RunState is taken apart and put together again. Does not know where it is kept, nor how settled attempts
are chunked (snapshots.py). Pure.
"""

from collections.abc import Iterable

import msgspec

from admission import events as ev
from admission.records import Alarm, Attempt, Child, Gate, Handled, Refusal, Result, Revision, Silence, Update
from admission.rows import Packed
from admission.state import RunState
from admission.vocabulary import OPEN_ATTEMPTS, AttemptState

_SUCCEEDED = AttemptState.SUCCEEDED


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
    silences: dict[str, Silence]
    current: dict[str, str]
    adopted: dict[str, str]
    artifacts: dict[str, ev.ArtifactRef]
    relaunches: dict[str, int]
    disputed: dict[str, None]


def live_part(run: RunState) -> Live:
    """The part of a snapshot that is written whole each time."""
    return Live(**{name: getattr(run, name) for name in Live.__struct_fields__})


def restore(live: Live, attempts: Iterable[Attempt | Packed]) -> RunState:
    """The state from its live part and its attempts in the order of their numbers.

    What is derived from attempts is derived here as `RunState.derive` does it for one of them: the last attempt that
    stands has the slot, the first one the conflict key, the last effect the target, and each conclusive "not executed"
    has moved the key on.
    """
    run = RunState(live.run_id)
    for name in Live.__struct_fields__:
        value = getattr(live, name)
        setattr(run, name, dict(value) if isinstance(value, dict) else value)
    slots, conflicts, targets, generations = run.slots, run.conflicts, run.targets, run.generations
    latest: dict[str, int] = {}
    kept = list(attempts)
    run.attempts.hold(kept)
    for row in kept:  # tens of thousands of them, nearly all succeeded: that branch does as little as it can
        state = row.state
        if state is _SUCCEEDED:
            slots[row.slot] = row.id
            if row.conflict_key:
                conflicts.setdefault(row.conflict_key, row.slot)
            touched, settled = row.touched, row.settled
            if touched not in latest or latest[touched] < settled:
                latest[touched], targets[touched] = settled, row.id
            continue
        if state is AttemptState.FAILED:
            generations[row.slot] = max(generations.get(row.slot, 1), row.generation + 1)
        if row.stands:
            slots[row.slot] = row.id
            if row.conflict_key:
                conflicts.setdefault(row.conflict_key, row.slot)
        if state in OPEN_ATTEMPTS:
            run.open_attempts[row.id] = None
    return run
