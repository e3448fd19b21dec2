"""The rules of the shop: a database and seven write actions, as a pure machine.

Knows orders, customers, products and what the shop's policy permits. Does not know HTTP, keys, time or chance: effect
numbers come from a counter, so the same calls on the same database always give the same receipts and the same database.
Money is counted in whole cents; the database holds it as a number with two decimals, as the data sets do.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Record = dict[str, Any]
Tables = Mapping[str, Mapping[str, Record]]

TABLES = ("orders", "products", "users")
CANCEL_REASONS = ("no longer needed", "ordered by mistake")
ADDRESS_FIELDS = ("address1", "address2", "city", "state", "country", "zip")
PENDING, DELIVERED, CANCELLED = "pending", "delivered", "cancelled"
ITEMS_MODIFIED = "pending (items modified)"
RETURN_REQUESTED, EXCHANGE_REQUESTED = "return requested", "exchange requested"


class Rule(StrEnum):
    """Why the shop says no. The names are stable: they stand in replies, journals and the oracle's answers."""

    ARGUMENTS_INVALID = "arguments_invalid"
    ORDER_UNKNOWN = "order_unknown"
    USER_UNKNOWN = "user_unknown"
    ORDER_NOT_PENDING = "order_not_pending"
    ORDER_ITEMS_ALREADY_MODIFIED = "order_items_already_modified"
    ORDER_NOT_DELIVERED = "order_not_delivered"
    REASON_NOT_ACCEPTED = "reason_not_accepted"
    PAYMENT_METHOD_UNKNOWN = "payment_method_unknown"
    PAYMENT_METHOD_UNCHANGED = "payment_method_unchanged"
    PAYMENT_ALREADY_MODIFIED = "payment_already_modified"
    GIFT_CARD_SHORT = "gift_card_short"
    REFUND_METHOD_NOT_ALLOWED = "refund_method_not_allowed"
    ITEM_NOT_IN_ORDER = "item_not_in_order"
    ITEM_COUNTS_DIFFER = "item_counts_differ"
    ITEM_OF_OTHER_PRODUCT = "item_of_other_product"
    ITEM_UNCHANGED = "item_unchanged"
    ITEM_UNAVAILABLE = "item_unavailable"


@dataclass(frozen=True)
class Action:
    """One call of a write action: its name and its JSON arguments (not to be changed afterwards)."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def identity(self) -> str:
        """The same text for the same action, whatever the order of its arguments."""
        return f"{self.name} {canonical(self.arguments)}"

    @property
    def target(self) -> str:
        """The order or customer it is about; empty when it names neither."""
        return str(self.arguments.get("order_id") or self.arguments.get("user_id") or "")


@dataclass(frozen=True)
class Executed:
    """It happened: `receipt` is what the customer's side may keep."""

    receipt: Record


@dataclass(frozen=True)
class Refused:
    """The shop's policy says no; nothing changed."""

    rule: StrEnum
    message: str


class _NoError(Exception):
    """Leaves a rule early inside this file; `Shop.execute` turns it into `Refused`."""

    def __init__(self, rule: Rule, message: str) -> None:
        super().__init__(message)
        self.refused = Refused(rule, message)


class DataError(ValueError):
    """A database that does not have the expected shape; the message names the place."""


class Database:
    """A data set as it was loaded. Never changed: shops put their own copies of changed records over it."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        """Take over `tables` (not copied).

        Raises:
            DataError: a table is missing, or a record's id differs from the name it is stored under.
        """
        for table in TABLES:
            if not isinstance(tables.get(table), dict):
                raise DataError(f"the database has no table {table!r}; expected {', '.join(TABLES)}")
        for table, field in (("orders", "order_id"), ("products", "product_id"), ("users", "user_id")):
            for name, record in tables[table].items():
                if not isinstance(record, dict) or record.get(field) != name:
                    raise DataError(f"{table}[{name!r}]: {field} must be {name!r}")
        self.tables: Tables = {table: tables[table] for table in TABLES}
        self._digests: dict[tuple[str, str], str] | None = None

    @property
    def digests(self) -> Mapping[tuple[str, str], str]:
        """Hash of every record by (table, id), computed once."""
        if self._digests is None:
            self._digests = {
                (table, name): digest(record) for table in TABLES for name, record in self.tables[table].items()
            }
        return self._digests

    def of_customer(self, user_id: str) -> Database:
        """The part that this customer's actions can read or change: the customer, the orders, all products.

        Raises:
            DataError: there is no such customer.
        """
        user = self.tables["users"].get(user_id)
        if user is None:
            raise DataError(f"no customer {user_id!r}")
        orders = {name: order for name, order in self.tables["orders"].items() if order["user_id"] == user_id}
        return Database({"orders": orders, "products": self.tables["products"], "users": {user_id: user}})


class Shop:
    """A database and the writes done to it so far.

    `execute` is the only way to change anything; it either changes everything the action means or nothing.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._changed: dict[tuple[str, str], Record] = {}
        self.effects = 0

    def read(self, table: str, name: str) -> Record | None:
        """The record as it is now (not to be changed), or None."""
        return self._changed.get((table, name)) or self._database.tables[table].get(name)

    def execute(self, action: Action) -> Executed | Refused:
        """Apply one write action by the shop's policy.

        Raises:
            KeyError: no such action; see `ACTIONS`.
        """
        perform = ACTIONS[action.name]
        draft = _Draft(self)
        try:
            summary = perform(draft, action.arguments)
        except _NoError as no:
            return no.refused
        self._changed.update(draft.changed)
        self.effects += 1
        receipt = {
            "effect": f"shop-{self.effects}",
            "action": action.name,
            "target": action.target,
            "summary": summary,
        }
        return Executed(receipt)

    def tables(self) -> dict[str, dict[str, Record]]:
        """The whole database as it is now."""
        now = {table: dict(self._database.tables[table]) for table in TABLES}
        for (table, name), record in self._changed.items():
            now[table][name] = record
        return now

    def database_hash(self) -> str:
        """One hash for the whole database, the same for the same contents in whatever order they came about."""
        digests = dict(self._database.digests)
        digests.update({place: digest(record) for place, record in self._changed.items()})
        return _combine(digests)

    def customer_hash(self, user_id: str) -> str:
        """The hash of `of_customer` as it is now, so that customers can be compared one by one.

        Raises:
            DataError: there is no such customer.
        """
        part = self._database.of_customer(user_id).tables
        digests = {(table, name): self._digest(table, name) for table in TABLES for name in part[table]}
        return _combine(digests)

    def _digest(self, table: str, name: str) -> str:
        changed = self._changed.get((table, name))
        return digest(changed) if changed is not None else self._database.digests[table, name]


def canonical(value: object) -> str:
    """JSON text with sorted names and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(record: object) -> str:
    """sha256 of the canonical text, in hex."""
    return hashlib.sha256(canonical(record).encode()).hexdigest()


def database_hash(tables: Tables) -> str:
    """The hash that `Shop.database_hash` gives for these contents."""
    return _combine({(table, name): digest(record) for table in TABLES for name, record in tables[table].items()})


def _combine(digests: Mapping[tuple[str, str], str]) -> str:
    lines = (f"{table}/{name} {value}\n" for (table, name), value in sorted(digests.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class _Draft:
    """Copies of the records one action changes; thrown away when the action is refused."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self.changed: dict[tuple[str, str], Record] = {}

    def order(self, arguments: Mapping[str, Any]) -> Record:
        name = _text(arguments, "order_id")
        return self._open("orders", name, Rule.ORDER_UNKNOWN)

    def user(self, name: str) -> Record:
        return self._open("users", name, Rule.USER_UNKNOWN)

    def product(self, name: str) -> Record:
        return self._shop.read("products", name) or {"variants": {}}

    def _open(self, table: str, name: str, unknown: Rule) -> Record:
        if (table, name) not in self.changed:
            record = self._shop.read(table, name)
            if record is None:
                raise _NoError(unknown, f"{table} has no {name}")
            self.changed[table, name] = json.loads(json.dumps(record))
        return self.changed[table, name]

    def method(self, order: Record, name: str) -> Record:
        methods: dict[str, Record] = self.user(order["user_id"])["payment_methods"]
        if name not in methods:
            raise _NoError(Rule.PAYMENT_METHOD_UNKNOWN, f"{name} is not a payment method of {order['user_id']}")
        return methods[name]

    def settle(self, order: Record, method: Record, due_cents: int) -> None:
        """Take what is due (give it back when negative), at once where the method is a gift card, and note it."""
        require_balance(method, due_cents)
        if due_cents:
            if _is_gift_card(method):
                method["balance"] = _money(_cents(method["balance"]) - due_cents)
            kind = "payment" if due_cents > 0 else "refund"
            entry = {"transaction_type": kind, "amount": _money(abs(due_cents)), "payment_method_id": method["id"]}
            order["payment_history"].append(entry)


def require_balance(method: Record, due_cents: int) -> None:
    """A gift card must hold what is asked of it."""
    if _is_gift_card(method) and due_cents > _cents(method["balance"]):
        raise _NoError(Rule.GIFT_CARD_SHORT, f"{method['id']} holds less than the {_money(due_cents)} that are due")


def _cancel(draft: _Draft, arguments: Mapping[str, Any]) -> Record:
    order = draft.order(arguments)
    _require_pending(order)
    reason = _text(arguments, "reason")
    if reason not in CANCEL_REASONS:
        raise _NoError(Rule.REASON_NOT_ACCEPTED, f"the reason must be one of: {', '.join(CANCEL_REASONS)}")
    paid: Counter[str] = Counter()
    for entry in order["payment_history"]:
        sign = 1 if entry["transaction_type"] == "payment" else -1
        paid[entry["payment_method_id"]] += sign * _cents(entry["amount"])
    for name, cents in sorted(paid.items()):
        if cents > 0:
            draft.settle(order, draft.method(order, name), -cents)
    order["status"] = CANCELLED
    order["cancel_reason"] = reason
    return {"status": CANCELLED, "refunded": _money(sum(cents for cents in paid.values() if cents > 0))}


def _modify_address(draft: _Draft, arguments: Mapping[str, Any]) -> Record:
    order = draft.order(arguments)
    _require_pending(order)
    order["address"] = _address(arguments)
    return {"status": order["status"], "zip": order["address"]["zip"]}


def _modify_payment(draft: _Draft, arguments: Mapping[str, Any]) -> Record:
    order = draft.order(arguments)
    _require_pending(order)
    new = draft.method(order, _text(arguments, "payment_method_id"))
    history = order["payment_history"]
    if len(history) != 1:
        raise _NoError(Rule.PAYMENT_ALREADY_MODIFIED, f"the payment of {order['order_id']} can be changed once")
    if history[0]["payment_method_id"] == new["id"]:
        raise _NoError(Rule.PAYMENT_METHOD_UNCHANGED, f"{order['order_id']} is already paid by {new['id']}")
    cents = _cents(history[0]["amount"])
    draft.settle(order, new, cents)
    draft.settle(order, draft.method(order, history[0]["payment_method_id"]), -cents)
    return {"status": order["status"], "payment_method_id": new["id"], "amount": _money(cents)}


def _modify_items(draft: _Draft, arguments: Mapping[str, Any]) -> Record:
    order = draft.order(arguments)
    _require_pending(order)
    swaps = _swaps(draft, order, arguments)
    method = draft.method(order, _text(arguments, "payment_method_id"))
    due = sum(_cents(variant["price"]) - _cents(item["price"]) for item, variant in swaps)
    draft.settle(order, method, due)
    for item, variant in swaps:
        item.update(item_id=variant["item_id"], price=variant["price"], options=dict(variant["options"]))
    order["status"] = ITEMS_MODIFIED
    return {"status": ITEMS_MODIFIED, "items": len(swaps), "difference": _money(due)}


def _modify_user_address(draft: _Draft, arguments: Mapping[str, Any]) -> Record:
    user = draft.user(_text(arguments, "user_id"))
    user["address"] = _address(arguments)
    return {"zip": user["address"]["zip"]}


def _return(draft: _Draft, arguments: Mapping[str, Any]) -> Record:
    order = draft.order(arguments)
    _require_delivered(order)
    items = _pick(order, _texts(arguments, "item_ids"))
    method = draft.method(order, _text(arguments, "payment_method_id"))
    payments = [entry for entry in order["payment_history"] if entry["transaction_type"] == "payment"]
    if method["id"] not in {entry["payment_method_id"] for entry in payments} and not _is_gift_card(method):
        raise _NoError(Rule.REFUND_METHOD_NOT_ALLOWED, "a refund goes to the original payment method or to a gift card")
    cents = sum(_cents(item["price"]) for item in items)
    order["status"] = RETURN_REQUESTED
    # The money moves when the goods are back, which is outside this shop's day.
    order["return"] = {
        "item_ids": sorted(item["item_id"] for item in items),
        "payment_method_id": method["id"],
        "refund": _money(cents),
    }
    return {"status": RETURN_REQUESTED, "items": len(items), "refund": _money(cents)}


def _exchange(draft: _Draft, arguments: Mapping[str, Any]) -> Record:
    order = draft.order(arguments)
    _require_delivered(order)
    swaps = _swaps(draft, order, arguments)
    method = draft.method(order, _text(arguments, "payment_method_id"))
    due = sum(_cents(variant["price"]) - _cents(item["price"]) for item, variant in swaps)
    require_balance(method, due)
    order["status"] = EXCHANGE_REQUESTED
    # As with a return, the difference is settled when the goods are back.
    order["exchange"] = {
        "swaps": sorted([item["item_id"], variant["item_id"]] for item, variant in swaps),
        "payment_method_id": method["id"],
        "difference": _money(due),
    }
    return {"status": EXCHANGE_REQUESTED, "items": len(swaps), "difference": _money(due)}


ACTIONS: Mapping[str, Callable[[_Draft, Mapping[str, Any]], Record]] = {
    "cancel_pending_order": _cancel,
    "modify_pending_order_address": _modify_address,
    "modify_pending_order_payment": _modify_payment,
    "modify_pending_order_items": _modify_items,
    "modify_user_address": _modify_user_address,
    "return_delivered_order_items": _return,
    "exchange_delivered_order_items": _exchange,
}


def _require_pending(order: Record) -> None:
    if order["status"] == ITEMS_MODIFIED:
        raise _NoError(Rule.ORDER_ITEMS_ALREADY_MODIFIED, f"{order['order_id']} is closed: items modified")
    if order["status"] != PENDING:
        raise _NoError(Rule.ORDER_NOT_PENDING, f"{order['order_id']} is {order['status']}, not {PENDING}")


def _require_delivered(order: Record) -> None:
    if order["status"] != DELIVERED:
        raise _NoError(Rule.ORDER_NOT_DELIVERED, f"{order['order_id']} is {order['status']}, not {DELIVERED}")


def _pick(order: Record, item_ids: list[str]) -> list[Record]:
    """One item of the order for each id; an order can hold the same item more than once."""
    left: list[Record] = list(order["items"])
    picked: list[Record] = []
    for item_id in item_ids:
        place = next((place for place, item in enumerate(left) if item["item_id"] == item_id), None)
        if place is None:
            raise _NoError(Rule.ITEM_NOT_IN_ORDER, f"{order['order_id']} does not hold {item_id} (often enough)")
        picked.append(left.pop(place))
    return picked


def _swaps(draft: _Draft, order: Record, arguments: Mapping[str, Any]) -> list[tuple[Record, Record]]:
    """Pairs of an item of the order and the available variant of the same product that replaces it."""
    old, new = _texts(arguments, "item_ids"), _texts(arguments, "new_item_ids")
    if len(old) != len(new):
        raise _NoError(Rule.ITEM_COUNTS_DIFFER, f"{len(old)} items for {len(new)} new ones")
    swaps: list[tuple[Record, Record]] = []
    for item, item_id in zip(_pick(order, old), new, strict=True):
        variant = draft.product(item["product_id"])["variants"].get(item_id)
        if variant is None:
            raise _NoError(Rule.ITEM_OF_OTHER_PRODUCT, f"{item_id} is no {item['name']}")
        if item_id == item["item_id"]:
            raise _NoError(Rule.ITEM_UNCHANGED, f"{item_id} is the item that is already there")
        if not variant["available"]:
            raise _NoError(Rule.ITEM_UNAVAILABLE, f"{item_id} is not available")
        swaps.append((item, variant))
    return swaps


def _address(arguments: Mapping[str, Any]) -> Record:
    return {field: _text(arguments, field, empty=field == "address2") for field in ADDRESS_FIELDS}


def _text(arguments: Mapping[str, Any], name: str, *, empty: bool = False) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise _NoError(Rule.ARGUMENTS_INVALID, f"{name} must be a text")
    return value


def _texts(arguments: Mapping[str, Any], name: str) -> list[str]:
    value = arguments.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise _NoError(Rule.ARGUMENTS_INVALID, f"{name} must be a list of at least one text")
    return value


def _is_gift_card(method: Record) -> bool:
    return bool(method["source"] == "gift_card")


def _cents(amount: float) -> int:
    return round(amount * 100)


def _money(cents: int) -> float:
    return cents / 100
