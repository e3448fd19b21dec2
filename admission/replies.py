"""Raw replies of the server, in the words of storage.py.

Knows: the shape in which the server and lua/commit.lua answer (RESP3). Does not know connections.
"""

from collections.abc import Sequence
from typing import Any

from admission.storage import Behind, Committed, Conflict, Entry, Far, Fenced, Reply, StoreUnavailable


def entries_of(reply: Sequence[Any]) -> tuple[Entry, ...]:
    """A range of a log."""
    return tuple(
        Entry(int(id_[:-2]), fields[1].decode(), int(fields[3]), fields[5])  # ids are n-0
        for id_, fields in reply
    )


def scored(reply: Sequence[Any]) -> list[tuple[str, int]]:
    """Members of a sorted set with their scores."""
    return [(member.decode(), int(score)) for member, score in reply]


def reply_of(reply: Sequence[Any]) -> Reply:
    """What lua/commit.lua answered. StoreUnavailable when it is not in our words."""
    code, version, control, time_ms, entries = reply
    match code:
        case b"committed":
            return Committed(version, control, time_ms, entries_of(entries) if entries else ())
        case b"conflict":
            return Conflict(version, control, entries_of(entries), time_ms)
        case b"far":
            return Far(version, control, time_ms)
        case b"behind":
            return Behind(version, time_ms)
        case b"fenced":
            return Fenced(version, time_ms)
    raise StoreUnavailable(f"commit.lua answered {code!r}: the store runs scripts of another version")
