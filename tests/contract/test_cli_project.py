"""The command's parts that ask no API: beginning a project, checking its files, commands that other packages bring."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from orchestrator.cli import mount
from tests.contract.cli_calls import call

# --- commands of others ----------------------------------------------------------------------------------------------


def test_a_command_that_cannot_be_loaded_leaves_the_others_alone() -> None:
    target = typer.Typer()
    target.command("one")(lambda: typer.echo("one"))
    mount(target, [EntryPoint("worker", "workers.commands:app", "g"), EntryPoint("gone", "no.such.module:app", "g")])
    run = CliRunner().invoke
    assert run(target, ["one"]).stdout == "one\n"
    assert "plan" in run(target, ["worker", "--help"]).stdout
    broken = run(target, ["gone", "any", "--thing"])
    assert broken.exit_code == 1
    assert "`regate gone` cannot be loaded" in broken.stderr


# --- projects --------------------------------------------------------------------------------------------------------


def test_a_new_project_is_usable_as_it_stands(tmp_path: Path) -> None:
    assert call("init", str(tmp_path / "new")).exit_code == 0
    result = call("check", str(tmp_path / "new"), "-o", "json")
    assert result.exit_code == 0, result.stderr
    assert {row["kind"] for row in json.loads(result.stdout)} == {"settings", "contract", "goal", "change"}
    (tmp_path / "new/goal.yaml").write_text("mine")
    again = call("init", str(tmp_path / "new"))
    assert again.exit_code == 3
    assert (tmp_path / "new/goal.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("regate.toml", "[gateway]", "[gatway]", "gatway"),
        ("services/shop.yaml", "    target: order_id  ", "    taget: order_id  ", "taget"),
        ("services/shop.yaml", "retention_ms: 86400000", "retention_ms: 100", "retention_ms"),
        ("goal.yaml", "text: Send", "txt: Send", "txt"),
        ("goal.yaml", "    agent: plan", "    agent: nobody", "agent `nobody` is unknown"),
        ("goal.yaml", "service: shop", "service: shoe", "service `shoe` is unknown"),
        ("goal.yaml", "action: cancel_pending_order", "action: cancel", "no operation `cancel`"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_line(tmp_path: Path, file: str, old: str, new: str, words: str) -> None:
    call("init", str(tmp_path))
    path = tmp_path / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    line = path.read_text()[: path.read_text().index(new)].count("\n") + 1
    result = call("check", str(tmp_path))
    assert result.exit_code == 1
    found = [told for told in result.stderr.splitlines() if words in told]
    assert any(told.startswith(f"{path}:") for told in found), result.stderr
    exact = file != "goal.yaml" or "txt" not in words
    assert not exact or any(abs(int(told.split(":")[1]) - line) <= 1 for told in found), (line, result.stderr)


def test_checking_nothing_is_not_found(tmp_path: Path) -> None:
    assert call("check", str(tmp_path)).exit_code == 4
    assert call("check", str(tmp_path / "missing.yaml")).exit_code == 4


def test_version() -> None:
    assert set(json.loads(call("version", "-o", "json").stdout)) == {"regate", "python"}
