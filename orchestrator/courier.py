"""The A2A client: launches children, asks them to stop, looks at them. The only place that speaks A2A as a client.

Knows how each call can end, and names it honestly: seen, gone, refused, unreachable. Does not know what follows from
that. "Gone" is not "stopped": a server may purge a cancelled task, and a restarted one forgets all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import anyio
import httpx
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.client.errors import AgentCardResolutionError
from a2a.types import (
    AgentCard,
    CancelTaskRequest,
    GetTaskRequest,
    ListTasksRequest,
    Message,
    Part,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    Task,
)
from a2a.types import TaskState as A2AState
from a2a.utils.errors import A2AError, InternalError, TaskNotCancelableError, TaskNotFoundError
from google.protobuf.json_format import Error as JsonFormatError
from google.protobuf.json_format import MessageToDict

from admission.vocabulary import ChildMode, Method, TaskState
from admission.wire import EXTENSION, Stamp, blot, launch_metadata, read_stamp, whole, without_grants

#: Longest that one call may take (seconds). Children are watched by asking often, so no call has to wait long.
CALL_DEADLINE_S = 10.0
CANCEL_DEADLINE_S = 3.0

_STATES = {
    A2AState.TASK_STATE_SUBMITTED: TaskState.SUBMITTED,
    A2AState.TASK_STATE_WORKING: TaskState.WORKING,
    A2AState.TASK_STATE_COMPLETED: TaskState.COMPLETED,
    A2AState.TASK_STATE_FAILED: TaskState.FAILED,
    A2AState.TASK_STATE_CANCELED: TaskState.CANCELED,
    A2AState.TASK_STATE_REJECTED: TaskState.REJECTED,
    A2AState.TASK_STATE_INPUT_REQUIRED: TaskState.INPUT_REQUIRED,
    A2AState.TASK_STATE_AUTH_REQUIRED: TaskState.AUTH_REQUIRED,
}


@dataclass(frozen=True, slots=True)
class Delivered:
    """One artifact as the task carries it."""

    name: str
    parts: list[Any]
    stamp: Stamp | None


@dataclass(frozen=True, slots=True)
class Seen:
    """The task was observed in this state."""

    task: str
    state: TaskState
    artifacts: tuple[Delivered, ...] = ()


@dataclass(frozen=True, slots=True)
class Gone:
    """The server does not know the task. Not proof of anything."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The server said no."""

    detail: str


@dataclass(frozen=True, slots=True)
class Replied:
    """The agent answered with a message instead of a task: it may have done its work, and cannot be followed."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No usable answer. What was asked may or may not have been done, unless it provably never left (`unsent`)."""

    detail: str
    unsent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything that a launching message holds. `grant` is empty for an agent that acts past the gate."""

    agent: str
    child: str
    context: str
    stamp: Stamp
    grant: str = field(repr=False)
    gateway: str
    brief: Mapping[str, Any]
    references: Sequence[str] = field(default_factory=tuple)


class Courier:
    """Use as an async context manager. Safe for many children at once."""

    def __init__(self) -> None:
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(connect=2, read=CALL_DEADLINE_S, write=5, pool=5),
            limits=httpx.Limits(max_connections=500),
            trust_env=False,
        )
        self._cards: dict[str, AgentCard] = {}
        self._clients: dict[str, Client] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def mode(self, agent_url: str) -> ChildMode | Unreachable:
        """How an agent of this URL has to be treated, from its card: with our extension it is mediated."""
        try:
            await self._client(agent_url)
        except _FAILURES as error:
            return Unreachable(_words(error))
        extensions = self._cards[agent_url].capabilities.extensions
        ours = any(extension.uri == EXTENSION for extension in extensions)
        return ChildMode.MEDIATED if ours else ChildMode.AUTONOMOUS

    async def launch(self, launch: Launch) -> Seen | Replied | Refused | Unreachable:
        """Send the launching message. Its message id is the child's id, so a resent one names the same child."""
        message = Message(
            message_id=launch.child,
            role=Role.ROLE_USER,
            parts=[_data_part(launch.brief)],
            context_id=launch.context,
            reference_task_ids=list(launch.references),
            extensions=[EXTENSION],
        )
        request = SendMessageRequest(message=message, configuration=SendMessageConfiguration(return_immediately=True))
        request.metadata.update(launch_metadata(launch.stamp, grant=launch.grant, gateway=launch.gateway))
        try:
            client = await self._client(launch.agent)
            with anyio.fail_after(CALL_DEADLINE_S):
                async for event in client.send_message(request):
                    if event.HasField("task"):
                        return _seen(event.task, launch.grant)
                    if event.HasField("status_update"):
                        update = event.status_update
                        return Seen(_task_id(update.task_id, launch.grant), _state(update.status.state))
                    if event.HasField("message"):
                        return Replied()
        except A2AError as error:
            self._forget(launch.agent)
            if _is_transport(error) or isinstance(error, InternalError):  # "try again later" is no refusal
                return Unreachable(_words(error, launch.grant), unsent=_never_left(error))
            return Refused(_words(error, launch.grant))
        except _FAILURES as error:
            self._forget(launch.agent)
            return Unreachable(_words(error, launch.grant), unsent=_never_left(error))
        return Unreachable("the answer held neither a task nor a message")

    async def look(self, agent_url: str, task: str) -> Seen | Gone | Unreachable:
        """The task's state and artifacts now."""
        try:
            client = await self._client(agent_url)
            with anyio.fail_after(CALL_DEADLINE_S):
                return _seen(await client.get_task(GetTaskRequest(id=task, history_length=0)))
        except TaskNotFoundError:
            return Gone()
        except _FAILURES as error:
            self._forget(agent_url)
            return Unreachable(_words(error))

    async def cancel(self, agent_url: str, task: str) -> Seen | Gone | Refused | Unreachable:
        """Ask the task to stop. Only a Seen with a terminal state says that it has."""
        try:
            client = await self._client(agent_url)
            with anyio.fail_after(CANCEL_DEADLINE_S):
                return _seen(await client.cancel_task(CancelTaskRequest(id=task)))
        except TaskNotFoundError:
            return Gone()
        except TaskNotCancelableError as error:
            seen = await self.look(agent_url, task)
            return seen if isinstance(seen, Seen) else Refused(_words(error))
        except _FAILURES as error:
            return Unreachable(_words(error))

    async def find(self, agent_url: str, context: str, child: str) -> Seen | Gone | Unreachable:
        """The task that a launching message of this child made, if the server knows one."""
        try:
            client = await self._client(agent_url)
            with anyio.fail_after(CALL_DEADLINE_S):
                found = await client.list_tasks(ListTasksRequest(context_id=context, page_size=100))
        except _FAILURES as error:
            return Unreachable(_words(error))
        for task in found.tasks:
            if any(message.message_id == child for message in task.history):
                return _seen(task)
        return Gone()

    async def _client(self, agent_url: str) -> Client:
        if agent_url not in self._clients:
            with anyio.fail_after(CALL_DEADLINE_S):
                card = await A2ACardResolver(self._http, agent_url).get_agent_card()
            self._cards[agent_url] = card
            config = ClientConfig(streaming=False, httpx_client=self._http)
            self._clients[agent_url] = ClientFactory(config).create(card)
        return self._clients[agent_url]

    def _forget(self, agent_url: str) -> None:
        """An agent that came back may have another card."""
        self._clients.pop(agent_url, None)


_FAILURES = (A2AError, AgentCardResolutionError, httpx.HTTPError, JsonFormatError, TimeoutError, OSError, ValueError)


def _is_transport(error: A2AError) -> bool:
    return type(error).__name__ in ("A2AClientError", "A2AClientTimeoutError", "AgentCardResolutionError")


def _never_left(error: BaseException | None) -> bool:
    """Whether no connection was made, so that nothing can have been sent: not the message, or not even for the card."""
    while error is not None:
        if isinstance(error, (AgentCardResolutionError, httpx.ConnectError, httpx.ConnectTimeout)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _words(error: BaseException, grant: str = "") -> str:
    """What went wrong, in the server's words, which may quote what was sent to it. Blotted before it is cut off."""
    text = blot(str(error), grant).strip()
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _data_part(value: Mapping[str, Any]) -> Part:
    part = Part()
    part.data.struct_value.update(dict(value))
    return part


def _state(state: int) -> TaskState:
    return _STATES.get(state, TaskState.WORKING)  # type: ignore[call-overload, no-any-return]


def _seen(task: Task, grant: str = "") -> Seen:
    """What a task shows. It goes into the log and to whoever reads a result, so no grant goes with it."""
    artifacts = []
    for artifact in task.artifacts:
        metadata = without_grants(MessageToDict(artifact.metadata))
        parts = [without_grants(_part_value(part)) for part in artifact.parts]
        name = blot(artifact.name or artifact.artifact_id)
        artifacts.append(Delivered(name=name, parts=parts, stamp=read_stamp(metadata)))
    return Seen(_task_id(task.id, grant), _state(task.status.state), tuple(artifacts))


def _task_id(task: str, grant: str = "") -> str:
    """A task's id as it may be kept. Blotted it would name no task any more, so one with a grant is not taken."""
    if blot(task, grant) != task:
        raise ValueError("the id that it gave the task holds the grant")
    return task


def _part_value(part: Part) -> Any:
    match part.WhichOneof("content"):
        case "text":
            return part.text
        case "data":
            return whole(MessageToDict(part.data))
        case "url":
            return {"url": part.url}
        case _:
            return {"raw_bytes": len(part.raw)}


#: Longest that one question to a service may take (seconds); no answer counts as unreachable.
ASK_DEADLINE_S = 15.0


class GatewayDoor:
    """The gateway's internal door. Only the gateway holds credentials, so only it asks services."""

    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=ASK_DEADLINE_S, trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def ask(self, run: str, attempt: str, method: Method) -> dict[str, Any]:
        """What the service says of an attempt. Never raises: no answer is the answer `unreachable`."""
        try:
            reply = await self._http.post(
                "/v1/internal/ask", json={"run": run, "attempt": attempt, "method": method.value}
            )
            reply.raise_for_status()
            answer = reply.json()
        except (httpx.HTTPError, ValueError) as error:
            return {"found": "unreachable", "detail": f"the gateway did not answer: {_words(error)}"}
        return answer if isinstance(answer, dict) else {"found": "unreachable", "detail": "unreadable answer"}
