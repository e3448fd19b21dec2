"""The only way out: an agent acts on the world by asking the gateway, and waits when it is told to wait.

Knows what each verdict means for an agent, and how long to wait between two asks. Does not know HTTP (the gate client
does), A2A, or what the agent is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, assert_never

import anyio

from admission.client import EffectReply, GateClient, GateProblem, GateReply, GateUnavailable
from admission.points import point
from admission.vocabulary import Blocks, GateState, Verdict

#: Pauses between two asks, in seconds: first and longest. The longest stays below the second within which a resumed
#: agent acts again, also when the watcher's news is lost.
BUSY_PAUSE_S = (0.02, 0.5)
DOUBT_PAUSE_S = (0.1, 1.0)
HELD_PAUSE_S = (0.1, 0.5)
UNAVAILABLE_PAUSE_S = (0.1, 0.8)


class WorkEnded(Exception):
    """This child asks for nothing any more: it was stopped, or its grant is void. Let it end the agent function."""


class Superseded(WorkEnded):
    """Another revision is in force, or the run is over."""

    def __init__(self, revision_in_force: int | None) -> None:
        self.revision_in_force = revision_in_force
        now = f"revision {revision_in_force} is in force" if revision_in_force else "this child is no longer current"
        super().__init__(f"superseded: {now}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one action. `verdict` IN_DOUBT means unknown: it may have happened, and regate goes on asking."""

    service: str
    action: str
    arguments: Mapping[str, Any]
    verdict: Verdict
    detail: str
    reply: EffectReply | None = None

    @property
    def done(self) -> bool:
        """Whether it took effect, now or before."""
        return self.verdict in (Verdict.DONE, Verdict.DONE_BEFORE)

    @property
    def settled(self) -> bool:
        """Whether it is known what happened: it took effect, or the service said no."""
        return self.done or self.verdict is Verdict.FAILED

    @property
    def observed_result(self) -> Any:
        """What the service answered, if anything is known of it."""
        return self.reply.observed_result if self.reply else None

    def as_record(self) -> dict[str, Any]:
        """The row of a result artifact."""
        return {
            "service": self.service,
            "action": self.action,
            "target": self.reply.target if self.reply else None,
            "verdict": self.verdict.value,
            "attempt": self.reply.attempt if self.reply else None,
            "observed_result": self.observed_result,
            "detail": self.detail,
        }


def pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """Growing pauses, without end."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(pause_s * 2, longest_s)


class Standing:
    """What is known of the gate, shared by the watcher that learns it and the hands that wait for it."""

    def __init__(self) -> None:
        self.news: GateReply | None = None
        self._changed = anyio.Event()

    @property
    def waits(self) -> bool:
        """Whether the gate is known to admit nothing now."""
        return self.news is not None and self.news.gate is not GateState.OPEN

    def learn(self, news: GateReply) -> None:
        """Take what the gateway said; wakes those who wait when it differs from what was known. Old news is dropped."""
        known = self.news
        if known is not None and news.version < known.version:
            return
        self.news = news
        if known is None or (known.gate, known.current) != (news.gate, news.current):
            self.wake()

    def wake(self) -> None:
        """Wake everybody who waits for a change."""
        self._changed.set()
        self._changed = anyio.Event()

    async def changed(self, limit_s: float) -> None:
        """Wait for a change, at most `limit_s` seconds."""
        changed = self._changed
        with anyio.move_on_after(limit_s):
            await changed.wait()


class Hands:
    """One child's way out. Several tasks of one agent may use it at once."""

    def __init__(self, gate: GateClient, task: str, standing: Standing) -> None:
        self._gate = gate
        self._task = task
        self._standing = standing
        self._over: WorkEnded | None = None

    @property
    def over(self) -> WorkEnded | None:
        """Why nothing may be asked any more, or None."""
        return self._over

    def close(self, why: WorkEnded) -> None:
        """From now on every use raises `why`. The first reason stays."""
        if self._over is None:
            self._over = why
            self._standing.wake()

    async def clear(self) -> None:
        """Return when work may go on: at once if the gate is open, else when it opens. Call it between two thoughts.

        Raises:
            WorkEnded: the child was stopped; Superseded when another revision is in force.
        """
        while True:
            self._check()
            if not self._standing.waits:
                return
            await self._standing.changed(limit_s=60.0)

    async def act(self, service: str, action: str, arguments: Mapping[str, Any], occurrence: int = 1) -> Outcome:
        """Ask for one effect and stay with it until there is something to know.

        Waits while the gate is held, while the same effect is under way, and while its outcome is in doubt. Returns
        with IN_DOUBT only if the doubt blocks nothing but this very effect. A gateway that cannot be reached is asked
        again without end, because an unanswered ask may have been admitted; the slot makes that safe.

        Raises:
            WorkEnded: the child was stopped; Superseded when another revision is in force.
        """
        busy, doubt = pauses(*BUSY_PAUSE_S), pauses(*DOUBT_PAUSE_S)
        held, unavailable = pauses(*HELD_PAUSE_S), pauses(*UNAVAILABLE_PAUSE_S)
        about = ""
        while True:
            await self.clear()
            point("worker.effect.before")
            try:
                answer = await self._gate.effect(
                    service, action, arguments, task=self._task, occurrence=occurrence, about=about
                )
            except GateUnavailable:
                await self._standing.changed(next(unavailable))
                continue
            except GateProblem as problem:
                if problem.status >= 500:
                    await self._standing.changed(next(unavailable))
                    continue
                if problem.status in (401, 403):
                    self.close(WorkEnded(f"the gateway refuses this child's grant: {problem}"))
                    self._check()
                return Outcome(service, action, arguments, Verdict.REFUSED, str(problem))
            point("worker.effect.after")
            if answer.verdict in (Verdict.IN_FLIGHT, Verdict.IN_DOUBT):
                about = answer.attempt  # so that the next ask is for its outcome, and for no further attempt
            match answer.verdict:
                case Verdict.SUPERSEDED | Verdict.NOT_CURRENT:
                    self.close(Superseded(answer.revision_in_force))
                case Verdict.HELD:
                    await self._standing.changed(next(held))
                case Verdict.IN_FLIGHT:
                    await self._standing.changed(next(busy))
                case Verdict.IN_DOUBT if answer.blocks is not Blocks.SLOT:
                    await self._standing.changed(next(doubt))
                case (
                    Verdict.IN_DOUBT
                    | Verdict.DONE
                    | Verdict.DONE_BEFORE
                    | Verdict.FAILED
                    | Verdict.CONFLICTS_WITH
                    | Verdict.NEEDS_OCCURRENCE
                    | Verdict.BUDGET
                    | Verdict.REFUSED
                ):
                    return Outcome(service, action, arguments, answer.verdict, answer.detail, answer)
                case _:
                    assert_never(answer.verdict)

    def _check(self) -> None:
        if self._over is not None:
            raise self._over
