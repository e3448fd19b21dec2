"""The pure shop: every action, every refusal, money to the cent, and a hash that knows contents and not history."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simulators.shop import ACTIONS, Action, Database, DataError, Executed, Refused, Rule, Shop, database_hash

HOME = {"address1": "1 Row", "address2": "", "city": "Alder", "state": "ME", "country": "USA", "zip": "04000"}


def tables() -> dict[str, dict[str, Any]]:
    def item(item_id: str, price: float, product_id: str = "p1") -> dict[str, Any]:
        return {
            "name": "Mug",
            "product_id": product_id,
            "item_id": item_id,
            "price": price,
            "options": {"size": item_id},
        }

    def variant(item_id: str, price: float, *, available: bool = True) -> dict[str, Any]:
        return {"item_id": item_id, "price": price, "available": available, "options": {"size": item_id}}

    def order(order_id: str, status: str, items: list[dict[str, Any]], paid_by: str) -> dict[str, Any]:
        total = round(sum(one["price"] for one in items), 2)
        return {
            "order_id": order_id,
            "user_id": "ann",
            "address": dict(HOME),
            "items": items,
            "status": status,
            "fulfillments": [],
            "payment_history": [{"transaction_type": "payment", "amount": total, "payment_method_id": paid_by}],
        }

    orders = [
        order("#1", "pending", [item("a", 10.1), item("a", 10.1), item("b", 20.2)], "card"),
        order("#2", "delivered", [item("a", 10.1), item("x", 5.0, "p2")], "paypal"),
        order("#3", "processed", [item("a", 10.1)], "card"),
        order("#4", "cancelled", [item("a", 10.1)], "card"),
        order("#5", "pending", [item("a", 10.1)], "gift"),
    ]
    methods = {
        "card": {"source": "credit_card", "id": "card"},
        "paypal": {"source": "paypal", "id": "paypal"},
        "gift": {"source": "gift_card", "id": "gift", "balance": 30},
    }
    variants = {"a": variant("a", 10.1), "b": variant("b", 20.2), "c": variant("c", 9.9, available=False)}
    return {
        "orders": {one["order_id"]: one for one in orders},
        "users": {"ann": {"user_id": "ann", "address": dict(HOME), "payment_methods": methods}},
        "products": {
            "p1": {"name": "Mug", "product_id": "p1", "variants": variants},
            "p2": {"name": "Tote", "product_id": "p2", "variants": {"x": variant("x", 5.0)}},
        },
    }


@pytest.fixture
def shop() -> Shop:
    return Shop(Database(tables()))


def swap(order_id: str, old: list[str], new: list[str], by: str = "card") -> dict[str, Any]:
    return {"order_id": order_id, "item_ids": old, "new_item_ids": new, "payment_method_id": by}


def done(shop: Shop, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    outcome = shop.execute(Action(name, arguments))
    assert isinstance(outcome, Executed), outcome
    return outcome.receipt


def order(shop: Shop, name: str) -> dict[str, Any]:
    found = shop.read("orders", name)
    assert found is not None
    return found


def balance(shop: Shop) -> float:
    user = shop.read("users", "ann")
    assert user is not None
    return float(user["payment_methods"]["gift"]["balance"])


def test_cancelling_refunds_a_gift_card_at_once(shop: Shop) -> None:
    receipt = done(shop, "cancel_pending_order", {"order_id": "#5", "reason": "ordered by mistake"})
    assert receipt == {
        "effect": "shop-1",
        "action": "cancel_pending_order",
        "target": "#5",
        "summary": {"status": "cancelled", "refunded": 10.1},
    }
    assert balance(shop) == 40.1
    assert order(shop, "#5")["payment_history"][-1]["transaction_type"] == "refund"


def test_an_address_can_change_again_and_then_the_items_close_the_order(shop: Shop) -> None:
    done(shop, "modify_pending_order_address", {"order_id": "#1", **HOME, "zip": "1"})
    done(shop, "modify_pending_order_address", {"order_id": "#1", **HOME, "zip": "2"})
    done(shop, "modify_pending_order_items", swap("#1", ["a", "b"], ["b", "a"]))
    assert [item["item_id"] for item in order(shop, "#1")["items"]] == ["b", "a", "a"]
    assert order(shop, "#1")["address"]["zip"] == "2"
    assert len(order(shop, "#1")["payment_history"]) == 1  # a swap that costs nothing leaves no entry
    for name, rest in (
        ("modify_pending_order_address", HOME),
        ("cancel_pending_order", {"reason": "no longer needed"}),
        ("modify_pending_order_payment", {"payment_method_id": "paypal"}),
        ("modify_pending_order_items", swap("#1", ["a"], ["b"])),
    ):
        refused = shop.execute(Action(name, {"order_id": "#1", **rest}))
        assert isinstance(refused, Refused)
        assert refused.rule is Rule.ORDER_ITEMS_ALREADY_MODIFIED


def test_the_same_item_twice_is_two_items(shop: Shop) -> None:
    done(shop, "modify_pending_order_items", swap("#1", ["a", "a"], ["b", "b"], "gift"))
    assert [item["item_id"] for item in order(shop, "#1")["items"]] == ["b", "b", "b"]
    assert balance(shop) == 9.8


def test_paying_otherwise_moves_gift_card_money(shop: Shop) -> None:
    done(shop, "modify_pending_order_payment", {"order_id": "#5", "payment_method_id": "card"})
    assert balance(shop) == 40.1
    kinds = [(one["transaction_type"], one["payment_method_id"]) for one in order(shop, "#5")["payment_history"]]
    assert kinds == [("payment", "gift"), ("payment", "card"), ("refund", "gift")]
    again = shop.execute(Action("modify_pending_order_payment", {"order_id": "#5", "payment_method_id": "paypal"}))
    assert isinstance(again, Refused)
    assert again.rule is Rule.PAYMENT_ALREADY_MODIFIED
    # What is refunded at the end is what was really paid last, and only that.
    receipt = done(shop, "cancel_pending_order", {"order_id": "#5", "reason": "no longer needed"})
    assert receipt["summary"]["refunded"] == 10.1
    assert order(shop, "#5")["payment_history"][-1]["payment_method_id"] == "card"
    assert balance(shop) == 40.1


def test_return_and_exchange_are_requests_and_happen_once(shop: Shop) -> None:
    back = {"order_id": "#2", "item_ids": ["x"], "payment_method_id": "gift"}
    done(shop, "return_delivered_order_items", back)
    assert order(shop, "#2")["status"] == "return requested"
    assert order(shop, "#2")["return"] == {"item_ids": ["x"], "payment_method_id": "gift", "refund": 5.0}
    assert balance(shop) == 30
    for name, arguments in (
        ("return_delivered_order_items", back),
        ("exchange_delivered_order_items", swap("#2", ["a"], ["b"])),
    ):
        refused = shop.execute(Action(name, arguments))
        assert isinstance(refused, Refused)
        assert refused.rule is Rule.ORDER_NOT_DELIVERED


def test_an_exchange_keeps_the_items_and_notes_the_difference(shop: Shop) -> None:
    done(shop, "exchange_delivered_order_items", swap("#2", ["a"], ["b"], "gift"))
    assert order(shop, "#2")["status"] == "exchange requested"
    assert order(shop, "#2")["exchange"] == {"swaps": [["a", "b"]], "payment_method_id": "gift", "difference": 10.1}
    assert [item["item_id"] for item in order(shop, "#2")["items"]] == ["a", "x"]


def test_a_customer_moves(shop: Shop) -> None:
    receipt = done(shop, "modify_user_address", {"user_id": "ann", **HOME, "zip": "9"})
    assert receipt["target"] == "ann"
    assert order(shop, "#1")["address"]["zip"] == HOME["zip"]


REFUSALS = [
    (Rule.ARGUMENTS_INVALID, "cancel_pending_order", {}),
    (Rule.ARGUMENTS_INVALID, "cancel_pending_order", {"order_id": 7}),
    (Rule.ARGUMENTS_INVALID, "modify_pending_order_address", {"order_id": "#1", **HOME, "city": ""}),
    (Rule.ARGUMENTS_INVALID, "return_delivered_order_items", {"order_id": "#2", "item_ids": []}),
    (Rule.ARGUMENTS_INVALID, "return_delivered_order_items", {"order_id": "#2", "item_ids": "a"}),
    (Rule.ORDER_UNKNOWN, "cancel_pending_order", {"order_id": "#9", "reason": "no longer needed"}),
    (Rule.USER_UNKNOWN, "modify_user_address", {"user_id": "bob", **HOME}),
    (Rule.ORDER_NOT_PENDING, "cancel_pending_order", {"order_id": "#3", "reason": "no longer needed"}),
    (Rule.ORDER_NOT_PENDING, "modify_pending_order_address", {"order_id": "#4", **HOME}),
    (Rule.ORDER_NOT_PENDING, "modify_pending_order_items", swap("#2", ["a"], ["b"])),
    (Rule.ORDER_NOT_DELIVERED, "exchange_delivered_order_items", swap("#1", ["a"], ["b"])),
    (Rule.REASON_NOT_ACCEPTED, "cancel_pending_order", {"order_id": "#1", "reason": "too dear"}),
    (Rule.PAYMENT_METHOD_UNKNOWN, "modify_pending_order_payment", {"order_id": "#1", "payment_method_id": "other"}),
    (Rule.PAYMENT_METHOD_UNCHANGED, "modify_pending_order_payment", {"order_id": "#1", "payment_method_id": "card"}),
    (Rule.GIFT_CARD_SHORT, "modify_pending_order_payment", {"order_id": "#1", "payment_method_id": "gift"}),
    (Rule.REFUND_METHOD_NOT_ALLOWED, "return_delivered_order_items",
     {"order_id": "#2", "item_ids": ["a"], "payment_method_id": "card"}),
    (Rule.ITEM_NOT_IN_ORDER, "modify_pending_order_items", swap("#1", ["a", "a", "a"], ["b", "b", "b"])),
    (Rule.ITEM_COUNTS_DIFFER, "modify_pending_order_items", swap("#1", ["a", "a"], ["b"])),
    (Rule.ITEM_OF_OTHER_PRODUCT, "exchange_delivered_order_items", swap("#2", ["a"], ["x"])),
    (Rule.ITEM_UNCHANGED, "exchange_delivered_order_items", swap("#2", ["a"], ["a"])),
    (Rule.ITEM_UNAVAILABLE, "exchange_delivered_order_items", swap("#2", ["a"], ["c"])),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "name", "arguments"), REFUSALS)
def test_a_refusal_has_a_name_and_changes_nothing(shop: Shop, rule: Rule, name: str, arguments: dict[str, Any]) -> None:
    before = shop.database_hash()
    outcome = shop.execute(Action(name, arguments))
    assert isinstance(outcome, Refused)
    assert outcome.rule is rule
    assert outcome.message
    assert shop.database_hash() == before
    assert shop.effects == 0


def test_every_rule_and_action_is_met_here() -> None:
    tested = {rule for rule, _, _ in REFUSALS} | {Rule.ORDER_ITEMS_ALREADY_MODIFIED, Rule.PAYMENT_ALREADY_MODIFIED}
    assert tested == set(Rule)
    assert len(ACTIONS) == 7


def test_a_gift_card_that_runs_short_in_the_middle_leaves_no_trace(shop: Shop) -> None:
    done(shop, "modify_pending_order_items", swap("#5", ["a"], ["b"], "gift"))
    assert balance(shop) == 19.9
    outcome = shop.execute(Action("modify_pending_order_items", swap("#1", ["a", "a"], ["b", "b"], "gift")))
    assert isinstance(outcome, Refused)
    assert outcome.rule is Rule.GIFT_CARD_SHORT
    assert balance(shop) == 19.9
    assert order(shop, "#1")["status"] == "pending"


def test_the_hash_is_of_contents_not_of_history() -> None:
    database = Database(tables())
    one, other = Shop(database), Shop(database)
    acts = [
        Action("cancel_pending_order", {"order_id": "#5", "reason": "no longer needed"}),
        Action("return_delivered_order_items", {"order_id": "#2", "item_ids": ["a"], "payment_method_id": "paypal"}),
        Action("modify_user_address", {"user_id": "ann", **HOME, "zip": "9"}),
    ]
    for action in acts:
        one.execute(action)
    for action in reversed(acts):
        other.execute(action)
    assert one.database_hash() == other.database_hash() != Shop(database).database_hash()
    assert one.customer_hash("ann") == other.customer_hash("ann")
    # Through JSON and back, as somebody who only sees the HTTP would compute it.
    assert database_hash(json.loads(json.dumps(one.tables()))) == one.database_hash()
    # The data set itself is never written to.
    assert database.tables == tables()


def test_a_customers_part_hashes_like_a_database_of_its_own() -> None:
    database = Database(tables())
    assert Shop(database).customer_hash("ann") == Shop(database.of_customer("ann")).database_hash()
    with pytest.raises(DataError, match="bob"):
        database.of_customer("bob")


def test_a_database_of_another_shape_is_refused() -> None:
    with pytest.raises(DataError, match="no table 'users'"):
        Database({"orders": {}, "products": {}})
    with pytest.raises(DataError, match=r"orders\['#1'\]"):
        Database({"orders": {"#1": {"order_id": "#2"}}, "products": {}, "users": {}})
