"""A revision-aware A2A agent: the card, the door that enforces the extension, and the executor behind it.

Knows A2A's server side (the only file of this room that does) and how an ending is told in it. Does not know what the
agent is for, and how the gate is asked.

Why it is built this way: the SDK lets a later event overwrite a terminal state, queues a second message behind the
running one, and waits for `cancel` without a limit. So the first terminal event of a task wins here, a task takes one
message, and the work lives outside the request that started it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import anyio.abc
from a2a.helpers.proto_helpers import get_data_parts, new_data_part, new_task_from_user_message, new_text_part
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.context import ServerCallContext
from a2a.server.events import Event, EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentExtension,
    AgentInterface,
    AgentSkill,
    Message,
    SendMessageRequest,
    Task,
    TaskStatusUpdateEvent,
)
from a2a.types import TaskState as A2AState
from a2a.utils.errors import (
    ExtensionSupportRequiredError,
    InternalError,
    InvalidParamsError,
    TaskNotFoundError,
    UnsupportedOperationError,
)
from google.protobuf.json_format import MessageToDict
from starlette.applications import Starlette

from admission.client import GateClient
from admission.points import point
from admission.vocabulary import TaskState
from admission.wire import EXTENSION, stamp_metadata
from workers.brief import BadLaunch, Launch, read_launch
from workers.work import AgentFunction, Ending, Report, Work

log = logging.getLogger("regate.worker")

RPC_PATH = "/rpc"
_LAUNCH = "regate.launch"
_TERMINAL = frozenset(
    {
        A2AState.TASK_STATE_COMPLETED,
        A2AState.TASK_STATE_FAILED,
        A2AState.TASK_STATE_CANCELED,
        A2AState.TASK_STATE_REJECTED,
    }
)
_SPELLED = {
    TaskState.COMPLETED: A2AState.TASK_STATE_COMPLETED,
    TaskState.FAILED: A2AState.TASK_STATE_FAILED,
    TaskState.CANCELED: A2AState.TASK_STATE_CANCELED,
    TaskState.REJECTED: A2AState.TASK_STATE_REJECTED,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """`stop_s`: how long an agent function may take to stop before its task ends without it (seconds).
    `works_max`: children at once. `finished_max`: ended tasks that are kept for GetTask. `close_s`: shutting down."""

    stop_s: float = 2.0
    works_max: int = 500
    finished_max: int = 5_000
    close_s: float = 5.0


def is_terminal(event: Event) -> bool:
    """Whether an event ends its task."""
    return isinstance(event, Task | TaskStatusUpdateEvent) and event.status.state in _TERMINAL


@dataclass(slots=True, weakref_slot=True)
class _Seen:
    """What passed one task's queue."""

    ended: bool = False
    dropped: int = 0


class FirstEnding(EventQueue):
    """A queue that passes events up to and including the first one that ends the task, and drops all later ones."""

    def __init__(self, inner: EventQueue, seen: _Seen) -> None:
        self._inner = inner
        self._seen = seen

    async def enqueue_event(self, event: Event) -> None:
        """Pass or drop. The ending is noted before the await: two that come at once are one ending and one late one."""
        if self._seen.ended:
            self._seen.dropped += 1
            log.info("dropped a late %s: its task has ended (%d so far)", type(event).__name__, self._seen.dropped)
            return
        self._seen.ended = is_terminal(event)
        await self._inner.enqueue_event(event)


class RevisionAware(DefaultRequestHandler):
    """The door: only launches with the extension come in, and a task takes exactly one message."""

    def __init__(self, executor: WorkExecutor, card: AgentCard, store: InMemoryTaskStore) -> None:
        super().__init__(agent_executor=executor, task_store=store, agent_card=card)
        self._executor = executor
        self._store = store

    async def on_message_send(self, params: SendMessageRequest, context: ServerCallContext) -> Message | Task:
        """Check, then hand on. Raises an A2A error that says what to send instead."""
        await self._check(params, context)
        answer: Message | Task = await super().on_message_send(params, context)
        return answer

    async def on_message_send_stream(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """As `on_message_send`, answered as a stream."""
        await self._check(params, context)
        async with aclosing(super().on_message_send_stream(params, context)) as events:
            async for event in events:
                yield event

    async def _check(self, params: SendMessageRequest, context: ServerCallContext) -> None:
        message = params.message
        if EXTENSION not in message.extensions and EXTENSION not in context.requested_extensions:
            raise ExtensionSupportRequiredError(
                message=f"this agent works only under {EXTENSION}: name it in message.extensions and send its metadata"
            )
        if message.task_id:
            if await self._store.get(message.task_id, context) is None:
                raise TaskNotFoundError(message=f"no task {message.task_id} here")
            raise UnsupportedOperationError(
                message=f"task {message.task_id} has its brief and takes no second message: cancel it, then launch a "
                "new task that refers to it in reference_task_ids"
            )
        if EXTENSION in message.metadata:
            # A message is kept in the task's history, which others may read; the request's metadata is not.
            raise InvalidParamsError(message=f"{EXTENSION} belongs into the request's metadata, not the message's")
        if self._executor.full:
            raise InternalError(
                message="this worker has all the children it can hold: send the same message again later"
            )
        data = get_data_parts(message.parts)
        try:
            context.state[_LAUNCH] = read_launch(MessageToDict(params.metadata), data[0] if data else None)
        except BadLaunch as wrong:
            raise InvalidParamsError(message=str(wrong)) from None


@dataclass(eq=False)
class WorkExecutor(AgentExecutor):
    """Starts the work of each task in `tasks` (set while the server runs), and tells its ending once."""

    function: AgentFunction
    limits: Limits
    store: InMemoryTaskStore
    tasks: anyio.abc.TaskGroup | None = None
    works: dict[str, Work] = field(default_factory=dict)
    _seen: WeakKeyDictionary[EventQueue, _Seen] = field(default_factory=WeakKeyDictionary)
    _finished: deque[tuple[str, ServerCallContext]] = field(default_factory=deque)

    @property
    def full(self) -> bool:
        """Whether no further child fits."""
        return len(self.works) >= self.limits.works_max

    def _guarded(self, queue: EventQueue) -> FirstEnding:
        # execute() and cancel() are given the same queue of a task, so both see the same ending.
        return FirstEnding(queue, self._seen.setdefault(queue, _Seen()))

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """One child, from its launch to its ending. Raises nothing: what is raised here is shown to the client."""
        if context.current_task is not None:
            log.warning("a second message reached task %s and was not worked on", context.task_id)
            return
        launch = context.call_context.state.get(_LAUNCH)
        if context.message is None or context.task_id is None or not isinstance(launch, Launch) or self.tasks is None:
            raise InternalError(message="the launch was not checked at the door; this is a defect of the worker")
        queue = self._guarded(event_queue)
        task = new_task_from_user_message(context.message)
        await queue.enqueue_event(task)
        # One try: how long to wait, and what may wake us before, the hands and the watcher know better than the client.
        gate = GateClient(launch.gateway, launch.grant, tries_max=1)
        work = Work(launch, task.id, gate, self.function)
        self.works[task.id] = work
        self.tasks.start_soon(self._live, work, task.id, context.call_context)
        updater = TaskUpdater(queue, task.id, task.context_id)
        try:
            await self._started(work)
            if work.claimed.is_set():
                await updater.start_work()
            await work.decided.wait()
            await self._stopped(work)
            await self._tell(work, updater)
        except Exception:  # the text of an exception would reach the client, so it stays here
            log.exception("the ending of task %s could not be told", task.id)
            await self._publish(
                updater, Ending(TaskState.FAILED, "failed", "the agent's result cannot be sent"), launch
            )
        finally:
            # Reached with the work still going only when the server closes: nobody is left to tell its ending.
            work.end(Ending(TaskState.CANCELED, "stopped", "the worker was shut down"))
            work.published.set()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Stop the work; returns within the limit, whatever the agent does. An ending told before this one stands."""
        task_id, context_id = context.task_id or "", context.context_id or ""
        work = self.works.get(task_id)
        if work is not None:
            work.end(Ending(TaskState.CANCELED, "cancelled", "cancelled as asked"))
            with anyio.move_on_after(self.limits.stop_s + 1.0):
                await work.published.wait()
        await TaskUpdater(self._guarded(event_queue), task_id, context_id).cancel()

    async def _live(self, work: Work, task_id: str, context: ServerCallContext) -> None:
        try:
            await work.run()
            # Kept until told: a cancel that comes in between must find it, and wait for what is being told.
            await work.published.wait()
        finally:
            self.works.pop(task_id, None)
            # A context of its own: the request's holds the grant, and is not to be kept.
            self._finished.append((task_id, ServerCallContext(user=context.user)))
        while len(self._finished) > self.limits.finished_max:
            await self.store.delete(*self._finished.popleft())

    async def _started(self, work: Work) -> None:
        async with anyio.create_task_group() as either:

            async def first(event: anyio.Event) -> None:
                await event.wait()
                either.cancel_scope.cancel()

            either.start_soon(first, work.claimed)
            either.start_soon(first, work.decided)

    async def _stopped(self, work: Work) -> None:
        with anyio.move_on_after(self.limits.stop_s) as limit:
            await work.gone.wait()
        if limit.cancelled_caught:
            log.warning(
                "the agent of child %s does not stop; its hands are closed and its task ends without it",
                work.launch.stamp.child,
            )

    async def _tell(self, work: Work, updater: TaskUpdater) -> None:
        ending = work.ending
        assert ending is not None
        point("worker.publish.before")
        if ending.report is not None:
            await self._artifacts(updater, ending.report, work.launch)
            point("worker.publish.between")
        await self._publish(updater, ending, work.launch)
        point("worker.publish.after")

    async def _artifacts(self, updater: TaskUpdater, report: Report, launch: Launch) -> None:
        stamp = stamp_metadata(launch.stamp)
        contents = [("result", dict(report.result)), *report.artifacts.items()]
        # All parts are made before the first is sent: a result that cannot be sent leaves no half behind.
        parts = [(name, new_data_part(content)) for name, content in contents]
        for name, part in parts:
            await updater.add_artifact(
                [part], artifact_id=name, name=name, metadata=stamp, last_chunk=True, extensions=[EXTENSION]
            )

    async def _publish(self, updater: TaskUpdater, ending: Ending, launch: Launch) -> None:
        metadata: dict[str, Any] = stamp_metadata(launch.stamp)
        metadata[EXTENSION]["reason"] = ending.reason
        if ending.revision_in_force is not None:
            metadata[EXTENSION]["revision_in_force"] = str(ending.revision_in_force)
        message = updater.new_agent_message([new_text_part(ending.text)]) if ending.text else None
        # Not by the updater's own complete/cancel: those remember an ending of their own and raise.
        await TaskUpdater(updater.event_queue, updater.task_id, updater.context_id).update_status(
            _SPELLED[ending.state], message=message, metadata=metadata
        )


def make_card(name: str, url: str, description: str) -> AgentCard:
    """The card of a revision-aware agent at `url`."""
    extension = AgentExtension(
        uri=EXTENSION,
        required=True,
        description="Works for one revision of a run, acts only through the gateway, stamps its results.",
    )
    return AgentCard(
        name=name,
        description=description,
        version="1",
        supported_interfaces=[
            AgentInterface(url=f"{url}{RPC_PATH}", protocol_binding="JSONRPC", protocol_version="1.0")
        ],
        capabilities=AgentCapabilities(streaming=True, extensions=[extension]),
        default_input_modes=["application/json"],
        default_output_modes=["application/json"],
        skills=[AgentSkill(id="work", name=name, description=description, tags=["regate"])],
    )


def make_app(
    function: AgentFunction,
    *,
    card: AgentCard,
    limits: Limits | None = None,
    on_stuck: Callable[[int], None] = lambda _: None,
) -> Starlette:
    """The ASGI application of one agent.

    `on_stuck` is called while shutting down with the number of agent functions that do not stop; a process leaves then,
    because nothing inside it can end them.
    """
    limits = limits or Limits()
    store = InMemoryTaskStore()
    executor = WorkExecutor(function, limits, store)
    handler = RevisionAware(executor, card, store)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        initialize = getattr(store, "initialize", None)  # stores with a database have it, and it must come first
        if initialize is not None:
            await initialize()
        async with anyio.create_task_group() as tasks:
            executor.tasks = tasks
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
                with anyio.move_on_after(limits.close_s, shield=True):
                    await handler.aclose()
                    for work in list(executor.works.values()):
                        await work.gone.wait()
                if executor.works:
                    log.error("%d agent functions do not stop", len(executor.works))
                    on_stuck(len(executor.works))

    return Starlette(
        routes=[*create_agent_card_routes(card), *create_jsonrpc_routes(handler, RPC_PATH)], lifespan=lifespan
    )
