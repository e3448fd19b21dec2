"""Goal files: what is taken, and what a wrong one is told, with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.dev_settings import SAMPLE_FILES, sample_text
from orchestrator.goals import (
    ChangeFile,
    GoalError,
    GoalPart,
    one_scope_goal,
    parse_goal,
    read_change_file,
    read_goal_file,
)

WHOLE = """\
text: Send the order to the cottage.
requirements:
  - {id: address, text: To the cottage.}
plan:
  address:
    agent: plan
    actions:
      - service: shop
        action: move
        arguments: {order: "#1", on: 2026-11-30, boxes: 2, zip: 04012, again: no, at: 12:30}
        occurrence: 2
  a/b:
    agent: plan
    brief: Tell them.
    needs: ["address:label"]
budget: {effects: 3}
"""


def refused(text: str, *, kind: type = GoalPart, file: str = "goal.yaml") -> str:
    with pytest.raises(GoalError) as caught:
        parse_goal(text, file, kind)
    return str(caught.value)


def test_a_whole_goal_becomes_what_the_rules_take() -> None:
    goal = parse_goal(WHOLE, "goal.yaml", GoalPart).goal()
    assert goal.text == "Send the order to the cottage."
    assert [r.id for r in goal.requirements] == ["address"]
    assert list(goal.plan) == ["address", "a/b"]
    action = goal.plan["address"].actions[0]
    # What YAML of old would turn into a date, an octal number, false and minutes stays as it was written.
    kept = {"on": "2026-11-30", "zip": "04012", "again": "no", "at": "12:30"}
    assert action.arguments == {"order": "#1", "boxes": 2, **kept}
    assert action.occurrence == 2
    assert goal.plan["a/b"].needs == ("address:label",)
    assert goal.budget_effects == 3


def test_json_is_taken_with_tabs_and_gives_lines_too() -> None:
    text = '{\n\t"text": "t",\n\t"plan": {"a": {"agent": "x"}}\n}'
    assert parse_goal(text, "goal.json", GoalPart).goal().plan["a"].agent == "x"
    told = refused('{\n "text": "t",\n "plan": {\n  "a": {"agnt": "x"}}\n}', file="goal.json")
    assert "goal.json:4: plan.a: unknown key `agnt`" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "goal.yaml:1: the file is empty"),
        ("- a\n", "goal.yaml:1: expected `text:`"),
        ("text: [a\n", "goal.yaml:2: not YAML"),
        ("text: a\n", "goal.yaml:1: goal: `plan` is missing"),
        ("text: a\nplan: {}\n", "goal.yaml:2: plan:"),
        ("text: ''\nplan: {a: {agent: x}}\n", "goal.yaml:1: text:"),
        ("text: a\nplan:\n  a:\n    agent: 7\n", "goal.yaml:4: plan.a.agent: must be a text; put it in quotes"),
        ("text: a\nplan:\n  a: {}\n", "goal.yaml:3: plan.a: `agent` is missing"),
        ("text: a\nplan:\n  'a b': {agent: x}\n", "goal.yaml:3: plan.a b: this name cannot be used"),
        ("text: a\nplan:\n  a: {agent: x}\n  a: {agent: y}\n", "goal.yaml:4: the key `a` stands here a second time"),
        ("text: a\nplan: &p\n  a: {agent: x}\nmore: *p\n", "aliases (*name) are not taken here"),
        ("text: a\nplan: {a: {agent: x}}\nbudget: {effects: -1}\n", "goal.yaml:3: budget.effects:"),
        ("text: a\nplan: {a: {agent: x, actions: [{service: s, action: t, occurrence: true}]}}\n", "occurrence"),
        ("text: a\nplan: {a: {agent: x, actions: [{service: s, action: t, arguments: {x: .nan}}]}}\n", "as JSON"),
        ("text: a\nplan: {a: {agent: x, actions: [{service: s, action: t, arguments: {1: 2}}]}}\n", "arguments"),
        ("text: a\nplan: {a: {agent: x}}\nremove: [b]\n", "goal.yaml:3: goal: unknown key `remove`"),
    ],
)
def test_a_mistake_is_named_with_file_line_and_place(text: str, words: str) -> None:
    assert words in refused(text)


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        ({"text": "a" * 8193, "plan": {"a": {"agent": "x"}}}, "is longer than 8192 bytes"),
        ({"text": "é" * 5000, "plan": {"a": {"agent": "x"}}}, "is longer than 8192 bytes"),
        ({"text": "a", "plan": {f"s{n}": {"agent": "x"} for n in range(101)}}, "at most 100"),
        (
            {"text": "a", "plan": {"a": {"agent": "x", "actions": [{"service": "s", "action": "t"}] * 501}}},
            "at most 500",
        ),
        (
            {
                "text": "a",
                "plan": {"a": {"agent": "x"}},
                "requirements": [{"id": f"r{n}", "text": "t"} for n in range(201)],
            },
            "at most 200",
        ),
        (
            {
                "text": "a",
                "plan": {
                    "a": {
                        "agent": "x",
                        "actions": [{"service": "s", "action": "t", "arguments": {"x": "y" * 2**20}}],
                    }
                },
            },
            "larger than 1048576 bytes",
        ),
    ],
)
def test_every_limit_holds(goal: dict, words: str) -> None:
    assert words in refused(json.dumps(goal), file="goal.json")


def test_a_change_names_only_what_changes(tmp_path: Path) -> None:
    file = tmp_path / "change.yaml"
    file.write_text("requirements: [{id: r, text: t}]\nremove: [old, a/b]\n")
    goal, remove = read_change_file(file)
    assert goal == {"requirements": [{"id": "r", "text": "t"}]}
    assert remove == ["old", "a/b"]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(GoalError, match=r"none\.yaml: cannot be read"):
        read_goal_file(tmp_path / "none.yaml")


def test_a_text_and_an_agent_make_a_goal_of_one_scope() -> None:
    assert one_scope_goal("do it", "plan") == {"text": "do it", "plan": {"main": {"agent": "plan", "brief": "do it"}}}
    with pytest.raises(GoalError, match=r"plan\.main\.agent"):
        one_scope_goal("do it", "no such name")


@pytest.mark.parametrize(("name", "kind"), list(zip(SAMPLE_FILES, (GoalPart, ChangeFile), strict=True)))
def test_the_sample_is_a_goal(name: str, kind: type) -> None:
    assert parse_goal(sample_text(name), name, kind).goal().plan["orders"].actions
