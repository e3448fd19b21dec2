"""The stack that stories share: started once, with services that tests make fail and children that misbehave.

Runs do not disturb each other, so one stack serves all stories that leave it whole. Those that break the store or the
orchestrator's lease have one of their own (test_cases_restart.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.scenario.stack import LETTERS, MAIL, PAYMENTS, ServiceSpec, Stack, StackSpec, running_stack
from tests.scenario.story import Story, told_on

#: A payment service whose replies are waited for only a short time.
TILL = ServiceSpec("payments", {"timeout_ms": 700})
COMMON = StackSpec(
    services={"payments": PAYMENTS, "till": TILL, "mail": MAIL, "letters": LETTERS},
    children={
        "stubborn": ("ignores_cancel", "--delay-ms", "700"),
        "late": ("late", "--delay-ms", "1500"),
        "finisher": ("completes_during_cancel", "--delay-ms", "0"),
        "silent": ("never_answers",),
        "loner": ("autonomous", "--delay-ms", "60000"),
    },
)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, valkey_binary: Path) -> Iterator[Stack]:
    """The shared stack."""
    with running_stack(tmp_path_factory.mktemp("stack") / "s", valkey_binary, COMMON) as running:
        yield running


@pytest.fixture
async def story(stack: Stack) -> AsyncIterator[Story]:
    """A story on the shared stack, all of whose usual parts run."""
    async with told_on(stack) as told:
        yield told
