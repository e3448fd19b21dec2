"""docs/protocol.md says what the rules say, and names only tests that exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from admission import events as ev
from admission.rules import MACHINES


@pytest.fixture
def generator(repo_root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_protocol", repo_root / "docs" / "render_protocol.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def page(repo_root: Path) -> str:
    return (repo_root / "docs" / "protocol.md").read_text(encoding="utf-8")


def test_the_protocol_page_is_what_the_rules_say(generator: ModuleType, page: str) -> None:
    assert generator.render(page) == page, "run `python docs/render_protocol.py`"


def test_a_stale_protocol_page_is_noticed(generator: ModuleType, page: str) -> None:
    row = next(line for line in page.splitlines() if line.startswith("| ") and "OpenScope" in line)
    assert generator.render(page.replace(row, "")) == generator.render(page) != page.replace(row, "")
    with pytest.raises(ValueError, match="markers"):
        generator.render(page.replace("<!-- end of events -->", ""))


def test_the_protocol_page_documents_every_row_command_and_event(page: str) -> None:
    for machine in MACHINES:
        part = page.partition(f"### Machine: {machine.name}\n")[2].partition("\n### ")[0].partition("\n<!--")[0]
        rows = [line for line in part.splitlines() if line.startswith("| ")]
        assert len(rows) == len(machine.rows) + 1, machine.name
        for command in machine.commands:
            assert f"| {command.__name__} | {machine.name} |" in page
    for kind in ev.AnyEvent.__args__:
        assert f"| `{kind.__struct_config__.tag}` |" in page


@pytest.mark.parametrize("name", [*(f"S{n}" for n in range(1, 18)), *(f"L{n}" for n in range(1, 7))])
def test_each_documented_invariant_names_its_test_or_says_that_it_has_none(
    name: str, page: str, repo_root: Path
) -> None:
    rows = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    assert len(rows) == 1
    held_by = rows[0].split(" | ")[-1]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", held_by)
    assert named or "stateful" in held_by or "not held" in held_by
    for file, test in [*named, ("tests/stateful/test_decide.py", "Protocol")]:
        tree = ast.parse((repo_root / file).read_text(encoding="utf-8"))
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert test in defined, f"{file} has no {test}"
