"""An agent without a model: it carries out the actions of its brief, in their order.

Knows what a plan's outcome is called. Does not know the gateway's verdicts beyond what an Outcome says of itself, and
does not look at what is done already: the gate answers that.
"""

from __future__ import annotations

from typing import Any

import anyio

from workers.brief import Brief
from workers.hands import Hands, Outcome
from workers.work import AgentFunction, Report


def plan_agent(think_ms: int = 0) -> AgentFunction:
    """The agent function; it pauses `think_ms` milliseconds between two actions."""

    async def follow(brief: Brief, hands: Hands) -> Report:
        outcomes: list[Outcome] = []
        for step in brief.actions:
            if outcomes and think_ms:
                await anyio.sleep(think_ms / 1000)
            await hands.clear()
            outcomes.append(await hands.act(step.service, step.action, step.arguments, step.occurrence))
        return Report(plan_result(outcomes))

    return follow


def plan_result(outcomes: list[Outcome]) -> dict[str, Any]:
    """The result artifact's JSON. "complete": of every action it is known that it took effect or that the service
    refused it. "incomplete": at least one is unknown, or was never sent."""
    return {
        "actions": [outcome.as_record() for outcome in outcomes],
        "outcome": "complete" if all(outcome.settled for outcome in outcomes) else "incomplete",
    }
