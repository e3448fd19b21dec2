"""What the command prints: JSON alone on standard output, other people's texts shown and never obeyed."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from orchestrator.cli_output import Column, Output, Screen, cell, clock_time, literal, pairs, table, visible
from orchestrator.cli_records import attention_table, control_lines, doctor_report, log_lines
from orchestrator.cli_tables import (
    change_report,
    effect_report,
    effects_table,
    run_report,
    runs_table,
    waiting_words,
)

HOSTILE = "[bold red]pay[/bold red] [link=http://x]\x1b[31m\x1b]0;title\x07 \u202eexe.txt :smile:"


def screen(output: Output = Output.TEXT, width: int = 400) -> Screen:
    def console() -> Console:
        return Console(file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False)

    return Screen(output, console(), console())


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_a_terminal_obeys_is_spelled_out() -> None:
    shown = visible("a\x1b[31m\x00\x9b\u202e\nb\tc ä 🙂")
    assert shown == "a\\x1b[31m\\x00\\x9b\\x202e\nb\tc ä 🙂"


@pytest.mark.parametrize("draw", [literal, cell])
def test_markup_of_others_is_shown_as_it_stands(draw) -> None:
    shown = screen()
    shown.draw(draw(HOSTILE))
    text = written(shown.out)
    assert "[bold red]pay[/bold red] [link=http://x]\\x1b[31m" in text
    assert ":smile:" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_every_report_shows_hostile_texts_literally() -> None:
    effect = {
        "attempt": "r-e1", "service": HOSTILE, "operation": HOSTILE, "target": HOSTILE, "outcome": HOSTILE,
        "why": HOSTILE, "observed_result": {"x": HOSTILE}, "revision": 1,
        "tries": [{"n": 1, "detail": HOSTILE, "gateway": HOSTILE}],
    }  # fmt: skip
    view = {
        "run": HOSTILE, "state": HOSTILE, "text": HOSTILE, "revision": {"in_force": 2}, "follows": HOSTILE,
        "revisions": [{"n": 2, "text": HOSTILE, "reason": HOSTILE, "changed": {"scopes": [HOSTILE]}, "kind": HOSTILE}],
        "scopes": {HOSTILE: {"gate": HOSTILE, "waits_for": [HOSTILE], "agent": HOSTILE}},
        "children": [{"child": HOSTILE, "task": HOSTILE, "task_state": HOSTILE}],
        "refusals": [{"service": HOSTILE, "target": HOSTILE, "reason": HOSTILE}],
        "results": [{"result": HOSTILE, "disposition": "dropped", "reason": HOSTILE}],
        "unresolved": [{"id": HOSTILE, "what": HOSTILE, "why": HOSTILE}],
        "alarms": [{"attempt": HOSTILE, "detail": HOSTILE}], "effects": [effect],
    }  # fmt: skip
    shown = screen(width=5000)
    shown.draw(*run_report(view), runs_table([view]), effects_table([effect]), *effect_report(effect))
    shown.draw(*change_report({"run": view, "in_force": 2}), attention_table([{"id": HOSTILE, "why": HOSTILE}]))
    shown.draw(log_lines([{"n": 1, "event": {"type": HOSTILE, "by": HOSTILE, "x": HOSTILE}}]))
    shown.draw(control_lines([{"seq": 1, "kind": HOSTILE, "text": HOSTILE, "told": [{"child": HOSTILE}]}]))
    shown.draw(*doctor_report({"a": HOSTILE, "b": {"c": HOSTILE}, "d": [HOSTILE], "e": [{"f": HOSTILE}]}))
    shown.result(HOSTILE)
    shown.say(waiting_words(view))
    for text in (written(shown.out), written(shown.err)):
        assert "[bold red]pay[/bold red]" in text
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "\u202e" not in text


def test_json_is_alone_on_standard_output() -> None:
    shown = screen(Output.JSON)
    shown.show({"a": "ä"}, lambda: pytest.fail("drawn although JSON was asked for"))
    shown.result("one line")
    assert json.loads(written(shown.out)) == {"a": "ä"}
    assert written(shown.err) == "one line\n"


def test_rows_are_one_list_or_one_line_each() -> None:
    rows = [{"n": 1, "text": "a\nb"}, {"n": 2, "text": "\ud800"}]
    whole, lines = screen(Output.JSON), screen(Output.JSONL)
    whole.rows(rows, tuple)
    lines.rows(rows, tuple)
    assert json.loads(written(whole.out)) == rows
    assert [json.loads(line) for line in written(lines.out).splitlines()] == rows


def test_a_result_is_on_standard_output_when_that_is_text() -> None:
    shown = screen()
    shown.result("done")
    shown.say("more")
    assert (written(shown.out), written(shown.err)) == ("done\n", "more\n")


def test_lines_that_are_piped_are_never_cut() -> None:
    shown = screen(width=40)
    shown.draw(literal("word " * 50))
    assert written(shown.out).count("\n") == 1


def test_ids_stay_in_one_piece_in_a_narrow_table() -> None:
    shown = screen(width=60)
    shown.draw(table([{"id": "a" * 30, "why": "w " * 100}], [Column("id", "id", whole=True), Column("why", "why")]))
    assert "a" * 30 in written(shown.out)


def test_cells_of_values() -> None:
    assert cell(None).plain == ""
    assert cell(True).plain == "yes"
    assert cell(["a", 1]).plain == "a, 1"
    assert cell({"a": 1}).plain == '{"a": 1}'
    assert cell("a\n  b").plain == "a b"
    assert cell("x" * 1000).plain.endswith("…")
    assert len(cell("x" * 1000).plain) == 200


@pytest.mark.parametrize("at", [None, 0, -5, "soon", True, 10**40, float("nan")])
def test_a_time_that_is_none_is_empty(at: object) -> None:
    assert clock_time(at) == ""


def test_a_time_is_shown_in_utc() -> None:
    assert clock_time(1_796_076_072_048) == "2026-11-30 22:01:12"


def test_pairs_without_value_are_left_out() -> None:
    shown = screen()
    shown.draw(pairs([("kept", 0), ("gone", None), ("empty", "")]))
    assert written(shown.out).split() == ["kept", "0"]


def test_a_change_shows_what_changed_what_was_kept_what_was_finished_and_what_is_open() -> None:
    def effect(number: int, outcome: str, revision: int = 1) -> dict[str, object]:
        name = f"r-e{number}"
        return {
            "attempt": name,
            "service": "s",
            "operation": "o",
            "target": "t",
            "outcome": outcome,
            "revision": revision,
        }

    view = {
        "revisions": [
            {"n": 1, "changed": {"scopes": ["old"]}, "kept": {}},
            {"n": 2, "changed": {"requirements": ["r1"], "scopes": ["a"]}, "kept": {"scopes": ["b"]}},
        ],
        "effects": [effect(1, "succeeded"), effect(2, "unknown"), effect(3, "revoked"), effect(4, "succeeded", 2)],
    }
    shown = screen()
    shown.draw(*change_report({"run": view, "in_force": 2}))
    lines = written(shown.out).splitlines()
    at = {title: lines.index(title) for title in ("changed", "kept", "finished before", "still open")}
    assert lines[at["changed"] + 1 : at["kept"]] == ["  requirements: r1", "  scopes: a"]
    assert lines[at["kept"] + 1 : at["finished before"]] == ["  scopes: b"]
    assert lines[at["finished before"] + 1 : at["still open"]] == ["  r-e1  s.o on t: succeeded"]
    assert lines[at["still open"] + 1 :] == ["  r-e2  s.o on t: unknown"]
