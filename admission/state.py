"""fold(): what a run's events add up to.

Theory of operation. A RunState has one owner, who mutates it by folding events in log order. Rows are immutable and
replaced. While a group of commands is decided, changes are journalled (`begin`) and can be taken back (`undo`) or kept
(`keep`), so an overlay costs nothing but the list of old values. What follows from an event (which admissions a
revision revokes, which children must stop) is derived here, at the event's position, and not carried by the command:
a redirect is decided on the control part of a copy whose ledger may be behind.

`fold` takes facts (tries, observations) in any order and any number of times. Pure.
"""

from admission import events as ev
from admission.fold_attempts import ATTEMPTS
from admission.fold_children import CHILDREN
from admission.fold_control import CONTROL
from admission.run_state import Folder, RunState, refusal_key

__all__ = ["FOLDERS", "FOLD_VERSION", "RunState", "fold", "refusal_key"]

#: Names the meaning of a snapshot. A snapshot of another fold version is ignored and the log is folded again.
FOLD_VERSION = "2"

#: Every event has exactly one folder; a test holds the two lists together.
FOLDERS: dict[type[ev.Event], Folder] = {**CONTROL, **CHILDREN, **ATTEMPTS}


def fold(run: RunState, n: int, event: ev.Event) -> None:
    """Apply the event at log position `n`. Positions are gapless: another one is a broken promise of the store."""
    if n != run.version + 1:
        raise AssertionError(f"run {run.run_id}: event {n} after {run.version}")
    run.set("version", n)
    if ev.is_control(event):
        run.set("control", run.control + 1)
    if event.at > run.time:
        run.set("time", event.at)
    FOLDERS[type(event)](run, n, event)
