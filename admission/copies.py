"""What a desk holds: copies of runs, the callers that wait for them, and how a group of callers is picked.

Knows: queues and who may share a commit. Does not know: the store, or how a group is decided (desk.py).
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Generic

import anyio
import msgspec

from admission.machine import CommandT, DecisionT, EventT, State
from admission.snapshots import SnapshotBook
from admission.storage import Commit, Compare, StoreBehind, StoreUnavailable

GROUP_COMMANDS_MAX = 256


class OutcomeUnknown(StoreUnavailable):
    """This commit was sent and not answered: it may be in the log, or come into it later. `Desk.resend` ends that."""

    def __init__(self, why: str, commit: Commit) -> None:
        super().__init__(why)
        self.commit = commit


class Answer(msgspec.Struct, Generic[DecisionT], frozen=True):
    """A decision that the store has confirmed. `version`: the position of its last event, or what it was decided on."""

    decision: DecisionT
    version: int
    time_ms: int


class Ask(Generic[CommandT, DecisionT]):
    """One caller's command, or with command None the wish to look at the confirmed state."""

    __slots__ = ("answer", "blobs", "command", "compare", "decision", "done", "failure", "fence", "indexes", "last")

    def __init__(
        self,
        command: CommandT | None,
        compare: Compare,
        fence: int | None,
        blobs: Mapping[str, bytes],
        *,
        indexes: bool = False,
    ) -> None:
        self.command = command
        self.compare = compare
        self.fence = fence
        self.blobs = blobs
        #: Whether the run's indexes are to be written although nothing changes.
        self.indexes = indexes
        self.decision: DecisionT | None = None
        #: The number of events of its group up to and with its own.
        self.last = 0
        self.done: anyio.Event | None = None
        self.answer: Answer[DecisionT] | None = None
        self.failure: Exception | None = None

    @property
    def only_looks(self) -> bool:
        """Whether it wants to see the run as it is, and nothing written."""
        return self.command is None and not self.indexes


class RunCopy(Generic[State, CommandT, DecisionT]):
    """What this process has of one run. While `busy`, one task owns the state; nobody else touches it."""

    __slots__ = ("asks", "book", "busy", "control_asks", "run", "state")

    def __init__(self, run: str, book: SnapshotBook[State] | None) -> None:
        self.run = run
        self.book = book
        self.state: State | None = None
        self.busy = False
        self.asks: deque[Ask[CommandT, DecisionT]] = deque()
        self.control_asks: deque[Ask[CommandT, DecisionT]] = deque()

    def pick(self) -> list[Ask[CommandT, DecisionT]]:
        """The next group: control first, and only commands with the same fence."""
        queue = self.control_asks or self.asks
        if len(queue) == 1:
            return [queue.popleft()]
        fence = queue[0].fence
        group = [ask for ask in queue if ask.fence == fence][:GROUP_COMMANDS_MAX]
        if len(group) == len(queue):
            queue.clear()
        else:
            for ask in group:
                queue.remove(ask)
        return group


class Decided(Generic[EventT]):
    """What a group adds up to."""

    __slots__ = ("blobs", "compare", "control", "data", "events")

    def __init__(self, compare: Compare) -> None:
        self.compare = compare
        self.control = 0
        self.events: list[EventT] = []
        self.data: list[bytes] = []
        self.blobs: dict[str, bytes] = {}


def fail(asks: Iterable[Ask[Any, Any]], error: Exception) -> None:
    """Give all that have no answer yet this failure."""
    for ask in asks:
        if ask.answer is None and ask.failure is None:
            ask.failure = error
    wake(asks)


def wake(asks: Iterable[Ask[Any, Any]]) -> None:
    """Let those go on that wait."""
    for ask in asks:
        if ask.done is not None:
            ask.done.set()


def lost_data(run: str, version: int, seen: int) -> StoreBehind:
    """The alarm for a log that ends at `version`, while this process has seen its entry `seen`."""
    return StoreBehind(
        f"run {run}: the store's log ends at {version}, this process has seen {seen}: "
        "acknowledged data was lost; stop everything and restore the store"
    )
