"""Writes that a customer could ask for, given an order's state. Whether the shop accepts one is for the caller to try.

Knows the shapes of orders and products, and draws from the chance it is given.
"""

from __future__ import annotations

from random import Random

from simulators.shop import CANCEL_REASONS, DELIVERED, PENDING, Action, Database, Record

_STREETS = ("Lantern Row", "Quarry Lane", "Heron Walk", "Millrace Street", "Saltmarsh Road")
_TOWNS = (
    ("Brackwater", "OR", "97099"),
    ("Ferndale Mills", "VT", "05099"),
    ("Port Alder", "ME", "04099"),
    ("Stonecroft", "NM", "87099"),
)


def candidate_orders(database: Database, user_id: str) -> list[Record]:
    """The customer's orders that still take a write of some kind, by id."""
    orders = database.tables["orders"].values()
    mine = [order for order in orders if order["user_id"] == user_id and order["status"] in (PENDING, DELIVERED)]
    return sorted(mine, key=lambda order: str(order["order_id"]))


def candidates(database: Database, order: Record, chance: Random) -> list[Action]:
    """Some writes on a pending or delivered order, invented from its own data."""
    methods = sorted(database.tables["users"][order["user_id"]]["payment_methods"])
    order_id, paid_by = order["order_id"], order["payment_history"][0]["payment_method_id"]
    item = chance.choice(order["items"])
    swap = _swap(database, item, chance)
    if order["status"] == DELIVERED:
        back = {"order_id": order_id, "item_ids": [item["item_id"]], "payment_method_id": paid_by}
        found = [Action("return_delivered_order_items", back)]
        if swap is not None:
            given = {**back, "new_item_ids": [swap], "payment_method_id": chance.choice(methods)}
            found.append(Action("exchange_delivered_order_items", given))
        return found
    found = [
        Action("cancel_pending_order", {"order_id": order_id, "reason": chance.choice(CANCEL_REASONS)}),
        Action("modify_pending_order_address", {"order_id": order_id, **_address(chance)}),
    ]
    if swap is not None:
        given = {
            "order_id": order_id,
            "item_ids": [item["item_id"]],
            "new_item_ids": [swap],
            "payment_method_id": chance.choice(methods),
        }
        found.append(Action("modify_pending_order_items", given))
    found.extend(
        Action("modify_pending_order_payment", {"order_id": order_id, "payment_method_id": method})
        for method in methods
        if method != paid_by
    )
    return found


def customer_writes(user_id: str, chance: Random) -> list[Action]:
    """A write on the customer rather than on an order."""
    return [Action("modify_user_address", {"user_id": user_id, **_address(chance)})]


def _swap(database: Database, item: Record, chance: Random) -> str | None:
    product = database.tables["products"].get(item["product_id"], {"variants": {}})
    free = [name for name, variant in product["variants"].items() if variant["available"] and name != item["item_id"]]
    return chance.choice(sorted(free)) if free else None


def _address(chance: Random) -> Record:
    city, state, code = chance.choice(_TOWNS)
    return {
        "address1": f"{chance.randint(1, 999)} {chance.choice(_STREETS)}",
        "address2": f"Unit {chance.randint(1, 99)}",
        "city": city,
        "state": state,
        "country": "USA",
        "zip": code,
    }
