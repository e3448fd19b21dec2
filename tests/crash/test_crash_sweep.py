"""The crash sweep: at every named point of a redirected run, the process that reaches it dies of SIGKILL and returns.

Clean runs are recorded first; each point that was reached, at its first and at a middle hit, is a case. After each case
the checker compares the log with what the services wrote down themselves. A new point is covered on the day on which it
is added.

Environment: REGATE_SWEEP=I/M runs the I-th of M shares (default: all), REGATE_LONG=1 adds the second and the last hit
of each point, REGATE_SEED is what faults and order are drawn from, and REGATE_CASE=NUMBER:ROLE:POINT:N runs one case,
as a failure names it.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest

from tests.crash.sweep import Case, Scenario, Told, sweep_spec
from tests.scenario.stack import Stack, running_stack
from tests.scenario.story import told_on

pytestmark = pytest.mark.anyio

SEED = int(os.environ.get("REGATE_SEED", "7"))
SHARE_DEFAULT = "1/1"
#: Stacks beside each other: while one waits for a process to come back, the other works.
LANES = 2
CLEAN_RUNS = 4
#: Of the cases, so many may pass without the point being reached that often: faults come in another order each time.
MISSED_MAX = 0.25


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory, valkey_binary: Path) -> Iterator[list[Stack]]:
    """One stack for each lane."""
    with ExitStack() as room:
        yield [
            room.enter_context(
                running_stack(tmp_path_factory.mktemp(f"lane{n}") / "s", valkey_binary, sweep_spec(SEED))
            )
            for n in range(LANES)
        ]


async def play(stacks: list[Stack], cases: list[Case]) -> list[Told]:
    """Play the cases, as many at a time as there are stacks."""
    told: list[Told] = []
    waiting = iter(cases)

    async def lane(stack: Stack) -> None:
        async with told_on(stack) as story:
            for case in waiting:
                try:
                    told.append(await Scenario(story, case).play())
                except Exception as failure:
                    failure.add_note(f"the case: REGATE_SEED={SEED} REGATE_CASE={case}")
                    raise

    async with anyio.create_task_group() as lanes:
        for stack in stacks:
            lanes.start_soon(lane, stack)
    return told


def cases_of(clean: list[Told]) -> list[Case]:
    """Every point that clean runs reached, at its first and at a middle hit, in an order drawn from the seed."""
    most: Counter[tuple[str, str]] = Counter()
    for told in clean:
        most |= told.hits
    hits = [(role, point, n) for (role, point), count in most.items() for n in sorted(_chosen(count))]
    random.Random(SEED).shuffle(hits)
    return [Case(CLEAN_RUNS + number, *hit) for number, hit in enumerate(hits, start=1)]


def _chosen(count: int) -> set[int]:
    middle = {1, count // 2 + 1}
    return middle | {min(2, count), count} if os.environ.get("REGATE_LONG") == "1" else middle


def share_of(cases: list[Case]) -> list[Case]:
    """The share that this process was asked to run."""
    part, _, parts = os.environ.get("REGATE_SWEEP", SHARE_DEFAULT).partition("/")
    return cases[int(part) - 1 :: int(parts)]


async def test_whoever_dies_at_whatever_point_comes_back_and_nothing_is_done_twice(
    stacks: list[Stack], capsys: pytest.CaptureFixture[str]
) -> None:
    alone = os.environ.get("REGATE_CASE")
    if alone:
        [only] = await play(stacks[:1], [Case.parse(alone)])
        assert only.killed, "the point was not reached that often"
        return
    began = time.monotonic()
    clean = await play(stacks, [Case(number) for number in range(1, CLEAN_RUNS + 1)])
    everything = cases_of(clean)
    share = share_of(everything)
    told = await play(stacks, share)
    missed = [str(one.case) for one in told if not one.killed]
    points = {(case.role, case.point) for case in everything}
    with capsys.disabled():
        print(
            f"\ncrash sweep, seed {SEED}: {len(told) - len(missed)} of {len(share)} kills carried out "
            f"({len(everything)} cases: {len(points)} points of {len({p for _, p in points})} names, times their "
            f"chosen hits) in {time.monotonic() - began:.0f} s; not reached: {', '.join(missed) or 'none'}"
        )
    assert {role for role, _ in points} == {"orchestrator", "gateway", "plan"}
    assert len(missed) <= MISSED_MAX * len(share), missed
