"""One child's life inside a worker: claim, watch the gate, run the agent function, end once.

Knows when the work of a child must stop and what its ending is. Does not know A2A or HTTP.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio

from admission.client import GateClient, GateProblem, GateUnavailable
from admission.points import point
from admission.vocabulary import Claim, GateState, TaskState
from workers.brief import Brief, Launch
from workers.hands import UNAVAILABLE_PAUSE_S, Hands, Standing, Superseded, WorkEnded, pauses

log = logging.getLogger("regate.worker")

T = TypeVar("T")

#: A watcher answered twice with the same news waits this long (seconds), so that no gateway can make it spin.
SAME_NEWS_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Report:
    """What an agent function hands back. `result` becomes the artifact "result"; further ones have their own names."""

    result: Mapping[str, Any]
    artifacts: Mapping[str, Any] = field(default_factory=dict)


AgentFunction = Callable[[Brief, Hands], Awaitable[Report]]


@dataclass(frozen=True, slots=True)
class Ending:
    """How the work ended. `reason` is one word for programs, `text` a sentence for people; neither holds a secret."""

    state: TaskState
    reason: str
    text: str = ""
    revision_in_force: int | None = None
    report: Report | None = None


class Work:
    """The work of one child. `run` lives in the worker's task group, not in the request that brought the launch, so
    that neither a client that goes away nor an agent that will not stop can hold up anything else."""

    def __init__(self, launch: Launch, task: str, gate: GateClient, function: AgentFunction) -> None:
        self.launch = launch
        self._task = task
        self._gate = gate
        self._function = function
        self._standing = Standing()
        self._hands = Hands(gate, task, self._standing)
        self._scope = anyio.CancelScope()
        self.ending: Ending | None = None
        self.claimed = anyio.Event()
        self.decided = anyio.Event()
        self.gone = anyio.Event()
        self.published = anyio.Event()

    def end(self, ending: Ending) -> None:
        """Settle how the work ends; the first call decides, and stops everything that still runs."""
        if self.ending is None:
            self.ending = ending
            self.decided.set()
        in_force = ending.revision_in_force
        self._hands.close(Superseded(in_force) if ending.reason == "superseded" else WorkEnded(ending.reason))
        self._scope.cancel()

    async def run(self) -> None:
        """Live the whole life. Never raises what an agent raised."""
        try:
            with self._scope:
                async with self._gate:
                    await self._live()
        except Exception as failure:  # noqa: BLE001 - an agent may raise anything; the task must still end, and say so
            self._fail(failure)
        finally:
            self.end(Ending(TaskState.CANCELED, "stopped", "the worker was shut down"))
            self.gone.set()

    async def _live(self) -> None:
        point("worker.claim.before")
        answer = await self._patiently(partial(self._gate.claim, self._task))
        point("worker.claim.after")
        if answer.claim is not Claim.CLAIMED:
            text = (
                "another task has this child already"
                if answer.claim is Claim.DUPLICATE
                else "the child was superseded before it started"
            )
            self.end(Ending(TaskState.REJECTED, answer.claim.value, text, answer.revision_in_force))
            return
        self.claimed.set()
        async with anyio.create_task_group() as tasks:
            self._standing.learn(await self._patiently(self._gate.gate))
            tasks.start_soon(self._watch)
            await self._perform()
            tasks.cancel_scope.cancel()

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        pause = pauses(*UNAVAILABLE_PAUSE_S)
        while True:
            try:
                return await ask()
            except GateUnavailable:
                pass
            except GateProblem as problem:
                if problem.status < 500:
                    raise
            await anyio.sleep(next(pause))

    async def _watch(self) -> None:
        """Learn how the gate stands as soon as it changes; end the work when the child is no longer current."""
        while True:
            known = self._standing.news
            if known is not None and (not known.current or known.gate is GateState.SEALED):
                self.end(_superseded(known.revision_in_force))
                return
            try:
                news = await self._patiently(partial(self._gate.gate, known))
            except GateProblem as problem:
                self.end(Ending(TaskState.FAILED, "grant_refused", f"the gateway refuses this child: {problem}"))
                return
            self._standing.learn(news)
            if news == known:
                await anyio.sleep(SAME_NEWS_PAUSE_S)

    async def _perform(self) -> None:
        try:
            await self._hands.clear()
            report = await self._function(self.launch.brief, self._hands)
        except Exception as failure:
            # An agent may pass on what our hands raised, or wrap it: once they are closed, that is why it ended.
            if self._hands.over is None:
                raise
            log.debug("the agent of child %s ended with %s", self.launch.stamp.child, type(failure).__name__)
        else:
            if self._hands.over is None:
                self.end(Ending(TaskState.COMPLETED, "completed", report=report))
                return
        why = self._hands.over
        if isinstance(why, Superseded):
            self.end(_superseded(why.revision_in_force))
        else:
            self.end(Ending(TaskState.FAILED, "stopped", self.launch.without_grant(str(why))))

    def _fail(self, failure: Exception) -> None:
        while isinstance(failure, ExceptionGroup) and len(failure.exceptions) == 1:
            failure = failure.exceptions[0]
        if self.ending is not None:
            return  # an agent that was told to stop may fall over; that changes nothing
        if isinstance(failure, GateProblem):
            text = f"the gateway refuses this child: {failure}"
        else:
            text = f"the agent failed: {type(failure).__name__}: {failure}"
            shown = "".join(traceback.format_exception(failure))
            log.error("child %s failed\n%s", self.launch.stamp.child, self.launch.without_grant(shown))
        self.end(Ending(TaskState.FAILED, "failed", self.launch.without_grant(text)))


def _superseded(revision_in_force: int | None) -> Ending:
    text = str(Superseded(revision_in_force))
    return Ending(TaskState.CANCELED, "superseded", text, revision_in_force)
