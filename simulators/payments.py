"""A payment service: refunds and charges, behind idempotency keys. It keeps no balance, only what it has done."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from starlette.applications import Starlette

from simulators.keyed import KeyedService, assembled, keyed_routes, shared_routes
from simulators.shop import Action, Executed, Refused

ACTIONS = ("refund", "charge")

#: What one payment may be at most (cents); more needs another channel.
AMOUNT_CENTS_MAX = 1_000_000


class PaymentRule(StrEnum):
    """Why a payment is refused."""

    UNKNOWN_ACTION = "unknown_action"
    ARGUMENT_MISSING = "argument_missing"
    AMOUNT_OUT_OF_RANGE = "amount_out_of_range"


class Payments:
    """The rules. Deterministic: a payment's number is its place in the journal of payments."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []

    def execute(self, action: Action) -> Executed | Refused:
        """Pay, or say by which rule not."""
        if action.name not in ACTIONS:
            return Refused(PaymentRule.UNKNOWN_ACTION, f"no action {action.name!r}")
        order, amount = action.arguments.get("order_id"), action.arguments.get("amount_cents")
        if not isinstance(order, str) or not order or not action.arguments.get("payment_method_id"):
            return Refused(PaymentRule.ARGUMENT_MISSING, "order_id and payment_method_id are needed")
        if isinstance(amount, bool) or not isinstance(amount, int) or not 0 < amount <= AMOUNT_CENTS_MAX:
            return Refused(PaymentRule.AMOUNT_OUT_OF_RANGE, f"amount_cents must be from 1 to {AMOUNT_CENTS_MAX}")
        receipt = {
            "effect": f"payment-{len(self.done) + 1}", "action": action.name, "target": order,
            "summary": {"amount_cents": amount},
        }  # fmt: skip
        self.done.append(receipt)
        return Executed(receipt)


def payments_app(service: KeyedService) -> Starlette:
    """The HTTP of the payment service."""
    return assembled([*keyed_routes(service, ACTIONS), *shared_routes(service.entrance, "payments")], service.entrance)
