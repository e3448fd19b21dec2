"""A worker that was told "in doubt" asks again about that attempt, and hears that the service has refused it."""

from __future__ import annotations

from pathlib import Path

import pytest

from admission.client import EffectReply, GateClient
from admission.commands import Classify, StartReconcile
from admission.vocabulary import Basis, Finding, Method, Verdict
from tests.scenario.gateway_stage import DELIVERED, TASK, Stage, gateway_stage, shop_process

pytestmark = pytest.mark.anyio


async def cancel(client: GateClient, about: str = "") -> EffectReply:
    arguments = {"order_id": DELIVERED, "reason": "no longer needed"}
    return await client.effect("shop", "cancel_pending_order", arguments, task=TASK, about=about)


async def settle(stage: Stage, attempt: str, basis: Basis) -> None:
    asked = await stage.do(StartReconcile(by="conductor", attempt=attempt, method=Method.VOID, epoch=1))
    command = Classify(
        by="conductor",
        attempt=attempt,
        finding=Finding.NOT_EXECUTED,
        basis=basis,
        epoch=1,
        started=asked.detail["started"],
    )
    assert (await stage.do(command)).accepted


async def test_what_was_refused_meanwhile_is_told_and_not_tried_anew(tmp_path: Path) -> None:
    async with (
        shop_process(tmp_path, "--fault", "*:lose::1") as shop,
        gateway_stage(shop.url, tmp_path, tries_max=1) as (stage, client),
    ):
        first = await cancel(client)
        assert first.verdict is Verdict.IN_DOUBT
        await settle(stage, first.attempt, Basis.SERVICE_REFUSED)
        again = await cancel(client, about=first.attempt)
        assert (again.verdict, again.attempt) == (Verdict.FAILED, first.attempt)
        assert len(await stage.attempts()) == 1
        assert (await cancel(client)).attempt != first.attempt, "without naming it, a worker asks for a new attempt"


async def test_what_was_voided_meanwhile_is_tried_anew(tmp_path: Path) -> None:
    async with (
        shop_process(tmp_path, "--fault", "*:reset::1") as shop,
        gateway_stage(shop.url, tmp_path, tries_max=1) as (stage, client),
    ):
        first = await cancel(client)
        assert first.verdict is Verdict.IN_DOUBT
        await settle(stage, first.attempt, Basis.VOIDED)
        again = await cancel(client, about=first.attempt)
        assert again.attempt != first.attempt
        assert again.verdict is Verdict.FAILED
