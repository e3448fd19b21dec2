"""decide(): what may happen. The tables of all machines, and the one function that applies them.

Theory of operation. A run is a handful of small state machines over one log: the run, the gates of its scopes, its
children, the slots that say "this was wanted before", and its attempts. Each is a table of rows (State, Event, Guard,
Action, Next). `decide` finds the machine that a command moves, reads its state, takes the first row whose guard holds,
and returns that row's events and answer. It never reads a clock and never raises for what comes from outside: an
expected answer is a value. A pair that no table knows is a hole in the protocol and raises. Pure.
"""

from typing import Any

from admission import commands as cmd
from admission.commands import Command
from admission.rules_attempt import ATTEMPT
from admission.rules_child import CHILD, PLAN
from admission.rules_gate import GATE
from admission.rules_run import RUN
from admission.rules_slot import SLOT
from admission.state import RunState
from admission.storage import Compare
from admission.table import Decision, Machine, Row, rows_by_pair

MACHINES: tuple[Machine, ...] = (RUN, GATE, PLAN, CHILD, SLOT, ATTEMPT)

_MACHINE_OF: dict[type[Command], Machine] = {command: m for m in MACHINES for command in m.commands}
_ROWS: dict[type[Command], dict[str, tuple[Row, ...]]] = {}
for _machine in MACHINES:
    for (_state, _command), _rows in rows_by_pair(_machine).items():
        _ROWS.setdefault(_command, {})[_state] = _rows

#: People's commands are decided on the control part alone, so that no rate of effects can delay a redirect. So is
#: opening: what keeps a closed gate closed only ever goes away (a closed gate admits nothing, permits no try, and no
#: child is planned behind it), so "nothing is open" stays true until a control event, and other scopes' effects cannot
#: starve it. Its checkpoint says at which position it is exact.
_CONTROL_COMPARED = (cmd.Revise, cmd.Pause, cmd.Resume, cmd.Cancel, cmd.OpenScope)
#: Facts compare nothing: what was seen has been seen, whatever else happened meanwhile.
_FACTS = (cmd.RecordTry, cmd.RecordSeen, cmd.RecordStop)


class ProtocolHole(Exception):
    """No table has a row for this state and command. A bug in regate, never in what the caller sent."""


def machine_of(command: type[Command]) -> Machine:
    """The machine that a command moves."""
    return _MACHINE_OF[command]


def compare_of(command: Command) -> Compare:
    """Which version the commit of this command's events must still stand at."""
    if isinstance(command, _CONTROL_COMPARED):
        return Compare.CONTROL
    return Compare.NONE if isinstance(command, _FACTS) else Compare.LOG


def row_for(run: RunState, command: Command) -> Row:
    """The one row that holds for a command in a run's state. Raises ProtocolHole."""
    kind = type(command)
    state = _MACHINE_OF[kind].state_of(run, command)
    for row in _ROWS[kind].get(state, ()):
        if row.guard is None or row.guard(run, command):
            return row
    raise ProtocolHole(f"no row for ({state}, {kind.__name__}) of {_MACHINE_OF[kind].name}")


def decide(run: RunState, command: Command, at: int) -> Decision:
    """What a command leads to in a run's state, at store time `at` (ms)."""
    run.clock = max(run.time, at)
    row = row_for(run, command)
    detail: dict[str, Any] = row.detail(run, command)
    return Decision(verdict=row.says, accepted=row.accepted, events=row.do(run, command, at), detail=detail)
