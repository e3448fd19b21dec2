"""How a misbehaving child speaks to the gateway: it claims, it asks, and it draws no conclusion from the answer.

Knows two routes of the gateway. Does not wait, repeat or stop: that is the point of these children.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from admission.wire import EXTENSION

ASK_DEADLINE_S = 120.0
#: How often, and after which wait, a gateway that cannot be reached is asked again.
TRIES_MAX = 20
RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class GateCalls:
    """The gateway for one child's task."""

    task: str
    gateway: str
    grant: str = field(repr=False)

    async def claim(self) -> str:
        """The gateway's word, or "unreachable"."""
        return str((await self._post("/v1/claims", {"task": self.task})).get("claim", "unreachable"))

    async def ask(self, step: Mapping[str, Any]) -> dict[str, Any]:
        """The gateway's whole answer to one action of a plan; `verdict` is "unreachable" when there is none."""
        body = {
            "task": self.task,
            "service": step.get("service"),
            "action": step.get("action"),
            "arguments": step.get("arguments") or {},
            "occurrence": step.get("occurrence") or 1,
        }
        return {"verdict": "unreachable"} | await self._post("/v1/effects", body)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.grant}"}
        why = ""
        for _ in range(TRIES_MAX):
            try:
                async with httpx.AsyncClient(timeout=ASK_DEADLINE_S, trust_env=False) as http:
                    reply = await http.post(f"{self.gateway}{path}", json=body, headers=headers)
                got = reply.json()
            except httpx.TransportError as error:
                why = type(error).__name__  # a gateway that is started again finds the same intent by its slot
                await anyio.sleep(RETRY_S)
            except (httpx.HTTPError, ValueError) as error:
                return {"detail": type(error).__name__}
            else:
                return got if isinstance(got, dict) else {}
        return {"detail": why}


def gate_calls(task: str, metadata: Mapping[str, Any]) -> GateCalls | None:
    """The gateway named in a launch's metadata, or None when it names none."""
    fields = metadata.get(EXTENSION)
    if not isinstance(fields, Mapping) or not fields.get("gateway"):
        return None
    return GateCalls(task, str(fields["gateway"]).rstrip("/"), str(fields.get("grant", "")))
