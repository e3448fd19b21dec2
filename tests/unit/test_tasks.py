"""Tasks, the two shifts and the oracle, on the project's own data set and, where it is at hand, on τ²-bench's."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from simulators.shop import Action, DataError, Executed, Refused, Shop
from simulators.tasks import (
    EXECUTED,
    NotShiftable,
    OracleContradictionError,
    Shift,
    Shifted,
    Source,
    Task,
    TaskSet,
    load,
    oracle,
    replace,
    retract,
    shift,
    why_not_redirectable,
)

TAU2 = Path(os.environ.get("REGATE_TAU2", Path(__file__).parents[3] / "shared" / "data" / "tau2-retail"))
SEEDS = range(5)


@pytest.fixture(scope="module")
def own() -> TaskSet:
    return load()


def identities(actions: tuple[Action, ...]) -> Counter[str]:
    return Counter(action.identity for action in actions)


def check_retract(task_set: TaskSet, task: Task, shifted: Shifted) -> None:
    """Exactly one action more, at its place, executed there, and no other outcome changed by it."""
    part = task_set.database.of_customer(shifted.user_id)
    (extra,) = shifted.retracted
    assert shifted.second == task.actions
    place = next(at for at, action in enumerate(shifted.first) if action is extra)
    assert shifted.first[:place] + shifted.first[place + 1 :] == task.actions
    touched = {action.target for action in task.actions}
    assert (shifted.source is Source.UNTOUCHED_ORDER) <= (extra.target not in touched)
    if shifted.source is Source.TOUCHED_ORDER:
        assert extra.target not in {action.target for action in shifted.first[:place]}
    if shifted.source is not Source.CUSTOMER:
        assert extra.target in part.tables["orders"]
    outcomes = dict.fromkeys(action.identity for action in task.actions)
    for action, outcome in oracle(part, (), shifted.first).outcomes:
        if action is extra:
            assert outcome == EXECUTED
        else:
            outcomes[action.identity] = outcome
    for action, outcome in oracle(part, (), task.actions).outcomes:
        assert outcomes[action.identity] == outcome


def check_replace(task_set: TaskSet, task: Task, shifted: Shifted) -> None:
    """The same customer's actions, and generated ones are valid with and without the first revision's effects."""
    assert shifted.first == task.actions
    assert shifted.second
    assert identities(shifted.first) != identities(shifted.second)
    customer = task_set.database.of_customer(shifted.user_id).tables
    assert {action.target for action in shifted.second} <= {*customer["orders"], shifted.user_id}
    if shifted.source is Source.OTHER_TASK:
        other = next(one for one in task_set.tasks if one.id == shifted.other_task_id)
        assert shifted.second == other.actions
        return
    for before in ((), task.actions):
        shop = Shop(task_set.database)
        for action in before:
            shop.execute(action)
        assert all(isinstance(shop.execute(action), Executed) for action in shifted.second)


def check_all(task_set: TaskSet, kind: Shift, seed: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for task in task_set.tasks:
        shifted = shift(task_set, task, kind, seed)
        assert shifted == shift(task_set, task, kind, seed)
        if isinstance(shifted, NotShiftable):
            counts[shifted.reason] += 1
            continue
        counts[shifted.source.value] += 1
        (check_retract if kind is Shift.RETRACT else check_replace)(task_set, task, shifted)
    return counts


def test_our_own_data_has_every_state_and_tasks_that_write_nothing(own: TaskSet) -> None:
    states = {order["status"] for order in own.database.tables["orders"].values()}
    assert states == {
        "pending", "processed", "delivered", "cancelled",
        "pending (items modified)", "return requested", "exchange requested",
    }  # fmt: skip
    assert {table: len(records) for table, records in own.database.tables.items()} == {
        "orders": 30, "products": 10, "users": 12,
    }  # fmt: skip
    assert [(task.id, task.user_id, why_not_redirectable(task)) for task in own.tasks if not task.actions] == [
        ("17", "imre_castellan_67", "writes nothing"),
        ("18", None, "writes nothing"),
    ]
    assert max(Counter(task.user_id for task in own.tasks).values()) >= 3
    used = {action.name for task in own.tasks for action in task.actions}
    assert len(used) == 7


def test_our_own_tasks_end_as_planned(own: TaskSet) -> None:
    outcomes = [(task.id, how) for task in own.tasks for _, how in oracle(own.database, (), task.actions).outcomes]
    assert [one for one in outcomes if one[1] != EXECUTED] == [("10", "order_items_already_modified")]


@pytest.mark.parametrize("kind", list(Shift))
@pytest.mark.parametrize("seed", SEEDS)
def test_our_own_tasks_can_all_be_shifted(own: TaskSet, kind: Shift, seed: int) -> None:
    counts = check_all(own, kind, seed)
    assert counts.pop("writes nothing") == 2
    assert counts.total() == 16
    assert set(counts) <= set(Source)


def test_the_seed_changes_the_shift(own: TaskSet) -> None:
    task = own.tasks[1]
    drawn = {tuple(action.identity for action in _first(retract(own, task, seed))) for seed in range(12)}
    assert len(drawn) > 4
    drawn = {tuple(action.identity for action in _second(replace(own, task, seed))) for seed in range(12)}
    assert len(drawn) == 2  # this customer has two other tasks


def _first(shifted: Shifted | NotShiftable) -> tuple[Action, ...]:
    assert isinstance(shifted, Shifted)
    return shifted.first


def _second(shifted: Shifted | NotShiftable) -> tuple[Action, ...]:
    assert isinstance(shifted, Shifted)
    return shifted.second


def test_a_task_without_customer_or_write_is_named_with_its_reason(own: TaskSet) -> None:
    assert retract(own, own.tasks[-1], 1) == NotShiftable("18", "writes nothing")
    lost = Task("lost", None, (Action("cancel_pending_order", {"order_id": "#none", "reason": "no longer needed"}),))
    assert replace(own, lost, 1) == NotShiftable("lost", "names no customer")


def test_the_oracle_applies_what_landed_once(own: TaskSet) -> None:
    task = own.tasks[1]
    plain = oracle(own.database, (), task.actions)
    for landed in range(len(task.actions) + 1):
        assert oracle(own.database, task.actions[:landed], task.actions) == plain
    assert plain.database_hash != Shop(own.database).database_hash()


def test_the_oracle_sees_a_retracted_effect_that_landed(own: TaskSet) -> None:
    task = own.tasks[1]
    shifted = retract(own, task, 3)
    assert isinstance(shifted, Shifted)
    assert oracle(own.database, shifted.retracted, task.actions).database_hash != (
        oracle(own.database, (), task.actions).database_hash
    )


def test_the_oracle_counts_repetitions(own: TaskSet) -> None:
    cancel = next(action for action in own.tasks[1].actions if action.name == "cancel_pending_order")
    answer = oracle(own.database, [cancel], [cancel, cancel])
    assert [outcome for _, outcome in answer.outcomes] == [EXECUTED, "order_not_pending"]


def test_the_oracle_rejects_a_record_that_cannot_be(own: TaskSet) -> None:
    cancel = next(action for action in own.tasks[1].actions if action.name == "cancel_pending_order")
    assert isinstance(_after(own, cancel).execute(cancel), Refused)
    with pytest.raises(OracleContradictionError, match="said to have landed"):
        oracle(own.database, [cancel, cancel], [])


def _after(task_set: TaskSet, action: Action) -> Shop:
    shop = Shop(task_set.database)
    shop.execute(action)
    return shop


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "expected a list"),
        ("[1]", "task 0"),
        ('[{"id": 1, "evaluation_criteria": {"actions": [{"name": "x"}]}}]', "task 0: an action"),
        ('[{"id": 1, "evaluation_criteria": {}}, {"id": "1", "evaluation_criteria": {}}]', "more than once"),
        ("[", "not JSON"),
    ],
)
def test_a_malformed_folder_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "db.json").write_text(json.dumps({"orders": {}, "products": {}, "users": {}}))
    with pytest.raises(DataError, match=r"tasks\.json cannot be read"):
        load(tmp_path)
    (tmp_path / "tasks.json").write_text(text)
    with pytest.raises(DataError, match=said):
        load(tmp_path)


if (TAU2 / "tasks.json").is_file():

    @pytest.fixture(scope="module")
    def public() -> TaskSet:
        return load(TAU2)

    def test_the_public_tasks_end_as_their_policy_says(public: TaskSet) -> None:
        refused = [
            (task.id, outcome)
            for task in public.tasks
            for _, outcome in oracle(public.database, (), task.actions).outcomes
            if outcome != EXECUTED
        ]
        # An exchange of an order that is still pending, and a gift card that holds less than the difference.
        assert refused == [("64", "order_not_delivered"), ("105", "gift_card_short")]

    @pytest.mark.parametrize("kind", list(Shift))
    @pytest.mark.parametrize("seed", SEEDS)
    def test_the_public_tasks_can_be_shifted(public: TaskSet, kind: Shift, seed: int) -> None:
        counts = check_all(public, kind, seed)
        print(f"{kind} seed {seed}: {dict(counts)} of {len(public.tasks)}")
        assert len(public.tasks) == 114
        assert counts.pop("writes nothing") == 10
        assert set(counts) <= set(Source)
