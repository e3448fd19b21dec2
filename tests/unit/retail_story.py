"""Runs of `retail` made by hand: one customer with three orders, a log, and a shop's journal that can be bent."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from admission.vocabulary import slot_of
from simulators.checks_input import Entry
from simulators.retail_cases import CHANGED, KEPT, ONLY, Case
from simulators.retail_verdict import Evidence, Verdict, judge
from simulators.shop import Action, Database, Executed, Refused, Shop
from simulators.tasks import Shift, Shifted, Source
from tests.unit.checker_story import digest

RUN, SERVICE, USER = "r1", "shop1", "ansel_broome_17"
ORDERS = ("#S1", "#S2", "#S3")


def database() -> Database:
    """One customer with three pending orders."""
    address = {"address1": "1 A", "address2": "", "city": "B", "state": "ME", "country": "USA", "zip": "04099"}
    card = {"payment_method_id": "card", "source": "credit_card"}
    user = {"user_id": USER, "name": {"first_name": "A", "last_name": "B"}, "address": address, "email": "a@b",
            "payment_methods": {"card": {"source": "credit_card", "id": "card"}}, "orders": list(ORDERS)}  # fmt: skip
    paid = {**card, "transaction_type": "payment", "amount": 10.0}
    orders = {
        name: {
            "order_id": name, "user_id": USER, "status": "pending", "address": address, "fulfillments": [],
            "items": [{"item_id": "i", "product_id": "p", "name": "x", "price": 10.0, "options": {}}],
            "payment_history": [{**paid}],
        }
        for name in ORDERS
    }  # fmt: skip
    return Database({"orders": orders, "users": {USER: user}, "products": {"p": {"product_id": "p", "variants": {}}}})


def cancel(order: str, reason: str = "no longer needed") -> Action:
    return Action("cancel_pending_order", {"order_id": order, "reason": reason})


EXTRA, FIRST, SECOND = cancel("#S1"), cancel("#S2"), cancel("#S3")


def case(*, two: bool = False, second: tuple[Action, ...] = (FIRST, SECOND)) -> Case:
    shifted = Shifted("7", USER, Shift.RETRACT, 1, (EXTRA, FIRST, SECOND), (FIRST, SECOND), Source.UNTOUCHED_ORDER)
    if two:
        first = {CHANGED: (EXTRA, FIRST), KEPT: (SECOND,)}
        return Case(shifted, first, {CHANGED: (FIRST,), KEPT: (SECOND,)}, CHANGED, KEPT, SERVICE)
    return Case(shifted, {ONLY: (EXTRA, FIRST, SECOND)}, {ONLY: second}, service=SERVICE)


@dataclass
class Told:
    """A run's log and its shop's journal, made by hand, one event a millisecond."""

    case: Case
    log: list[dict[str, Any]] = field(default_factory=list)
    journal: list[dict[str, Any]] = field(default_factory=list)
    phase: str = "completed"
    unresolved: list[dict[str, Any]] = field(default_factory=list)
    trouble: str = ""

    def __post_init__(self) -> None:
        self.shop = Shop(database())
        self.tries: dict[str, int] = {}
        self.generations: dict[str, int] = {}
        goal = {"text": "t", "plan": {name: {"agent": "plan"} for name in self.case.first}}
        self.add("run_started", run=RUN, principal="me", request_id="q1", payload_hash="h", goal=goal, goal_hash="g1")
        self.add("update_recorded", seq=1, kind="start", request_id="q1", payload_hash="h")
        facts = {"service": SERVICE, "operation": "cancel_pending_order", "version": "1", "contract_class": "VOID",
                 "schema_hash": "s", "dedupes": True, "tries_max": 5, "retention_ms": 9_000_000}  # fmt: skip
        self.add("contract_noted", ref="c", facts=facts)
        for scope in self.case.first:
            self.child(scope, 1)

    def add(self, event: str, /, **fields: Any) -> None:
        self.log.append({"type": event, "at": 1000 + len(self.log), **fields})

    @property
    def now(self) -> int:
        return 1000 + len(self.log)

    def child(self, scope: str, revision: int, **more: Any) -> None:
        name = f"c-{scope}-{revision}"
        self.add("child_planned", child=name, scope=scope, revision=revision, n=1, agent="plan", mode="mediated",
                 goal_hash=f"g{revision}", context=f"x-{scope}", **more)  # fmt: skip
        self.add("launch_started", child=name, n=1)
        self.add("child_bound", child=name, task=f"t-{name}")
        self.add("child_claimed", child=name, task=f"t-{name}", answer="claimed")

    def admit(self, action: Action, scope: str = ONLY, revision: int = 1) -> str:
        slot = slot_of(SERVICE, action.name, action.target, action.arguments)
        n = sum(1 for e in self.log if e["type"] == "effect_admitted") + 1
        generation = self.generations[slot] = self.generations.get(slot, 0) + 1
        attempt = f"{RUN}-e{n}"
        self.add("effect_admitted", attempt=attempt, scope=scope, revision=revision, child=f"c-{scope}-{revision}",
                 slot=slot, generation=generation, key=f"k-{slot}-{generation}", service=SERVICE, operation=action.name,
                 target=action.target, contract="c", input_ref=f"i-{slot}", cost=1)  # fmt: skip
        self.add("try_granted", attempt=attempt, n=1, gateway="g")
        return attempt

    def perform(self, attempt: str, action: Action) -> None:
        """The shop does it, and its journal holds it."""
        key = next(e["key"] for e in self.log if e.get("attempt") == attempt and e["type"] == "effect_admitted")
        line = {"n": len(self.journal) + 1, "at_ms": self.now, "key": key, "action": action.name, "fault": "none",
                "payload_sha256": "p", "arguments": dict(action.arguments)}  # fmt: skip
        match self.shop.execute(action):
            case Executed(receipt):
                self.journal.append({**line, "event": "executed", "receipt": receipt})
            case Refused(rule, message):
                error = {"code": "policy", "rule": rule.value, "message": message}
                self.journal.append({**line, "event": "refused", "error": error})

    def restart_shop(self) -> None:
        """Rebuild the shop from what its journal says now."""
        self.shop = Shop(database())
        for line in self.journal:
            self.shop.execute(Action(line["action"], line["arguments"]))

    def recorded(self, attempt: str, outcome: str = "ok") -> None:
        basis = "service_refused" if outcome == "not_executed" else "reply"
        self.add("try_recorded", attempt=attempt, n=1, outcome=outcome, basis=basis)

    def done(self, action: Action, scope: str = ONLY, revision: int = 1) -> str:
        attempt = self.admit(action, scope, revision)
        self.perform(attempt, action)
        refused = self.journal[-1]["event"] == "refused"
        self.recorded(attempt, "not_executed" if refused else "ok")
        return attempt

    def accept(self) -> None:
        """The change is recorded, and the gate closed."""
        scope = self.case.redirected
        self.add("update_recorded", seq=2, kind="correct", request_id="q2", payload_hash="h")
        self.add("revision_accepted", n=2, seq=2, goal={"text": "t2"}, goal_hash="g2", affects=[scope])
        self.add("stop_requested", child=f"c-{scope}-1", reason="revision 2", n=1)
        self.add("child_seen", child=f"c-{scope}-1", state="canceled")

    def open(self) -> None:
        """The gate opens for revision 2, and its child starts. The checkpoint's contents are the checker's matter."""
        scope = self.case.redirected
        done = [
            {"attempt": e["attempt"], "slot": e["slot"], "service": SERVICE, "operation": e["operation"],
             "target": e["target"], "revision": e["revision"]}
            for e in self.log
            if e["type"] == "effect_admitted" and any(
                r["type"] in ("try_recorded", "effect_classified") and r["attempt"] == e["attempt"]
                and (r.get("outcome") == "ok" or r.get("finding") == "executed")
                for r in self.log
            )
        ]  # fmt: skip
        checkpoint = {
            "id": "cp2", "scope": scope, "revision": 2, "goal_hash": "g2", "position": len(self.log),
            "effects_done": done, "artifacts": [], "pending": [],
            "children": [{"child": f"c-{scope}-1", "revision": 1, "state": "stop_confirmed"}],
            "budget_spent": len(done), "budget_reserved": 0,
        }  # fmt: skip
        self.add("checkpoint_written", checkpoint=checkpoint, hash=digest(checkpoint))
        self.add("scope_opened", scope=scope, revision=2, checkpoint="cp2", epoch=1)
        self.child(scope, 2, follows=f"c-{scope}-1", follows_state="stop_confirmed")

    def result(self, scope: str, revision: int, disposition: str = "adopted") -> None:
        child = f"c-{scope}-{revision}"
        self.add("child_seen", child=child, state="completed")
        self.add("result_filed", result=f"r-{child}", child=child, task=f"t-{child}", scope=scope, revision=revision,
                 disposition=disposition)  # fmt: skip

    def finish(self) -> None:
        self.add("run_finished", phase="completed", summary="done", epoch=1)

    def evidence(self) -> Evidence:
        log = _glued(
            [Entry(RUN, n, event["at"], "", event) for n, event in enumerate(copy.deepcopy(self.log), start=1)]
        )
        found = self.shop.customer_hash(USER)
        return Evidence(RUN, log, self.journal, found, self.phase, self.unresolved, self.trouble)

    def verdict(self) -> Verdict:
        return judge(self.case, database(), self.evidence())


#: Events that stand in one commit with the event before them.
GLUED = {"try_granted": "effect_admitted", "revision_accepted": "update_recorded", "scope_opened": "checkpoint_written",
         "update_recorded": "run_started"}  # fmt: skip


def _glued(log: list[Entry]) -> list[Entry]:
    out: list[Entry] = []
    for entry in log:
        before = out[-1] if out else None
        same = before is not None and GLUED.get(entry.type) == before.type
        out.append(replace(entry, commit=before.commit if same and before else f"commit{entry.n}"))
    return out


def passed(*, two: bool = False) -> Told:
    """The extra write landed, the change came between it and the next, and all that is wanted was done."""
    told = Told(case(two=two))
    scope = told.case.redirected
    told.done(EXTRA, scope)
    if two:
        told.done(SECOND, KEPT)
        told.result(KEPT, 1)
    told.accept()
    told.open()
    told.done(FIRST, scope, 2)
    if not two:
        told.done(SECOND, scope, 2)
    told.result(scope, 2)
    told.finish()
    return told


def blocked() -> Told:
    """The extra write's request was lost on its way, and the shop can only be asked."""
    told = Told(case())
    told.log[2]["facts"] |= {"contract_class": "LOOKUP"}
    attempt = told.admit(EXTRA)
    told.recorded(attempt, "in_doubt")
    told.accept()
    told.add("reconcile_started", attempt=attempt, method="lookup", covers=1, n=1, epoch=1)
    started = len(told.log)
    told.add("effect_classified", attempt=attempt, finding="unknown", basis="gave_up", started=started, epoch=1,
             detail="not found, which proves nothing")  # fmt: skip
    told.phase = "blocked"
    told.unresolved = [{"kind": "effect", "id": attempt, "why": "not found, which proves nothing"}]
    return told


def said(told: Told) -> str:
    return "\n".join(told.verdict().violations)
