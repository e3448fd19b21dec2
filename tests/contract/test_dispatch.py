"""One try on the wire: every way it can end has its one honest name, and one try is one arrival."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream

from admission.contracts import Operation, Prepared, parse_contract
from admission.dispatch import Dispatcher, Found, TryResult
from admission.services import SecretReference, Service
from admission.vocabulary import Basis, Method, TryOutcome
from tests.contract.raw_service import Arrival, Behaviour, RawService, answering, raw_service, reply, reset, until

pytestmark = pytest.mark.anyio

CONTRACT = """\
service: s
version: "1"
operations:
  keyed:
    request: {method: POST, path: "/act"}
    arguments: {to: string}
    target: to
    class: VOID
    idempotency: {header: Idempotency-Key, retention_ms: 86400000}
    lookup: {path: "/keys/{key}"}
    void: {path: "/keys/{key}/void"}
    not_after: {header: X-Not-After, max_age_ms: 30000, clock_skew_ms: 2000}
    refused_statuses: [422]
    unavailable_statuses: [503, 410, 412]
    timeout_ms: 400
    tries_max: 3
  plain:
    request: {method: POST, path: "/plain"}
    arguments: {to: string}
    target: to
    class: OPAQUE
    refused_statuses: [422]
    timeout_ms: 400
  patient:
    request: {method: POST, path: "/plain"}
    arguments: {to: string}
    target: to
    class: OPAQUE
    timeout_ms: 20000
"""
PARSED = parse_contract(CONTRACT, "s.yaml")
KEYED, PLAIN = PARSED.operations["keyed"], PARSED.operations["plain"]
PATIENT = PARSED.operations["patient"]
RECEIPT = reply(200, {"receipt": {"effect": "e-1"}})


def service_at(url: str, secret: SecretReference | None = None) -> Service:
    return Service("s", url, PARSED, secret)


def prepared(operation: Operation = KEYED) -> Prepared:
    return operation.prepare({"to": "bob"})


async def send(
    url: str, operation: Operation = KEYED, dispatcher: Dispatcher | None = None, secret: SecretReference | None = None
) -> TryResult:
    request = prepared(operation).request
    if dispatcher is not None:
        return await dispatcher.send(service_at(url, secret), operation, request, key="rg-1", not_after_ms=17)
    async with Dispatcher(answer_max_bytes=4096) as own:
        return await own.send(service_at(url, secret), operation, request, key="rg-1", not_after_ms=17)


def named(result: TryResult) -> tuple[TryOutcome, Basis]:
    return result.outcome, result.basis


DONE = (TryOutcome.OK, Basis.REPLY)
REFUSED = (TryOutcome.NOT_EXECUTED, Basis.SERVICE_REFUSED)
NOTHING = (TryOutcome.NOT_EXECUTED, Basis.NOTHING_WRITTEN)
DOUBT = (TryOutcome.IN_DOUBT, Basis.NO_ANSWER)


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "name", "again"),
    [
        (RECEIPT, DONE, False),
        (reply(201, {"id": 7}), DONE, False),
        (reply(204), DONE, False),
        (reply(422, {"code": "policy"}), REFUSED, False),
        (reply(422, raw=b"no JSON"), REFUSED, False),
        (reply(503, {"code": "unavailable"}), REFUSED, True),
        (reply(410, {"code": "voided"}), REFUSED, False),
        (reply(412, {"code": "expired"}), REFUSED, False),
        (reply(409, {"code": "in_progress"}), DOUBT, True),
        (reply(500, {"code": "oops"}), DOUBT, True),
        (reply(502), DOUBT, True),
        (reply(404), DOUBT, True),
        (reply(200, raw=b'{"id": 1, "id": 2}'), DONE, False),
        (reply(200, raw=b"<html>"), DOUBT, True),
        (reply(200, raw=b"[1]"), DOUBT, True),
        (reply(200), DOUBT, True),
        (reply(200, raw=b"[" * 4000), DOUBT, True),
        (reply(200, {"n": 2**80}), DOUBT, True),
        (reply(200, raw=b'{"n": NaN}'), DOUBT, True),
        (reply(200, {"s": "\ud800"}), DOUBT, True),
        (reply(200, {"text": "x" * 5000}), DOUBT, True),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000 + b"\r\n\r\n", DOUBT, True),
        (b"SMTP ready\r\n\r\n", DOUBT, True),
    ],
)
async def test_an_answer_has_one_name(answer: bytes, name: tuple[TryOutcome, Basis], again: bool) -> None:
    async with raw_service(answering(answer)) as service:
        result = await send(service.url)
    assert named(result) == name, result
    assert result.again is again
    assert len(service.arrivals) == 1


async def test_the_receipt_is_what_was_observed() -> None:
    async with raw_service(answering(RECEIPT)) as service:
        result = await send(service.url)
    assert result.observed == {"effect": "e-1"}
    assert result.status == 200
    async with raw_service(answering(reply(422, {"code": "policy", "message": "no"}))) as service:
        result = await send(service.url)
    assert result.observed == {"code": "policy", "message": "no"}


async def test_a_redirect_is_not_followed() -> None:
    async with raw_service(answering(RECEIPT)) as elsewhere:
        there = f"Location: {elsewhere.url}/act\r\n"
        async with raw_service(answering(reply(307, headers=there))) as service:
            result = await send(service.url)
    assert named(result) == DOUBT
    assert len(service.arrivals) == 1
    assert elsewhere.connections == 0


# --- nothing written -------------------------------------------------------------------------------------------------


async def test_a_refused_connection_wrote_nothing(free_port: int) -> None:
    result = await send(f"http://127.0.0.1:{free_port}")
    assert named(result) == NOTHING
    assert result.again


async def test_an_unknown_host_wrote_nothing() -> None:
    assert named(await send("http://no-such-host.invalid")) == NOTHING


async def test_a_failed_handshake_wrote_nothing() -> None:
    async def garbage(stream: SocketStream, arrival: Arrival) -> bool:
        await stream.send(b"not TLS at all\r\n\r\n")
        return False

    async with raw_service(answering(RECEIPT), on_connect=garbage) as service:
        result = await send(service.url.replace("http:", "https:"))
    assert named(result) == NOTHING
    assert service.arrivals == []


async def test_no_free_connection_in_time_wrote_nothing() -> None:
    release = anyio.Event()

    async def busy(stream: SocketStream, arrival: Arrival) -> bool:
        await release.wait()
        await stream.send(RECEIPT)
        return True

    async with raw_service(busy) as service, Dispatcher(connections_max=1) as dispatcher:
        results: list[TryResult] = []

        async def first() -> None:
            results.append(await send(service.url, PATIENT, dispatcher))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first)
            await until(lambda: bool(service.arrivals))
            assert named(await send(service.url, PLAIN, dispatcher)) == NOTHING
            release.set()
    assert [named(r) for r in results] == [DONE]
    assert len(service.arrivals) == 1


async def test_a_missing_credential_wrote_nothing(tmp_path: Path) -> None:
    async with raw_service(answering(RECEIPT)) as service:
        result = await send(service.url, secret=SecretReference("file:gone", tmp_path, {}))
    assert named(result) == NOTHING
    assert "file:gone" in result.detail
    assert service.connections == 0


# --- in doubt --------------------------------------------------------------------------------------------------------


async def _close(stream: SocketStream, arrival: Arrival) -> bool:
    return False


async def _reset(stream: SocketStream, arrival: Arrival) -> bool:
    reset(stream)
    return False


async def _half(stream: SocketStream, arrival: Arrival) -> bool:
    await stream.send(RECEIPT[:-5])
    return False


async def _half_refusal(stream: SocketStream, arrival: Arrival) -> bool:
    await stream.send(reply(422, {"code": "policy"})[:-5])
    return False


async def _silent(stream: SocketStream, arrival: Arrival) -> bool:
    await anyio.sleep(30)
    return False


async def _trickle(stream: SocketStream, arrival: Arrival) -> bool:
    for at in range(len(RECEIPT)):
        await stream.send(RECEIPT[at : at + 1])
        await anyio.sleep(0.05)
    return False


@pytest.mark.parametrize("behave", [_close, _reset, _half, _half_refusal, _silent, _trickle])
@pytest.mark.parametrize("operation", [KEYED, PLAIN], ids=["keyed", "plain"])
async def test_whatever_breaks_off_after_the_request_is_in_doubt(behave: Behaviour, operation: Operation) -> None:
    async with raw_service(behave) as service:
        with anyio.fail_after(3):
            result = await send(service.url, operation)
    assert named(result) == DOUBT
    assert result.again is (operation is KEYED)
    assert len(service.arrivals) == 1


@pytest.mark.parametrize("behave", [_close, _reset])
async def test_a_connection_dropped_unread_is_in_doubt_and_not_tried_again(behave: Behaviour) -> None:
    """We cannot see that the service read nothing, so we do not say so."""
    async with raw_service(answering(RECEIPT), on_connect=behave) as service:
        result = await send(service.url)
    assert named(result) == DOUBT
    assert service.connections == 1


# --- one try is one arrival ------------------------------------------------------------------------------------------


def _first_good_then_dropped(service_box: list[RawService]) -> Behaviour:
    async def behave(stream: SocketStream, arrival: Arrival) -> bool:
        if len(service_box[0].arrivals) == 1:
            await stream.send(RECEIPT)
            return True
        return False

    return behave


async def test_a_kept_connection_that_drops_is_not_tried_again_in_secret() -> None:
    box: list[RawService] = []
    async with raw_service(_first_good_then_dropped(box)) as service, Dispatcher() as dispatcher:
        box.append(service)
        assert named(await send(service.url, KEYED, dispatcher)) == DONE
        assert named(await send(service.url, KEYED, dispatcher)) == DOUBT
    assert [a.connection for a in service.arrivals] == [1, 1]
    assert service.connections == 1


async def test_a_kept_connection_that_was_closed_meanwhile_is_not_used() -> None:
    async def once(stream: SocketStream, arrival: Arrival) -> bool:
        await stream.send(RECEIPT)
        return False

    async with raw_service(once) as service, Dispatcher() as dispatcher:
        for n in (1, 2):
            assert named(await send(service.url, KEYED, dispatcher)) == DONE
            await until(lambda n=n: service.closed >= n)  # type: ignore[misc]
    assert [a.connection for a in service.arrivals] == [1, 2]


async def test_without_a_key_no_connection_is_used_twice() -> None:
    async with raw_service(answering(RECEIPT)) as service, Dispatcher() as dispatcher:
        for _ in range(3):
            assert named(await send(service.url, PLAIN, dispatcher)) == DONE
    assert [a.connection for a in service.arrivals] == [1, 2, 3]


async def test_two_tries_are_the_same_bytes_under_the_same_key() -> None:
    async with raw_service(answering(reply(503, {}))) as service, Dispatcher() as dispatcher:
        await send(service.url, KEYED, dispatcher)
        await send(service.url, KEYED, dispatcher)
    one, two = service.arrivals
    assert (one.line, one.body) == (two.line, two.body) == ("POST /act HTTP/1.1", b'{"to":"bob"}')
    assert one.headers == two.headers
    assert one.headers["idempotency-key"] == "rg-1"
    assert one.headers["x-not-after"] == "17"


async def test_a_contract_without_a_key_sends_none() -> None:
    async with raw_service(answering(RECEIPT)) as service:
        await send(service.url, PLAIN)
    assert "idempotency-key" not in service.arrivals[0].headers
    assert "x-not-after" not in service.arrivals[0].headers


# --- credentials -----------------------------------------------------------------------------------------------------


async def test_the_credential_travels_and_is_in_no_result() -> None:
    async def echo(stream: SocketStream, arrival: Arrival) -> bool:
        await stream.send(reply(422, {"you_sent": arrival.headers["authorization"]}))
        return True

    secret = SecretReference("env:SHOP", Path(), {"SHOP": "s3cr3t"})
    async with raw_service(echo) as service:
        result = await send(service.url, secret=secret)
    assert service.arrivals[0].headers["authorization"] == "Bearer s3cr3t"
    assert "s3cr3t" not in repr(result)
    assert result.observed == {"you_sent": "Bearer ***"}


SLASHED = "tok/7+aB=="


@pytest.mark.parametrize(
    ("body", "observed"),
    [
        (rb'{"echo": "Bearer tok\/7+aB=="}', {"echo": "Bearer ***"}),
        (rb'{"echo": ["\u0074ok/7\u002baB=\u003d", {"d": "x tok\/7+aB== y"}]}', {"echo": ["***", {"d": "x *** y"}]}),
        (rb'{"tok\/7+aB==": 1}', {"***": 1}),
    ],
)  # fmt: skip
async def test_an_echoed_credential_is_blotted_however_json_spells_it(body: bytes, observed: object) -> None:
    secret = SecretReference("env:SHOP", Path(), {"SHOP": SLASHED})
    async with raw_service(answering(reply(422, raw=body))) as service:
        result = await send(service.url, secret=secret)
    assert named(result) == REFUSED
    assert result.observed == observed


async def test_what_a_service_says_of_a_key_is_blotted_too() -> None:
    secret = SecretReference("env:SHOP", Path(), {"SHOP": SLASHED})
    answer = reply(200, raw=rb'{"state": "executed", "receipt": {"by": "tok\/7+aB=="}}')
    async with raw_service(answering(answer)) as service, Dispatcher() as dispatcher:
        asked = await dispatcher.ask(service_at(service.url, secret), KEYED, Method.LOOKUP, key="rg-1", target="bob")
    assert (asked.found, asked.observed) == (Found.EXECUTED, {"by": "***"})


@pytest.mark.parametrize("then", ["another-1", None])
async def test_a_credential_that_is_changed_before_the_answer_is_still_blotted(then: str | None) -> None:
    kept = {"SHOP": "s3cr3t"}

    async def change_and_echo(stream: SocketStream, arrival: Arrival) -> bool:
        kept.clear()
        kept.update({"SHOP": then} if then else {})
        await stream.send(reply(422, {"you_sent": arrival.headers["authorization"]}))
        return True

    async with raw_service(change_and_echo) as service:
        result = await send(service.url, secret=SecretReference("env:SHOP", Path(), kept))
    assert result.observed == {"you_sent": "Bearer ***"}


async def test_a_credential_that_cannot_be_a_header_is_not_quoted() -> None:
    secret = SecretReference("env:SHOP", Path(), {"SHOP": "s3cr3t\r\nX: y"})
    async with raw_service(answering(RECEIPT)) as service:
        result = await send(service.url, secret=secret)
    assert named(result) == NOTHING
    assert "s3cr3t" not in repr(result)
    assert service.connections == 0


# --- asking afterwards -----------------------------------------------------------------------------------------------

CLOCK = "X-Clock: 1700000000123\r\n"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (reply(200, {"state": "executed", "status": 200, "receipt": {"e": 1}}, headers=CLOCK), Found.EXECUTED),
        (reply(200, {"state": "refused", "status": 422, "error": {"code": "policy"}}, headers=CLOCK), Found.REFUSED),
        (reply(200, {"state": "voided"}, headers=CLOCK), Found.VOIDED),
        (reply(404, {"state": "not_found"}, headers=CLOCK), Found.NOT_FOUND),
        (reply(404, {"detail": "Not Found"}, headers=CLOCK), Found.UNSUPPORTED),
        (reply(405, headers=CLOCK), Found.UNSUPPORTED),
        (reply(500, {"state": "not_found"}, headers=CLOCK), Found.UNREACHABLE),
        (reply(200, {"state": "perhaps"}, headers=CLOCK), Found.UNREACHABLE),
        (reply(200, raw=b"", headers=CLOCK), Found.UNREACHABLE),
    ],
)
async def test_an_answer_about_a_key(answer: bytes, found: Found) -> None:
    async with raw_service(answering(answer)) as service, Dispatcher() as dispatcher:
        asked = await dispatcher.ask(service_at(service.url), KEYED, Method.LOOKUP, key="rg-1", target="bob")
    assert asked.found is found
    assert asked.clock_ms == 1700000000123
    assert service.arrivals[0].line == "GET /keys/rg-1 HTTP/1.1"


async def test_the_payload_is_compared() -> None:
    right = prepared().request.body_sha256
    for seen, matches in ((right, True), ("0" * 64, False), (None, None)):
        body = {"state": "executed", "receipt": {"e": 1}, **({"payload_sha256": seen} if seen else {})}
        async with raw_service(answering(reply(200, body))) as service, Dispatcher() as dispatcher:
            asked = await dispatcher.ask(
                service_at(service.url), KEYED, Method.LOOKUP, key="rg-1", target="bob", body_sha256=right
            )
        assert asked.payload_matches is matches
        assert asked.observed == {"e": 1}


async def test_a_void_is_a_post_and_a_date_is_a_clock() -> None:
    answer = reply(200, {"state": "voided"}, headers="Date: Tue, 14 Nov 2023 22:13:20 GMT\r\n")
    async with raw_service(answering(answer)) as service, Dispatcher() as dispatcher:
        asked = await dispatcher.ask(service_at(service.url), KEYED, Method.VOID, key="rg-1", target="bob")
    assert asked.found is Found.VOIDED
    assert asked.clock_ms == 1700000000000
    assert service.arrivals[0].line == "POST /keys/rg-1/void HTTP/1.1"


async def test_asking_nobody(free_port: int) -> None:
    async with Dispatcher() as dispatcher:
        gone = service_at(f"http://127.0.0.1:{free_port}")
        asked = await dispatcher.ask(gone, KEYED, Method.LOOKUP, key="rg-1", target="bob")
        assert asked.found is Found.UNREACHABLE
        assert asked.clock_ms is None
        asked = await dispatcher.ask(gone, PLAIN, Method.VOID, key="rg-1", target="bob")
        assert asked.found is Found.UNSUPPORTED


def test_frozen_bytes_hold_no_credential_and_no_key() -> None:
    assert set(json.loads(prepared().frozen)) == {"method", "path", "body"}
