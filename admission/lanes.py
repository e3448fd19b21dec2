"""A few connections shared by many callers: who finds one free goes at once, who does not goes with the next batch.

Knows: how callers and connections meet. Does not know what travels on a connection; `exchange` does.

A call alone costs nothing extra: its own task writes and reads. While all connections are busy, calls gather; the first
of them that gets a connection takes all that wait with it, so that many callers cost few system calls and few fsyncs.
There is no task of our own that could die and leave callers waiting.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import anyio

Connection = TypeVar("Connection")
Request = TypeVar("Request")
Answer = TypeVar("Answer")

#: A batch never holds more requests than this, however many callers wait.
BATCH_REQUESTS_MAX = 64


class ReplyLost(Exception):
    """The batch that a request travelled in was broken off: whether the other side acted on it is unknown."""


class _Waiting(Generic[Connection, Request, Answer]):
    """A caller that waits: for a connection (then it leads the next batch), or for the answer another one fetched."""

    __slots__ = ("answer", "connection", "failure", "request", "woken")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.woken = anyio.Event()
        self.connection: Connection | None = None
        self.answer: Answer | None = None
        self.failure: Exception | None = None


class Lanes(Generic[Connection, Request, Answer]):
    """`exchange(connection, requests)` gives one answer a request, in their order, or raises for all of them."""

    def __init__(
        self,
        connections: Sequence[Connection],
        exchange: Callable[[Connection, Sequence[Request]], Awaitable[list[Answer]]],
    ) -> None:
        self._free = list(connections)
        self._exchange = exchange
        self._waiting: deque[_Waiting[Connection, Request, Answer]] = deque()

    async def call(self, request: Request) -> Answer:
        """The answer to one request. Raises what `exchange` raises; ReplyLost when a batch was broken off."""
        if self._free:
            connection = self._free.pop()
            try:
                return (await self._exchange(connection, (request,)))[0]
            finally:
                self._release(connection)
        waiting: _Waiting[Connection, Request, Answer] = _Waiting(request)
        self._waiting.append(waiting)
        try:
            await waiting.woken.wait()
        except BaseException:
            if waiting.connection is not None:
                self._release(waiting.connection)
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
            raise
        if waiting.connection is not None:
            return await self._lead(waiting, waiting.connection)
        if waiting.failure is not None:
            raise waiting.failure
        return waiting.answer  # type: ignore[return-value]

    async def _lead(self, first: _Waiting[Connection, Request, Answer], connection: Connection) -> Answer:
        """Send what waits by now together with our own request, and hand out the answers."""
        batch = [first]
        while self._waiting and len(batch) < BATCH_REQUESTS_MAX:
            batch.append(self._waiting.popleft())
        failure: Exception = ReplyLost("the caller that led this batch was cancelled")
        answers: list[Answer] = []
        try:
            answers = await self._exchange(connection, [waiting.request for waiting in batch])
        except Exception as error:
            failure = error
            raise
        finally:
            for waiting, answer in zip(batch, answers, strict=False):
                waiting.answer = answer
            for waiting in batch:
                waiting.failure = None if answers else failure
                waiting.woken.set()
            self._release(connection)
        return answers[0]

    def _release(self, connection: Connection) -> None:
        if self._waiting:
            leader = self._waiting.popleft()
            leader.connection = connection
            leader.woken.set()
        else:
            self._free.append(connection)
