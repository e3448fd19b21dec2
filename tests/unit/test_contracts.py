"""Contracts: what is read, what is refused and in which words, and what is made of arguments."""

from __future__ import annotations

import json

import pytest

from admission.contracts import (
    FROZEN_MAX_BYTES,
    ArgumentsError,
    ArgumentsTooLarge,
    Contract,
    ContractError,
    Operation,
    parse_contract,
    read_frozen,
)
from admission.vocabulary import Blocks, ContractClass, digest

GOOD = """\
service: shop
version: "1"
source: docs/shop.md
verified_on: 2026-11-30
operations:
  cancel_order:
    request: {method: POST, path: "/actions/cancel_order"}
    arguments: {order_id: string, reason: string, "note?": string}
    target: order_id
    generated: [reason, note]
    class: VOID
    idempotency: {header: Idempotency-Key, retention_ms: 86400000}
    lookup: {path: "/keys/{key}", lag_max_ms: 5}
    void: {path: "/keys/{key}/void"}
    not_after: {header: X-Not-After, max_age_ms: 30000, clock_skew_ms: 2000}
    refused_statuses: [422]
    unavailable_statuses: [503, 410, 412]
    timeout_ms: 5000
    tries_max: 3
    undo: "none, because the goods are gone"
"""


def operation_text(body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return f'service: s\nversion: "1"\noperations:\n  act:\n{lines}'


def problems(text: str) -> list[tuple[int, str]]:
    with pytest.raises(ContractError) as caught:
        parse_contract(text, "services/s.yaml")
    for line, words in caught.value.problems:
        assert f"services/s.yaml:{line}: {words}" in str(caught.value)
    return list(caught.value.problems)


def act(body: str) -> Operation:
    return parse_contract(operation_text(body), "s.yaml").operations["act"]


def good() -> Contract:
    return parse_contract(GOOD, "shop.yaml")


def test_a_good_contract_becomes_facts() -> None:
    facts = good().operations["cancel_order"].facts
    assert facts.contract_class is ContractClass.VOID
    assert (facts.service, facts.operation, facts.version) == ("shop", "cancel_order", "1")
    assert facts.unknown_blocks is Blocks.SCOPE
    assert facts.dedupes
    assert (facts.tries_max, facts.timeout_ms, facts.retention_ms) == (3, 5000, 86400000)
    assert (facts.not_after_max_age_ms, facts.clock_skew_ms, facts.lookup_lag_ms) == (30000, 2000, 5)


@pytest.mark.parametrize("spelled", ["note?", "'note?'", "note? "])
def test_an_optional_argument_needs_no_quotes_inside_braces(spelled: str) -> None:
    """The YAML library alone stops at the question mark."""
    text = GOOD.replace('"note?"', spelled)
    assert parse_contract(text, "x").schema_hash == good().schema_hash
    two = GOOD.replace('"note?": string', "note?: string, more?: string")
    assert "more?" in parse_contract(two, "x").operations["cancel_order"].part.arguments
    [(line, _)] = problems(text.replace("class: VOID", "class: SURE"))
    assert line == 11


@pytest.mark.parametrize("broken", ["[a?b", "{a?b: c}", "{?: c}", "{a ?: c}"])
def test_other_question_marks_are_left_alone(broken: str) -> None:
    found = problems(f"service: s\nversion: {broken}")
    assert all(line in (1, 2) and words for line, words in found)


def test_the_schema_hash_follows_the_meaning() -> None:
    reordered = GOOD.replace("    timeout_ms: 5000\n    tries_max: 3\n", "    tries_max: 3\n    timeout_ms: 5000\n")
    assert parse_contract(reordered, "x").schema_hash == good().schema_hash
    assert parse_contract(GOOD.replace("5000", "5001"), "x").schema_hash != good().schema_hash


MINIMAL = 'request: {method: POST, path: "/a"}\narguments: {to: string}\ntarget: to\nclass: OPAQUE'


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "expected `service:`"),
        ("- 1", 1, "expected `service:`"),
        ("service: s\noperations: [", 2, "not YAML"),
        ("service: s\n\toperations: 1", 2, "not YAML"),
        ('service: s\nversion: "1"\nservice: t\noperations: {}', 3, "`service` stands here a second time"),
        ('service: s\nversion: "1"', 1, "`operations` is missing"),
        ("service: s\nversion: 1\noperations: {}", 2, "version: must be a text, not integer; put it in quotes"),
        ('service: s\nversion: "1"\nurl: x\noperations: {}', 3, "unknown key `url`"),
        (GOOD.replace("tries_max", "tries_mx"), 19, "unknown key `tries_mx` (did you mean `tries_max`?)"),
        (GOOD.replace("lag_max_ms", "lag_ms"), 13, "operations.cancel_order.lookup: unknown key `lag_ms`"),
        (GOOD.replace("class: VOID", "class: SURE"), 11, "operations.cancel_order.class"),
        (GOOD.replace("    class: VOID\n", ""), 6, "operations.cancel_order: `class` is missing"),
        (GOOD.replace("order_id: string, ", "order_id: text, "), 8, "'string', 'integer'"),
        (GOOD.replace("order_id: string", "'order id': string"), 8, "`order id` is not a name"),
        (GOOD.replace("Idempotency-Key", '"Idempotency Key"'), 12, "cannot be used here"),
        (GOOD.replace("retention_ms: 86400000", "retention_ms: soon"), 12, "retention_ms"),
        (GOOD.replace("method: POST", "method: GET"), 7, "request.method"),
        (GOOD.replace("[422]", "[200]"), 16, "refused_statuses"),
        (GOOD.replace("[422]", "[422, 503]"), 17, "[503] stand in refused_statuses too"),
        (GOOD.replace("target: order_id", "target: order"), 9, "target names `order`, which is not among"),
        (GOOD.replace("target: order_id", "target: note"), 9, "target needs `note`, which is optional"),
        (GOOD.replace("[reason, note]", "[because]"), 10, "generated names `because`"),
        (GOOD.replace("/actions/cancel_order", "/orders/{id}"), 7, "request names `id`"),
        (GOOD.replace("/keys/{key}/void", "/void"), 14, "the void path must use {key}"),
        (GOOD.replace('"/keys/{key}"', '"/orders/{order_id}"'), 13, "may use {key} and {target}, not {order_id}"),
        (GOOD.replace('undo: "none, because the goods are gone"', "undo: {operation: redo}"), 20, "operation `redo`"),
    ],
)
def test_a_bad_file_is_named_with_line_and_words(text: str, line: int, words: str) -> None:
    found = problems(text)
    assert any(at == line and words in said for at, said in found), found


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        (MINIMAL.replace("OPAQUE", "VOID"), 8, "class VOID rests on `void`"),
        (MINIMAL.replace("OPAQUE", "VOID"), 8, "class VOID rests on `idempotency`"),
        (MINIMAL.replace("OPAQUE", "NOT_AFTER"), 8, "class NOT_AFTER rests on `not_after`"),
        (MINIMAL.replace("OPAQUE", "NOT_AFTER"), 8, "class NOT_AFTER rests on `lookup`"),
        (MINIMAL.replace("OPAQUE", "LOOKUP"), 8, "class LOOKUP rests on `lookup`"),
        (MINIMAL.replace("OPAQUE", "KEY"), 8, "class KEY rests on `idempotency`"),
        (MINIMAL + "\ntries_max: 2", 9, "class OPAQUE can be tried once, not 2 times"),
        (
            MINIMAL.replace("OPAQUE", "GW_ACK") + "\ntries_max: 2",
            9,
            "without `idempotency` may execute twice",
        ),
        (
            MINIMAL.replace("OPAQUE", "LOOKUP") + '\nlookup: {path: "/t/{target}"}',
            9,
            "the lookup path must use {key}",
        ),
        (MINIMAL.replace("OPAQUE", "LOOKUP") + '\nlookup: {path: "/keys/{key}"}', 9, "only sent with `idempotency`"),
        (MINIMAL + "\nidentity: [to]\ngenerated: [to]", 9, "`to` is generated anew by a model"),
        (MINIMAL + "\nconflict_key: 'mail:{whom}'", 9, "conflict_key names `whom`"),
        (MINIMAL.replace("to: string", "to: array"), 7, "to be a single value, not an array"),
        (MINIMAL.replace("to: string", 'to: string, "to?": string'), 6, "declared twice"),
    ],
)
def test_a_class_needs_what_it_claims(body: str, line: int, words: str) -> None:
    found = problems(operation_text(body))
    assert any(at == line and words in said for at, said in found), found


def test_several_mistakes_are_told_at_once_in_the_order_of_their_lines() -> None:
    found = problems(GOOD.replace("class: VOID", "class: SURE").replace("tries_max", "tries").replace("[422]", "[99]"))
    assert [line for line, _ in found] == [11, 16, 19]


class TestInequality:
    """max_age + skew + margin < retention, or late_arrival_max + margin < retention (protocol section 6)."""

    def test_it_names_both_numbers_and_what_to_change(self) -> None:
        [(line, words)] = problems(GOOD.replace("86400000", "33000"))
        assert line == 12
        for part in ("33000 ms after its permit", "max_age_ms 30000", "clock_skew_ms 2000", "retention_ms 33000"):
            assert part in words
        assert "lower not_after.max_age_ms" in words

    def test_one_millisecond_more_is_enough(self) -> None:
        assert parse_contract(GOOD.replace("86400000", "33001"), "x").operations

    KEY = MINIMAL.replace("OPAQUE", "KEY")

    def test_without_not_after_the_declared_lateness_counts(self) -> None:
        idem = "\nidempotency: {header: K, retention_ms: 10000, late_arrival_max_ms: %d}"
        assert act(self.KEY + idem % 8999).facts.late_arrival_max_ms == 8999
        [(line, words)] = problems(operation_text(self.KEY + idem % 9000))
        assert line == 9
        assert "10000 ms after its permit" in words
        assert "lower late_arrival_max_ms" in words

    def test_without_either_the_contract_is_incomplete(self) -> None:
        [(line, words)] = problems(operation_text(self.KEY + "\nidempotency: {header: K, retention_ms: 10000}"))
        assert line == 9
        assert "idempotency.late_arrival_max_ms" in words


class TestPreparing:
    """Slot, target, frozen bytes from arguments."""

    def test_generated_arguments_do_not_make_another_intent(self) -> None:
        operation = good().operations["cancel_order"]
        one = operation.prepare({"order_id": "#W1", "reason": "no longer needed"})
        two = operation.prepare({"order_id": "#W1", "reason": "by mistake", "note": "sorry"})
        assert one.slot == two.slot
        assert one.input_ref != two.input_ref
        assert one.target == "#W1"
        assert operation.prepare({"order_id": "#W2", "reason": "no longer needed"}).slot != one.slot

    def test_the_frozen_bytes_are_canonical_and_can_be_read_again(self) -> None:
        operation = good().operations["cancel_order"]
        one = operation.prepare({"reason": "é", "order_id": "#W1"})
        assert one.frozen == operation.prepare({"order_id": "#W1", "reason": "é"}).frozen
        assert one.input_ref == digest(one.frozen)
        assert read_frozen(one.frozen) == one.request
        assert json.loads(one.request.body) == {"order_id": "#W1", "reason": "é"}
        assert (one.request.method, one.request.path) == ("POST", "/actions/cancel_order")

    def test_an_occurrence_is_another_slot(self) -> None:
        operation = act(MINIMAL)
        assert operation.prepare({"to": "bob"}).slot + "" == operation.prepare({"to": "bob"}, occurrence=1).slot
        assert operation.prepare({"to": "bob"}, occurrence=2).slot != operation.prepare({"to": "bob"}).slot

    def test_null_for_an_optional_argument_is_not_given(self) -> None:
        operation = act(MINIMAL.replace("to: string", 'to: string, "cc?": string'))
        assert operation.prepare({"to": "bob", "cc": None}).frozen == operation.prepare({"to": "bob"}).frozen

    def test_the_same_number_is_the_same_intent(self) -> None:
        operation = act(MINIMAL.replace("to: string", "to: string, amount: number"))
        assert operation.prepare({"to": "b", "amount": 5}).slot == operation.prepare({"to": "b", "amount": 5.0}).slot

    def test_arguments_in_the_path_are_quoted_and_not_in_the_body(self) -> None:
        body = MINIMAL.replace('"/a"', '"/to/{to}/x"').replace("to: string", "to: string, n: integer")
        request = act(body).prepare({"to": "#1/../%", "n": 1}).request
        assert request.path == "/to/%231%2F..%2F%25/x"
        assert json.loads(request.body) == {"n": 1}
        with pytest.raises(ArgumentsError, match=r"cannot be '\.\.'"):
            act(body).prepare({"to": "..", "n": 1})

    def test_a_delete_without_arguments_left_has_no_body(self) -> None:
        body = MINIMAL.replace("POST", "DELETE").replace('"/a"', '"/to/{to}"')
        assert act(body).prepare({"to": "x"}).request.body == b""

    def test_the_conflict_key_is_filled(self) -> None:
        body = MINIMAL.replace("to: string", "to: string, about: string") + "\nconflict_key: 'mail:{to}:{about}'"
        assert act(body).prepare({"to": "bob", "about": "x"}).conflict_key == "mail:bob:x"

    def test_a_refused_operation_says_why(self) -> None:
        assert act(MINIMAL + "\nrefuse: 'only people may do this'").refusal == "only people may do this"
        assert act(MINIMAL).refusal == ""

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({}, "argument `to` (string) is missing; argument `n` (integer) is missing"),
            ({"to": 1, "n": 1}, "argument `to` must be string, not integer"),
            ({"to": None, "n": 1}, "argument `to` must be string, not null"),
            ({"to": "a", "n": True}, "argument `n` must be integer, not boolean"),
            ({"to": "a", "n": 1.5}, "argument `n` must be integer, not number"),
            ({"to": "a", "n": "1"}, "argument `n` must be integer, not string"),
            ({"to": "a", "n": 1, "nn": 2}, "argument `nn` is unknown (did you mean `n`?); known: to, n"),
            ({"to": "", "n": 1}, "argument `to` must not be empty"),
        ],
    )
    def test_arguments_that_do_not_match(self, arguments: dict[str, object], words: str) -> None:
        with pytest.raises(ArgumentsError) as caught:
            act(MINIMAL.replace("to: string", "to: string, n: integer")).prepare(arguments)
        assert words in str(caught.value)

    def test_arguments_that_are_too_large(self) -> None:
        with pytest.raises(ArgumentsTooLarge, match=str(FROZEN_MAX_BYTES)):
            act(MINIMAL).prepare({"to": "x" * FROZEN_MAX_BYTES})
