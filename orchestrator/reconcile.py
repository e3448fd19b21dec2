"""What an answer from a service proves about an attempt, and what to ask when nothing is proven yet.

Contract and evidence in, conclusion out. "Not found" alone never means "did not happen": it counts only after a fence
(a void's own answer, or the service's clock past the expiry that the service enforces). Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from admission.agenda import all_closed, can_be_asked
from admission.events import ContractFacts
from admission.records import Attempt
from admission.rules_attempt import key_forgotten
from admission.vocabulary import AttemptState, Basis, ContractClass, Finding, Method

_WHY_NOT_ASKABLE = {
    ContractClass.OPAQUE: "the service cannot be asked and knows no keys; only a person who looks there can tell",
    ContractClass.KEY: "the service can only be sent the same key again, which would cause the effect if it was lost",
    ContractClass.GW_ACK: "only its gateway could have said that nothing was sent, and it did not",
}


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What is proven, on which basis; UNKNOWN says in one line why, and what would settle it."""

    finding: Finding
    basis: Basis
    detail: str = ""
    observed: dict[str, Any] | None = None
    clock_before_ms: int = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """A service's answer as the gateway reports it, and its clock as read before the question was sent (ms; 0: not)."""

    found: str
    observed: dict[str, Any] | None = None
    payload_matches: bool | None = None
    clock_before_ms: int = 0
    detail: str = ""


def evidence_from(answer: Mapping[str, Any], clock_before_ms: int) -> Evidence:
    """The gateway's answer as evidence."""
    observed = answer.get("observed")
    return Evidence(
        found=str(answer.get("found", "unreachable")),
        observed=observed if isinstance(observed, dict) else None,
        payload_matches=answer.get("payload_matches"),
        clock_before_ms=clock_before_ms,
        detail=str(answer.get("detail") or ""),
    )


def without_asking(facts: ContractFacts, attempt: Attempt) -> Conclusion | None:
    """What can be concluded without a question: every try is closed, or nobody can be asked. None: ask."""
    if all_closed(attempt):
        basis = attempt.tries[-1].basis or Basis.NOTHING_WRITTEN
        return Conclusion(Finding.NOT_EXECUTED, basis, attempt.why or "no try was executed", attempt.observed)
    if can_be_asked(facts.contract_class) is None and attempt.state is not AttemptState.UNKNOWN:
        return Conclusion(
            Finding.UNKNOWN, Basis.GAVE_UP, f"no answer came back, and {_WHY_NOT_ASKABLE[facts.contract_class]}"
        )
    return None


def method_for(facts: ContractFacts) -> Method | None:
    """How the service is asked."""
    return can_be_asked(facts.contract_class)


def fence_ms(facts: ContractFacts, attempt: Attempt) -> int:
    """The service's time after which a lookup's "not found" is conclusive; 0 when the contract offers no expiry."""
    return attempt.not_after + facts.clock_skew_ms + facts.lookup_lag_ms if attempt.not_after else 0


def conclude(facts: ContractFacts, attempt: Attempt, evidence: Evidence, now: int) -> Conclusion | None:
    """What an answer proves; None when the question has to be asked again later."""
    if evidence.found in ("refused", "voided", "not_found") and key_forgotten(facts, attempt):
        return _unknown(attempt, f"asked so late that the service may have forgotten it ({evidence.found})")
    match evidence.found:
        case "executed" if evidence.payload_matches is False:
            return _unknown(attempt, "the service holds another request under this key; somebody else may have used it")
        case "executed":
            return Conclusion(Finding.EXECUTED, Basis.LOOKUP_FOUND, observed=evidence.observed)
        case "refused":
            said = evidence.detail or "the service refused it"
            return Conclusion(Finding.NOT_EXECUTED, Basis.SERVICE_REFUSED, said, evidence.observed)
        case "voided":
            return Conclusion(Finding.NOT_EXECUTED, Basis.VOIDED, "voided before it was executed", evidence.observed)
        case "not_found":
            return _not_found(facts, attempt, evidence, now)
        case _:
            if now < attempt.reconcile_at + facts.reconcile_deadline_ms:
                return None
            return _unknown(
                attempt, f"the service could not be asked ({evidence.detail or evidence.found}); asking goes on"
            )


def _not_found(facts: ContractFacts, attempt: Attempt, evidence: Evidence, now: int) -> Conclusion | None:
    fence = fence_ms(facts, attempt)
    if fence and evidence.clock_before_ms > fence:
        return Conclusion(
            Finding.NOT_EXECUTED, Basis.NOT_AFTER_PASSED, "not found after it could no longer be executed",
            clock_before_ms=evidence.clock_before_ms,
        )  # fmt: skip
    if now < attempt.reconcile_at + facts.reconcile_deadline_ms:
        return None
    if fence:
        return _unknown(attempt, "not found yet, and the service may still execute it; asked again after its expiry")
    return _unknown(
        attempt, "not found, which proves nothing: the request may still be on its way and cannot be called off"
    )


def _unknown(attempt: Attempt, why: str) -> Conclusion | None:
    if attempt.state is AttemptState.UNKNOWN:
        return None  # it is on record as unknown; saying it again would append nothing new
    return Conclusion(Finding.UNKNOWN, Basis.GAVE_UP, why)
