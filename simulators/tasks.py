"""Tasks of a τ²-bench style folder, the two ways to change one in the middle, and the oracle that says how it must end.

Knows tasks, the pure shop and a seed. Does not know runs, agents or how a task is carried out.
The shape that is read: a list of `{"id", "evaluation_criteria": {"actions": [{"name", "arguments"}]}}`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import as_file, files
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from simulators.candidates import candidate_orders, candidates, customer_writes
from simulators.service import load_database
from simulators.shop import ACTIONS, Action, Database, DataError, Executed, Shop

EXECUTED = "executed"
REPLACEMENT_ACTIONS_MAX = 3


class Shift(StrEnum):
    """How a customer changes their mind."""

    RETRACT = "retract"
    REPLACE = "replace"


class Source(StrEnum):
    """Where the actions come from that the task itself does not have, the preferred ones first."""

    OTHER_TASK = "other_task"
    UNTOUCHED_ORDER = "untouched_order"
    TOUCHED_ORDER = "touched_order"
    CUSTOMER = "customer"
    """No order of the customer takes a write that leaves the task alone, so the customer's own address changes."""


@dataclass(frozen=True)
class Task:
    """A task's customer (None when nothing names one) and its wanted write actions, in their order."""

    id: str
    user_id: str | None
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Shifted:
    """A task with a change: what the first revision asks for, and what the second does."""

    task_id: str
    user_id: str
    shift: Shift
    seed: int
    first: tuple[Action, ...]
    second: tuple[Action, ...]
    source: Source
    other_task_id: str | None = None

    @property
    def retracted(self) -> tuple[Action, ...]:
        """What the first revision asks for and the second no longer does, repetitions counted."""
        wanted = Counter(action.identity for action in self.second)
        gone: list[Action] = []
        for action in self.first:
            if wanted[action.identity] > 0:
                wanted[action.identity] -= 1
            else:
                gone.append(action)
        return tuple(gone)


@dataclass(frozen=True)
class NotShiftable:
    """A task that cannot be changed in this way, and why."""

    task_id: str
    reason: str


@dataclass(frozen=True)
class TaskSet:
    """A database and the tasks on it."""

    database: Database
    tasks: tuple[Task, ...]

    def of_customer(self, user_id: str) -> tuple[Task, ...]:
        """The tasks of one customer, in the file's order."""
        return tuple(task for task in self.tasks if task.user_id == user_id)


class OracleAnswer(NamedTuple):
    """The database a faultless shop ends with, and each wanted action with `executed` or the rule against it."""

    database_hash: str
    outcomes: tuple[tuple[Action, str], ...]


class OracleContradictionError(Exception):
    """An effect is said to have landed that the shop's rules refuse at that place: the record is wrong."""


def load(folder: Path | None = None) -> TaskSet:
    """Read `db.json` or `shop.json` and `tasks.json` from a folder; None reads the package's own data set.

    Raises:
        DataError: a file is missing or has another shape; the message names file and task.
    """
    if folder is None:
        with as_file(files("simulators") / "data") as own:
            return load(own)
    database = load_database(folder)
    path = folder / "tasks.json"
    try:
        raw: Any = json.loads(path.read_bytes())
    except OSError as failure:
        raise DataError(f"{path} cannot be read: {failure.strerror}") from failure
    except ValueError as damage:
        raise DataError(f"{path} is not JSON: {damage}") from damage
    if not isinstance(raw, list):
        raise DataError(f"{path}: expected a list of tasks")
    tasks = tuple(_task(database, one, f"{path}: task {place}") for place, one in enumerate(raw))
    repeated = [name for name, count in Counter(task.id for task in tasks).items() if count > 1]
    if repeated:
        raise DataError(f"{path}: the task id {repeated[0]!r} stands there more than once")
    return TaskSet(database, tasks)


def why_not_redirectable(task: Task) -> str | None:
    """The reason why a task cannot be redirected at all, or None."""
    if not task.actions:
        return "writes nothing"
    if task.user_id is None:
        return "names no customer"
    return None


def retract(task_set: TaskSet, task: Task, seed: int) -> Shifted | NotShiftable:
    """First revision: the task with one more valid write at a seeded place; second revision: the task.

    The extra write is one that the shop executes there and that changes no outcome of the task's own actions.
    An order that the task leaves alone is preferred. On one that it touches, the extra comes before the first touch.
    """
    reason = why_not_redirectable(task)
    if reason is not None or task.user_id is None:
        return NotShiftable(task.id, reason or "names no customer")
    chance = Random(f"{seed}/{task.id}/{Shift.RETRACT}")
    part = task_set.database.of_customer(task.user_id)
    for source, pool in _pools(part, task, chance):
        for extra in pool:
            latest = _first_touch(task.actions, extra.target)
            place = chance.randint(0, latest)
            if extra.identity not in {action.identity for action in task.actions} and all(
                _harmless(part, task.actions, extra, at) for at in {0, place, latest}
            ):
                first = (*task.actions[:place], extra, *task.actions[place:])
                return Shifted(task.id, task.user_id, Shift.RETRACT, seed, first, task.actions, source)
    return NotShiftable(task.id, "no further write of this customer leaves the task's own outcomes as they are")


def replace(task_set: TaskSet, task: Task, seed: int) -> Shifted | NotShiftable:
    """First revision: the task; second revision: another task of the same customer, drawn by the seed.

    Where there is none: one to `REPLACEMENT_ACTIONS_MAX` seeded writes on the customer's other orders, valid whether
    the task's actions have happened by then or not.
    """
    reason = why_not_redirectable(task)
    if reason is not None or task.user_id is None:
        return NotShiftable(task.id, reason or "names no customer")
    chance = Random(f"{seed}/{task.id}/{Shift.REPLACE}")
    mine = [action.identity for action in task.actions]
    others = [
        other
        for other in task_set.of_customer(task.user_id)
        if other.actions and sorted(action.identity for action in other.actions) != sorted(mine)
    ]
    if others:
        other = chance.choice(others)
        source = Source.OTHER_TASK
        return Shifted(task.id, task.user_id, Shift.REPLACE, seed, task.actions, other.actions, source, other.id)
    part = task_set.database.of_customer(task.user_id)
    for source, pool in _pools(part, task, chance):
        chosen: list[Action] = []
        wanted = chance.randint(1, REPLACEMENT_ACTIONS_MAX)
        for action in pool:
            fresh = action.target not in {one.target for one in chosen} and action.identity not in mine
            if fresh and _valid(part, (), [*chosen, action]) and _valid(part, task.actions, [*chosen, action]):
                chosen.append(action)
            if len(chosen) == wanted:
                break
        if chosen:
            second = tuple(chosen)
            return Shifted(task.id, task.user_id, Shift.REPLACE, seed, task.actions, second, source)
    return NotShiftable(task.id, "no other task of this customer, and no write that the shop would accept")


def shift(task_set: TaskSet, task: Task, kind: Shift, seed: int) -> Shifted | NotShiftable:
    """`retract` or `replace` by name."""
    return retract(task_set, task, seed) if kind is Shift.RETRACT else replace(task_set, task, seed)


def oracle(database: Database, landed_before: Iterable[Action], wanted: Iterable[Action]) -> OracleAnswer:
    """How a shop without faults ends: first what landed before the change, then the wanted actions, in their order.

    A wanted action that landed before is not applied again (repetitions counted); its outcome is `executed`.

    Raises:
        OracleContradictionError: the rules refuse an action that is said to have landed.
    """
    shop = Shop(database)
    there: Counter[str] = Counter()
    for action in landed_before:
        outcome = shop.execute(action)
        if not isinstance(outcome, Executed):
            raise OracleContradictionError(f"{action.identity} is said to have landed, but: {outcome.message}")
        there[action.identity] += 1
    outcomes: list[tuple[Action, str]] = []
    for action in wanted:
        if there[action.identity] > 0:
            there[action.identity] -= 1
            outcomes.append((action, EXECUTED))
        else:
            outcomes.append((action, _apply(shop, action)))
    return OracleAnswer(shop.database_hash(), tuple(outcomes))


def _task(database: Database, raw: object, where: str) -> Task:
    criteria = raw.get("evaluation_criteria") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or "id" not in raw or not isinstance(criteria, dict):
        raise DataError(f"{where}: expected an object with id and evaluation_criteria")
    actions: list[Action] = []
    for call in criteria.get("actions") or ():
        if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict) or "name" not in call:
            raise DataError(f"{where}: an action is an object with name and arguments")
        actions.append(Action(str(call["name"]), call["arguments"]))
    writes = tuple(action for action in actions if action.name in ACTIONS)
    # What is written says more than what is read; of the reads, the last ones are about the customer who was found.
    named = [_customer(database, action) for action in (*writes, *reversed(actions))]
    return Task(str(raw["id"]), next((user for user in named if user), None), writes)


def _customer(database: Database, action: Action) -> str | None:
    """The customer an action is about, by order, user id, email, or name and zip code."""
    users, given = database.tables["users"], action.arguments
    order = database.tables["orders"].get(str(given.get("order_id")))
    if order is not None:
        return str(order["user_id"])
    if given.get("user_id") in users:
        return str(given["user_id"])
    if action.name == "find_user_id_by_email":
        return next((name for name, user in users.items() if user.get("email") == given.get("email")), None)
    if action.name == "find_user_id_by_name_zip":
        return next((name for name, user in users.items() if _is_called(user, given)), None)
    return None


def _is_called(user: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    name = user["name"]
    return [name["first_name"], name["last_name"], user["address"]["zip"]] == [
        given.get("first_name"),
        given.get("last_name"),
        given.get("zip"),
    ]


def _pools(part: Database, task: Task, chance: Random) -> Iterable[tuple[Source, list[Action]]]:
    """Candidates in order of preference, each pool shuffled by the seed."""
    assert task.user_id is not None
    touched = {action.target for action in task.actions}
    mine = candidate_orders(part, task.user_id)
    for source, orders in (
        (Source.UNTOUCHED_ORDER, [order for order in mine if order["order_id"] not in touched]),
        (Source.TOUCHED_ORDER, [order for order in mine if order["order_id"] in touched]),
    ):
        pool = [action for order in orders for action in candidates(part, order, chance)]
        chance.shuffle(pool)
        yield source, pool
    yield Source.CUSTOMER, customer_writes(task.user_id, chance)


def _first_touch(actions: Sequence[Action], target: str) -> int:
    """The place of the first action on that target, or the end."""
    return next((place for place, action in enumerate(actions) if action.target == target), len(actions))


def _apply(shop: Shop, action: Action) -> str:
    outcome = shop.execute(action)
    return EXECUTED if isinstance(outcome, Executed) else outcome.rule.value


def _harmless(part: Database, actions: Sequence[Action], extra: Action, place: int) -> bool:
    """Whether the extra is executed at that place and every other outcome stays what it is without it."""
    without, shop = Shop(part), Shop(part)
    plain = [_apply(without, action) for action in actions]
    before = [_apply(shop, action) for action in actions[:place]]
    accepted = _apply(shop, extra)
    after = [_apply(shop, action) for action in actions[place:]]
    return accepted == EXECUTED and before + after == plain


def _valid(part: Database, before: Iterable[Action], actions: Iterable[Action]) -> bool:
    shop = Shop(part)
    for action in before:
        shop.execute(action)
    return all(_apply(shop, action) == EXECUTED for action in actions)
