"""Every word that more than one room of regate uses, with its one meaning.

Knows: identifiers, closed sets of states, verdicts and reasons, and how identifiers are derived.
Does not know: events, rules, storage, HTTP. Pure: nothing here reads a clock, makes a random id or does I/O, so that
a derived name is the same whoever derives it (a crashed process relaunches the *same* child, resends the *same* key).
The words are explained in docs/glossary.md.
"""

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class RunPhase(StrEnum):
    """Where a run stands. Derived from its folded state, never stored (protocol: run table)."""

    NONE = "none"
    RUNNING = "running"
    PAUSED = "paused"
    REDIRECTING = "redirecting"
    BLOCKED = "blocked"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    CANCELLED_UNRESOLVED = "cancelled_unresolved"
    COMPLETED = "completed"
    FAILED = "failed"


TERMINAL_PHASES = frozenset({RunPhase.CANCELLED, RunPhase.COMPLETED, RunPhase.FAILED})


class GateState(StrEnum):
    """The gate of one scope. Only OPEN admits."""

    OPEN = "open"
    HELD = "held"
    CLOSED = "closed"
    SEALED = "sealed"


class ChildState(StrEnum):
    """One child: an A2A task that works for one scope under one revision."""

    PLANNED = "planned"
    LAUNCHING = "launching"
    RUNNING = "running"
    STOP_REQUESTED = "stop_requested"
    STOP_REFUSED = "stop_refused"
    UNREACHABLE = "unreachable"
    STOP_CONFIRMED = "stop_confirmed"
    ENDED = "ended"
    LOST = "lost"


#: States a child never leaves: a terminal A2A state was observed, or it is given up as lost.
SETTLED_CHILDREN = frozenset({ChildState.STOP_CONFIRMED, ChildState.ENDED, ChildState.LOST})


class ChildMode(StrEnum):
    """MEDIATED: every effect passes the gate. AUTONOMOUS: acts on its own, so a gate waits until it is seen to end."""

    MEDIATED = "mediated"
    AUTONOMOUS = "autonomous"


class TaskState(StrEnum):
    """A2A task states, in our spelling."""

    SUBMITTED = "submitted"
    WORKING = "working"
    INPUT_REQUIRED = "input_required"
    AUTH_REQUIRED = "auth_required"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    REJECTED = "rejected"


TERMINAL_TASKS = frozenset({TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELED, TaskState.REJECTED})


class AttemptState(StrEnum):
    """One admitted intention to act on the world."""

    ADMITTED = "admitted"
    SENDING = "sending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REVOKED = "revoked"
    UNKNOWN = "unknown"


OPEN_ATTEMPTS = frozenset({AttemptState.ADMITTED, AttemptState.SENDING, AttemptState.UNKNOWN})


class TryOutcome(StrEnum):
    """How one send on the wire ended."""

    GRANTED = "granted"
    OK = "ok"
    NOT_EXECUTED = "not_executed"
    IN_DOUBT = "in_doubt"


class Basis(StrEnum):
    """Why we believe an outcome. Every settled attempt names one."""

    REPLY = "reply"
    NO_ANSWER = "no_answer"
    SERVICE_REFUSED = "service_refused"
    NOTHING_WRITTEN = "nothing_written"
    LOOKUP_FOUND = "lookup_found"
    VOIDED = "voided"
    NOT_AFTER_PASSED = "not_after_passed"
    NEVER_GRANTED = "never_granted"
    GAVE_UP = "gave_up"
    OPERATOR = "operator"


class Finding(StrEnum):
    """What a classification says became of an attempt."""

    EXECUTED = "executed"
    NOT_EXECUTED = "not_executed"
    UNKNOWN = "unknown"


class ContractClass(StrEnum):
    """What a service offers for finding out what became of a request (protocol section 6)."""

    VOID = "VOID"
    NOT_AFTER = "NOT_AFTER"
    GW_ACK = "GW_ACK"
    LOOKUP = "LOOKUP"
    KEY = "KEY"
    OPAQUE = "OPAQUE"


class Blocks(StrEnum):
    """What an unknown attempt blocks: its whole scope, or only the slot that it could double."""

    SCOPE = "scope"
    SLOT = "slot"


class Method(StrEnum):
    """How a service is asked what became of an attempt."""

    LOOKUP = "lookup"
    VOID = "void"


class Verdict(StrEnum):
    """The gate's answer to a worker that asks for an effect."""

    DONE = "done"
    DONE_BEFORE = "done_before"
    FAILED = "failed"
    IN_DOUBT = "in_doubt"
    IN_FLIGHT = "in_flight"
    SUPERSEDED = "superseded"
    HELD = "held"
    NOT_CURRENT = "not_current"
    CONFLICTS_WITH = "conflicts_with"
    NEEDS_OCCURRENCE = "needs_occurrence"
    BUDGET = "budget"
    REFUSED = "refused"


class Claim(StrEnum):
    """The answer to a worker that says "this A2A task is that child, and I start now"."""

    CLAIMED = "claimed"
    DUPLICATE = "duplicate"
    SUPERSEDED = "superseded"


class Disposition(StrEnum):
    """What became of a child's result."""

    ADOPTED = "adopted"
    PARKED = "parked"
    DROPPED = "dropped"


class UpdateKind(StrEnum):
    """What a person asked of a run."""

    START = "start"
    CORRECT = "correct"
    REPLACE = "replace"
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def canonical(value: Any) -> bytes:
    """The one byte form of a JSON value: sorted keys, no spaces, UTF-8. Raises TypeError on what JSON cannot hold."""
    return _canonical(value).encode()


def digest(value: bytes) -> str:
    """sha256, in hex."""
    return hashlib.sha256(value).hexdigest()


def short_hash(*parts: str, length: int = 12) -> str:
    """A short stable name from parts; the separator cannot occur inside a part's JSON form."""
    return hashlib.sha256(canonical(list(parts))).hexdigest()[:length]


def run_id_for(principal: str, request_id: str, follows: str = "") -> str:
    """The id of the run that this request creates, so that creating is safe to repeat.

    A linked run carries its root's id in front, because all runs of a lineage live in the root's partition.
    """
    own = short_hash("run", principal, request_id, follows)
    return f"{root_of(follows)}.{own}" if follows else own


def root_of(run_id: str) -> str:
    """The root run of the lineage that `run_id` belongs to."""
    return run_id.split(".", 1)[0]


def partition_of(run_id: str, partitions: int) -> int:
    """The partition that holds a run: H(root run) mod P."""
    return int.from_bytes(hashlib.sha256(root_of(run_id).encode()).digest()[:4], "big") % partitions


def child_id_for(run_id: str, scope: str, revision: int, n: int) -> str:
    """The n-th child of a scope under a revision; also its A2A message id, so a resent launch names the same child."""
    return f"c{short_hash('child', run_id, scope, str(revision), str(n))}"


def context_id_for(run_id: str, scope: str) -> str:
    """The A2A context shared by all children of one scope."""
    return f"x{short_hash('context', run_id, scope)}"


def slot_of(service: str, operation: str, target: str, identity: Mapping[str, Any], *, occurrence: int = 1) -> str:
    """The name of an intended effect: same intent, same slot, across revisions and workers (protocol section 1)."""
    body = canonical([service, operation, target, dict(identity)])
    return f"{hashlib.sha256(body).hexdigest()[:20]}#{occurrence}"


def idempotency_key(run_id: str, slot: str, generation: int) -> str:
    """The key sent to a service. Derived from the lineage's root, so it survives loss of the ledger."""
    return f"rg-{short_hash('key', root_of(run_id), slot, str(generation), length=32)}"


def scope_prefixes(scope: str) -> tuple[str, ...]:
    """`a/b/c` gives `a`, `a/b`, `a/b/c`: every gate that must be open for it."""
    parts = scope.split("/")
    return tuple("/".join(parts[: i + 1]) for i in range(len(parts)))


def within(scope: str, prefix: str) -> bool:
    """Whether `scope` is `prefix` or lies below it."""
    return scope == prefix or scope.startswith(prefix + "/")
