"""What each run of `retail` is to do, decided before anything is started: plan, change, moment, and which shop.

Knows tasks, the pure shop and a seed. Does not know HTTP, processes or logs. A case is a task with a change: revision 1
asks for `first`, and at `moment` revision 2 asks for `second`. Some cases have two scopes, and only one is redirected.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Any

from admission.vocabulary import slot_of
from simulators.candidates import candidate_orders, candidates
from simulators.shop import Action, Database, Executed, Shop
from simulators.tasks import NotShiftable, Shift, Shifted, Task, TaskSet, shift, why_not_redirectable

AGENT = "plan"
ONLY, CHANGED, KEPT = "order", "changed", "kept"
#: What is aimed at; what is reached is read from the log afterwards and must be `*_MIN`.
SPLIT_SHARE, BETWEEN_SHARE, BEFORE_SHARE = 0.35, 0.38, 0.06
SPLIT_SHARE_MIN, IN_FLIGHT_SHARE_MIN, BETWEEN_SHARE_MIN = 0.20, 0.30, 0.20


class MomentKind(StrEnum):
    """When the change comes, seen from the scope that it redirects."""

    BEFORE = "before_anything"
    IN_FLIGHT = "in_flight"
    BETWEEN = "between_two"


@dataclass(frozen=True)
class Moment:
    """`k` counts the scope's effects from 1: while the k-th is in flight, or between the k-th and the next."""

    kind: MomentKind
    k: int = 0

    def __str__(self) -> str:
        return self.kind.value if not self.k else f"{self.kind.value} {self.k}"


@dataclass(frozen=True)
class Case:
    """One run: scope name -> actions, for both revisions. `kept` is the scope that the change leaves alone."""

    shifted: Shifted
    first: Mapping[str, tuple[Action, ...]]
    second: Mapping[str, tuple[Action, ...]]
    redirected: str = ONLY
    kept: str | None = None
    service: str = ""
    moment: Moment = Moment(MomentKind.BEFORE)

    @property
    def task_id(self) -> str:
        return self.shifted.task_id

    @property
    def user_id(self) -> str:
        return self.shifted.user_id

    def wanted(self) -> list[Action]:
        """What the user wants in the end, the redirected scope first (scopes do not depend on each other)."""
        return [*self.second[self.redirected], *(self.second[self.kept] if self.kept else ())]

    def goal(self) -> dict[str, Any]:
        """The goal of revision 1, as the API takes it."""
        plan = {name: _plan(self.service, actions) for name, actions in self.first.items()}
        text = f"task {self.task_id} for {self.user_id}"
        requirements = [{"id": name, "text": f"what scope {name} does"} for name in plan]
        return {"text": text, "requirements": requirements, "plan": plan}

    def change(self) -> dict[str, Any]:
        """The body of the redirect, but for its request id and reason."""
        scope = {self.redirected: _plan(self.service, self.second[self.redirected])}
        if self.kept is not None or self.shifted.shift is Shift.RETRACT:
            return {"kind": "correct", "goal": {"plan": scope}}
        text = f"another task for {self.user_id}"
        requirements = [{"id": self.redirected, "text": "instead of the first task"}]
        return {"kind": "replace", "goal": {"text": text, "requirements": requirements, "plan": scope}}

    def slots(self, revision: int) -> dict[str, Action]:
        """Slot -> action of all scopes of a revision."""
        plan = self.first if revision == 1 else self.second
        return {
            slot_of(self.service, action.name, action.target, action.arguments, occurrence=n): action
            for actions in plan.values()
            for action, n in with_occurrences(actions)
        }


def with_occurrences(actions: Iterable[Action]) -> list[tuple[Action, int]]:
    """Each action with how often it has stood there, this time included."""
    seen: Counter[str] = Counter()
    counted = []
    for action in actions:
        seen[action.identity] += 1
        counted.append((action, seen[action.identity]))
    return counted


def _plan(service: str, actions: Iterable[Action]) -> dict[str, Any]:
    steps = [
        {"service": service, "action": action.name, "arguments": dict(action.arguments), "occurrence": n}
        for action, n in with_occurrences(actions)
    ]
    return {"agent": AGENT, "brief": "Carry out the actions in their order.", "actions": steps}


# --- which cases -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cases:
    """The cases of one shift and seed, and the tasks that cannot be redirected, with the reason."""

    runs: tuple[Case, ...]
    not_redirectable: Mapping[str, str]

    @property
    def services(self) -> list[str]:
        """The shops that they need."""
        return sorted({case.service for case in self.runs}, key=lambda name: (len(name), name))


def make_cases(task_set: TaskSet, tasks: Sequence[Task], kind: Shift, seed: int) -> Cases:
    """The cases of these tasks. Each customer occurs once in a shop; scopes and moments are dealt by the seed."""
    not_redirectable: dict[str, str] = {}
    plain: list[Case] = []
    for task in tasks:
        reason = why_not_redirectable(task)
        shifted = shift(task_set, task, kind, seed) if reason is None else NotShiftable(task.id, reason)
        if isinstance(shifted, NotShiftable):
            not_redirectable[task.id] = shifted.reason
        else:
            plain.append(Case(shifted, {ONLY: shifted.first}, {ONLY: shifted.second}))
    dealt = _deal_moments(_deal_scopes(task_set.database, plain, kind, seed), kind, seed)
    return Cases(tuple(_deal_shops(dealt)), not_redirectable)


def _deal_shops(cases: Iterable[Case]) -> list[Case]:
    used: Counter[str] = Counter()
    placed = []
    for case in cases:
        used[case.user_id] += 1
        placed.append(replace(case, service=f"shop{used[case.user_id]}"))
    return placed


def _deal_scopes(database: Database, cases: list[Case], kind: Shift, seed: int) -> list[Case]:
    """Give a share of the cases two scopes."""
    chance = Random(f"{seed}/{kind}/scopes")
    wanted = math.ceil(SPLIT_SHARE * len(cases))
    dealt = list(cases)
    order = list(range(len(cases)))
    chance.shuffle(order)
    for place in order:
        if wanted == 0:
            break
        case = split(database, cases[place].shifted, chance)
        if case is not None:
            dealt[place] = case
            wanted -= 1
    return dealt


def _deal_moments(cases: list[Case], kind: Shift, seed: int) -> list[Case]:
    chance = Random(f"{seed}/{kind}/moments")
    order = list(range(len(cases)))
    chance.shuffle(order)
    between = math.ceil(BETWEEN_SHARE * len(cases))
    before = math.floor(BEFORE_SHARE * len(cases))
    dealt = list(cases)
    for place in order:
        effects = len(cases[place].first[cases[place].redirected])
        if effects >= 2 and between:
            moment = Moment(MomentKind.BETWEEN, chance.randint(1, effects - 1))
            between -= 1
        elif before:
            moment = Moment(MomentKind.BEFORE)
            before -= 1
        else:
            moment = Moment(MomentKind.IN_FLIGHT, chance.randint(1, effects))
        dealt[place] = replace(cases[place], moment=moment)
    return dealt


# --- two scopes ------------------------------------------------------------------------------------------------------


def split(database: Database, shifted: Shifted, chance: Random) -> Case | None:
    """The same task in two scopes of which one is redirected; None where its actions hang together.

    What touches one order stays in one scope, and whatever order the scopes run in, every outcome is the same.
    Retract: the scope with the extra write is redirected. Replace: a part of the first task is kept on; else a part of
    the second is there from the start; else one more write on an order that neither touches is.
    """
    part = database.of_customer(shifted.user_id)
    for changed_first, changed_second, kept in _divisions(part, shifted, chance):
        changes = [a.identity for a in changed_first] != [a.identity for a in changed_second]
        if not changed_first or not changed_second or not kept or not changes:
            continue
        if len(changed_first) + len(kept) >= 2 and _independent(part, changed_first, changed_second, kept):
            return Case(
                shifted,
                {CHANGED: changed_first, KEPT: kept},
                {CHANGED: changed_second, KEPT: kept},
                redirected=CHANGED,
                kept=KEPT,
            )
    return None


_Actions = tuple[Action, ...]


def _divisions(part: Database, shifted: Shifted, chance: Random) -> Iterable[tuple[_Actions, _Actions, _Actions]]:
    """(redirected scope's first, its second, the other scope's actions), the preferred ones first."""
    first, second = shifted.first, shifted.second
    if shifted.shift is Shift.RETRACT:
        extra = {action.target for action in shifted.retracted}
        for target in _shuffled(first, chance):
            if target not in extra:
                yield _without(first, target), _without(second, target), _only(first, target)
        return
    for target in _shuffled(first, chance):
        if target not in {action.target for action in second}:
            yield _without(first, target), second, _only(first, target)
    for target in _shuffled(second, chance):
        if target not in {action.target for action in first}:
            yield first, _without(second, target), _only(second, target)
    touched = {action.target for action in (*first, *second)}
    free = [order for order in candidate_orders(part, shifted.user_id) if order["order_id"] not in touched]
    more = [action for order in free for action in candidates(part, order, chance)]
    chance.shuffle(more)
    for action in more:
        if isinstance(Shop(part).execute(action), Executed):
            yield first, second, (action,)


def _shuffled(actions: Iterable[Action], chance: Random) -> list[str]:
    targets = sorted({action.target for action in actions})
    chance.shuffle(targets)
    return targets


def _only(actions: Iterable[Action], target: str) -> _Actions:
    return tuple(action for action in actions if action.target == target)


def _without(actions: Iterable[Action], target: str) -> _Actions:
    return tuple(action for action in actions if action.target != target)


def _independent(part: Database, first: _Actions, second: _Actions, kept: _Actions) -> bool:
    """Whether the kept scope comes out the same before, in the middle of, and after what the other one does.

    The other one does some of its first actions, then its second ones.
    """
    for done in range(len(first) + 1):
        other = (*first[:done], *second)
        alone = _played(part, [*other, *kept])
        for place in range(len(other)):
            mixed = _played(part, [*other[:place], *kept, *other[place:]])
            if mixed != alone:
                return False
    return True


def _played(part: Database, actions: Iterable[Action]) -> tuple[str, dict[str, list[bool]]]:
    shop = Shop(part)
    outcomes: defaultdict[str, list[bool]] = defaultdict(list)
    for action in actions:
        outcomes[action.identity].append(isinstance(shop.execute(action), Executed))
    return shop.database_hash(), outcomes
