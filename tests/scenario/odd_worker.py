"""A worker process whose agent is awkward on purpose: `python odd_worker.py KIND [--no-guard]`.

Knows only the worker kit. Kinds: racer (ends after `brief` ms, with many artifacts), stubborn (will not be cancelled
and acts afterwards), leaky (raises what its brief says), slow (works for `brief` ms).
"""

from __future__ import annotations

import argparse

import anyio

import workers.agent
from workers.agent import Limits
from workers.brief import Brief
from workers.hands import Hands, WorkEnded
from workers.serving import Address, serve
from workers.work import Report


async def racer(brief: Brief, hands: Hands) -> Report:
    await anyio.sleep(int(brief.brief) / 1000)
    return Report({"outcome": "complete", "actions": []}, {f"note {n}": {"n": n} for n in range(20)})


async def stubborn(brief: Brief, hands: Hands) -> Report:
    try:
        await hands.act("shop", "before", {"order_id": "#W1"})
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            try:
                await hands.act("shop", "after", {"order_id": "#W1"})
            except WorkEnded:
                await anyio.sleep(float(brief.brief))
    raise AssertionError("nobody wakes it")


async def leaky(brief: Brief, hands: Hands) -> Report:
    await hands.clear()
    raise RuntimeError(f"could not go on with {brief.brief}")


async def slow(brief: Brief, hands: Hands) -> Report:
    await anyio.sleep(int(brief.brief) / 1000)
    await hands.act("shop", "after", {"order_id": "#W1"})
    return Report({"outcome": "complete", "actions": []})


KINDS = {"racer": racer, "stubborn": stubborn, "leaky": leaky, "slow": slow}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--no-guard", action="store_true")
    given = parser.parse_args()
    if given.no_guard:
        workers.agent.is_terminal = lambda event: False
    serve(KINDS[given.kind], kind=given.kind, name="odd", address=Address(), limits=Limits(stop_s=0.5, close_s=1.0))
