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
    last: dict[str, tuple[int, str]] = {}
    for row in attempts:
        run.attempts[row.id] = row
        if row.state is AttemptState.FAILED:
            run.generations[row.slot] = row.generation + 1
        if row.contradicted and row.slot not in run.slots:
            run.slots[row.slot] = row.id
            if row.conflict_key:
                run.conflicts.setdefault(row.conflict_key, row.slot)
        if row.state is AttemptState.FAILED:
            continue
        if row.state is not AttemptState.REVOKED:
            run.slots[row.slot] = row.id
            if row.conflict_key:
                run.conflicts[row.conflict_key] = row.slot
            if row.state is AttemptState.SUCCEEDED:
                touched = f"{row.service}:{row.target}"
                if last.get(touched, (-1, ""))[0] < row.settled:
                    last[touched] = (row.settled, row.id)
            else:
                run.open_attempts[row.id] = None
    run.targets.update({touched: row_id for touched, (_, row_id) in last.items()})
    return run
