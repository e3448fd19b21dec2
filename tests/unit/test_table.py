"""The tables have no hole and no overlap, and the check that says so can fail."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import Any

import pytest

from admission import commands as cmd
from admission import events as ev
from admission import rules, state
from admission.commands import Command
from admission.rules import MACHINES, ProtocolHole, machine_of
from admission.state import RunState
from admission.table import SAME, Machine, Row, prove, rows_by_pair
from tests.unit.rules_stage import Stage, goal


class Light(StrEnum):
    RED = "red"
    GREEN = "green"


def _never(run: RunState, command: Any) -> bool:
    return False


def _always(run: RunState, command: Any) -> bool:
    return True


def _row(*states: StrEnum | str, on: type[Command] = cmd.Pause, guard: Callable[..., bool] | None = None) -> Row:
    return Row(states=states, on=on, guard=guard, says=Light.RED)


def _machine(*rows: Row) -> Machine:
    return Machine(
        name="light", states=tuple(Light), commands={cmd.Pause: "somebody"}, state_of=lambda r, c: "red", rows=rows
    )


def _all_classes(module: Any, base: type) -> list[type]:
    found = [c for _, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, base) and c is not base]
    return [c for c in found if c.__module__ == module.__name__]


def test_no_pair_is_without_an_answer_and_no_two_rows_hold() -> None:
    assert prove(MACHINES) == []


def test_the_tables_are_as_large_as_they_look(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {m.name: (len(m.rows), len(rows_by_pair(m)), len(m.states) * len(m.commands)) for m in MACHINES}
    with capsys.disabled():
        print()
        for name, (rows, pairs, wanted) in counts.items():
            print(f"  machine {name:8} {rows:3} rows answer {pairs:3} of {wanted:3} pairs (state, command)")
    assert all(pairs == wanted for _, pairs, wanted in counts.values())
    assert sum(rows for rows, _, _ in counts.values()) > 90


FAULTY: dict[str, tuple[tuple[Row, ...], str]] = {
    "a pair without a row": ((_row(Light.RED),), "(green, Pause) has no row"),
    "no otherwise": ((_row(Light.RED), _row(Light.GREEN, guard=_never)), "has no row for 'otherwise'"),
    "a row after otherwise": ((_row(*Light), _row(Light.RED, guard=_never), _row(Light.RED)), "rows after 'otherwise'"),
    "a guard twice": (
        (_row(*Light, guard=_never), _row(Light.RED, guard=_never), _row(*Light)),
        "(red, Pause): one guard twice",
    ),
    "two otherwise": ((_row(*Light), _row(Light.GREEN)), "rows after 'otherwise'"),
    "a foreign state": ((_row(*Light), _row("blue")), "(blue, Pause) is no state or command of it"),
    "a foreign command": ((_row(*Light), _row(*Light, on=cmd.Resume)), "(red, Resume) is no state or command of it"),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_prove_finds(fault: str) -> None:
    rows, sentence = FAULTY[fault]
    assert any(sentence in found for found in prove([_machine(*rows)]))


def test_prove_accepts_a_whole_machine() -> None:
    assert prove([_machine(_row(Light.RED, guard=_always), _row(*Light))]) == []


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_taking_any_row_away_leaves_a_hole_or_a_missing_guard(machine: Machine) -> None:
    """Every 'otherwise' row is needed: without it, prove complains about exactly its pairs."""
    for row in machine.rows:
        if row.guard is None:
            rest = tuple(r for r in machine.rows if r is not row)
            assert prove([replace(machine, rows=rest)]), f"{machine.name}: {row.on.__name__} in {row.states}"


def test_every_command_moves_exactly_one_machine() -> None:
    commands = _all_classes(cmd, cmd.Command)
    assert len(commands) > 20
    for command in commands:
        assert [m.name for m in MACHINES if command in m.commands] == [machine_of(command).name], command


def test_every_event_has_a_folder_and_a_place_in_the_union() -> None:
    kinds = set(_all_classes(ev, ev.Event))
    assert kinds == set(state.FOLDERS)
    assert kinds == set(ev.AnyEvent.__args__)
    tags = [kind.__struct_config__.tag for kind in kinds]  # type: ignore[attr-defined]
    assert len(set(tags)) == len(kinds)


def test_every_guard_explains_itself() -> None:
    """The protocol's page prints the first sentence of each guard's docstring."""
    guards = {row.guard for m in MACHINES for row in m.rows if row.guard is not None}
    assert [g.__name__ for g in guards if not (g.__doc__ or "").strip()] == []


def test_rows_that_change_nothing_promise_nothing() -> None:
    for machine in MACHINES:
        for row in machine.rows:
            if not row.accepted and "refus" not in row.records:
                assert row.next == SAME, f"{machine.name}: {row.on.__name__} {row.states} is refused but moves on"
                assert not row.sends, f"{machine.name}: {row.on.__name__} {row.states} is refused but sends"


def test_a_pair_that_no_table_knows_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(goal("a"))
    monkeypatch.delitem(rules._ROWS[cmd.Pause], "running")
    with pytest.raises(ProtocolHole):
        stage.decide(cmd.Pause(request_id="r"))
