"""A small world for the rules: services with a truth table, a wire that loses and delays, gateways that pause.

Knows: what really happened, and how services of each contract class answer. Does not know the rules: it is what they
are checked against.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from admission import events as ev
from admission.vocabulary import Basis, Blocks, ContractClass, Finding, TryOutcome

#: The services' clocks are behind the store's by this (ms), within the skew that their contract declares.
BEHIND_MS = 200
LAG_MS = 70
RETENTION_MS = 600_000
LATE_MAX_MS = 60_000


def _facts(contract_class: ContractClass, blocks: Blocks = Blocks.SCOPE, *, dedupes: bool = True) -> ev.ContractFacts:
    name = f"{contract_class.value}-{blocks.value}"
    timed = contract_class is ContractClass.NOT_AFTER
    return ev.ContractFacts(
        service="shop", operation=name, version="1", contract_class=contract_class, schema_hash=name,
        unknown_blocks=blocks, dedupes=dedupes,
        tries_max=3 if dedupes else 2, timeout_ms=1_000,
        retention_ms=RETENTION_MS if dedupes else 0, late_arrival_max_ms=LATE_MAX_MS,
        not_after_max_age_ms=5_000 if timed else 0, clock_skew_ms=300 if timed else 0,
        lookup_lag_ms=LAG_MS if timed else 0,
    )  # fmt: skip


CONTRACTS = (
    _facts(ContractClass.VOID), _facts(ContractClass.NOT_AFTER), _facts(ContractClass.LOOKUP),
    _facts(ContractClass.KEY),
    _facts(ContractClass.OPAQUE, dedupes=False), _facts(ContractClass.OPAQUE, Blocks.SLOT, dedupes=False),
    _facts(ContractClass.VOID, Blocks.SLOT),
)  # fmt: skip


@dataclass
class Send:
    """A request that a gateway was permitted to make. It may be anywhere between the gateway and the service."""

    attempt: str
    n: int
    key: str
    slot: str
    facts: ev.ContractFacts
    not_after: int
    granted_at: int
    gateway_waits: bool = True
    arrived: bool = False


@dataclass(frozen=True)
class Reply:
    """What the service would say, as its gateway would name it."""

    outcome: TryOutcome
    basis: Basis


@dataclass(frozen=True)
class Found:
    """What asking showed, and on which basis it may be believed."""

    finding: Finding
    basis: Basis
    clock_before_ms: int = 0


@dataclass
class Services:
    """The truth: which key and slot took effect when, what was refused for good, what was voided."""

    effects: list[tuple[str, str, int]] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    voided: set[str] = field(default_factory=set)

    def happened(self, key: str) -> bool:
        return any(k == key for k, _, _ in self.effects)

    def per_slot(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for _, slot, _ in self.effects:
            counts[slot] = counts.get(slot, 0) + 1
        return counts

    def arrive(self, send: Send, now: int, *, willing: str) -> Reply:
        """One request reaches the service. `willing`: ok, no (a refusal for good), busy (nothing done this time)."""
        send.arrived = True
        if send.facts.dedupes:
            first = next((at for k, _, at in self.effects if k == send.key), None)
            if first is not None and now - first < RETENTION_MS:
                return Reply(TryOutcome.OK, Basis.REPLY)
            if send.key in self.voided or send.key in self.refused:
                return Reply(TryOutcome.NOT_EXECUTED, Basis.SERVICE_REFUSED)
        if send.not_after and now - BEHIND_MS > send.not_after:
            return Reply(TryOutcome.NOT_EXECUTED, Basis.SERVICE_REFUSED)
        if willing == "busy":
            return Reply(TryOutcome.NOT_EXECUTED, Basis.SERVICE_REFUSED)
        if willing == "no":
            self.refused.add(send.key)
            return Reply(TryOutcome.NOT_EXECUTED, Basis.SERVICE_REFUSED)
        self.effects.append((send.key, send.slot, now))
        return Reply(TryOutcome.OK, Basis.REPLY)

    def void(self, key: str) -> Found:
        """Test and set: the answer is what counts."""
        if self.happened(key):
            return Found(Finding.EXECUTED, Basis.LOOKUP_FOUND)
        if key in self.refused:
            return Found(Finding.NOT_EXECUTED, Basis.SERVICE_REFUSED)
        self.voided.add(key)
        return Found(Finding.NOT_EXECUTED, Basis.VOIDED)

    def look_up(self, key: str, facts: ev.ContractFacts, now: int, not_after: int) -> Found:
        """A read, possibly behind. What "not found" is worth is for the rules to say; here it is always offered."""
        seen = [at for k, _, at in self.effects if k == key and at <= now - facts.lookup_lag_ms]
        if seen:
            return Found(Finding.EXECUTED, Basis.LOOKUP_FOUND)
        if key in self.refused:
            return Found(Finding.NOT_EXECUTED, Basis.SERVICE_REFUSED)
        return Found(Finding.NOT_EXECUTED, Basis.NOT_AFTER_PASSED, clock_before_ms=now - BEHIND_MS)
