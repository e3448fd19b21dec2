"""Five ways in which an A2A agent can be a difficult child.

Knows what each does with its work and with a cancel. Has no guard on purpose: what it publishes is what the SDK keeps.
Does not know how it is served.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc
from a2a.helpers.proto_helpers import get_data_parts, new_data_part, new_task_from_user_message
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.tasks import TaskUpdater

from admission.wire import EXTENSION, Stamp, read_stamp, stamp_metadata, whole
from simulators.children.gate_calls import GateCalls, gate_calls

PATIENCE_MS = 60_000


@dataclass(frozen=True, slots=True)
class Tempo:
    """`delay_ms`: the delay of the behaviour itself. `patience_ms`: how long one waits to be cancelled at all."""

    delay_ms: int = 1_500
    patience_ms: int = PATIENCE_MS

    @property
    def delay_s(self) -> float:
        """The delay in seconds."""
        return self.delay_ms / 1000

    @property
    def patience_s(self) -> float:
        """The patience in seconds."""
        return self.patience_ms / 1000


@dataclass(eq=False)
class Job:
    """One task of a child. `over` ends its execute()."""

    updater: TaskUpdater
    stamp: Stamp | None
    gate: GateCalls | None
    steps: list[Mapping[str, Any]]
    done: list[dict[str, Any]] = field(default_factory=list)
    cancelled: anyio.Event = field(default_factory=anyio.Event)
    over: anyio.Event = field(default_factory=anyio.Event)

    async def act(self, step: Mapping[str, Any]) -> None:
        """Ask the gateway for one step, note the answer, and say on stderr what was asked when."""
        answer = await self.gate.ask(step) if self.gate else {"verdict": "no gateway"}
        row = {"service": step.get("service"), "action": step.get("action")}
        row |= {name: answer.get(name) for name in ("target", "verdict", "attempt", "observed_result")}
        self.done.append(row)
        said = {"task": self.updater.task_id, "action": row["action"], "verdict": row["verdict"]}
        print(json.dumps(said | {"after_cancel": self.cancelled.is_set()}), file=sys.stderr, flush=True)

    async def complete(self) -> None:
        """Publish the result, stamped with what the child was launched with, and COMPLETED."""
        metadata = stamp_metadata(self.stamp) if self.stamp else None
        part = new_data_part({"actions": self.done, "outcome": "complete"})
        await self.updater.add_artifact(
            [part], artifact_id="result", name="result", metadata=metadata, extensions=[EXTENSION] if metadata else None
        )
        await self.updater.complete()


class DifficultChild(AgentExecutor):
    """What all have in common: claim, start, perform the plan through the gateway. The rest is each one's own."""

    speaks_extension = True

    def __init__(self, tempo: Tempo) -> None:
        self.tempo = tempo
        self.tasks: anyio.abc.TaskGroup | None = None
        self.jobs: dict[str, Job] = {}

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Begin the task, then behave."""
        assert context.message is not None
        task = new_task_from_user_message(context.message)
        await event_queue.enqueue_event(task)
        data = get_data_parts(context.message.parts)
        steps = whole(data[0].get("actions") or []) if data and isinstance(data[0], Mapping) else []
        job = Job(
            TaskUpdater(event_queue, task.id, task.context_id),
            read_stamp(context.metadata),
            gate_calls(task.id, context.metadata),
            steps,
        )
        if job.gate is not None and await job.gate.claim() != "claimed":
            await job.updater.reject()
            return
        self.jobs[task.id] = job
        try:
            await job.updater.start_work()
            await self.behave(job)
        finally:
            self.jobs.pop(task.id, None)

    async def behave(self, job: Job) -> None:
        """Work, and publish the end of the task: here, at once. Each kind has its own way."""
        await job.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """The polite answer; each kind has its own."""
        await TaskUpdater(event_queue, context.task_id or "", context.context_id or "").cancel()

    def close(self) -> None:
        """Let go of everything, so that the process can end."""
        for job in self.jobs.values():
            job.over.set()


class IgnoresCancel(DifficultChild):
    """Answers CANCELED at once and works on: each action is asked for `delay_ms` after the one before."""

    async def behave(self, job: Job) -> None:
        """The work lives outside the request, so nothing that the SDK cancels reaches it."""
        assert self.tasks is not None
        self.tasks.start_soon(self._work, job)
        await job.over.wait()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Say yes and do nothing."""
        job = self.jobs.get(context.task_id or "")
        if job is not None:
            job.cancelled.set()
        await super().cancel(context, event_queue)

    async def _work(self, job: Job) -> None:
        for step in job.steps:
            await anyio.sleep(self.tempo.delay_s)
            await job.act(step)
        if not job.steps:
            await anyio.sleep(self.tempo.delay_s)
        if not job.cancelled.is_set():
            await job.complete()
        job.over.set()


class Late(DifficultChild):
    """Performs its plan, then has no ear for cancel: completes `delay_ms` after it, stamped with its old revision.

    A cancel request is answered only then, with a task that completed. Never cancelled, it completes when its patience
    is over.
    """

    async def behave(self, job: Job) -> None:
        """Work outside the request; stay in execute() even when the SDK cancels it, so that the task stays open."""
        assert self.tasks is not None
        self.tasks.start_soon(self._work, job)
        while not job.over.is_set():
            try:
                await job.over.wait()
            except anyio.get_cancelled_exc_class():
                continue

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Publish nothing."""
        job = self.jobs.get(context.task_id or "")
        if job is not None:
            job.cancelled.set()

    async def _work(self, job: Job) -> None:
        for step in job.steps:
            await job.act(step)
        with anyio.move_on_after(self.tempo.patience_s):
            await job.cancelled.wait()
            await anyio.sleep(self.tempo.delay_s)
        await job.complete()
        job.over.set()


class CompletesDuringCancel(DifficultChild):
    """Performs its plan and waits; a cancel is answered, `delay_ms` later, with the completed task."""

    async def behave(self, job: Job) -> None:
        """Wait to be cancelled, for as long as the patience lasts."""
        for step in job.steps:
            await job.act(step)
        with anyio.move_on_after(self.tempo.patience_s):
            await job.cancelled.wait()
            await job.over.wait()
        if not job.cancelled.is_set():
            await job.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Complete instead."""
        job = self.jobs.get(context.task_id or "")
        if job is None:
            return
        job.cancelled.set()
        await anyio.sleep(self.tempo.delay_s)
        await job.complete()


class NeverAnswers(DifficultChild):
    """Performs its plan and works for ever; a cancel hangs."""

    async def behave(self, job: Job) -> None:
        """Never end."""
        for step in job.steps:
            await job.act(step)
        await job.over.wait()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Never return."""
        await anyio.sleep_forever()


class Autonomous(DifficultChild):
    """Knows nothing of revisions: no extension in its card, no claim, no stamp. Works `delay_ms`, obeys a cancel."""

    speaks_extension = False

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Take any message, work a while, complete."""
        assert context.message is not None
        task = new_task_from_user_message(context.message)
        await event_queue.enqueue_event(task)
        updater = TaskUpdater(event_queue, task.id, task.context_id)
        await updater.start_work()
        await anyio.sleep(self.tempo.delay_s)
        await Job(updater, None, None, []).complete()


KINDS: dict[str, type[DifficultChild]] = {
    "ignores_cancel": IgnoresCancel,
    "late": Late,
    "completes_during_cancel": CompletesDuringCancel,
    "never_answers": NeverAnswers,
    "autonomous": Autonomous,
}
