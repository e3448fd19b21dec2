"""The simulated services as processes: each fault over HTTP, keys, void, expiry, and what a kill -9 leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from simulators.tasks import load, oracle

pytestmark = pytest.mark.anyio

TASK = load().tasks[1]
ADDRESS, ITEMS, CANCEL = TASK.actions
ORDER = CANCEL.target
START_DEADLINE_S = 20


class Service:
    """A service process and a client for it."""

    def __init__(self, process: subprocess.Popen[str], hello: dict[str, str]) -> None:
        self.process = process
        self.hello = hello
        self.http = httpx.AsyncClient(base_url=hello["url"], timeout=10)

    async def act(self, action: Any, key: str | None = None, **headers: str) -> httpx.Response:
        given = {"Idempotency-Key": key} if key else {}
        return await self.http.post(
            f"/actions/{action.name}", json=dict(action.arguments), headers={**given, **headers}
        )

    async def state(self, key: str) -> str:
        return str((await self.http.get(f"/keys/{key}")).json()["state"])

    async def order(self, name: str = ORDER) -> Any:
        return (await self.http.get(f"/orders/{name.replace('#', '%23')}")).json()

    async def hash(self) -> str:
        return str((await self.http.get("/database/hash")).json()["sha256"])

    async def clock(self) -> int:
        return int((await self.http.get("/healthz")).headers["X-Clock"])

    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in Path(self.hello["journal"]).read_text().splitlines()]

    def events(self) -> list[str]:
        return [line["event"] for line in self.journal()]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    async def until(self, holds: Callable[[], bool]) -> None:
        with anyio.fail_after(10):
            while not holds():  # noqa: ASYNC110 - the state is in another process
                await anyio.sleep(0.02)


Start = Callable[..., Service]


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Start]:
    started: list[Service] = []

    def start(*options: str, kind: str = "retail", journal: str = "journal.jsonl") -> Service:
        command = [sys.executable, "-m", "simulators", "service", kind, "--journal", str(tmp_path / journal), *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            _, errors = process.communicate(timeout=START_DEADLINE_S)
            raise AssertionError(f"exit {process.returncode}: {errors}")
        started.append(Service(process, json.loads(line)))
        return started[-1]

    yield start
    for service in started:
        if service.process.poll() is None:
            service.kill()
        for pipe in (service.process.stdout, service.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
async def start(start_process: Start) -> AsyncIterator[Start]:
    """As `start_process`, with the clients closed at the end."""
    services: list[Service] = []

    def remembered(*options: str, **more: str) -> Service:
        services.append(start_process(*options, **more))
        return services[-1]

    yield remembered
    for service in services:
        await service.http.aclose()


async def test_an_action_is_recorded_before_its_reply_and_replayed_by_key(start: Start) -> None:
    shop = start()
    assert shop.hello["kind"] == "retail"
    first = await shop.act(CANCEL, "k")
    (line,) = shop.journal()
    assert first.status_code == 200
    receipt = first.json()["receipt"]
    assert line["receipt"] == receipt == {**receipt, "effect": "shop-1", "target": ORDER}
    assert (line["n"], line["event"], line["key"], line["arguments"]) == (1, "executed", "k", CANCEL.arguments)
    again = await shop.act(CANCEL, "k")
    assert again.content == first.content
    assert (again.headers["Idempotent-Replay"], "Idempotent-Replay" in first.headers) == ("true", False)
    assert shop.events() == ["executed", "replayed"]
    found = (await shop.http.get("/keys/k")).json()
    assert found == {
        "state": "executed", "status": 200, "receipt": receipt, "payload_sha256": line["payload_sha256"],
    }  # fmt: skip
    assert (await shop.order())["status"] == "cancelled"
    assert (await shop.http.get("/journal")).json() == shop.journal()
    assert await shop.hash() == oracle(load().database, [CANCEL], []).database_hash


async def test_a_refusal_is_final_for_its_key_and_without_a_key_nothing_is_remembered(start: Start) -> None:
    shop = start()
    assert (await shop.act(CANCEL)).status_code == 200
    assert (await shop.act(CANCEL)).json()["rule"] == "order_not_pending"
    refused = await shop.act(CANCEL, "k")
    assert (refused.status_code, refused.json()["code"]) == (422, "policy")
    assert (await shop.act(CANCEL, "k")).headers["Idempotent-Replay"] == "true"
    assert (await shop.http.get("/keys/k")).json()["error"] == refused.json()
    assert (await shop.http.post("/keys/k/void")).json()["state"] == "refused"
    assert shop.events() == ["executed", "refused", "refused", "replayed"]


async def test_a_key_with_another_payload_leaves_the_first_outcome_alone(start: Start) -> None:
    shop = start()
    await shop.act(ADDRESS, "k")
    reused = await shop.act(CANCEL, "k")
    assert (reused.status_code, reused.json()["code"]) == (422, "key_reused")
    assert (await shop.order())["status"] == "pending"
    assert (await shop.http.get("/keys/k")).json()["receipt"]["action"] == ADDRESS.name
    assert shop.events() == ["executed", "key_reused"]


async def test_a_lost_reply_is_executed_once(start: Start) -> None:
    shop = start("--fault", f"{CANCEL.name}:lose")
    with pytest.raises(httpx.RemoteProtocolError):
        await shop.act(CANCEL, "k")
    assert shop.events() == ["executed"]
    assert await shop.state("k") == "executed"
    assert (await shop.act(CANCEL, "k")).headers["Idempotent-Replay"] == "true"


async def test_a_delayed_reply_is_recorded_long_before(start: Start) -> None:
    shop = start("--fault", f"{CANCEL.name}:delay:60000")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shop.act, CANCEL, "k")
        await shop.until(lambda: shop.events() == ["executed"])
        assert await shop.state("k") == "executed"
        tasks.cancel_scope.cancel()


async def test_a_rejected_request_did_nothing(start: Start) -> None:
    shop = start("--fault", f"{CANCEL.name}:reject::2")
    for _ in range(2):
        rejected = await shop.act(CANCEL, "k")
        assert (rejected.status_code, rejected.json()["code"]) == (503, "unavailable")
        assert await shop.state("k") == "not_found"
    assert (await shop.act(CANCEL, "k")).status_code == 200
    assert shop.events() == ["rejected", "rejected", "executed"]


async def test_a_reset_is_a_reset_and_did_nothing(start: Start) -> None:
    shop = start("--fault", "*:reset")
    with pytest.raises(httpx.ReadError) as caught:
        await shop.act(CANCEL, "k")
    assert any(isinstance(cause, ConnectionResetError) for cause in causes(caught.value))
    assert await shop.state("k") == "not_found"
    assert (await shop.act(CANCEL, "k")).status_code == 200
    assert shop.events() == ["dropped", "executed"]


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


async def test_a_late_request_happens_after_its_connection_was_dropped(start: Start) -> None:
    shop = start("--fault", f"{CANCEL.name}:late:400")
    with pytest.raises(httpx.RemoteProtocolError):
        await shop.act(CANCEL, "k")
    assert await shop.state("k") == "not_found"
    await shop.until(lambda: shop.events() == ["dropped", "executed"])
    dropped, executed = shop.journal()
    assert executed["at_ms"] - dropped["at_ms"] >= 400
    assert await shop.state("k") == "executed"


async def test_void_beats_a_late_request(start: Start) -> None:
    shop = start("--fault", f"{CANCEL.name}:late:400")
    with pytest.raises(httpx.RemoteProtocolError):
        await shop.act(CANCEL, "k")
    for _ in range(2):
        assert (await shop.http.post("/keys/k/void")).json() == {"state": "voided"}
    await shop.until(lambda: len(shop.events()) == 3)
    assert shop.events() == ["dropped", "voided", "rejected"]
    assert (await shop.order())["status"] == "pending"
    assert (await shop.act(CANCEL, "k")).status_code == 410
    assert await shop.state("k") == "voided"


async def test_a_retry_beats_a_late_request(start: Start) -> None:
    shop = start("--fault", f"{CANCEL.name}:late:400")
    with pytest.raises(httpx.RemoteProtocolError):
        await shop.act(CANCEL, "k")
    assert (await shop.act(CANCEL, "k")).status_code == 200
    assert (await shop.http.post("/keys/k/void")).json()["state"] == "executed"
    await shop.until(lambda: len(shop.events()) == 3)
    assert shop.events() == ["dropped", "executed", "replayed"]


async def test_expiry_is_judged_by_the_shops_own_clock_when_the_work_would_be_done(start: Start) -> None:
    shop = start("--clock-skew-ms", "60000", "--fault", f"{CANCEL.name}:late:400")
    ahead = await shop.clock()
    assert 55_000 < ahead - time.time() * 1000 < 65_000
    expired = await shop.act(ADDRESS, "a", **{"X-Not-After": str(ahead - 1)})
    assert (expired.status_code, expired.json()["code"]) == (412, "expired")
    assert await shop.state("a") == "not_found"
    with pytest.raises(httpx.RemoteProtocolError):
        await shop.act(CANCEL, "k", **{"X-Not-After": str(await shop.clock() + 200)})
    await shop.until(lambda: shop.events() == ["expired", "dropped", "expired"])
    assert (await shop.order())["status"] == "pending"
    assert (await shop.act(CANCEL, "k", **{"X-Not-After": str(await shop.clock() + 60_000)})).status_code == 200


async def test_a_shop_that_cannot_void_has_no_void_and_no_expiry(start: Start) -> None:
    shop = start("--cannot-void")
    assert (await shop.act(CANCEL, "k", **{"X-Not-After": "1"})).status_code == 200
    assert (await shop.http.post("/keys/other/void")).status_code in (404, 405)
    assert await shop.state("other") == "not_found"


async def test_one_key_and_one_order_at_a_time(start: Start) -> None:
    shop = start("--work-ms", "300")
    replies: list[int] = []

    async def send(action: Any, key: str) -> None:
        replies.append((await shop.act(action, key)).status_code)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send, CANCEL, "k")
        await anyio.sleep(0.1)
        busy = await shop.act(CANCEL, "k")
        assert (busy.status_code, busy.json()["code"]) == (409, "in_progress")
        tasks.start_soon(send, CANCEL, "other")
        # A void of a busy key waits for the end and tells it.
        assert (await shop.http.post("/keys/k/void")).json()["state"] == "executed"
    assert replies == [200, 422]
    assert shop.events() == ["rejected", "executed", "refused"]


async def test_many_requests_with_one_key_execute_once(start: Start) -> None:
    shop = start()
    statuses: list[int] = []

    async def send() -> None:
        statuses.append((await shop.act(CANCEL, "k")).status_code)

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(send)
    assert set(statuses) <= {200, 409}
    assert shop.events().count("executed") == 1
    assert [line["n"] for line in shop.journal()] == list(range(1, 21))


async def test_a_killed_shop_comes_back_with_keys_database_and_spent_faults(start: Start) -> None:
    options = ("--fault", f"{CANCEL.name}:lose")
    shop = start(*options)
    await shop.act(ADDRESS, "a")
    await shop.http.post("/keys/v/void")
    with pytest.raises(httpx.RemoteProtocolError):
        await shop.act(CANCEL, "k")
    refused = await shop.act(ITEMS, "i")
    before, database = shop.journal(), await shop.hash()
    shop.kill()
    with Path(shop.hello["journal"]).open("a") as torn:
        torn.write('{"n": 99, "event": "exec')
    port = shop.hello["url"].rpartition(":")[2]
    back = start(*options, "--port", port)
    assert back.hello["url"] == shop.hello["url"]
    assert back.journal() == before
    assert await back.hash() == database
    assert [await back.state(key) for key in "akiv"] == ["executed", "executed", refused_state(refused), "voided"]
    assert (await back.act(CANCEL, "k")).headers["Idempotent-Replay"] == "true"
    assert (await back.act(ADDRESS, "v")).status_code == 410
    assert [line["n"] for line in back.journal()] == list(range(1, len(before) + 3))


def refused_state(reply: httpx.Response) -> str:
    return "executed" if reply.status_code == 200 else "refused"


async def test_a_late_request_dies_with_its_process(start: Start) -> None:
    shop = start("--fault", f"{CANCEL.name}:late:500")
    with pytest.raises(httpx.RemoteProtocolError):
        await shop.act(CANCEL, "k")
    shop.kill()
    back = start()
    await anyio.sleep(0.7)  # that nothing happens can only be seen by waiting for longer than it would take
    assert back.events() == ["dropped"]
    assert await back.state("k") == "not_found"


async def test_a_credential_is_wanted_for_writes_and_key_questions(start: Start, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret\n")
    shop = start("--credential-file", str(tmp_path / "secret"))
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert (await shop.act(CANCEL, "k", **headers)).status_code == 401
        assert (await shop.http.get("/keys/k", headers=headers)).status_code == 401
        assert (await shop.http.post("/keys/k/void", headers=headers)).status_code == 401
    assert (await shop.act(CANCEL, "k", Authorization="Bearer s3cret")).status_code == 200
    assert shop.events() == ["executed"]
    assert "s3cret" not in Path(shop.hello["journal"]).read_text()


async def test_bad_requests_are_named(start: Start) -> None:
    shop = start()
    for path, body, headers, status, code in (
        ("/actions/give_everything_away", b"{}", {}, 404, "unknown_action"),
        (f"/actions/{CANCEL.name}", b"[]", {}, 400, "malformed"),
        (f"/actions/{CANCEL.name}", b"{}", {"X-Not-After": "soon"}, 400, "malformed"),
        (f"/actions/{CANCEL.name}", b"{}", {"Idempotency-Key": "k" * 256}, 400, "malformed"),
        (f"/actions/{CANCEL.name}", b" " * 300_000, {}, 413, "too_large"),
    ):
        reply = await shop.http.post(path, content=body, headers=headers)
        assert (reply.status_code, reply.json()["code"]) == (status, code)
    assert (await shop.http.get("/orders/%23nothing")).status_code == 404
    assert shop.events() == ["rejected"]


async def test_mail_forgets_and_a_lost_reply_cannot_be_asked_about(start: Start) -> None:
    mail = start("--fault", "send_message:lose", kind="mail")
    message = {"to": "ann@example.com", "template": "refund", "subject": "Refund", "body": "On its way."}
    with pytest.raises(httpx.RemoteProtocolError):
        await mail.http.post("/messages", json=message, headers={"Idempotency-Key": "k"})
    again = await mail.http.post("/messages", json=message, headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()) == (202, {"receipt": {"message": "mail-2"}})
    assert (await mail.http.get("/keys/k")).status_code == 404
    assert (await mail.http.post("/messages", json={"subject": "?"})).status_code == 422
    assert mail.events() == ["executed", "executed", "refused"]
    mail.kill()
    back = start(kind="mail")
    assert (await back.http.post("/messages", json=message)).json() == {"receipt": {"message": "mail-3"}}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--data", "/nowhere"), "cannot be read"),
        (("--fault", "x:explode"), "unknown kind"),
        (("--credential-file", "/nowhere"), "No such file"),
    ],
)
def test_a_service_that_cannot_start_says_why(start_process: Start, options: tuple[str, ...], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        start_process(*options)


async def test_a_journal_has_one_owner_and_one_database(start: Start, tmp_path: Path) -> None:
    shop = start()
    await shop.act(CANCEL, "k")
    with pytest.raises(AssertionError, match="running process"):
        start()
    shop.kill()
    (tmp_path / "db.json").write_text(json.dumps({"orders": {}, "products": {}, "users": {}}))
    with pytest.raises(AssertionError, match="does not happen again"):
        start("--data", str(tmp_path))
    Path(shop.hello["journal"]).write_text('{"n": 2}\n')
    with pytest.raises(AssertionError, match=r"journal\.jsonl:1: expected line number 1"):
        start()


async def test_sigterm_ends_a_service(start: Start) -> None:
    shop = start("--fault", f"{CANCEL.name}:late:60000")
    with pytest.raises(httpx.RemoteProtocolError):
        await shop.act(CANCEL, "k")
    shop.process.send_signal(signal.SIGTERM)
    await shop.until(lambda: shop.process.poll() is not None)
    assert shop.process.returncode in (0, -signal.SIGTERM)
    assert os.path.getsize(shop.hello["journal"]) > 0
