"""Around the services' rules: journal before reply, the clock, and faults as a function of the seed."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from simulators.connections import Connections
from simulators.entrance import Arrival, Entrance, Reply, drifting, wall_clock
from simulators.faults import FaultKind, FaultSchedule, FaultSpecError, Profile, choose, parse_rule
from simulators.journal import Journal, JournalError
from simulators.retail import RetailService
from simulators.tasks import load

CANCEL = load().tasks[1].actions[2]


@pytest.mark.anyio
async def test_no_reply_leaves_before_its_line_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, so that the disk can be held up and broken."""
    journal = Journal(tmp_path / "journal.jsonl")
    entrance = Entrance(journal, FaultSchedule(), Connections(), wall_clock, wall_clock)
    service = RetailService(load().database, entrance)
    held, synced, replies = threading.Event(), threading.Event(), list[Reply]()

    def slow(descriptor: int) -> None:
        synced.set()
        held.wait(10)

    monkeypatch.setattr(os, "fsync", slow)
    arrival = Arrival(CANCEL.name, json.dumps(dict(CANCEL.arguments)).encode(), "k", None, "payload")

    async def send() -> None:
        replies.append(await service.process(arrival, None))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        tasks.start_soon(service.lookup, "k")
        with anyio.fail_after(10):
            while not synced.is_set():  # noqa: ASYNC110 - set in a thread
                await anyio.sleep(0.01)
        assert [line["event"] for line in journal.lines] == ["executed"]
        assert not replies
        held.set()
    assert [reply.status for reply in replies] == [200]

    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    for key in ("new", "newer"):
        with pytest.raises(JournalError, match="could not be synced"):
            await service.process(replace(arrival, key=key), None)
    journal.close()


def test_a_clock_that_is_off_and_runs_away() -> None:
    real = [1_000_000]
    clock = drifting(lambda: real[0], skew_ms=-500, drift_ppm=20_000)
    assert clock() == 999_500
    real[0] += 10_000
    assert clock() == 999_500 + 10_200


def test_faults_are_a_function_of_the_seed() -> None:
    def drawn(seed: int, profile: Profile, occurrence: int = 1) -> list[FaultKind]:
        return [choose(profile, seed=seed, payload_sha256=str(n), occurrence=occurrence).kind for n in range(2_000)]

    assert drawn(1, Profile.MIXED) == drawn(1, Profile.MIXED) != drawn(2, Profile.MIXED)
    assert set(drawn(1, Profile.MIXED)) == set(FaultKind)
    assert set(drawn(1, Profile.NONE)) == {FaultKind.NONE}
    assert set(drawn(1, Profile.DELAYED)) == {FaultKind.NONE, FaultKind.DELAY}
    assert set(drawn(1, Profile.LOST)) == {FaultKind.NONE, FaultKind.LOSE, FaultKind.LATE}
    assert set(drawn(1, Profile.MIXED, occurrence=4)) == {FaultKind.NONE}
    late = [choose(Profile.LOST, seed=1, payload_sha256=str(n), occurrence=1) for n in range(2_000)]
    times = [fault.ms for fault in late if fault.kind is FaultKind.LATE]
    assert 300 <= min(times) < max(times) <= 1_500


@pytest.mark.parametrize("text", ["", "x", "x:lose:a", "x:lose:1:2:3", ":lose", "x:delay:600001", "x:lose:-1"])
def test_a_fault_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(FaultSpecError):
        parse_rule(text)
