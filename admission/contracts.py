"""What a service promises: contract files read, checked, and put to use.

A contract says, for each operation of a service, what it takes, which arguments make it the same intent, and what the
service offers for finding out what became of a request (protocol section 6). A contract that claims a class without
offering what the class rests on, or that forgets keys before a request can no longer arrive, is refused here, with file
and line, so that no later code has to doubt it. Pure: text comes in, values go out; no credentials, no addresses.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

import yaml
from pydantic import ValidationError

from admission.contract_parts import KEYS, PLACEHOLDER, ContractPart, OperationPart, complaints, placeholders
from admission.events import ContractFacts
from admission.vocabulary import canonical, digest, slot_of

CONTRACT_MAX_BYTES = 256 * 1024
#: Frozen request bytes travel in the commit that admits them, which takes blobs up to this size.
FROZEN_MAX_BYTES = 64 * 1024
#: "Not executed", but asking again under the same key cannot end otherwise: gone for good, or expired.
FINAL_STATUSES = frozenset({410, 412})
OCCURRENCE_MAX = 1_000
BARE_OPTIONALS_MAX = 200

_BARE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


class Problem(NamedTuple):
    """One thing wrong with a contract: where it stands, and what to do."""

    line: int
    text: str


class ContractError(Exception):
    """A contract file cannot be used. `problems` in the order of their lines; the message has one line for each."""

    def __init__(self, file: str, problems: Sequence[Problem]) -> None:
        self.file = file
        self.problems = tuple(sorted(problems))
        super().__init__("\n".join(f"{file}:{line}: {text}" for line, text in self.problems))


class ArgumentsError(Exception):
    """Arguments do not match the contract. The message names each one that does not, and what is wanted."""


class ArgumentsTooLarge(Exception):
    """The frozen request would exceed FROZEN_MAX_BYTES."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it was frozen: sent in these bytes, every time. `body` is empty where none is sent."""

    method: str
    path: str
    body: bytes

    @property
    def body_sha256(self) -> str:
        """What a service that hashes its payloads should have seen."""
        return digest(self.body)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An intended effect, named and frozen. `frozen`: canonical bytes of method, path, body; `input_ref` their hash."""

    target: str
    slot: str
    conflict_key: str
    frozen: bytes
    input_ref: str
    request: Request


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation, ready for use. `refusal` is not empty when the contract forbids it to agents."""

    name: str
    part: OperationPart
    facts: ContractFacts

    @property
    def refusal(self) -> str:
        """Why the contract refuses this operation; empty if it does not."""
        return self.part.refuse or ""

    def prepare(self, arguments: Mapping[str, Any], *, occurrence: int = 1) -> Prepared:
        """Name and freeze the effect that these arguments ask for.

        An optional argument given as null counts as not given. Raises ArgumentsError, ArgumentsTooLarge.
        """
        part = self.part
        given = _checked(part.arguments, arguments)
        target = str(given[part.target])
        if not target:
            raise ArgumentsError(f"argument `{part.target}` must not be empty: it names what is touched")
        declared = [name.rstrip("?") for name in part.arguments]
        names = part.identity if part.identity is not None else [n for n in declared if n not in part.generated]
        identity = {name: _plain(given[name]) for name in names if name in given}
        in_path = set(placeholders(part.request.path))
        body = {name: value for name, value in given.items() if name not in in_path}
        path = _fill_path(part.request.path, given)
        frozen = canonical({"method": part.request.method, "path": path, "body": body})
        if len(frozen) > FROZEN_MAX_BYTES:
            raise ArgumentsTooLarge(f"the request has {len(frozen)} bytes, at most {FROZEN_MAX_BYTES} are taken")
        return Prepared(
            target=target,
            slot=slot_of(self.facts.service, self.name, target, identity, occurrence=occurrence),
            conflict_key=PLACEHOLDER.sub(lambda m: str(given[m[1]]), part.conflict_key or ""),
            frozen=frozen,
            input_ref=digest(frozen),
            request=Request(part.request.method, path, _body_bytes(part.request.method, body)),
        )

    def ask_path(self, path: str, *, key: str, target: str) -> str:
        """The path of a lookup or void for one attempt."""
        return _fill_path(path, {"key": key, "target": target})


@dataclass(frozen=True, slots=True)
class Contract:
    """A service's contract. `schema_hash` changes with anything in it that has a meaning."""

    service: str
    version: str
    schema_hash: str
    operations: Mapping[str, Operation]


def read_frozen(frozen: bytes) -> Request:
    """The request in frozen bytes (`Prepared.frozen`, or the blob that an attempt's `input_ref` names)."""
    fields = json.loads(frozen)
    return Request(fields["method"], fields["path"], _body_bytes(fields["method"], fields["body"]))


def parse_contract(text: str, file: str) -> Contract:
    """The contract in a YAML text. `file` is only for messages. Raises ContractError with everything that is wrong."""
    if len(text.encode()) > CONTRACT_MAX_BYTES:
        raise ContractError(file, [Problem(1, f"the file is larger than {CONTRACT_MAX_BYTES} bytes")])
    try:
        loader, root = _composed(text)
        if not isinstance(root, yaml.MappingNode):
            raise ContractError(file, [Problem(1, "expected `service:`, `version:` and `operations:`")])
        doubled = list(_doubled_keys(root))
        data = loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ContractError(file, [Problem(mark.line + 1 if mark else 1, f"not YAML: {error.problem}")]) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ContractError(file, [Problem(1, f"not readable as YAML: {type(error).__name__}")]) from None
    if doubled:
        raise ContractError(file, doubled)
    try:
        part = ContractPart.model_validate(data)
    except ValidationError as error:
        raise ContractError(file, [_worded(root, dict(e)) for e in error.errors(include_url=False)]) from None
    found = [
        Problem(_line(root, ("operations", name, *where))[0], f"operations.{name}: {words}")
        for name, operation in part.operations.items()
        for where, words in complaints(operation, part.operations)
    ]
    if found:
        raise ContractError(file, found)
    schema_hash = digest(canonical(part.model_dump(mode="json", by_alias=True)))[:16]
    operations = {n: Operation(n, o, _facts(part, n, o, schema_hash=schema_hash)) for n, o in part.operations.items()}
    return Contract(part.service, part.version, schema_hash, operations)


def _composed(text: str) -> tuple[yaml.SafeLoader, yaml.Node | None]:
    """The text's nodes. Raises yaml.YAMLError.

    YAML 1.2 allows `{note?: string}`, but the library stops at that `?`. Where it says it stopped, and only there, the
    name is put in quotes; no line moves.
    """
    for _ in range(BARE_OPTIONALS_MAX):
        loader = yaml.SafeLoader(text)
        try:
            return loader, loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            at = error.problem_mark.index if error.problem_mark else len(text)
            name = _BARE_NAME.search(text, 0, at)
            if name is None or not text[at:].startswith(("?:", "? :")):
                raise
            text = f'{text[: name.start()]}"{name[0]}?"{text[at + 1 :]}'
    raise yaml.YAMLError(f"more than {BARE_OPTIONALS_MAX} optional arguments; put them in quotes")


def _facts(contract: ContractPart, name: str, o: OperationPart, *, schema_hash: str) -> ContractFacts:
    return ContractFacts(
        service=contract.service,
        operation=name,
        version=contract.version,
        contract_class=o.contract_class,
        schema_hash=schema_hash,
        unknown_blocks=o.unknown_blocks,
        dedupes=o.idempotency is not None,
        tries_max=o.tries_max,
        timeout_ms=o.timeout_ms,
        retention_ms=o.idempotency.retention_ms if o.idempotency else 0,
        late_arrival_max_ms=(o.idempotency.late_arrival_max_ms or 0) if o.idempotency else 0,
        not_after_max_age_ms=o.not_after.max_age_ms if o.not_after else 0,
        clock_skew_ms=o.not_after.clock_skew_ms if o.not_after else 0,
        lookup_lag_ms=o.lookup.lag_max_ms if o.lookup else 0,
        reconcile_deadline_ms=o.reconcile_deadline_ms,
        cost=o.cost,
    )


# --- arguments -------------------------------------------------------------------------------------------------------


def _checked(declared: Mapping[str, str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    wrong = []
    given: dict[str, Any] = {}
    for spelled, kind in declared.items():
        name = spelled.rstrip("?")
        value = arguments.get(name)
        if value is None and (spelled.endswith("?") or name not in arguments):
            if not spelled.endswith("?"):
                wrong.append(f"argument `{name}` ({kind}) is missing")
            continue
        fits = isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
        if not fits:
            wrong.append(f"argument `{name}` must be {kind}, not {_kind_of(value)}")
        given[name] = value
    known = [name.rstrip("?") for name in declared]
    unknown = [name for name in arguments if name not in known]
    wrong += [f"argument `{n[:64]}` is unknown{_meant(n, known)}; known: {', '.join(known) or 'none'}" for n in unknown]
    if wrong:
        raise ArgumentsError("; ".join(wrong))
    return given


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind in ("boolean", "string", "integer", "number", "array", "object"):
        if isinstance(value, _TYPES[kind]):
            return kind
    return type(value).__name__


def _plain(value: Any) -> Any:
    """1.0 and 1 are the same number to whoever wrote them, so they must name the same slot."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value


def _fill_path(path: str, values: Mapping[str, Any]) -> str:
    def filled(match: re.Match[str]) -> str:
        value = str(values[match[1]])
        if value in ("", ".", ".."):
            raise ArgumentsError(f"argument `{match[1]}` stands in the path and cannot be {value!r}")
        return quote(value, safe="")

    return PLACEHOLDER.sub(filled, path)


def _body_bytes(method: str, body: Mapping[str, Any]) -> bytes:
    return b"" if method == "DELETE" and not body else canonical(body)


def _meant(name: object, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(name)[:64], known, n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""


# --- lines -----------------------------------------------------------------------------------------------------------


def _line(root: yaml.MappingNode, where: Sequence[str | int]) -> tuple[int, list[str]]:
    """The line of the deepest part of `where` that stands in the file, and the keys that led there."""
    node: yaml.Node = root
    line, path = 1, []
    for step in where:
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if getattr(k, "value", None) == str(step)), None)
            if found is None:
                continue  # not in the file: a missing key, or a name that only the checker uses
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line + 1
        else:
            continue
        path.append(str(step))
    return line, path


def _doubled_keys(node: yaml.Node, depth: int = 0) -> Iterator[Problem]:
    """YAML lets the last of two equal keys win in silence; in a promise that hides a mistake."""
    if depth > 20:
        return
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(getattr(key, "value", ""))
            if name in seen:
                yield Problem(key.start_mark.line + 1, f"the key `{name}` stands here a second time; remove one")
            seen.add(name)
            yield from _doubled_keys(value, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _doubled_keys(value, depth + 1)


def _worded(root: yaml.MappingNode, error: Mapping[str, Any]) -> Problem:
    where = tuple(error["loc"])
    line, path = _line(root, where)
    place = ".".join(path)
    last = str(where[-1]) if where else ""
    match error["type"]:
        case "missing":
            words = f"`{last}` is missing"
        case "extra_forbidden":
            place = ".".join(path[:-1])
            words = f"unknown key `{last}`{_meant(last, KEYS)}"
        case "string_pattern_mismatch" if where[-1:] == ("[key]",):
            words = f"`{where[-2]}` is not a name: letters, digits and `_`, at most 64"
        case "string_pattern_mismatch":
            words = f"{str(error['input'])[:64]!r} cannot be used here; wanted: {error['ctx']['pattern']}"
        case "string_type":
            words = f"must be a text, not {_kind_of(error['input'])}; put it in quotes"
        case _:
            words = f"{error['msg'][:1].lower()}{error['msg'][1:]}"
    return Problem(line, f"{place}: {words}" if place else words)
