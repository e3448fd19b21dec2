"""What a Desk has to be told of the rules: the pure functions, as values.

Knows: their shapes. Does not know the rules themselves, so that the desk can be tested with a state machine of ten
lines, and the rules without a desk. Pure.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from admission.storage import Compare, Index


class Copy(Protocol):
    """A folded state that its owner mutates: at log position `version`, `control` control events in."""

    @property
    def version(self) -> int: ...

    @property
    def control(self) -> int: ...

    def begin(self) -> None:
        """From here on, changes can be taken back."""

    def undo(self) -> None:
        """Take back everything since begin."""

    def keep(self) -> None:
        """Make everything since begin final."""


class HasEvents(Protocol):
    """What decide answers; a refusal has no events."""

    @property
    def events(self) -> Sequence[Any]: ...


State = TypeVar("State", bound=Copy)
CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")
DecisionT = TypeVar("DecisionT", bound=HasEvents)


@dataclass(frozen=True, slots=True)
class SnapshotCodec(Generic[State]):
    """How a state becomes bytes. A snapshot is a live part, and chunks of rows that hardly ever change again.

    `version` names the meaning of the fold; snapshots of another one are ignored.
    """

    version: str
    #: The settled rows with their ids, in an order that new ones only extend; rows are immutable and replaced.
    settled_rows: Callable[[State], Iterable[tuple[str, Any]]]
    #: Bytes of some rows; the same rows give the same bytes.
    encode_rows: Callable[[Sequence[Any]], bytes]
    #: And back, as (id, row).
    decode_rows: Callable[[bytes], Iterable[tuple[str, Any]]]
    #: The state without the settled rows for which `in_chunk(id, row)` holds.
    encode_live: Callable[[State, Callable[[str, Any], bool]], bytes]
    #: run id, live bytes, rows of all chunks by id (a row of the live part goes before one of a chunk) → the state.
    decode_live: Callable[[str, bytes, dict[str, Any]], State]


@dataclass(frozen=True, slots=True)
class Machine(Generic[State, CommandT, EventT, DecisionT]):
    """The rules of one kind of log."""

    new: Callable[[str], State]
    decide: Callable[[State, CommandT, int], DecisionT]
    fold: Callable[[State, int, EventT], None]
    encode: Callable[[EventT], bytes]
    decode: Callable[[bytes], EventT]
    is_control: Callable[[EventT], bool]
    compare_of: Callable[[CommandT], Compare]
    index_of: Callable[[State], Index]
    snapshots: SnapshotCodec[State] | None = None
