"""How a worker speaks to the gateway: ask for an effect, claim a child, watch the gate.

Knows the gateway's routes and answers. Does not know services, credentials or the store: a worker has none of them.
Asking again is always safe, because the gateway recognises the same intent by its slot; so a lost connection and a 503
are tried again here, a bounded number of times, and everything else is an answer or an exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import anyio
import httpx

from admission.vocabulary import Blocks, Claim, GateState, Verdict

#: One effect may take several tries of several seconds each before the gateway answers.
EFFECT_DEADLINE_S = 120.0
TRIES_MAX = 12
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0


class GateProblem(Exception):
    """The gateway refused the request itself (problem+json): no verdict was given, and nothing was sent."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(f"{title} ({status}): {detail}" if detail else f"{title} ({status})")
        self.status = status
        self.title = title
        self.detail = detail


class GrantRefused(GateProblem):
    """401: the grant is forged, expired or foreign. This child can do nothing any more."""


class UnknownOperation(GateProblem):
    """404: no such service, or the service's contract has no such operation."""


class ArgumentsRefused(GateProblem):
    """413 or 422: the arguments are too large, malformed, or do not match the contract."""


class GateUnavailable(Exception):
    """The gateway could not be reached, or its store is away, for as long as we tried. Asking again later is safe."""


@dataclass(frozen=True, slots=True)
class EffectReply:
    """The gate's answer about one effect. `revision_in_force` is what counts now; `detail` is one line for people."""

    verdict: Verdict
    revision_in_force: int
    attempt: str = ""
    blocks: Blocks | None = None
    detail: str = ""
    target: str = ""
    input_ref: str = ""
    operation_id: str = ""
    observed_result: dict[str, Any] | None = None
    revision: int = 0
    child: str = ""
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class ClaimReply:
    """Whether this A2A task may work as the child that the grant names."""

    claim: Claim
    revision_in_force: int


@dataclass(frozen=True, slots=True)
class GateReply:
    """Where the gate stands. `current` False: this child must stop. `version` goes into the next question."""

    gate: GateState
    current: bool
    revision_in_force: int
    version: int


class GateClient:
    """Speaks for one child, with its grant. Use as `async with`; may be shared by tasks of that child."""

    def __init__(
        self,
        url: str,
        grant: str,
        *,
        tries_max: int = TRIES_MAX,
        effect_deadline_s: float = EFFECT_DEADLINE_S,
        backoff_first_s: float = BACKOFF_FIRST_S,
    ) -> None:
        self._tries_max = tries_max
        self._effect_deadline_s = effect_deadline_s
        self._backoff_first_s = backoff_first_s
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"Bearer {grant}"},
            timeout=httpx.Timeout(30.0, connect=5.0),
            trust_env=False,
            follow_redirects=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def effect(
        self,
        service: str,
        action: str,
        arguments: Mapping[str, Any],
        *,
        task: str,
        occurrence: int = 1,
        about: str = "",
    ) -> EffectReply:
        """Ask for one effect and wait for its verdict. `task` is the A2A task that claimed the child.

        `about` is the attempt that an earlier answer left open: if the service turns out to have refused it, the
        answer is that refusal, and not another attempt.

        Raises GateProblem (GrantRefused, UnknownOperation, ArgumentsRefused), GateUnavailable.
        """
        body = {
            "task": task, "service": service, "action": action, "arguments": dict(arguments), "occurrence": occurrence,
        }  # fmt: skip
        if about:
            body["about"] = about
        got = await self._call("POST", "/v1/effects", body=body, timeout_s=self._effect_deadline_s)
        blocks = got.get("blocks")
        return EffectReply(
            verdict=Verdict(got["verdict"]),
            revision_in_force=int(got["revision_in_force"]),
            attempt=str(got.get("attempt") or ""),
            blocks=Blocks(blocks) if blocks else None,
            detail=str(got.get("detail") or ""),
            target=str(got.get("target") or ""),
            input_ref=str(got.get("input_ref") or ""),
            operation_id=str(got.get("operation_id") or ""),
            observed_result=got.get("observed_result"),
            revision=int(got.get("revision") or 0),
            child=str(got.get("child") or ""),
            outcome=str(got.get("outcome") or ""),
        )

    async def claim(self, task: str) -> ClaimReply:
        """Say that this A2A task starts the child now. Raises as `effect`."""
        got = await self._call("POST", "/v1/claims", body={"task": task})
        return ClaimReply(Claim(got["claim"]), int(got["revision_in_force"]))

    async def gate(self, known: GateReply | None = None, *, wait_ms: int = 20_000) -> GateReply:
        """Where the gate stands: at once when nothing is known, else when it changed, at the latest after `wait_ms`.

        Raises as `effect`.
        """
        query: dict[str, str] = {}
        if known is not None:
            query = {
                "version": str(known.version), "wait_ms": str(wait_ms), "gate": known.gate.value,
                "current": "true" if known.current else "false",
            }  # fmt: skip
        got = await self._call("GET", "/v1/gate", query=query, timeout_s=wait_ms / 1000 + 10)
        return GateReply(
            GateState(got["gate"]), bool(got["current"]), int(got["revision_in_force"]), int(got["version"])
        )

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: dict[str, Any] | None = None,
        query: dict[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> dict[str, Any]:
        why = ""
        for n in range(self._tries_max):
            if n:
                await anyio.sleep(min(self._backoff_first_s * 2 ** (n - 1), BACKOFF_MAX_S))
            try:
                reply = await self._http.request(
                    method, path, json=body, params=query or None, timeout=httpx.Timeout(timeout_s, connect=5.0)
                )
            except httpx.TransportError as error:
                # Also a lost reply: the gateway goes on with what it admitted, and the slot finds it again.
                why = f"the gateway at {self._http.base_url} does not answer ({type(error).__name__})"
                continue
            if reply.status_code == 503:
                why = _problem(reply).detail
                continue
            if reply.status_code != 200:
                raise _problem(reply)
            got = reply.json()
            if not isinstance(got, dict):
                raise GateProblem(502, "unreadable answer", "the gateway's answer is not a JSON object")
            return got
        raise GateUnavailable(f"{why}; tried {self._tries_max} times. Asking again later is safe")


def _problem(reply: httpx.Response) -> GateProblem:
    try:
        fields = reply.json()
    except ValueError:
        fields = {}
    if not isinstance(fields, dict):
        fields = {}
    title, detail = str(fields.get("title") or reply.reason_phrase), str(fields.get("detail") or "")
    kinds = {401: GrantRefused, 404: UnknownOperation, 413: ArgumentsRefused, 422: ArgumentsRefused}
    return kinds.get(reply.status_code, GateProblem)(reply.status_code, title, detail)
