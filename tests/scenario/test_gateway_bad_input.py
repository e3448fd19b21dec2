"""What the gateway turns away before anything is decided: grants that open nothing, requests that nobody can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from admission.client import ArgumentsRefused, GateClient, GateProblem, GrantRefused, UnknownOperation
from admission.vocabulary import Verdict
from admission.wire import Grant, sign_grant
from tests.scenario.gateway_stage import KEY, ORDER, OTHER_KEY, SCOPE, TASK, gateway_stage
from tests.scenario.test_gateway import ACTION, cancel

pytestmark = pytest.mark.anyio


async def test_grants_that_open_nothing(tmp_path: Path) -> None:
    async with gateway_stage("http://127.0.0.1:9", tmp_path) as (stage, _):
        altered = stage.token()[:-4] + "AAAA"
        for token in ("", "x", "x.y", altered, stage.token(key=OTHER_KEY), stage.token(expires_ms=1)):
            async with GateClient(stage.url, token or "none") as client:
                with pytest.raises(GrantRefused) as caught:
                    await cancel(client)
                assert caught.value.status == 401
                assert caught.value.detail
        async with GateClient(stage.url, stage.token(revision=2)) as client:
            assert (await cancel(client)).verdict is Verdict.SUPERSEDED
        async with GateClient(stage.url, stage.token(child="c-unknown")) as client:
            assert (await cancel(client)).verdict is Verdict.NOT_CURRENT


async def test_a_grant_for_a_run_of_another_store_opens_nothing(tmp_path: Path) -> None:
    async with gateway_stage("http://127.0.0.1:9", tmp_path) as (stage, client):
        elsewhere = sign_grant(Grant("run-elsewhere", SCOPE, stage.child, 1, stage.desk.now_ms() + 60_000), KEY)
        async with GateClient(stage.url, elsewhere) as foreign:
            for ask in (lambda: cancel(foreign), lambda: foreign.claim(TASK), foreign.gate):
                with pytest.raises(GrantRefused, match="'run-elsewhere', which this store does not hold") as caught:
                    await ask()
                assert caught.value.status == 401
        assert (await client.gate()).current


async def test_requests_that_cannot_be_understood(tmp_path: Path) -> None:
    good = {"task": TASK, "service": "shop", "action": ACTION, "arguments": {"order_id": ORDER, "reason": "x"}}
    async with gateway_stage("http://127.0.0.1:9", tmp_path) as (stage, client):
        with pytest.raises(UnknownOperation, match="no service 'shp'; known: shop"):
            await client.effect("shp", ACTION, {}, task=TASK)
        with pytest.raises(UnknownOperation, match=f"no operation 'cancel'; known: {ACTION}"):
            await client.effect("shop", "cancel", {}, task=TASK)
        with pytest.raises(ArgumentsRefused, match="argument `reason`"):
            await client.effect("shop", ACTION, {"order_id": ORDER}, task=TASK)
        with pytest.raises(ArgumentsRefused) as caught:
            await client.effect("shop", ACTION, {"order_id": ORDER, "reason": "x" * 70_000}, task=TASK)
        assert caught.value.status == 413
        with pytest.raises(GateProblem, match="occurrence"):
            await client.effect("shop", ACTION, good["arguments"], task=TASK, occurrence=0)  # type: ignore[arg-type]
        bad: list[tuple[object, int]] = [
            (b"{", 422),
            (b"[]", 422),
            (b'{"task": NaN}', 422),
            (b"[" * 60_000, 422),
            (b'{"task": "\\ud800"}', 422),
            (b"x" * 80_000, 413),
            (json.dumps(good).encode().replace(b"{", b'{"task": "another", ', 1), 422),
            (json.dumps(good).encode().replace(b'"reason"', b'"reason": "y", "reason"'), 422),
            ({**good, "extra": 1}, 422),
            ({**good, "task": ""}, 422),
            ({**good, "arguments": []}, 422),
            ({**good, "occurrence": True}, 422),
        ]
        for body, status in bad:
            refused = await stage.post("/v1/effects", body)
            assert refused.status_code == status, (body, refused.text)
            assert refused.headers["content-type"] == "application/problem+json"
            assert set(refused.json()) == {"type", "title", "status", "detail"}
        assert await stage.attempts() == []
