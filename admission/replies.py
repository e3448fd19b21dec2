"""Raw replies of the server, in the words of storage.py.

Knows: the shape in which the server and lua/commit.lua answer (RESP3). Does not know connections.
"""

from collections.abc import Sequence
from typing import Any

from admission.storage import Behind, Committed, Conflict, Entry, Far, Fenced, Reply, StoreUnavailable


def entries_of(reply: Sequence[Any], after: int) -> list[Entry]:
    """The events after a position in a range of a log: each of its entries is one commit, named by its last event."""
    entries: list[Entry] = []
    for id_, fields in reply:
        commit, at_ms, events = fields[1].decode(), int(fields[3]), fields[7].split(b"\n")
        first = int(id_[:-2]) - len(events) + 1
        entries += [Entry(n, commit, at_ms, data) for n, data in enumerate(events, first) if n > after]
    return entries


def scored(reply: Sequence[Any]) -> list[tuple[str, int]]:
    """Members of a sorted set with their scores."""
    return [(member.decode(), int(score)) for member, score in reply]


def reply_of(reply: Sequence[Any], known: int) -> Reply:
    """What lua/commit.lua answered. StoreUnavailable when it is not in our words."""
    code, version, control, time_ms, entries = reply
    match code:
        case b"committed":
            return Committed(version, control, time_ms, tuple(entries_of(entries, known)) if entries else ())
        case b"conflict":
            return Conflict(version, control, tuple(entries_of(entries, known)), time_ms)
        case b"far":
            return Far(version, control, time_ms)
        case b"behind":
            return Behind(version, time_ms)
        case b"fenced":
            return Fenced(version, time_ms)
    raise StoreUnavailable(f"commit.lua answered {code!r}: the store runs scripts of another version")
