"""The independent checker: a clean run passes, and each check alone catches a run bent in one place."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simulators import checks_attempts, checks_control, checks_journal
from simulators.checker import check
from simulators.checks_input import Entry, InputError, read_journal, read_log
from tests.unit.checker_story import AUTO, Json, Story, clean, linked

Bend = Callable[[Story], Any]


def write(path: Path, lines: list[Json]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def logs_of(folder: Path, *stories: Story) -> list[list[Entry]]:
    return [read_log(write(folder / f"log{i}.jsonl", story.log_lines())) for i, story in enumerate(stories)]


def verdict_of(folder: Path, *stories: Story) -> Json:
    journals = []
    for service in stories[0].journals:
        lines = [line for story in stories for line in story.journal_lines(service)]
        journals.append(read_journal(service, write(folder / f"{service}.jsonl", lines)))
    return check(logs_of(folder, *stories), journals)


def fired(verdict: Json) -> set[str]:
    return {violation["check"] for violation in verdict["violations"]}


def test_a_clean_run_passes_and_shows_what_is_late_and_what_is_open(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, clean())

    assert verdict["violations"] == []
    assert [verdict[name] for name in ("duplicate_effects", "stale_effects", "hidden_unknowns")] == [0, 0, 0]
    assert [(row["attempt"], row["closed_by"], row["before_open_ms"] > 0) for row in verdict["late_landings"]] == [
        ("e2", "revision 2", True)
    ]
    assert [(row["attempt"], row["outcome"], row["journal"]) for row in verdict["unresolved"]] == [
        ("e3", "unknown", "executed")
    ]
    assert verdict["checked_against"][:2] == ["shop: 5 effects", "mail: 1 effects"]
    assert verdict["smallest_margin_ms"] > 0


def test_a_linked_run_may_do_what_its_ancestor_surely_did_not(tmp_path: Path) -> None:
    first = clean()
    first.insert("finish", "resolved", "effect_resolved", **RESOLVED)
    first.journals["mail"].clear()
    assert verdict_of(tmp_path, first, linked())["violations"] == []


RESOLVED: Json = {"attempt": "e3", "happened": False, "request_id": "q9", "payload_hash": "h"}
RESOLVED |= {"reason": "they never got it", "evidence": "phone call"}


def rename_revision_3(s: Story) -> None:
    for _, _, event in s.steps:
        part = event["checkpoint"] if event["type"] == "checkpoint_written" else event
        name = "n" if event["type"] == "revision_accepted" else "revision"
        if part.get(name) == 3:
            part[name] = 4


def open_twice(s: Story) -> None:
    again = {**s.event("cp2")["checkpoint"], "id": "cp2b", "predecessor": "cp2", "predecessor_hash": AUTO}
    s.insert("open2", "open2b", "scope_opened", commit="b", scope="a", revision=2, checkpoint="cp2b", epoch=3)
    s.insert("open2", "cp2b", "checkpoint_written", commit="b", checkpoint=again, hash=AUTO)


def send_again_in_linked_run(s: Story) -> list[Story]:
    s.insert("finish", "resolved", "effect_resolved", **RESOLVED)
    return [s, linked()]


def refused_attempt(s: Story, after: str, revision: int = 1) -> None:
    """A whole attempt that no service executes, so that only the moment of its admission can be wrong."""
    s.admit("e9", "a", revision, "change", slot="extra", after=after)
    s.recorded("e9", "not_executed", after="e9.granted")


def revoked_attempt_executed(s: Story) -> None:
    s.admit("e9", "a", 1, "change", slot="extra", after="e8.recorded1")
    s.drop("e9.granted")
    s.executed("shop", "change", {"order_id": "O9"}, after="e9.admitted", key="key-extra-1")


def granted_after_hold(s: Story) -> None:
    s.admit("e9", "a", 2, "change", slot="extra", after="e5.recorded1")
    s.move("e9.granted", after="release")
    s.recorded("e9", "not_executed", after="e9.granted")


def unknown_at_opening(s: Story) -> None:
    s.move("e4.classified", after="open2")
    found: Json = {"attempt": "e4", "finding": "unknown", "basis": "gave_up", "started": 1, "epoch": 3}
    s.insert("e4.asked", "e4.unknown", "effect_classified", **found)


def autonomous_child_alive(s: Story) -> None:
    s.event("ca1.planned")["mode"] = "autonomous"
    s.event("cp2")["checkpoint"]["children"] = []
    s.move("ca1.canceled", after="open2")


def finish_with_autonomous_child(s: Story) -> None:
    s.event("ca3.planned")["mode"] = "autonomous"
    s.drop("ca3.completed")


def adopt_again(s: Story) -> None:
    again = {k: v for k, v in s.event("cb1.result").items() if k not in ("type", "at")}
    s.insert("cb1.result", "again", "result_filed", **again)


def use_the_old_key(s: Story) -> None:
    s.event("e5.admitted")["key"] = "key-changed-1"
    s.effect_of("key-changed-2")["key"] = "key-changed-1"


def admit_before_the_outcome(s: Story) -> None:
    s.move("e4.classified", after="e5.granted")
    every_contract(s, unknown_blocks="slot")
    s.event("cp2")["checkpoint"]["pending"].append({"attempt": "e4"})


def reuse_a_request(s: Story) -> None:
    s.insert("finish", "resolved", "effect_resolved", **RESOLVED | {"request_id": "q3", "happened": True})


def second_payload(s: Story) -> None:
    s.journals["shop"].append({"event": "key_reused", "key": "key-last-1", "after": "hold"})


def too_much_done(s: Story) -> None:
    s.event("cp2")["checkpoint"]["effects_done"].append({"attempt": "e4", "slot": "changed#1", "revision": 1})


def every_contract(s: Story, **fields: Any) -> None:
    for operation in ("refund", "cancel", "change"):
        s.event(f"contract.{operation}")["facts"].update(fields)


def adopt_while_held(s: Story) -> None:
    s.move("cb1.completed", after="hold")
    s.move("cb1.result", after="hold")


def written_twice(s: Story) -> None:
    s.event("cp3")["checkpoint"]["id"] = s.event("open3")["checkpoint"] = "cp2"


def one_intent_in_two_slots(s: Story) -> None:
    s.event("e1.admitted")["conflict_key"] = s.event("e6.admitted")["conflict_key"] = "k"


def skip_an_update_number(s: Story) -> None:
    s.event("update3")["seq"] = s.event("rev3")["seq"] = 5


def voided_too_late(s: Story) -> None:
    s.move("e4.classified", after="open2")


def retry_meant_at_opening(s: Story) -> None:
    s.event("e4.recorded1").update(outcome="not_executed", retry_at=99_999)
    voided_too_late(s)


def seen_before_opening(s: Story) -> None:
    s.insert("cp2", "odd", "child_seen", child="cb1", state="working")


def refused_but_executed(s: Story) -> None:
    s.executed("shop", "change", {}, after="e8.granted", key="key-refused-1")


def executed_twice(s: Story) -> None:
    s.executed("shop", "refund", {}, after="e1.granted", key="key-refunded-1")


def lose_the_child(s: Story) -> None:
    s.insert("cb1.completed", "lost", "child_lost", child="cb1", detail="gone")


def set_(label: str, **fields: Any) -> Bend:
    return lambda s: s.event(label).update(fields)


def in_checkpoint(label: str, **fields: Any) -> Bend:
    return lambda s: s.event(label)["checkpoint"].update(fields)


CORRUPTIONS: list[tuple[str, str, Bend]] = [
    ("LOG", "unknown event type", lambda s: s.insert("hold", "odd", "gate_painted")),
    ("LOG", "outcome of an attempt nobody admitted", lambda s: s.recorded("e99", after="hold")),
    ("LOG", "outcome of a try nobody granted", lambda s: s.recorded("e6", n=2, after="e6.recorded1")),
    ("LOG", "contract not noted", set_("e8.admitted", contract="other")),
    ("S1", "a revision number is left out", rename_revision_3),
    ("S1", "an update number is left out", skip_an_update_number),
    ("S1", "a revision without a redirect before it", set_("update3", kind="pause")),
    ("S1", "a scope opened twice", open_twice),
    ("S2", "a retry after the gate closed", lambda s: s.move("e2.granted2", after="rev2")),
    ("S2", "admitted after the gate closed", lambda s: refused_attempt(s, "rev2")),
    ("S2", "admitted before the gate opened", lambda s: refused_attempt(s, "rev2", revision=2)),
    ("S2", "admitted while held", lambda s: refused_attempt(s, "hold", revision=2)),
    ("S2", "granted after the hold revoked it", granted_after_hold),
    ("S2", "admitted after cancel", lambda s: s.insert("ca3.seen", "cancel", "run_cancelled", seq=4)),
    ("S2", "admitted after the end", lambda s: refused_attempt(s, "finish", revision=3)),
    ("S3", "an effect under a key of nobody", lambda s: s.executed("shop", "refund", {}, after="hold", key="stranger")),
    ("S3", "an effect without any key", lambda s: s.executed("shop", "refund", {"id": "Trefunded"}, after="hold")),
    ("S3", "more mails than tries", lambda s: s.executed("mail", "send", {"to": "bob"}, after="hold")),
    ("S3", "an effect of an attempt that was never granted", revoked_attempt_executed),
    ("S4", "one key executed twice", executed_twice),
    ("S4", "one intent under two slots", one_intent_in_two_slots),
    ("S4", "one slot in two runs", send_again_in_linked_run),
    ("S5", "opened while an attempt is being sent", voided_too_late),
    ("S5", "opened while an attempt waits for its retry", retry_meant_at_opening),
    ("S6", "succeeded, not in the journal", lambda s: s.journals["shop"].remove(s.effect_of("key-refunded-1"))),
    ("S6", "failed, in the journal", refused_but_executed),
    ("S7", "landed after the opening", lambda s: s.effect_of("key-refunded-1").update(after="open2")),
    ("S8", "a superseded child's result adopted", set_("ca1.result", disposition="adopted")),
    ("S8", "another task's result", set_("cb1.result", task="task-other")),
    ("S8", "another revision's stamp", set_("cb1.result", revision=2)),
    ("S8", "another goal", set_("cb1.planned", goal_hash="goal0")),
    ("S8", "an unclaimed child", lambda s: s.drop("cb1.claimed")),
    ("S8", "a lost child", lose_the_child),
    ("S8", "adopted twice", adopt_again),
    ("S8", "adopted while held", adopt_while_held),
    ("S10", "more admitted than the budget", lambda s: s.event("rev3")["goal"].update(budget_effects=5)),
    ("S11", "called stopped, never seen to be", lambda s: s.drop("ca1.canceled")),
    ("S11", "opened before an autonomous child ended", autonomous_child_alive),
    ("S11", "finished before an autonomous child ended", finish_with_autonomous_child),
    ("S12", "an old holder decides", set_("open3", epoch=2)),
    ("S13", "one request makes two revisions", set_("update3", request_id="q2")),
    ("S13", "one request resolves and redirects", reuse_a_request),
    ("S14", "the old generation's key is used again", use_the_old_key),
    ("S14", "one generation under two keys", set_("e5.admitted", generation=1)),
    ("S14", "a generation is left out", set_("e5.admitted", generation=3)),
    ("S14", "a new generation while the old one is open", admit_before_the_outcome),
    ("S14", "a retry at a service that does not dedupe", lambda s: every_contract(s, dedupes=False)),
    ("S14", "a retry beyond the limit", lambda s: every_contract(s, tries_max=1)),
    ("S14", "a retry when the key may be forgotten", lambda s: every_contract(s, retention_ms=9_010)),
    ("S14", "voided where nothing can be voided", lambda s: every_contract(s, contract_class="LOOKUP")),
    ("S14", "a key with two payloads", second_payload),
    ("S15", "the hash is of something else", set_("cp3", hash="0" * 64)),
    ("S15", "an effect is missing", lambda s: s.event("cp2")["checkpoint"]["effects_done"].pop()),
    ("S15", "an effect is too much", too_much_done),
    ("S15", "it is exact for a position that had not come", in_checkpoint("cp2", position=10_000)),
    ("S15", "the predecessor had another hash", in_checkpoint("cp3", predecessor_hash="0" * 64)),
    ("S15", "the predecessor is not named", in_checkpoint("cp3", predecessor="", predecessor_hash="")),
    ("S15", "written twice", written_twice),
    ("S15", "something stands before the opening", seen_before_opening),
    ("S15", "of another scope", in_checkpoint("cp2", scope="b")),
    ("S16", "opened past an unknown outcome", unknown_at_opening),
    ("S16", "the checkpoint does not name the unknown one", in_checkpoint("cp3", pending=[])),
    ("JOURNAL", "a service was called whose journal is missing", lambda s: s.journals.pop("mail")),
    ("HIDDEN", "still being sent when the run ends", lambda s: s.drop("e7.recorded1")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bend"), [pytest.param(n, b, id=f"{n}: {t}") for n, t, b in CORRUPTIONS])
def test_a_run_bent_in_one_place_is_caught_by_that_check_alone(tmp_path: Path, name: str, bend: Bend) -> None:
    story = clean()
    bent = bend(story)
    stories = bent if name == "S4" and isinstance(bent, list) and isinstance(bent[0], Story) else [story]
    assert fired(verdict_of(tmp_path, *stories)) == {name}


def test_every_check_has_a_run_that_it_catches() -> None:
    sources = [Path(str(module.__file__)).read_text() for module in (checks_control, checks_attempts, checks_journal)]
    named = set(re.findall(r'(?:broken|Violation)\(\s*"([A-Z]+\d*)"', "\n".join(sources)))
    assert named == {name for name, _, _ in CORRUPTIONS}


def test_a_gap_in_the_positions_is_caught(tmp_path: Path) -> None:
    lines = clean().log_lines()
    for line in lines[40:]:
        line["n"] += 1
    journals = [read_journal(s, write(tmp_path / s, clean().journal_lines(s))) for s in ("shop", "mail")]
    assert fired(check([read_log(write(tmp_path / "log", lines))], journals)) == {"LOG"}


@pytest.mark.parametrize(
    ("bend", "promise"),
    [
        (CORRUPTIONS[i][2], promise)
        for promise, name, text in (
            ("duplicate_effects", "S4", "one key executed twice"),
            ("stale_effects", "S2", "a retry after the gate closed"),
            ("stale_effects", "S7", "landed after the opening"),
            ("hidden_unknowns", "S6", "failed, in the journal"),
            ("hidden_unknowns", "HIDDEN", "still being sent when the run ends"),
        )
        for i, row in enumerate(CORRUPTIONS)
        if row[:2] == (name, text)
    ],
)
def test_a_broken_promise_is_counted(tmp_path: Path, bend: Bend, promise: str) -> None:
    story = clean()
    bend(story)
    assert verdict_of(tmp_path, story)[promise] == 1


def test_a_child_that_was_never_launched_may_end_unseen(tmp_path: Path) -> None:
    story = clean()
    story.drop(*(f"ca1.{step}" for step in ("launch", "bound", "claimed", "seen", "stop", "canceled", "result")))
    story.effect_of("key-cancelled-1")["after"] = "rev2"
    story.event("cp2")["checkpoint"]["children"][0]["state"] = "ended"
    story.event("ca2.planned")["follows_state"] = "ended"
    assert verdict_of(tmp_path, story)["violations"] == []


def test_a_scope_below_is_judged_by_its_own_opening(tmp_path: Path) -> None:
    story = clean()
    for label in ("rev2", "rev3"):
        story.event(label)["affects"] = ["a", "a/sub"]
    story.event("e4.admitted")["scope"] = "a/sub"
    story.move("e4.classified", after="open2")
    for n, predecessor in ((2, ""), (3, "sub2")):
        base = {"id": f"sub{n}", "scope": "a/sub", "revision": n, "goal_hash": f"goal{n}", "effects_done": []}
        base["position"] = AUTO
        if predecessor:
            base |= {"predecessor": predecessor, "predecessor_hash": AUTO}
        after = "e4.classified" if n == 2 else "open3"
        opened = {"scope": "a/sub", "revision": n, "checkpoint": f"sub{n}", "epoch": 3}
        story.insert(after, f"subopen{n}", "scope_opened", commit=f"s{n}", **opened)
        story.insert(after, f"sub{n}", "checkpoint_written", commit=f"s{n}", checkpoint=base, hash=AUTO)
    assert verdict_of(tmp_path, story)["violations"] == []
    story.move("e4.classified", after="subopen2")
    assert fired(verdict_of(tmp_path, story)) == {"S5"}


def test_a_landing_after_the_opening_is_legal_where_only_the_slot_is_blocked(tmp_path: Path) -> None:
    story = clean()
    story.journals["mail"][0]["after"] = "ca2.seen"
    verdict = verdict_of(tmp_path, story)
    assert verdict["violations"] == []
    assert verdict["stale_effects"] == 0
    assert {row["attempt"]: row["before_open_ms"] < 0 for row in verdict["late_landings"]} == {"e2": False, "e3": True}


def test_a_mail_is_given_to_the_attempt_whose_receipt_it_is(tmp_path: Path) -> None:
    story = clean()
    story.admit("e9", "a", 1, "send", slot="other-mail", target="bob", after="e3.recorded1")
    story.recorded("e9", after="e9.granted")
    story.event("e9.recorded1")["observed"] = {"receipt": {"message": "mail-1"}}
    story.journals["mail"][0]["receipt"] = {"message": "mail-1"}
    done = {"attempt": "e9", "slot": "other-mail#1", "revision": 1}
    for checkpoint in ("cp2", "cp3"):
        story.event(checkpoint)["checkpoint"]["effects_done"].append(done)
    verdict = verdict_of(tmp_path, story)
    assert verdict["violations"] == []
    assert [row["journal"] for row in verdict["unresolved"]] == ["absent"]


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "simulators.checker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_program_tells_by_its_exit_code(tmp_path: Path) -> None:
    story = clean()
    log = write(tmp_path / "log", [{"run": story.run}, *story.log_lines()])
    shop = write(tmp_path / "shop", story.journal_lines("shop"))
    mail = write(tmp_path / "mail", story.journal_lines("mail"))
    mail.write_text(mail.read_text() + '{"n": 2, "event": "exec')  # a kill in the middle of a write
    files = ["--log", str(log), "--journal", f"shop={shop}", "--journal", f"mail={mail}"]

    passed = program(*files, "-o", "json")
    assert (passed.returncode, passed.stderr) == (0, "")
    assert json.loads(passed.stdout)["violations"] == []

    story.executed("shop", "refund", {}, after="hold", key="stranger")
    write(shop, story.journal_lines("shop"))
    failed = program(*files)
    assert failed.returncode == 1
    assert "BROKEN S3" in failed.stdout

    log.write_text("{}\nno json\n")
    unreadable = program(*files)
    assert (unreadable.returncode, unreadable.stdout) == (2, "")
    assert f"{log}:1:" in unreadable.stderr
    assert program("--log", str(tmp_path / "none")).returncode == 2
    assert program("--log", str(log), "--journal", "shop").returncode == 2


def test_an_event_without_a_needed_field_is_named(tmp_path: Path) -> None:
    story = clean()
    del story.event("e1.admitted")["key"]
    with pytest.raises(InputError, match=r"position \d+: effect_admitted needs a text 'key'"):
        check(logs_of(tmp_path, story), [])


def test_it_shares_no_code_with_what_it_checks() -> None:
    folder = Path(str(checks_control.__file__)).parent
    files = [folder / "checker.py", *sorted(folder.glob("checks_*.py"))]
    assert len(files) == 6
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                foreign = name.split(".")[0] not in sys.stdlib_module_names
                assert not foreign or name.startswith("simulators.check"), f"{file.name} imports {name}"
