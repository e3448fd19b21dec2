"""A hand-written run for the checker's tests: its log and the journals of the two services it used.

Scopes a and b; a is redirected twice. In revision 1 of a: a refund lands and is recorded (e1); a cancellation loses its
reply twice and lands after the gate closed (e2, found by lookup); a mail loses its reply and cannot be asked (e3, stays
unknown, blocks its slot); a change is never executed (e4, voided). Scope b goes on under revision 1. Knows the wire
form of events as text only, like the checker: it imports nothing of ours.
"""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

Json = dict[str, Any]
RUN, NEXT = "run1", "run1.next"
AUTO = "filled in by Story"


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Story:
    """Events under labels, so that a test can say what to bend. Times and positions follow from the order."""

    def __init__(self, run: str = RUN, begin_ms: int = 10_000) -> None:
        self.run, self.begin_ms = run, begin_ms
        self.steps: list[tuple[str, str, Json]] = []  # label, commit, event
        self.journals: dict[str, list[Json]] = {"shop": [], "mail": []}

    def add(self, label: str, type_: str, /, *, commit: str = "", **fields: Any) -> None:
        self.steps.append((label, commit or label, {"type": type_, "at": 1, **fields}))

    def index(self, label: str) -> int:
        return next(i for i, step in enumerate(self.steps) if step[0] == label)

    def event(self, label: str) -> Json:
        return self.steps[self.index(label)][2]

    def drop(self, *labels: str) -> None:
        self.steps = [step for step in self.steps if step[0] not in labels]

    def move(self, label: str, *, after: str) -> None:
        step = self.steps.pop(self.index(label))
        self.steps.insert(self.index(after) + 1, step)

    def insert(self, after: str, label: str, type_: str, /, *, commit: str = "", **fields: Any) -> None:
        step = (label, commit or label, {"type": type_, "at": 1, **fields})
        self.steps.insert(self.index(after) + 1, step)

    def at(self, label: str) -> int:
        return self.begin_ms + 10 * self.index(label)

    def executed(self, service: str, action: str, arguments: Json, *, after: str, key: str | None = None) -> None:
        """The service did something 1 ms after the event `after`."""
        line = {"event": "executed", "action": action, "arguments": arguments, "after": after}
        self.journals[service].append(line | ({"key": key} if key else {}))

    def effect_of(self, label: str) -> Json:
        return next(line for lines in self.journals.values() for line in lines if line.get("key") == label)

    def log_lines(self) -> list[Json]:
        hashes: dict[str, str] = {}
        lines: list[Json] = []
        for n, (label, commit, event) in enumerate(copy.deepcopy(self.steps), start=1):
            if event["type"] == "checkpoint_written":
                checkpoint = event["checkpoint"]
                if checkpoint.get("position") == AUTO:
                    checkpoint["position"] = n - 1
                if checkpoint.get("predecessor_hash") == AUTO:
                    checkpoint["predecessor_hash"] = hashes[checkpoint["predecessor"]]
                event["hash"] = digest(checkpoint) if event["hash"] == AUTO else event["hash"]
                hashes[checkpoint["id"]] = event["hash"]
            lines.append({"n": n, "at": self.at(label), "commit": commit, "event": event})
        return lines

    def journal_lines(self, service: str) -> list[Json]:
        lines = []
        for n, line in enumerate(self.journals[service], start=1):
            rest = {key: value for key, value in line.items() if key != "after"}
            lines.append({"n": n, "at_ms": self.at(line["after"]) + 1, **rest})
        return lines

    # --- shorter words for what comes often ---

    def child(self, name: str, scope: str, revision: int, **more: Any) -> None:
        goal_hash = f"goal{revision}"
        self.add(
            f"{name}.planned", "child_planned", child=name, scope=scope, revision=revision, n=1, agent="plan",
            mode="mediated", goal_hash=goal_hash, context=f"x-{scope}", **more,
        )  # fmt: skip
        self.add(f"{name}.launch", "launch_started", child=name, n=1)
        self.add(f"{name}.bound", "child_bound", child=name, task=f"task-{name}")
        self.add(f"{name}.claimed", "child_claimed", child=name, task=f"task-{name}", answer="claimed")
        self.add(f"{name}.seen", "child_seen", child=name, state="working")

    def admit(
        self, name: str, scope: str, revision: int, operation: str, *, slot: str, after: str = "", **more: Any
    ) -> None:
        service = "mail" if operation == "send" else "shop"
        fields: Json = {"generation": 1, "key": f"key-{slot}-1", "child": f"c{scope}{revision}", "target": f"T{slot}"}
        fields |= {"attempt": name, "scope": scope, "revision": revision, "slot": f"{slot}#1", "cost": 1, **more}
        fields |= {"service": service, "operation": operation, "contract": operation, "input_ref": f"sha-{name}"}
        grant: Json = {"attempt": name, "n": 1, "gateway": "g1"}
        if after:
            self.insert(after, f"{name}.granted", "try_granted", commit=name, **grant)
            self.insert(after, f"{name}.admitted", "effect_admitted", commit=name, **fields)
        else:
            self.add(f"{name}.admitted", "effect_admitted", commit=name, **fields)
            self.add(f"{name}.granted", "try_granted", commit=name, **grant)

    def recorded(self, name: str, outcome: str = "ok", n: int = 1, *, after: str = "") -> None:
        basis = {"ok": "reply", "not_executed": "service_refused"}.get(outcome, "reply")
        fields: Json = {"attempt": name, "n": n, "outcome": outcome, "basis": basis}
        label = f"{name}.recorded{n}"
        if after:
            self.insert(after, label, "try_recorded", **fields)
        else:
            self.add(label, "try_recorded", **fields)

    def classified(self, name: str, finding: str, basis: str) -> None:
        self.add(f"{name}.asked", "reconcile_started", attempt=name, method="void", covers=1, n=1, epoch=3)
        self.add(
            f"{name}.classified", "effect_classified", attempt=name, finding=finding, basis=basis, started=1, epoch=3,
            detail="the service cannot be asked" if finding == "unknown" else "",
        )  # fmt: skip

    def redirect(self, n: int, seq: int) -> None:
        asked = {"seq": seq, "kind": "correct", "request_id": f"q{seq}", "payload_hash": "h"}
        self.add(f"update{seq}", "update_recorded", commit=f"rev{n}", **asked)
        self.add(
            f"rev{n}", "revision_accepted", commit=f"rev{n}", n=n, seq=seq, goal={"text": f"v{n}"},
            goal_hash=f"goal{n}", affects=["a"], changed=["a"], kept=["b"],
        )  # fmt: skip

    def open(self, n: int, done: list[tuple[str, str, int]], **more: Any) -> None:
        checkpoint = {
            "id": f"cp{n}", "scope": "a", "revision": n, "goal_hash": f"goal{n}", "position": AUTO, "artifacts": [],
            "effects_done": [
                {"attempt": a, "slot": f"{slot}#1", "revision": r, "service": "shop", "operation": "x", "target": "T"}
                for a, slot, r in done
            ],
            "pending": [{"attempt": "e3", "slot": "mailed#1", "why": "cannot be asked"}],
            "budget_spent": 1, "budget_reserved": 0, **more,
        }  # fmt: skip
        self.add(f"cp{n}", "checkpoint_written", commit=f"open{n}", checkpoint=checkpoint, hash=AUTO)
        self.add(f"open{n}", "scope_opened", commit=f"open{n}", scope="a", revision=n, checkpoint=f"cp{n}", epoch=3)


def facts(service: str, operation: str, **more: Any) -> Json:
    return {"service": service, "operation": operation, "version": "1", "schema_hash": "s", **more}


def clean() -> Story:
    """The run in which everything that was promised holds."""
    s = Story()
    start: Json = {"request_id": "q1", "payload_hash": "h"}
    goal = {"text": "v1", "plan": {"a": {"agent": "plan"}, "b": {"agent": "plan"}}}
    s.add("start", "run_started", commit="start", run=RUN, principal="me", goal=goal, goal_hash="goal1", **start)
    s.add("update1", "update_recorded", commit="start", seq=1, kind="start", **start)
    asked: Json = {"contract_class": "VOID", "dedupes": True, "tries_max": 3}
    asked |= {"retention_ms": 60_000, "not_after_max_age_ms": 9_000}
    for operation in ("refund", "cancel", "change"):
        s.add(f"contract.{operation}", "contract_noted", ref=operation, facts=facts("shop", operation, **asked))
    mail = facts("mail", "send", contract_class="OPAQUE", unknown_blocks="slot")
    s.add("contract.send", "contract_noted", ref="send", facts=mail)
    s.child("ca1", "a", 1)
    s.child("cb1", "b", 1)
    s.admit("e1", "a", 1, "refund", slot="refunded")
    s.recorded("e1")
    s.executed("shop", "refund", {"order_id": "O1"}, after="e1.granted", key="key-refunded-1")
    s.admit("e3", "a", 1, "send", slot="mailed", target="bob", conflict_key="email:bob")
    s.recorded("e3", "in_doubt")
    s.executed("mail", "send", {"to": "bob", "body": "Hi"}, after="e3.granted")
    s.admit("e2", "a", 1, "cancel", slot="cancelled")
    s.recorded("e2", "in_doubt")
    s.add("e2.granted2", "try_granted", attempt="e2", n=2, gateway="g1")
    s.admit("e4", "a", 1, "change", slot="changed")
    s.recorded("e4", "in_doubt")
    s.admit("e8", "b", 1, "change", slot="refused")
    s.recorded("e8", "not_executed")
    s.redirect(2, 2)
    s.add("ca1.stop", "stop_requested", child="ca1", reason="revision 2", n=1)
    s.recorded("e2", "in_doubt", n=2)
    s.executed("shop", "cancel", {"order_id": "O2"}, after="ca1.stop", key="key-cancelled-1")
    s.add("ca1.canceled", "child_seen", child="ca1", state="canceled")
    late: Json = {"result": "r1", "child": "ca1", "task": "task-ca1", "scope": "a", "revision": 1}
    s.add("ca1.result", "result_filed", disposition="dropped", **late)
    s.classified("e2", "executed", "lookup_found")
    s.classified("e3", "unknown", "gave_up")
    s.classified("e4", "not_executed", "voided")
    done = [("e1", "refunded", 1), ("e2", "cancelled", 1)]
    s.open(2, done, children=[{"child": "ca1", "revision": 1, "state": "stop_confirmed"}])
    s.child("ca2", "a", 2, follows="ca1", follows_state="stop_confirmed")
    s.admit("e5", "a", 2, "change", slot="changed", generation=2, key="key-changed-2")
    s.recorded("e5")
    s.executed("shop", "change", {"order_id": "O3"}, after="e5.granted", key="key-changed-2")
    s.add("hold", "run_held", hold="h1", scopes=["a", "b"])
    s.add("release", "run_released", hold="h1", scopes=["a", "b"])
    s.admit("e6", "b", 1, "refund", slot="b-refunded")
    s.recorded("e6")
    s.executed("shop", "refund", {"order_id": "O4"}, after="e6.granted", key="key-b-refunded-1")
    s.add("cb1.completed", "child_seen", child="cb1", state="completed")
    good: Json = {"result": "r2", "child": "cb1", "task": "task-cb1", "scope": "b", "revision": 1}
    s.add("cb1.result", "result_filed", disposition="adopted", **good)
    s.redirect(3, 3)
    s.add("ca2.completed", "child_seen", child="ca2", state="completed")
    done += [("e5", "changed", 2), ("e6", "b-refunded", 1)]
    s.open(3, done, predecessor="cp2", predecessor_hash=AUTO)
    s.child("ca3", "a", 3, follows="ca2", follows_state="ended")
    s.admit("e7", "a", 3, "refund", slot="last")
    s.recorded("e7")
    s.executed("shop", "refund", {"order_id": "O5"}, after="e7.granted", key="key-last-1")
    s.add("ca3.completed", "child_seen", child="ca3", state="completed")
    s.add("finish", "run_finished", phase="completed", summary="done", epoch=3)
    return s


def linked() -> Story:
    """A second run of the same lineage that sends the mail again, as it may once a person said it had not been sent."""
    s = Story(NEXT, begin_ms=20_000)
    goal = {"text": "again", "plan": {"a": {"agent": "plan"}}}
    start: Json = {"request_id": "n1", "payload_hash": "h", "principal": "me", "follows": RUN}
    s.add("start", "run_started", run=NEXT, goal=goal, goal_hash="goal1", **start)
    mail = facts("mail", "send", contract_class="OPAQUE", unknown_blocks="slot")
    s.add("contract.send", "contract_noted", ref="send", facts=mail)
    s.admit("e1", "a", 1, "send", slot="mailed", target="bob", generation=2, key="key-mailed-2")
    s.recorded("e1")
    s.executed("mail", "send", {"to": "bob", "body": "Hi"}, after="e1.granted")
    return s
