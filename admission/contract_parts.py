"""What a contract file may say: its parts, and what must not be said together.

Knows: the fields, their limits, and the rules between them (a class needs what it rests on; a key must outlive the last
request that can arrive, protocol section 6). Does not know YAML, files, lines, or what a contract is used for. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from admission.vocabulary import Blocks, ContractClass

#: What is left between the last possible arrival of a request and the moment its service forgets the key.
RETENTION_MARGIN_MS = 1_000
PLACEHOLDER = re.compile(r"\{([^{}]*)\}")

TypeName = Literal["string", "integer", "number", "boolean", "array", "object"]
Name = Annotated[StrictStr, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.\-]{0,63}$")]
ArgumentName = Annotated[StrictStr, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}\??$")]
Text = Annotated[StrictStr, Field(min_length=1, max_length=2_000)]
Header = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~\-]{1,64}$")]
Path = Annotated[StrictStr, Field(pattern=r"^/[^\s#]*$", max_length=500)]
Ms = Annotated[StrictInt, Field(gt=0, le=10**12)]
MsOrZero = Annotated[StrictInt, Field(ge=0, le=10**12)]
Status = Annotated[StrictInt, Field(ge=300, le=599)]


class Part(BaseModel):
    """A mapping in the file; a key that means nothing is an error, since it was meant to mean something."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RequestPart(Part):
    """Method and path of the call. `{argument}` in the path is replaced; the other arguments are the JSON body."""

    method: Literal["POST", "PUT", "PATCH", "DELETE"]
    path: Path


class IdempotencyPart(Part):
    """The service executes one key once, for at least `retention_ms`."""

    header: Header
    retention_ms: Ms
    late_arrival_max_ms: Ms | None = None


class LookupPart(Part):
    """Where to ask what became of a key (or target). An answer may be `lag_max_ms` behind."""

    path: Path
    lag_max_ms: MsOrZero = 0


class VoidPart(Part):
    """Where to say, atomically, that a key shall never be executed any more."""

    path: Path


class NotAfterPart(Part):
    """The service refuses a request that arrives later than this header says, by its own clock."""

    header: Header
    max_age_ms: Ms
    clock_skew_ms: MsOrZero


class UndoPart(Part):
    """Which operation takes it back."""

    operation: Name
    arguments: dict[StrictStr, Any] = {}


class OperationPart(Part):
    """One operation, as the file states it."""

    request: RequestPart
    arguments: dict[ArgumentName, TypeName]
    target: StrictStr
    identity: tuple[StrictStr, ...] | None = None
    generated: tuple[StrictStr, ...] = ()
    conflict_key: Text | None = None
    contract_class: ContractClass = Field(alias="class")
    unknown_blocks: Blocks = Blocks.SCOPE
    idempotency: IdempotencyPart | None = None
    lookup: LookupPart | None = None
    void: VoidPart | None = None
    not_after: NotAfterPart | None = None
    refused_statuses: tuple[Status, ...] = ()
    unavailable_statuses: tuple[Status, ...] = ()
    timeout_ms: Annotated[StrictInt, Field(ge=1, le=120_000)] = 10_000
    tries_max: Annotated[StrictInt, Field(ge=1, le=10)] = 1
    reconcile_deadline_ms: Ms = 10_000
    cost: Annotated[StrictInt, Field(ge=0, le=1_000_000)] = 1
    refuse: Text | None = None
    undo: Text | UndoPart | None = None


class ContractPart(Part):
    """A contract file."""

    service: Name
    version: Text
    source: Text | None = None
    verified_on: date | None = None
    operations: Annotated[dict[Name, OperationPart], Field(min_length=1, max_length=500)]


_PARTS: tuple[type[Part], ...] = (
    ContractPart, OperationPart, RequestPart, IdempotencyPart, LookupPart, VoidPart, NotAfterPart, UndoPart
)  # fmt: skip
#: Every key that has a meaning somewhere in a contract.
KEYS = sorted({field.alias or name for part in _PARTS for name, field in part.model_fields.items()})


# --- what a contract must not say ------------------------------------------------------------------------------------

#: Keys that lead to the place, and words.
Complaint = tuple[tuple[str, ...], str]

_NEEDS: Mapping[ContractClass, tuple[str, ...]] = {
    ContractClass.VOID: ("void", "idempotency"),
    ContractClass.NOT_AFTER: ("not_after", "lookup"),
    ContractClass.GW_ACK: (),
    ContractClass.LOOKUP: ("lookup",),
    ContractClass.KEY: ("idempotency",),
    ContractClass.OPAQUE: (),
}


def complaints(o: OperationPart, operations: Mapping[str, OperationPart]) -> Iterator[Complaint]:
    """(where inside the operation, what is wrong and what to change) for everything that does not fit together."""
    yield from _wrong_class(o)
    yield from _wrong_names(o)
    yield from _wrong_times(o)
    both = sorted(set(o.refused_statuses) & set(o.unavailable_statuses))
    if both:
        yield ("unavailable_statuses",), f"{both} stand in refused_statuses too; a status means one of the two"
    if isinstance(o.undo, UndoPart) and o.undo.operation not in operations:
        yield ("undo",), f"undo names the operation `{o.undo.operation}`, which this contract does not have"


def _wrong_class(o: OperationPart) -> Iterator[Complaint]:
    for need in _NEEDS[o.contract_class]:
        if getattr(o, need) is None:
            yield ("class",), f"class {o.contract_class} rests on `{need}`, which is missing; add it or lower the class"
    if o.tries_max > 1 and o.contract_class is ContractClass.OPAQUE:
        yield ("tries_max",), f"class OPAQUE can be tried once, not {o.tries_max} times; set tries_max: 1"
    elif o.tries_max > 1 and o.idempotency is None:
        yield ("tries_max",), "trying again without `idempotency` may execute twice; set tries_max: 1"


def _wrong_names(o: OperationPart) -> Iterator[Complaint]:
    declared = {name.rstrip("?"): not name.endswith("?") for name in o.arguments}
    if len(declared) < len(o.arguments):
        yield ("arguments",), "an argument is declared twice, with and without `?`"
    wanted: list[tuple[str, str]] = [("target", o.target)]
    wanted += [("conflict_key", name) for name in placeholders(o.conflict_key or "")]
    wanted += [("request", name) for name in placeholders(o.request.path)]
    for where, name in wanted:
        if name not in declared:
            yield (where,), f"{where} names `{name}`, which is not among the arguments"
        elif not declared[name]:
            yield (where,), f"{where} needs `{name}`, which is optional; remove its `?`"
        elif o.arguments[name] in ("array", "object"):
            yield (where,), f"{where} needs `{name}` to be a single value, not an {o.arguments[name]}"
    for where, names in (("identity", o.identity or ()), ("generated", o.generated)):
        for name in names:
            if name not in declared:
                yield (where,), f"{where} names `{name}`, which is not among the arguments"
    for name in sorted(set(o.identity or ()) & set(o.generated)):
        yield ("identity",), f"`{name}` is generated anew by a model, so it cannot be part of the identity"
    for where, ask in (("lookup", o.lookup), ("void", o.void)):
        asked = set(placeholders(ask.path)) if ask else set()
        for name in sorted(asked - {"key", "target"}):
            yield (where, "path"), f"the {where} path may use {{key}} and {{target}}, not {{{name}}}"
        if "key" in asked and o.idempotency is None:
            yield (where, "path"), f"the {where} path uses {{key}}, which is only sent with `idempotency`"
    if o.lookup and "key" not in placeholders(o.lookup.path):
        yield (
            ("lookup", "path"),
            "the lookup path must use {key}: what is found by target may be another effect's doing",
        )
    if o.void and "key" not in placeholders(o.void.path):
        yield ("void", "path"), "the void path must use {key}: it is one request that is voided, not a target"


def _wrong_times(o: OperationPart) -> Iterator[Complaint]:
    """Protocol section 6: a request that can arrive after its key is forgotten would be a new action."""
    if o.idempotency is None:
        return
    retention = o.idempotency.retention_ms
    if o.not_after is not None:
        age, skew = o.not_after.max_age_ms, o.not_after.clock_skew_ms
        last = age + skew + RETENTION_MARGIN_MS
        parts = f"max_age_ms {age} + clock_skew_ms {skew} + margin {RETENTION_MARGIN_MS}"
        change = "lower not_after.max_age_ms"
    elif o.idempotency.late_arrival_max_ms is not None:
        late = o.idempotency.late_arrival_max_ms
        last = late + RETENTION_MARGIN_MS
        parts = f"late_arrival_max_ms {late} + margin {RETENTION_MARGIN_MS}"
        change = "lower late_arrival_max_ms"
    else:
        yield (
            ("idempotency",),
            ("without `not_after`, say how late a request may still arrive: idempotency.late_arrival_max_ms"),
        )
        return
    if last >= retention:
        yield (
            ("idempotency", "retention_ms"),
            (
                f"a request may arrive until {last} ms after its permit ({parts}), but its key is only kept for "
                f"retention_ms {retention}: later it would be executed again; {change}, or correct retention_ms if the "
                f"service promises more than {last} ms"
            ),
        )


def placeholders(text: str) -> list[str]:
    """The names in a text's `{name}` places, in order."""
    return PLACEHOLDER.findall(text)
