"""The API over real HTTP: what is changed, what is shown, and every bad input with a clear problem and nothing lost."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from admission import commands as cmd
from admission.keys import run_keys
from admission.memory import MemoryStore
from admission.storage import Store
from admission.store import RedisStore, make_client
from tests.contract.api_room import CHANGE, GOAL, Room, api_room
from tests.contract.store_room import StoreServer

pytestmark = pytest.mark.anyio


@pytest.fixture
async def room(memory_store: MemoryStore) -> AsyncIterator[Room]:
    async with api_room(memory_store) as made:
        yield made


def refused(reply: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """A problem document of that kind, and what a person is told."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"].startswith("application/problem+json")
    problem: dict[str, Any] = reply.json()
    assert set(problem) >= {"type", "title", "status", "detail"}
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["detail"]
    return problem


# --- the main road, on both stores -----------------------------------------------------------------------------------


async def test_a_run_is_started_redirected_paused_resumed_and_cancelled(store: Store) -> None:
    async with api_room(store) as room:
        started = await room.start(request_id="one")
        run = started["run"]["run"]
        assert (started["verdict"], started["in_force"], started["run"]["state"]) == ("accepted", 1, "running")
        assert started["line"].startswith("started under revision 1, from nothing")

        change = {"kind": "correct", "goal": CHANGE, "expected_revision": 1, "reason": "she moved", "by": "ann"}
        answer = (await room.http.post(f"/v1/runs/{run}/revisions", json=change)).json()
        assert answer["in_force"] == 2
        assert answer["changed"]["changed"]["scopes"] == ["order"]
        assert answer["changed"]["kept"] == {"requirements": ["where", "who"], "scopes": ["mail"]}
        assert "revision 2 is in force, changes order, keeps mail" in answer["line"]
        assert answer["run"]["scopes"]["order"]["gate"] == "closed"
        assert answer["run"]["scopes"]["mail"]["gate"] == "open"
        assert answer["run"]["revisions"][1]["by"] == "ann"

        for verb, state in (("pause", "redirecting"), ("resume", "redirecting"), ("cancel", "cancelling")):
            answer = (await room.http.post(f"/v1/runs/{run}/{verb}", json={"reason": "because"})).json()
            assert (answer["verdict"], answer["run"]["state"]) == ("accepted", state)
        listed = (await room.http.get("/v1/runs")).json()
        assert [row["run"] for row in listed["runs"]] == [run]
        assert listed["cursor"] is None


async def test_a_request_sent_twice_is_carried_out_once(room: Room) -> None:
    first = await room.start(request_id="same")
    again = await room.start(request_id="same")
    assert (first["verdict"], again["verdict"]) == ("accepted", "repeated")
    assert again["run"]["run"] == first["run"]["run"]
    run = first["run"]["run"]
    headers = {"Idempotency-Key": "k1"}
    change = {"kind": "correct", "goal": CHANGE}
    one = (await room.http.post(f"/v1/runs/{run}/revisions", json=change, headers=headers)).json()
    two = (await room.http.post(f"/v1/runs/{run}/revisions", json=change, headers=headers)).json()
    assert (one["verdict"], two["verdict"]) == ("accepted", "repeated")
    assert two["run"]["revision"]["in_force"] == 2


async def test_without_a_request_id_each_start_is_a_run_of_its_own(room: Room) -> None:
    runs = [(await room.start())["run"]["run"] for _ in range(3)]
    assert len(set(runs)) == 3
    first = (await room.http.get("/v1/runs", params={"limit": 2})).json()
    rest = (await room.http.get("/v1/runs", params={"limit": 2, "cursor": first["cursor"]})).json()
    assert sorted(row["run"] for row in (*first["runs"], *rest["runs"])) == sorted(runs)
    assert rest["cursor"] is None


async def test_effects_are_shown_with_their_frozen_request_and_settled_by_hand(room: Room) -> None:
    run = (await room.start())["run"]["run"]
    child = await room.child(run)
    attempt = await room.effect(run, child, "ann@example.com")
    await room.lost(run, attempt)
    shown = (await room.http.get(f"/v1/effects/{attempt}")).json()
    assert (shown["outcome"], shown["request"]) == ("unknown", {"to": "her"})
    unknown = (await room.http.get(f"/v1/runs/{run}/effects", params={"state": "unknown"})).json()
    assert [row["attempt"] for row in unknown["effects"]] == [attempt]
    [item] = (await room.http.get("/v1/attention")).json()["items"]
    assert (item["id"], item["blocks"]) == (attempt, "slot")

    decision = {"happened": True, "reason": "she has it", "evidence": "her answer", "request_id": "r"}
    answer = (await room.http.post(f"/v1/effects/{run[:6]}-e1/resolve", json=decision)).json()
    assert (answer["effect"]["outcome"], answer["effect"]["basis"]) == ("succeeded", "operator")
    assert "settled send" in answer["line"] or "settled mail.send" in answer["line"]
    assert (await room.http.get("/v1/attention")).json()["items"] == []
    again = await room.http.post(f"/v1/effects/{attempt}/resolve", json=decision)
    assert again.json()["verdict"] == "repeated"
    assert (await room.http.get(f"/v1/effects/{attempt}")).json()["evidence"] == "her answer"


async def test_effects_come_in_pages(room: Room) -> None:
    run = (await room.start())["run"]["run"]
    child = await room.child(run)
    for n in range(5):
        await room.effect(run, child, f"{n}@example.com")
    seen: list[str] = []
    cursor: int | None = 0
    while cursor is not None:
        page = (await room.http.get(f"/v1/runs/{run}/effects?limit=2&cursor={cursor}")).json()
        seen += [row["attempt"] for row in page["effects"]]
        cursor = page["cursor"]
    assert seen == [f"{run}-e{n}" for n in range(1, 6)]


@pytest.mark.parametrize("part", ["children", "results", "checkpoints", "refusals", "revisions", "unresolved"])
async def test_the_parts_of_a_run_are_routes_of_their_own(room: Room, part: str) -> None:
    run = (await room.start())["run"]["run"]
    await room.child(run)
    answer = (await room.http.get(f"/v1/runs/{run}/{part}")).json()
    assert answer == {"run": run, part: (await room.view(run))[part]}


# --- the log ---------------------------------------------------------------------------------------------------------


async def test_the_log_is_given_as_it_stands_in_pages(room: Room) -> None:
    run = (await room.start())["run"]["run"]
    child = await room.child(run)
    await room.effect(run, child, "ann@example.com")
    whole = (await room.http.get(f"/v1/runs/{run}/log")).json()
    assert set(whole) == {"run", "entries", "cursor"}
    assert [entry["n"] for entry in whole["entries"]] == list(range(1, len(whole["entries"]) + 1))
    assert all(set(entry) == {"n", "at", "commit", "event"} for entry in whole["entries"])
    stored = await room.store.read(run, 0)
    assert [json.loads(entry.data) for entry in stored] == [entry["event"] for entry in whole["entries"]]
    assert [entry.at_ms for entry in stored] == [entry["at"] for entry in whole["entries"]]
    first = (await room.http.get(f"/v1/runs/{run}/log", params={"limit": 2})).json()
    rest = (await room.http.get(f"/v1/runs/{run}/log", params={"after": first["cursor"]})).json()
    assert first["entries"] + rest["entries"] == whole["entries"]
    assert rest["cursor"] is None


async def test_the_control_log_has_the_updates_alone(room: Room) -> None:
    run = (await room.start())["run"]["run"]
    child = await room.child(run)
    await room.effect(run, child, "ann@example.com")
    await room.http.post(f"/v1/runs/{run}/revisions", json={"kind": "correct", "goal": CHANGE, "reason": "r"})
    answer = (await room.http.get(f"/v1/runs/{run}/log", params={"control": True})).json()
    assert [(row["kind"], row["revision"]) for row in answer["updates"]] == [("start", 1), ("correct", 2)]
    assert [row["child"] for row in answer["updates"][0]["acknowledged"]] == [child]
    assert {entry["event"]["type"] for entry in answer["entries"]} == {
        "run_started", "update_recorded", "revision_accepted",
    }  # fmt: skip


# --- naming and waiting ----------------------------------------------------------------------------------------------


async def test_a_run_is_named_by_last_or_by_a_unique_beginning(room: Room) -> None:
    first = (await room.start(request_id="a"))["run"]["run"]
    await anyio.sleep(0.002)  # the store's clock has milliseconds, and `last` goes by it
    second = (await room.start(request_id="b"))["run"]["run"]
    assert (await room.view("last"))["run"] == second
    assert (await room.view(first[:6]))["run"] == first
    problem = refused(await room.http.get("/v1/runs/nowhere"), 404, "unknown-run")
    assert set(problem["known"]) == {first, second}


async def test_an_ambiguous_beginning_names_those_that_it_begins(room: Room) -> None:
    known: dict[str, str] = {}
    for n in range(40):  # some two of forty hexadecimal ids begin alike
        run = (await room.start(request_id=f"r{n}"))["run"]["run"]
        if run[0] in known:
            problem = refused(await room.http.get(f"/v1/runs/{run[0]}"), 409, "ambiguous")
            assert {run, known[run[0]]} <= set(problem["known"])
            return
        known[run[0]] = run
    pytest.fail("forty ids with different first digits")


async def test_waiting_ends_when_the_run_is_there_and_not_before(room: Room) -> None:
    run = (await room.start())["run"]["run"]
    found: list[dict[str, Any]] = []

    async def wait() -> None:
        query = {"wait_for": "paused,completed", "timeout_ms": "20000"}
        found.append((await room.http.get(f"/v1/runs/{run}", params=query)).json())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.sleep(0.15)
        assert found == []
        await room.http.post(f"/v1/runs/{run}/pause", json={"reason": "r"})
    assert found[0]["state"] == "paused"


async def test_waiting_in_vain_shows_how_things_stand(room: Room) -> None:
    run = (await room.start())["run"]["run"]
    reply = await room.http.get(f"/v1/runs/{run}", params={"wait_for": "completed", "timeout_ms": 30})
    assert reply.json()["state"] == "running"
    version = reply.json()["version"]
    reply = await room.http.get(f"/v1/runs/{run}", params={"changed_since": version - 1, "timeout_ms": 20_000})
    assert reply.json()["version"] == version
    refused(await room.http.get(f"/v1/runs/{run}", params={"wait_for": "done"}), 422, "malformed")


# --- bad input -------------------------------------------------------------------------------------------------------


async def test_a_conflict_names_the_revision_in_force_and_changes_nothing(room: Room) -> None:
    run = (await room.start())["run"]["run"]
    change = {"kind": "correct", "goal": CHANGE, "expected_revision": 7}
    problem = refused(await room.http.post(f"/v1/runs/{run}/revisions", json=change), 409, "conflict")
    assert problem["in_force"] == 1
    assert "revision 1" in problem["detail"]
    assert (await room.view(run))["version"] == 1


async def test_a_request_id_with_another_payload_is_refused(room: Room) -> None:
    run = (await room.start(request_id="same"))["run"]["run"]
    other = {**GOAL, "text": "something else"}
    reply = await room.http.post("/v1/runs", json={"goal": other, "request_id": "same"})
    assert "use a new one" in refused(reply, 422, "request-id-reused")["detail"]
    await room.http.post(f"/v1/runs/{run}/pause", json={"request_id": "p", "reason": "one"})
    reply = await room.http.post(f"/v1/runs/{run}/cancel", json={"request_id": "p", "reason": "one"})
    refused(reply, 422, "request-id-reused")
    view = await room.view(run)
    assert (view["text"], view["state"]) == (GOAL["text"], "paused")


async def test_a_finished_run_takes_no_more_changes(room: Room) -> None:
    run = (await room.start())["run"]["run"]
    await room.http.post(f"/v1/runs/{run}/cancel", json={"reason": "r"})
    await room.desk.submit(run, cmd.Finish(epoch=0))
    assert (await room.view(run))["state"] == "cancelled"
    change = {"kind": "correct", "goal": CHANGE}
    problem = refused(await room.http.post(f"/v1/runs/{run}/revisions", json=change), 409, "run-ended")
    assert (problem["state"], problem["in_force"]) == ("cancelled", 1)
    assert "start a new one" in problem["detail"]
    refused(await room.http.post(f"/v1/runs/{run}/resume", json={}), 409, "run-ended")


@pytest.mark.parametrize("verb", ["revisions", "pause", "resume", "cancel"])
async def test_an_unknown_run_is_not_found_whatever_is_asked_of_it(room: Room, verb: str) -> None:
    body = {"kind": "correct", "goal": CHANGE} if verb == "revisions" else {}
    refused(await room.http.post(f"/v1/runs/0123456789ab/{verb}", json=body), 404, "unknown-run")
    assert await room.store.head("0123456789ab") == (0, 0)


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({}, "goal", "is missing"),
        ({"goal": {"text": "t"}}, "goal", "`plan` is missing"),
        ({"goal": {**GOAL, "plan": {}}}, "goal.plan", "at least 1"),
        ({"goal": {**GOAL, "plan": {"a": {"agent": "plan", "action": []}}}}, "goal.plan.a", "unknown key `action`"),
        ({"goal": {**GOAL, "text": "x" * 9000}}, "goal.text", "longer than 8192 bytes"),
        ({"goal": GOAL, "requestid": "x"}, "goal", "unknown key `requestid`"),
        ({"goal": GOAL, "request_id": "two words"}, "request_id", "cannot be used"),
    ],
)
async def test_a_malformed_goal_is_named_field_by_field(
    room: Room, body: dict[str, Any], field: str, words: str
) -> None:
    problem = refused(await room.http.post("/v1/runs", json=body), 422, "malformed")
    assert problem["errors"][0]["field"] == field
    assert words in problem["errors"][0]["detail"]
    assert (await room.http.get("/v1/runs")).json()["runs"] == []


@pytest.mark.parametrize("raw", [b"{", b"[1]", b'"x"', b'{"goal": NaN}', b"\xff\xfe", b"[" * 100_000])
async def test_a_body_that_is_no_json_object_is_refused(room: Room, raw: bytes) -> None:
    refused(await room.http.post("/v1/runs", content=raw), 422, "malformed")


async def test_a_plan_that_makes_no_sense_is_refused_with_its_faults(room: Room) -> None:
    plan = {"a": {"agent": "plan", "needs": ["b"]}, "b": {"agent": "plan", "needs": ["a"]}}
    problem = refused(await room.http.post("/v1/runs", json={"goal": {"text": "t", "plan": plan}}), 422, "invalid")
    assert any("circle" in fault for fault in problem["faults"])
    run = (await room.start())["run"]["run"]
    nothing = {"kind": "replace", "goal": GOAL}
    problem = refused(await room.http.post(f"/v1/runs/{run}/revisions", json=nothing), 422, "invalid")
    assert problem["faults"] == ["the revision changes nothing"]
    gone = {"kind": "correct", "goal": {}, "remove": ["nobody"]}
    refused(await room.http.post(f"/v1/runs/{run}/revisions", json=gone), 422, "invalid")


async def test_a_replacement_needs_a_whole_goal(room: Room) -> None:
    run = (await room.start())["run"]["run"]
    reply = await room.http.post(f"/v1/runs/{run}/revisions", json={"kind": "replace", "goal": CHANGE})
    assert "`text` is missing" in refused(reply, 422, "malformed")["detail"]
    reply = await room.http.post(f"/v1/runs/{run}/revisions", json={"kind": "start", "goal": GOAL})
    refused(reply, 422, "malformed")


async def test_an_agent_that_nobody_knows_is_named_with_those_that_are_known(room: Room) -> None:
    goal = {"text": "t", "plan": {"a": {"agent": "plann"}}}
    problem = refused(await room.http.post("/v1/runs", json={"goal": goal}), 422, "unknown-agent")
    assert (problem["known"], "'plann'" in problem["detail"]) == (["plan"], True)
    run = (await room.start())["run"]["run"]
    change = {"kind": "correct", "goal": {"plan": goal["plan"]}}
    refused(await room.http.post(f"/v1/runs/{run}/revisions", json=change), 422, "unknown-agent")


async def test_a_body_over_the_limit_is_refused_with_and_without_its_length(room: Room) -> None:
    large = b'{"goal": "' + b"x" * (1024 * 1024) + b'"}'

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(large), 64 * 1024):
            yield large[start : start + 64 * 1024]

    for content in (large, pieces()):
        try:
            reply = await room.http.post("/v1/runs", content=content)
        except httpx.TransportError:
            continue  # the server may hang up on the rest before its answer is read
        assert "at most 1048576 bytes" in refused(reply, 413, "too-large")["detail"]
    assert (await room.http.get("/v1/runs")).json()["runs"] == []


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic dXNlcjpwYXNz", "token-of-the-test"])
async def test_without_the_token_nothing_is_told(room: Room, header: str | None) -> None:
    run = (await room.start())["run"]["run"]
    headers = {"Authorization": header} if header else {}
    async with httpx.AsyncClient(base_url=room.http.base_url, headers=headers) as stranger:
        for method, path in (("GET", "/v1/runs"), ("POST", f"/v1/runs/{run}/cancel"), ("GET", "/openapi.json")):
            problem = refused(await stranger.request(method, path), 401, "unauthorized")
            assert run not in json.dumps(problem)
        assert (await stranger.get("/healthz")).json() == {"status": "ok"}
    assert (await room.view(run))["state"] == "running"


async def test_effects_that_do_not_exist_or_are_settled_are_refused(room: Room) -> None:
    run = (await room.start())["run"]["run"]
    decision = {"happened": True, "reason": "r", "evidence": "e"}
    refused(await room.http.get(f"/v1/effects/{run}-e9"), 404, "unknown-effect")
    refused(await room.http.post(f"/v1/effects/{run}-e9/resolve", json=decision), 404, "unknown-effect")
    refused(await room.http.get("/v1/effects/nowhere-e1"), 404, "unknown-run")
    child = await room.child(run)
    attempt = await room.effect(run, child, "ann@example.com")
    await room.effect(run, child, "bob@example.com")
    reply = await room.http.post(f"/v1/effects/{attempt}/resolve", json=decision)
    assert refused(reply, 409, "wrong-state")["outcome"] == "sending"
    assert refused(await room.http.get(f"/v1/effects/{run}"), 409, "ambiguous")["known"][0] == attempt
    await room.lost(run, attempt)
    for missing in ("reason", "evidence", "happened"):
        body = {name: value for name, value in decision.items() if name != missing}
        refused(await room.http.post(f"/v1/effects/{attempt}/resolve", json=body), 422, "malformed")
    refused(
        await room.http.post(f"/v1/effects/{attempt}/resolve", json={**decision, "happened": "yes"}), 422, "malformed"
    )


async def test_states_and_routes_that_do_not_exist_are_problems_too(room: Room) -> None:
    run = (await room.start())["run"]["run"]
    refused(await room.http.get(f"/v1/runs/{run}/effects", params={"state": "lost"}), 422, "malformed")
    refused(await room.http.get(f"/v1/runs/{run}/effects", params={"limit": 0}), 422, "malformed")
    refused(await room.http.get("/v1/runs", params={"cursor": "nobody"}), 422, "malformed")
    refused(await room.http.get("/v1/nothing"), 404, "no-such-route")
    refused(await room.http.get(f"/v1/runs/{run}/nothing"), 404, "no-such-route")
    refused(await room.http.post(f"/v1/runs/{run}/explode", json={}), 404, "no-such-route")
    refused(await room.http.delete(f"/v1/runs/{run}"), 405, "http")
    refused(await room.http.post(f"/v1/runs/{run}/resume", json={}), 409, "wrong-state")


# --- the store -------------------------------------------------------------------------------------------------------


async def test_a_store_that_is_away_is_said_and_a_repeat_is_safe(room: Room, memory_store: MemoryStore) -> None:
    run = (await room.start())["run"]["run"]
    memory_store.faults.unavailable = True
    problem = refused(await room.http.get(f"/v1/runs/{run}"), 503, "store-unavailable")
    assert "request_id" not in problem["detail"], "a look changes nothing"
    [finding] = (await room.http.get("/v1/doctor")).json()["problems"]
    assert "the store does not answer" in finding
    refused(await room.http.get("/v1/runs"), 503, "store-unavailable")
    memory_store.faults.unavailable = False
    assert (await room.view(run))["state"] == "running"
    memory_store.faults.unknown_outcomes = 1
    body = {"reason": "r", "request_id": "p"}
    problem = refused(await room.http.post(f"/v1/runs/{run}/pause", json=body), 503, "store-unavailable")
    assert "request_id" in problem["detail"]
    answer = (await room.http.post(f"/v1/runs/{run}/pause", json=body)).json()
    assert answer["run"]["state"] == "paused"
    assert len(answer["run"]["updates"]) == 2


@pytest.mark.parametrize("lost", ["the run", "its last entry"])
async def test_a_log_that_became_shorter_raises_the_alarm_and_is_no_unknown_run(
    redis_store: RedisStore, store_server: StoreServer, lost: str
) -> None:
    async with api_room(redis_store) as room:
        run = (await room.start())["run"]["run"]
        await room.http.post(f"/v1/runs/{run}/pause", json={"reason": "r"})
        client = make_client(store_server.url)
        log, head = run_keys(run, redis_store.partitions).log, run_keys(run, redis_store.partitions).head
        if lost == "the run":
            await client.flushall()
        else:
            await client.xdel(log, "3-0")
            await client.hset(head, "v", "2")
        await client.aclose()
        await client.connection_pool.aclose()
        problem = refused(await room.http.post(f"/v1/runs/{run}/resume", json={}), 503, "store-behind")
        assert "this process stops" in problem["detail"]
        assert len(room.alarms) == 1


# --- around it -------------------------------------------------------------------------------------------------------


async def test_processes_and_doctor_say_what_they_were_told(memory_store: MemoryStore, tmp_path: Path) -> None:
    async def doctor() -> dict[str, Any]:
        return {"versions": {"regate": "1"}}

    async with api_room(memory_store, data_dir=tmp_path, doctor=doctor) as room:
        assert (await room.http.get("/v1/processes")).json() == {"processes": []}
        rows = [{"role": "gateway", "pid": 7, "ended": "killed by signal 9"}]
        (tmp_path / "processes.json").write_text(json.dumps({"processes": rows}))
        assert (await room.http.get("/v1/processes")).json() == {"processes": rows}
        report = (await room.http.get("/v1/doctor")).json()
        assert report["versions"] == {"regate": "1"}
        assert report["store"]["partitions"] == len(report["partitions"]) == 16
        assert abs(report["clock"]["desk_behind_ms"]) < 1000


async def test_answers_do_not_wait_for_an_acknowledgement(room: Room) -> None:
    run = (await room.start())["run"]["run"]
    await room.view(run)
    begun = anyio.current_time()
    for _ in range(20):
        await room.view(run)
    # Without TCP_NODELAY each of them would take 40 ms more.
    assert anyio.current_time() - begun < 20 * 0.04
