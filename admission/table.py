"""What a rule is: a row of (State, Event, Guard, Action, Next). And the check that a table of rows has no hole.

The rows of one (state, command) are tried in order and the first whose guard holds is taken. The last one has no guard
("otherwise"), and no other one lacks a guard: so exactly one row holds for every pair, whatever the state contains.
`prove` checks that for every state and command of a machine; decide raises on a pair that no table knows. Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from admission.commands import Command
from admission.events import Event
from admission.state import RunState


class Answer(StrEnum):
    """Answers to people and to the conductor. Workers get a Verdict, a Claim or a Disposition."""

    ACCEPTED = "accepted"
    REPEATED = "repeated"
    REUSED_ID = "reused_id"
    CONFLICT = "conflict"
    RUN_ENDED = "run_ended"
    NO_SUCH_RUN = "no_such_run"
    NOT_FOUND = "not_found"
    WRONG_STATE = "wrong_state"
    INVALID = "invalid"
    ALREADY = "already"
    BLOCKED = "blocked"
    SKIPPED = "skipped"
    CLOSED = "closed"
    NOT_YOURS = "not_yours"
    NO_RETRY = "no_retry"
    NOT_CONCLUSIVE = "not_conclusive"


@dataclass(frozen=True, slots=True)
class Decision:
    """What a command leads to. `detail` is for the caller: names and numbers, no secrets."""

    verdict: StrEnum
    accepted: bool
    events: tuple[Event, ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)


Guard = Callable[[RunState, Any], bool]
Action = Callable[[RunState, Any, int], tuple[Event, ...]]
Detail = Callable[[RunState, Any], dict[str, Any]]

SAME = "same"


def nothing(run: RunState, command: Any, at: int) -> tuple[Event, ...]:
    """The action of a row that changes nothing."""
    return ()


def no_detail(run: RunState, command: Any) -> dict[str, Any]:
    """A row that has nothing more to say than its verdict."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rule. `guard` None means "otherwise". `sends` says that the caller acts outside once it is committed."""

    states: tuple[StrEnum | str, ...]
    on: type[Command]
    guard: Guard | None = None
    do: Action = nothing
    next: str = SAME
    says: StrEnum
    accepted: bool = False
    detail: Detail = no_detail
    sends: str = ""
    records: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A small state machine inside a run: its states, who moves it, and its rows."""

    name: str
    states: tuple[str, ...]
    commands: dict[type[Command], str]
    state_of: Callable[[RunState, Any], str]
    rows: tuple[Row, ...]


def rows_by_pair(machine: Machine) -> dict[tuple[str, type[Command]], tuple[Row, ...]]:
    """The rows of each (state, command), in the order in which they are tried."""
    found: dict[tuple[str, type[Command]], list[Row]] = {}
    for row in machine.rows:
        for state in row.states:
            found.setdefault((str(state), row.on), []).append(row)
    return {pair: tuple(rows) for pair, rows in found.items()}


def prove(machines: Sequence[Machine]) -> list[str]:
    """Every hole and every overlap in the tables, as sentences; empty when there is none."""
    faults = []
    for machine in machines:
        pairs = rows_by_pair(machine)
        for command in machine.commands:
            for state in machine.states:
                rows = pairs.pop((state, command), ())
                where = f"{machine.name}: ({state}, {command.__name__})"
                if not rows:
                    faults.append(f"{where} has no row")
                    continue
                if rows[-1].guard is not None:
                    faults.append(f"{where} has no row for 'otherwise'")
                faults += [f"{where}: rows after 'otherwise'" for row in rows[:-1] if row.guard is None]
                guards = [row.guard for row in rows]
                faults += [f"{where}: one guard twice" for i, g in enumerate(guards) if g in guards[:i]]
        faults += [f"{machine.name}: ({s}, {c.__name__}) is no state or command of it" for s, c in pairs]
    return faults
