"""What the API is made of, and which effect is meant by a name. Knows no routes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio

from admission import commands as cmd
from admission.state import RunState
from admission.storage import Store, StoreBehind
from admission.table import Decision
from orchestrator.directory import RunDirectory
from orchestrator.problems import Problem

log = logging.getLogger("regate.api")

Seen = TypeVar("Seen")


class Answered(Protocol):
    """What the desk answers."""

    @property
    def decision(self) -> Decision: ...

    @property
    def version(self) -> int: ...


class ApiDesk(Protocol):
    """What the API needs of a desk."""

    async def submit(self, run: str, command: cmd.Command, *, fence: int | None = None) -> Answered: ...

    async def look(self, run: str, at: Callable[[RunState], Seen]) -> Seen: ...

    def now_ms(self) -> int: ...


async def _no_doctor() -> dict[str, Any]:
    return {}


def _no_alarm(error: StoreBehind) -> None:
    log.critical("%s", error)


@dataclass(frozen=True, kw_only=True)
class ApiParts:
    """What the API is made of. `agents` None: names of agents are not checked. `alarm` is told of lost data."""

    desk: ApiDesk
    store: Store
    new_id: Callable[[], str]
    agents: Collection[str] | None = None
    data_dir: Path | None = None
    doctor: Callable[[], Awaitable[dict[str, Any]]] = _no_doctor
    alarm: Callable[[StoreBehind], None] = _no_alarm
    closing: anyio.Event = field(default_factory=anyio.Event)


async def resolve_attempt(parts: ApiParts, runs: RunDirectory, given: str) -> tuple[str, str]:
    """Run and id of the attempt that is meant: RUN-eN, where RUN may be a beginning or `last`.

    Raises Problem: 404 when there is none, 409 when there are several.
    """
    head, dash, tail = given.rpartition("-e")
    if not dash or not tail.isdigit():
        head, tail = given, ""
    run = await runs.resolve(head)

    def pick(state: RunState) -> list[str]:
        whole = f"{run}-e{tail}"
        if tail:
            return [whole] if whole in state.attempts else []
        return list(state.attempts)[:7]

    found = await parts.desk.look(run, pick)
    if len(found) == 1:
        return run, found[0]
    if not found:
        words = f"run {run} has no effect {given!r}; GET /v1/runs/{run}/effects lists them"
        raise Problem(404, "unknown-effect", words)
    raise Problem(409, "ambiguous", f"{given!r} names several effects: {', '.join(found[:6])}", known=found[:6])
