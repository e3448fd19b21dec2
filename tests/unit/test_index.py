"""The index that every commit carries is worked out from little where that is enough: it must agree with the whole."""

from __future__ import annotations

import pytest

from admission import events as ev
from admission.agenda import index_in_full, index_of
from admission.vocabulary import TryOutcome
from tests.unit.rules_stage import Stage, goal


class WatchedStage(Stage):
    """A stage on which both ways are compared after each event."""

    looks = 0
    steady = 0

    def fold(self, *events: ev.Event) -> None:
        for event in events:
            super().fold(event)
            assert index_of(self.run) == index_in_full(self.run), event
            self.looks += 1
            self.steady += self.run.still.steady


@pytest.mark.parametrize("outcome", [TryOutcome.OK, TryOutcome.NOT_EXECUTED, TryOutcome.IN_DOUBT])
def test_the_short_way_agrees_with_the_long_one_through_a_run(outcome: TryOutcome) -> None:
    stage = WatchedStage(goal("a", "b"))
    child = stage.running("a")
    for target in ("o1", "o2"):
        stage.record(stage.sent(child, target), outcome)
    stage.unknown(child, "o3")
    in_flight = stage.sent(child, "o4")
    stage.pause()
    stage.resume()
    stage.finished("b")
    stage.change("a")
    stage.record(in_flight, TryOutcome.OK)
    stage.cancel()
    assert stage.looks > stage.steady > 0, "both ways were taken"


def test_what_is_taken_back_is_not_remembered() -> None:
    stage = WatchedStage(goal("a"))
    stage.running("a")
    before = index_of(stage.run)
    stage.run.begin()
    stage.cancel()
    assert index_of(stage.run) != before
    stage.run.undo()
    assert index_of(stage.run) == before == index_in_full(stage.run)
