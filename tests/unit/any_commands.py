"""Any command at all, made of four small numbers, aimed at what a run has at the moment.

Knows: how to pick children, attempts and scopes that exist (or, now and then, do not). Does not know which commands
are sensible: most of what it makes is refused, and that is the point.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from admission import commands as cmd
from admission import events as ev
from admission.records import Attempt, Child
from admission.vocabulary import (
    Basis,
    Blocks,
    ChildMode,
    ChildState,
    ContractClass,
    Finding,
    Method,
    TaskState,
    TryOutcome,
    UpdateKind,
    slot_of,
)
from tests.unit.rules_stage import Stage, action, facts, plan, stamp_of

Draw = tuple[int, int, int, int]

#: One step of a random history: which command, and three numbers that choose its operands.
DRAW = st.tuples(*(st.integers(0, 59) for _ in range(4)))


def history(seed: int, steps: int = 80) -> list[Draw]:
    """A long history from one seed: all commands are equally likely, which a shrinking strategy does not give."""
    chance = random.Random(seed)
    return [
        (chance.randrange(60), chance.randrange(60), chance.randrange(60), chance.randrange(60)) for _ in range(steps)
    ]


#: Short histories, to which a failure shrinks, and long ones, in which it is found.
DRAWS: st.SearchStrategy[list[Draw]] = st.one_of(
    st.lists(DRAW, max_size=40), st.integers(0, 10**9).map(history), st.integers(0, 10**9).map(history)
)

FIRST_GOAL = ev.Goal(
    text="any",
    plan={"a": plan(actions=(action("o1", occurrence=2),)), "b": plan(needs=("a",)), "p": plan(), "p/q": plan()},
    budget_effects=9,
)
_CONTRACTS = [
    facts(c, unknown_blocks=b, dedupes=c is not ContractClass.OPAQUE,
          not_after_max_age_ms=20_000 if c is ContractClass.NOT_AFTER else 0, cost=cost)
    for c, b, cost in [
        (ContractClass.VOID, Blocks.SCOPE, 1), (ContractClass.NOT_AFTER, Blocks.SCOPE, 2),
        (ContractClass.LOOKUP, Blocks.SCOPE, 1), (ContractClass.OPAQUE, Blocks.SLOT, 1),
        (ContractClass.KEY, Blocks.SCOPE, 1),
    ]
]  # fmt: skip


def _of(values: Sequence[Any], n: int) -> Any:
    return values[n % len(values)]


def _child(stage: Stage, n: int) -> Child | None:
    rows = list(stage.run.children.values())
    return rows[-1 - n % min(len(rows), 6)] if rows else None


def _attempt(stage: Stage, n: int) -> Attempt | None:
    rows = list(stage.run.attempts.values())
    return rows[-1 - n % min(len(rows), 6)] if rows else None


def _scope(stage: Stage, n: int) -> str:
    return str(_of([*stage.run.gates, "nowhere"], n))


def _revise(stage: Stage, a: int, b: int, c: int) -> cmd.Command:
    scope = _scope(stage, a)
    changed = ev.Goal(
        text=_of(["", "", f"text {b}"], c),
        plan=_of([{scope: plan(brief=f"brief {b}")}, {}, {f"n{b % 3}": plan()}, {scope: plan(needs=("a:x",))}], b),
        budget_effects=_of([None, None, None, 3, 12], c),
    )
    remove = (scope,) if b % 7 == 3 else ()
    kind = UpdateKind.REPLACE if c % 9 == 5 else UpdateKind.CORRECT
    if kind is UpdateKind.REPLACE:
        changed = ev.Goal(text=f"new {b}", plan={"a": plan(), f"n{b % 3}": plan()})
    expected = _of([None, None, stage.run.head, stage.run.head + 1], b)
    return cmd.Revise(kind=kind, request_id=f"r{a % 20}", goal=changed, remove=remove, expected_revision=expected)


def _person(stage: Stage, a: int, b: int, c: int) -> cmd.Command:
    kinds: list[type[Any]] = [
        cmd.Pause,
        cmd.Resume,
        cmd.Resume,
        cmd.Pause,
        cmd.Resume,
        cmd.Resume,
        cmd.Pause,
        cmd.Cancel,
    ]
    return _of(kinds, a)(request_id=f"r{b}")  # type: ignore[no-any-return]


def _admit(stage: Stage, a: int, b: int, c: int) -> cmd.Command | None:
    child = _child(stage, a)
    if child is None:
        return None
    target, occurrence = f"o{b % 4}", _of([1, 1, 1, 2], c)
    task = child.task if a % 9 else "elsewhere"
    return cmd.Admit(
        child=child.id, scope=child.scope, revision=child.revision, task=task, service="shop", operation="refund",
        target=target, slot=slot_of("shop", "refund", target, {}, occurrence=occurrence), input_ref=f"bytes {target}",
        contract=_of(_CONTRACTS, b + c), gateway=f"g{a % 2}", occurrence=occurrence,
        conflict_key=f"k{b % 2}" if c % 3 == 0 else "", refusal="no" if c % 17 == 16 else "",
    )  # fmt: skip


def _record(stage: Stage, a: int, b: int, c: int) -> cmd.Command | None:
    attempt = _attempt(stage, a)
    if attempt is None:
        return None
    n = 1 + b % max(1, len(attempt.tries))
    outcome = _of([TryOutcome.OK, TryOutcome.NOT_EXECUTED, TryOutcome.IN_DOUBT, TryOutcome.IN_DOUBT], c)
    return cmd.RecordTry(
        attempt=attempt.id, n=n, outcome=outcome,
        basis=_of([Basis.REPLY, Basis.NOTHING_WRITTEN, Basis.SERVICE_REFUSED], b),
        observed={"n": n}, detail="", retry_at=stage.now + 500 if b % 3 == 0 else 0,
    )  # fmt: skip


def _grant(stage: Stage, a: int, b: int, c: int) -> cmd.Command | None:
    attempt = _attempt(stage, a)
    if attempt is None:
        return None
    return cmd.GrantTry(attempt=attempt.id, n=len(attempt.tries) + (1 if b % 5 else 0), gateway=f"g{c % 2}")


def _reconcile(stage: Stage, a: int, b: int, c: int) -> cmd.Command | None:
    attempt = _attempt(stage, a)
    return None if attempt is None else cmd.StartReconcile(attempt=attempt.id, method=_of(list(Method), b), epoch=1)


def _classify(stage: Stage, a: int, b: int, c: int) -> cmd.Command | None:
    attempt = _attempt(stage, a)
    return None if attempt is None else cmd.Classify(
        attempt=attempt.id, finding=_of(list(Finding), b), basis=_of(list(Basis), c), epoch=1,
        started=attempt.asked_position if a % 4 else 0, clock_before_ms=stage.now + 60_000, observed={"found": b},
    )  # fmt: skip


def _resolve(stage: Stage, a: int, b: int, c: int) -> cmd.Command | None:
    attempt = _attempt(stage, a)
    return (
        None
        if attempt is None
        else cmd.Resolve(
            attempt=attempt.id, happened=bool(b % 2), request_id=f"x{c}", reason="r", evidence="e", by="op"
        )
    )


def _plan_child(stage: Stage, a: int, b: int, c: int) -> cmd.Command:
    scope = _scope(stage, a)
    gate = stage.run.gates.get(scope)
    return cmd.PlanChild(
        scope=scope, revision=gate.cur if gate else 1, mode=_of([*[ChildMode.MEDIATED] * 3, *ChildMode], b)
    )


def _open(stage: Stage, a: int, b: int, c: int) -> cmd.Command:
    scope = _scope(stage, a)
    gate = stage.run.gates.get(scope)
    return cmd.OpenScope(scope=scope, revision=gate.target if gate and b % 5 else 1, epoch=1)


def _about_child(
    make: Callable[[Child, int, int], cmd.Command],
) -> Callable[[Stage, int, int, int], cmd.Command | None]:
    def command(stage: Stage, a: int, b: int, c: int) -> cmd.Command | None:
        child = _child(stage, a)
        return None if child is None else make(child, b, c)

    return command


def _task(child: Child, n: int) -> str:
    return child.task or f"t{child.id}" if n % 6 else "elsewhere"


def _file(child: Child, b: int, c: int) -> cmd.Command:
    stamp = _of([stamp_of(child), stamp_of(child), None, stamp_of(child, revision=99)], b)
    refs = (ev.ArtifactRef(name=f"x{c % 2}", blob=f"{b:064d}", size_bytes=1),)
    return cmd.FileResult(child=child.id, task=_task(child, c), stamp=stamp, artifacts=refs)


_claim = _about_child(lambda k, b, c: cmd.ClaimChild(child=k.id, scope=k.scope, revision=k.revision, task=_task(k, b)))
_seen = _about_child(lambda k, b, c: cmd.RecordSeen(child=k.id, state=_of(list(TaskState), b)))
_launch = _about_child(lambda k, b, c: cmd.StartLaunch(child=k.id))


def _forward(stage: Stage, a: int, b: int, c: int) -> cmd.Command | None:
    """What brings a scope on: most histories would otherwise never come as far as an effect."""
    scope = _of(list(stage.run.gates), a)
    gate = stage.run.gates[scope]
    child = stage.run.children.get(stage.run.current.get(scope, ""))
    if gate.cur != gate.target:
        return cmd.OpenScope(scope=scope, revision=gate.target, epoch=1)
    if child is None or child.revision != gate.cur or child.settled:
        return cmd.PlanChild(scope=scope, revision=gate.cur, mode=ChildMode.MEDIATED)
    if child.state is ChildState.PLANNED:
        return cmd.StartLaunch(child=child.id)
    if not child.claimed:
        return cmd.ClaimChild(child=child.id, scope=scope, revision=child.revision, task=_task(child, 1))
    rows = list(stage.run.children)
    return _admit(stage, len(rows) - 1 - rows.index(child.id), b, c)


#: More of what moves a run, less of what ends it.
_MAKERS: tuple[Callable[[Stage, int, int, int], cmd.Command | None], ...] = (
    *[_forward] * 18, *[_record] * 6, *[_classify] * 3, *[_reconcile] * 3, *[_grant] * 2, _admit, _admit, _plan_child,
    _launch, _claim, _open, _revise, _person, _resolve, _resolve, _seen, _about_child(_file), _about_child(_file),
    _about_child(lambda k, b, c: cmd.BindChild(child=k.id, task=_task(k, b))),
    _about_child(lambda k, b, c: cmd.RequestStop(child=k.id, reason="asked")),
    _about_child(lambda k, b, c: cmd.RecordStop(child=k.id, refused=bool(b % 2), detail="")),
    _about_child(lambda k, b, c: cmd.DeclareLost(child=k.id, detail="")),
    lambda stage, a, b, c: cmd.Finish(epoch=1),
)  # fmt: skip

#: The commands whose commits compare nothing: their events may arrive twice, late and in another order.
_FACTS = (
    _record,
    _record,
    _seen,
    _about_child(lambda k, b, c: cmd.RecordStop(child=k.id, refused=bool(b % 2), detail="")),
)


def any_command(stage: Stage, draw: Draw) -> cmd.Command | None:
    """The command that these numbers mean now; None when there is nothing to aim it at."""
    kind, a, b, c = draw
    return _of(_MAKERS, kind)(stage, a, b, c)  # type: ignore[no-any-return]


def any_fact(stage: Stage, draw: Draw) -> cmd.Command | None:
    """A report of what was seen outside."""
    kind, a, b, c = draw
    return _of(_FACTS, kind)(stage, a, b, c)  # type: ignore[no-any-return]


def played(draws: Sequence[Draw]) -> Stage:
    """A run with this history. The clock moves on with every step."""
    stage = Stage(FIRST_GOAL)
    for draw in draws:
        stage.now += draw[3] * 20
        command = any_command(stage, draw)
        if command is not None:
            stage.do(command)
    return stage
