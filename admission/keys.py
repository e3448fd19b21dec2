"""Every key of the store, and no other file spells one.

Knows: how keys are named, and that all keys of a partition share one hash tag, so that a commit touches one slot of a
cluster. Does not know what stands behind a key; that is the business of store.py and of the scripts in lua/. Pure.
"""

from dataclasses import dataclass

from admission.vocabulary import partition_of

#: Outside all partitions: identity, format and partition count of the store (JSON).
META = "regate:meta"
#: Which data directory an embedded server's content belongs to; missing in a store that lost it.
DATA_DIRECTORY = "regate:data-directory"


def tag(partition: int) -> str:
    """The hash tag of a partition."""
    return f"{{p{partition:02d}}}"


@dataclass(frozen=True, slots=True)
class PartitionKeys:
    """The indexes that all runs of one partition share."""

    #: Stream `0-<commit number>` of (run, version): a doorbell, capped.
    feed: str
    #: Sorted set of runs by the partition's commit number at their last change.
    runs: str
    #: Set of runs that are not finished.
    live: str
    #: Sorted set of runs with something for a person, by since when (ms).
    attention: str
    #: Sorted set with one entry a run: its earliest due time (ms).
    timers: str
    #: Hash: holder, incarnation, epoch, until when.
    lease: str


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of one run."""

    #: Stream of (commit id, server ms, number of events, events one a line), `n-0` with the position of the last event.
    log: str
    #: Hash: version of the log (v), count of control events (c), what the indexes hold of the run (i).
    head: str


def partition_keys(partition: int) -> PartitionKeys:
    """The keys of a partition."""
    start = tag(partition)
    return PartitionKeys(
        feed=f"{start}:feed",
        runs=f"{start}:runs",
        live=f"{start}:live",
        attention=f"{start}:attention",
        timers=f"{start}:timers",
        lease=f"{start}:lease",
    )


def run_keys(run: str, partitions: int) -> RunKeys:
    """The keys of a run, in the partition of its lineage's root."""
    start = _run(run, partitions)
    return RunKeys(log=f"{start}:log", head=f"{start}:head")


def blob_key(run: str, partitions: int, sha: str) -> str:
    """Where a run keeps bytes under their sha256."""
    return blob_prefix(run, partitions) + sha


def blob_prefix(run: str, partitions: int) -> str:
    """What the keys of all blobs of a run begin with; the sha256 follows."""
    return f"{_run(run, partitions)}:blob:"


def snapshot_key(run: str, partitions: int, fold_version: str) -> str:
    """Where a run keeps its folded state, as this version of the fold writes it."""
    return f"{_run(run, partitions)}:snapshot:{fold_version}"


def _run(run: str, partitions: int) -> str:
    return f"{tag(partition_of(run, partitions))}:run:{run}"
