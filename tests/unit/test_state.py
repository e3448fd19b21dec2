"""What fold promises: undo and snapshots restore, events survive the wire, facts may come twice and in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import event, example, given
from hypothesis import strategies as st

from admission import events as ev
from admission.live import live_part, restore
from admission.state import RunState, fold
from admission.vocabulary import TERMINAL_TASKS, TryOutcome
from tests.unit.any_commands import DRAW, DRAWS, FIRST_GOAL, Draw, any_command, any_fact, history, played
from tests.unit.rules_stage import RUN, Stage

#: Not part of what is folded: the journal of an overlay, the time of the last decision, and what caches are keyed by.
_ASIDE = {"_undo", "clock", "shape", "still"}


def contents(run: RunState) -> dict[str, Any]:
    """Everything a state consists of, as an independent copy. Rows are immutable, so the dicts are what is copied."""
    values = {name: getattr(run, name) for name in RunState.__slots__ if name not in _ASIDE}
    return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (one[name], other[name]) for name in one if one[name] != other[name]}


def refolded(log: list[ev.Event]) -> RunState:
    run = RunState(RUN)
    for n, entry in enumerate(log, 1):
        fold(run, n, entry)
    return run


def _restored(run: RunState) -> RunState:
    rows = sorted(run.attempts.values(), key=lambda row: row.no)
    return restore(live_part(run), rows)


@given(DRAWS, st.lists(st.sampled_from(["keep", "undo"]), min_size=90, max_size=90), st.integers(1, 4))
def test_undo_takes_back_a_group_exactly(draws: list[Draw], ends: list[str], group: int) -> None:
    stage = Stage(FIRST_GOAL)
    for start, end in zip(range(0, len(draws), group), ends, strict=False):
        before, length = contents(stage.run), len(stage.log)
        stage.run.begin()
        for draw in draws[start : start + group]:
            stage.now += draw[3] * 20
            command = any_command(stage, draw)
            if command is not None:
                stage.do(command)
        if end == "undo":
            stage.run.undo()
            del stage.log[length:]
            assert differences(contents(stage.run), before) == {}
        else:
            stage.run.keep()
    assert differences(contents(stage.run), contents(refolded(stage.log))) == {}


@given(DRAWS)
@example(history(79))  # two slots with one conflict key, one of them contradicted
@example(history(720))  # a contradicted attempt, and a later one of the same slot
@example(history(239))  # one conflict key, two occurrences of one intent
def test_a_snapshot_restores_what_the_events_add_up_to_after_any_prefix(draws: list[Draw]) -> None:
    log = played(draws).log
    run = RunState(RUN)
    for n, entry in enumerate(log, 1):
        fold(run, n, entry)
        if n % 3 == 0 or n == len(log):
            assert differences(contents(_restored(run)), contents(run)) == {}, f"after {n} events: {entry}"


@given(DRAWS, st.integers(0, 80))
def test_a_restored_state_goes_on_as_if_it_had_never_been_away(draws: list[Draw], cut: int) -> None:
    log = played(draws).log
    run = refolded(log[:cut])
    other = _restored(run)
    for n, entry in enumerate(log[cut:], cut + 1):
        fold(run, n, entry)
        fold(other, n, entry)
    assert differences(contents(other), contents(run)) == {}


@given(DRAWS)
def test_events_survive_the_wire_and_are_counted_right(draws: list[Draw]) -> None:
    stage = played(draws)
    again = [ev.decode(ev.encode(entry)) for entry in stage.log]
    assert again == stage.log
    assert stage.run.control == sum(ev.is_control(entry) for entry in stage.log)
    assert differences(contents(refolded(list(again))), contents(stage.run)) == {}
    event(f"kinds of events: {len({type(e) for e in stage.log}) // 4 * 4}+")


def _without_numbers(run: RunState) -> dict[str, Any]:
    return {name: value for name, value in contents(run).items() if name not in ("version", "time", "control")}


@given(DRAWS, st.lists(DRAW, min_size=1, max_size=6))
def test_a_fact_that_comes_twice_counts_once(draws: list[Draw], facts: list[Draw]) -> None:
    stage = played(draws)
    for draw in facts:
        command = any_fact(stage, draw)
        reported = stage.decide(command).events if command is not None else ()
        stage.fold(*reported)
        once = _without_numbers(stage.run)
        stage.fold(*reported)
        assert differences(_without_numbers(stage.run), once) == {}


def _tell_the_same_story(one: ev.Event, other: ev.Event) -> bool:
    """Whether two facts are about one thing and cannot both be the last word: then their order is what counts."""
    if isinstance(one, ev.TryRecorded) and isinstance(other, ev.TryRecorded):
        if one.attempt != other.attempt:
            return False
        said = {one.outcome, other.outcome}
        return TryOutcome.OK in said and TryOutcome.NOT_EXECUTED in said
    if isinstance(one, ev.ChildSeen) and isinstance(other, ev.ChildSeen):
        return one.child == other.child and (one.state in TERMINAL_TASKS) is (other.state in TERMINAL_TASKS)
    return type(one) is type(other)


def _meaning(run: RunState) -> dict[str, Any]:
    """What later decisions rest on, without log positions and words."""
    attempts = {
        a.id: (a.state, [t.outcome for t in a.tries], a.contradicted, a.reconcile, a.open)
        for a in run.attempts.values()
    }
    children = {c.id: (c.state, c.task_state, c.settled, c.reconcile) for c in run.children.values()}
    return {
        "attempts": attempts, "children": children, "slots": dict(run.slots), "generations": dict(run.generations),
        "conflicts": dict(run.conflicts), "open": set(run.open_attempts), "spent": run.spent, "reserved": run.reserved,
        "relaunches": dict(run.relaunches), "adopted": dict(run.adopted),
        "alarms": sorted(a.attempt for a in run.alarms.values()),
    }  # fmt: skip


@given(DRAWS, DRAW, DRAW)
def test_facts_may_come_in_either_order(draws: list[Draw], first: Draw, second: Draw) -> None:
    stage = played(draws)
    commands = [any_fact(stage, draw) for draw in (first, second)]
    reported = [entry for c in commands if c is not None for entry in stage.decide(c).events]
    if len(reported) != 2 or _tell_the_same_story(*reported):
        return
    ends = [_meaning(refolded([*stage.log, *order])) for order in (reported, reported[::-1])]
    assert differences(*ends) == {}
