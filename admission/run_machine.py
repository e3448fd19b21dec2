"""The rules of a run as one value, for a Desk: events, fold, decide, indexes, and how a state becomes a snapshot.

Pure.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from admission import events as ev
from admission.agenda import index_of
from admission.commands import Command
from admission.live import Live, live_part, restore
from admission.machine import Machine, SnapshotCodec
from admission.records import Attempt
from admission.rows import decode_rows, encode_rows
from admission.rules import compare_of, decide
from admission.state import FOLD_VERSION, RunState, fold
from admission.table import Decision
from admission.vocabulary import OPEN_ATTEMPTS


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    live: Live
    attempts: list[Attempt]


_encode = msgspec.msgpack.Encoder().encode
_decode_snapshot = msgspec.msgpack.Decoder(_Snapshot).decode


def _settled_rows(run: RunState) -> Iterable[tuple[str, Any]]:
    return ((key, row) for key, row in run.attempts.stored() if row.state not in OPEN_ATTEMPTS)


def _decode_rows(data: bytes) -> Sequence[tuple[str, Any]]:
    return [(row.id, row) for row in decode_rows(data)]


def _encode_live(run: RunState, in_chunk: Callable[[str, Any], bool]) -> bytes:
    own = [run.attempts[key] for key, row in run.attempts.stored() if not in_chunk(key, row)]
    return _encode(_Snapshot(live=live_part(run), attempts=own))


def _decode_live(run_id: str, data: bytes, rows: dict[str, Any]) -> RunState:
    snapshot = _decode_snapshot(data)
    if snapshot.live.run_id != run_id:
        raise ValueError(f"a snapshot of run {snapshot.live.run_id} stands where that of {run_id} should be")
    # The chunks' rows are not ours to change: what stands in the live part as well goes before them.
    merged = {**rows, **{row.id: row for row in snapshot.attempts}}
    return restore(snapshot.live, sorted(merged.values(), key=attrgetter("no")))


#: What a Desk has to be told to keep runs.
RUN_MACHINE: Machine[RunState, Command, ev.Event, Decision] = Machine(
    new=RunState,
    decide=decide,
    fold=fold,
    encode=ev.encode,
    decode=ev.decode,
    is_control=ev.is_control,
    compare_of=compare_of,
    index_of=index_of,
    snapshots=SnapshotCodec(
        version=FOLD_VERSION,
        settled_rows=_settled_rows,
        encode_rows=lambda rows: encode_rows(list(rows)),
        decode_rows=_decode_rows,
        encode_live=_encode_live,
        decode_live=_decode_live,
    ),
)
