"""The outside acts of the conductor: planning with an agent's card, launching, stopping, observing, collecting, asking.

Each act records before it acts and settles after it acted, and ends by itself: how often it is repeated is the
agenda's matter. An act that cannot reach anybody waits a little, so that listing it again does not become a storm.
"""

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import anyio

from admission import agenda as ag
from admission import commands as cmd
from admission.agenda import Action
from admission.events import ArtifactRef
from admission.points import point
from admission.records import Child
from admission.standing import seen_to_end
from admission.storage import Store
from admission.table import Answer
from admission.vocabulary import (
    TERMINAL_TASKS,
    Basis,
    ChildMode,
    Claim,
    Finding,
    TaskState,
    canonical,
)
from admission.wire import GRANT_LIFETIME_MS, Grant, sign_grant
from orchestrator.courier import Courier, Delivered, GatewayDoor, Gone, Launch, Refused, Replied, Seen, Unreachable
from orchestrator.plan import INLINE_BYTES_MAX, brief_for, needed_artifacts, stamp_for
from orchestrator.reconcile import conclude, evidence_from, method_for, without_asking

log = logging.getLogger("regate.conductor")

#: Waits between looks at a child's task, from the first to the longest (seconds).
LOOK_FIRST_S = 0.05
LOOK_LONGEST_S = 1.0
#: After so long without any contact, a child is lost (seconds).
CONTACT_LOST_S = 6.0
#: A child that answered "canceled" is watched so much longer for a result it may still deliver (seconds).
LINGER_S = 10.0
#: How long an agent that cannot be reached is tried before people are told (seconds).
AGENT_PATIENCE_S = 10.0
#: Wait after an act found nobody (seconds).
NOBODY_S = 1.0
#: A result's own words are kept in the log up to this size; all of it is in the artifact.
SUMMARY_BYTES_MAX = 16 * 1024


class Acts:
    """What the conductor does outside. Use as an async context manager."""

    def __init__(
        self,
        *,
        desk: Any,
        store: Store,
        courier: Courier,
        gateway_url: str,
        agents: Mapping[str, str],
        internal_token: str,
        grant_key: bytes,
    ) -> None:
        self._desk = desk
        self._store = store
        self._courier = courier
        self._gateway_url = gateway_url
        self._agents = agents
        self._grant_key = grant_key
        self._door = GatewayDoor(gateway_url, internal_token)
        self._clocks: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        await self._courier.__aenter__()
        await self._door.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._door.__aexit__(kind, error, trace)
        await self._courier.__aexit__(kind, error, trace)

    async def perform(self, run: str, action: Action, epoch: int) -> None:
        """Do one thing of the agenda."""
        match action:
            case ag.Plan():
                await self._plan(run, action, epoch)
            case ag.Launch(child):
                await self._launch(run, child, epoch)
            case ag.FindTask(child):
                await self._find(run, child)
            case ag.Stop(child):
                await self._stop(run, child, epoch)
            case ag.Observe(child):
                await self._observe(run, child, epoch)
            case ag.Collect(child):
                await self._collect(run, child, epoch)
            case ag.Ask(attempt):
                await self._ask(run, attempt, epoch)
            case ag.Commit(command):
                await self._desk.submit(run, command, fence=epoch)

    def _url(self, child: Child) -> str | None:
        return self._agents.get(child.agent)

    # -- children -----------------------------------------------------------------------------------------------------

    async def _plan(self, run: str, action: ag.Plan, epoch: int) -> None:
        url = self._agents.get(action.agent)
        mode: ChildMode | Unreachable = Unreachable(f"no agent {action.agent!r} is configured")
        with anyio.move_on_after(AGENT_PATIENCE_S):
            while url is not None:
                mode = await self._courier.mode(url)
                if isinstance(mode, ChildMode):
                    break
                await anyio.sleep(NOBODY_S)
        if not isinstance(mode, ChildMode):
            # Asking goes on for as long as the scope wants a child; but from now on people can see what it waits for.
            told = cmd.ReportSilence(by="courier", scope=action.scope, revision=action.revision, detail=mode.detail)
            await self._desk.submit(run, told)
            await anyio.sleep(NOBODY_S)
            return
        command = cmd.PlanChild(by="conductor", scope=action.scope, revision=action.revision, mode=mode)
        await self._desk.submit(run, command, fence=epoch)

    async def _launch(self, run: str, child_id: str, epoch: int) -> None:
        answer = await self._desk.submit(run, cmd.StartLaunch(by="conductor", child=child_id), fence=epoch)
        if not answer.decision.accepted:
            return
        state = await self._desk.current(run)
        child = state.children[child_id]
        url = self._url(child)
        if url is None or not state.is_current(child):
            return
        if child.launches > 1:
            # The first message may have arrived although its answer did not: look before sending it again.
            known = await self._courier.find(url, child.context, child_id)
            if isinstance(known, Seen):
                await self._bind(run, child_id, known.task)
                return
            if child.mode is ChildMode.AUTONOMOUS:
                return  # no claim would stop a second one from doing everything again
            state = await self._desk.current(run)
        contents = await self._contents(run, needed_artifacts(state, child.scope))
        state = await self._desk.current(run)
        child = state.children[child_id]
        if not state.is_current(child):
            return
        expires = self._desk.now_ms() + GRANT_LIFETIME_MS
        grant = Grant(run=run, scope=child.scope, child=child.id, revision=child.revision, expires_ms=expires)
        before = state.children.get(child.follows)
        mediated = child.mode is ChildMode.MEDIATED
        launch = Launch(
            agent=url, child=child.id, context=child.context, stamp=stamp_for(state, child),
            grant=sign_grant(grant, self._grant_key) if mediated else "", gateway=self._gateway_url if mediated else "",
            brief=brief_for(state, child, contents), references=[before.task] if before and before.task else [],
        )  # fmt: skip
        await self._send_launch(run, child_id, launch, epoch)

    async def _send_launch(self, run: str, child_id: str, launch: Launch, epoch: int) -> None:
        point("act.launch.before")
        sent = await self._courier.launch(launch)
        with anyio.move_on_after(AGENT_PATIENCE_S):
            while isinstance(sent, Unreachable) and sent.unsent:  # nothing has left, so this is still the first time
                await anyio.sleep(NOBODY_S)
                sent = await self._courier.launch(launch)
        point("act.launch.after")
        match sent:
            case Seen():
                await self._bind(run, child_id, sent.task)
            case Refused():
                said = cmd.RecordSeen(by="courier", child=child_id, state=TaskState.REJECTED, detail=sent.detail)
                await self._desk.submit(run, said)
            case Replied():
                lost = cmd.DeclareLost(
                    by="courier", child=child_id, detail="it answered with a message, without a task"
                )
                await self._desk.submit(run, lost, fence=epoch)
            case Unreachable():
                log.warning("run %s, child %s: launch not answered: %s", run, child_id, sent.detail)

    async def _contents(self, run: str, artifacts: tuple[ArtifactRef, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for artifact in artifacts:
            if artifact.size_bytes <= INLINE_BYTES_MAX:
                data = await self._store.blob(run, artifact.blob)
                if data is not None:
                    found[artifact.blob] = data.decode()
        return found

    async def _bind(self, run: str, child_id: str, task: str) -> None:
        answer = await self._desk.submit(run, cmd.BindChild(by="courier", child=child_id, task=task))
        if answer.decision.verdict is Claim.DUPLICATE:
            # Two launches made two tasks. The other one is the child; this one is an orphan and has to end.
            child = (await self._desk.current(run)).children[child_id]
            url = self._url(child)
            if url is not None:
                await self._courier.cancel(url, task)

    async def _find(self, run: str, child_id: str) -> None:
        child = (await self._desk.current(run)).children[child_id]
        url = self._url(child)
        known = await self._courier.find(url, child.context, child_id) if url else Gone()
        if isinstance(known, Seen):
            await self._bind(run, child_id, known.task)
            return
        await anyio.sleep(NOBODY_S)

    async def _stop(self, run: str, child_id: str, epoch: int) -> None:
        child = (await self._desk.current(run)).children[child_id]
        request = cmd.RequestStop(by="conductor", child=child_id, reason=child.stop_reason or "stop")
        answer = await self._desk.submit(run, request, fence=epoch)
        url = self._url(child)
        if not answer.decision.accepted or url is None:
            return
        point("act.cancel.before")
        ended = await self._courier.cancel(url, child.task)
        point("act.cancel.after")
        match ended:
            case Seen():
                await self._take(run, child_id, ended)
            case Gone():
                await self._stop_failed(run, child_id, "the agent does not know the task; that is no proof of a stop")
            case Unreachable():
                await self._stop_failed(run, child_id, ended.detail)
            case Refused():
                await self._stop_failed(run, child_id, ended.detail, refused=True)

    async def _stop_failed(self, run: str, child: str, detail: str, *, refused: bool = False) -> None:
        await self._desk.submit(run, cmd.RecordStop(by="courier", child=child, refused=refused, detail=detail))

    async def _observe(self, run: str, child_id: str, epoch: int) -> None:
        """Look until a terminal state is seen or the child is lost."""
        wait_s = LOOK_FIRST_S
        # Counted from the first look in vain: a process that was paused itself has heard nobody meanwhile.
        silent_since_s: float | None = None
        while True:
            child = (await self._desk.current(run)).children[child_id]
            url = self._url(child)
            if url is None:
                await anyio.sleep(NOBODY_S)
                return
            if seen_to_end(child):
                break
            point("act.look.before")
            seen = await self._courier.look(url, child.task)
            point("act.look.after")
            if isinstance(seen, Seen):
                silent_since_s = None
                if await self._take(run, child_id, seen):
                    break
            elif not child.settled:
                now_s = anyio.current_time()
                silent_since_s = now_s if silent_since_s is None else silent_since_s
                silent = now_s - silent_since_s > CONTACT_LOST_S
                if silent or (isinstance(seen, Gone) and not child.stop_wanted):
                    words = "the agent does not know the task any more" if isinstance(seen, Gone) else seen.detail
                    # A judgement from this process's silence, not a fact: it counts only from whoever leads now.
                    lost = cmd.DeclareLost(by="courier", child=child_id, detail=words)
                    await self._desk.submit(run, lost, fence=epoch)
                    break
            await anyio.sleep(wait_s)
            wait_s = min(wait_s * 1.5, LOOK_LONGEST_S)
        await self._linger(run, child_id)

    async def _take(self, run: str, child_id: str, seen: Seen) -> bool:
        """Record a state; file the result first, so that a crash between the two leaves it to be found again."""
        terminal = seen.state in TERMINAL_TASKS
        if terminal and seen.artifacts and seen.state is TaskState.COMPLETED:
            await self._file(run, child_id, seen)
        await self._desk.submit(run, cmd.RecordSeen(by="courier", child=child_id, state=seen.state))
        return terminal

    async def _linger(self, run: str, child_id: str) -> None:
        """Agents that said "canceled" may go on and deliver. What comes is filed, never merged."""
        child = (await self._desk.current(run)).children[child_id]
        url = self._url(child)
        if not child.stop_wanted or child.task_state is not TaskState.CANCELED or url is None:
            return
        with anyio.move_on_after(LINGER_S):
            while True:
                seen = await self._courier.look(url, child.task)
                if isinstance(seen, Seen) and (seen.artifacts and seen.state is TaskState.COMPLETED):
                    await self._file(run, child_id, seen)
                    return
                await anyio.sleep(LOOK_LONGEST_S)

    async def _collect(self, run: str, child_id: str, epoch: int) -> None:
        state = await self._desk.current(run)
        child = state.children[child_id]
        url = self._url(child)
        parked = state.results.get(child.result)
        if parked is not None:
            again = cmd.FileResult(
                by="conductor", child=child_id, task=parked.task, stamp=stamp_for(state, child),
                artifacts=parked.artifacts, summary=parked.summary,
            )  # fmt: skip
            await self._desk.submit(run, again)
            return
        seen: Seen | Gone | Unreachable = Gone()
        with anyio.move_on_after(CONTACT_LOST_S):
            while url is not None:
                seen = await self._courier.look(url, child.task)
                if not isinstance(seen, Unreachable):
                    break
                await anyio.sleep(LOOK_FIRST_S * 4)
        if isinstance(seen, Seen):
            await self._file(run, child_id, seen)
        else:
            # It completed and what it delivered cannot be had any more: that is filed, and another child follows.
            nothing = cmd.FileResult(by="courier", child=child_id, task=child.task, stamp=None)
            await self._desk.submit(run, nothing, fence=epoch)

    async def _file(self, run: str, child_id: str, seen: Seen) -> None:
        stamps = [a.stamp for a in seen.artifacts]
        stamp = stamps[0] if stamps and all(s == stamps[0] for s in stamps) else None
        refs = []
        point("act.file.before")
        for artifact in seen.artifacts:
            data = canonical(artifact.parts)
            refs.append(
                ArtifactRef(name=artifact.name, blob=await self._store.put_blob(run, data), size_bytes=len(data))
            )
        command = cmd.FileResult(
            by="courier", child=child_id, task=seen.task, stamp=stamp, artifacts=tuple(refs),
            summary=_summary(seen.artifacts),
        )  # fmt: skip
        point("act.file.stored")
        await self._desk.submit(run, command)
        point("act.file.after")

    # -- attempts -----------------------------------------------------------------------------------------------------

    async def _ask(self, run: str, attempt_id: str, epoch: int) -> None:
        state = await self._desk.current(run)
        attempt = state.attempts[attempt_id]
        facts = state.facts_of(attempt)
        known = without_asking(facts, attempt)
        if known is not None:
            await self._classify(run, attempt_id, known, started=0, epoch=epoch)
            return
        method = method_for(facts)
        if method is None:
            return
        ask = cmd.StartReconcile(by="conductor", attempt=attempt_id, method=method, epoch=epoch)
        answer = await self._desk.submit(run, ask, fence=epoch)
        if not answer.decision.accepted:
            return
        clock_before = self._clocks.get(attempt_id, 0)
        point("act.ask.before")
        said = await self._door.ask(run, attempt_id, method)
        point("act.ask.after")
        clock = said.get("clock_ms")
        if isinstance(clock, int):
            self._clocks[attempt_id] = clock
        attempt = (await self._desk.current(run)).attempts[attempt_id]
        if not attempt.open:
            self._clocks.pop(attempt_id, None)
            return
        known = conclude(facts, attempt, evidence_from(said, clock_before), self._desk.now_ms())
        if known is not None:
            started = int(answer.decision.detail["started"])
            await self._classify(run, attempt_id, known, started=started, epoch=epoch)

    async def _classify(self, run: str, attempt: str, known: Any, *, started: int, epoch: int) -> None:
        command = cmd.Classify(
            by="conductor", attempt=attempt, finding=known.finding, basis=known.basis, epoch=epoch, started=started,
            clock_before_ms=known.clock_before_ms, observed=known.observed, detail=known.detail,
        )  # fmt: skip
        answer = await self._desk.submit(run, command, fence=epoch)
        if answer.decision.verdict is Answer.NOT_CONCLUSIVE:
            log.warning(
                "run %s, attempt %s: %s on basis %s is not conclusive", run, attempt, known.finding, known.basis
            )
            await anyio.sleep(NOBODY_S)
        elif known.finding is not Finding.UNKNOWN and known.basis is not Basis.GAVE_UP:
            self._clocks.pop(attempt, None)


def _summary(artifacts: tuple[Delivered, ...]) -> dict[str, Any]:
    for artifact in artifacts:
        for part in artifact.parts:
            if artifact.name == "result" and isinstance(part, dict):
                small = len(canonical(part)) <= SUMMARY_BYTES_MAX
                return part if small else {"outcome": part.get("outcome"), "too_long": True}
    return {}
