"""The demo keeps its promises, shows what it claims to show, and leaves a directory that can be worked with."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KEYS = {
    "run", "revisions", "children", "effects", "refused", "late_results", "unresolved", "checkpoints", "processes",
    "promises",
}  # fmt: skip
DEMO_TIMEOUT_S = 120


def regate(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command, as a user calls it, without what the environment of these tests says."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REGATE_")}
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=DEMO_TIMEOUT_S, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One demo, and where it was run."""
    folder = tmp_path_factory.mktemp("demo")
    done = regate("demo", "--seed", "7", "-o", "json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder


def test_the_object_has_the_promised_keys_and_the_promises_hold(shown: tuple[dict[str, Any], Path]) -> None:
    found, _ = shown
    assert set(found) >= KEYS
    promises = found["promises"]
    assert (promises["duplicate_effects"], promises["stale_effects"], promises["hidden_unknowns"]) == (0, 0, 0)
    assert promises["violations"] == []
    assert any(line.startswith("payments: 1 ") for line in promises["checked_against"])


def test_the_story_is_the_one_that_is_told(shown: tuple[dict[str, Any], Path]) -> None:
    found, _ = shown
    effects = {(row["operation"], row["target"], row["revision"]): row for row in found["effects"]}
    refund = effects["refund", "#S40100", 1]
    assert (refund["outcome"], refund["basis"]) == ("succeeded", "lookup_found")
    assert [row["what"].split(" ")[0] for row in found["unresolved"]] == ["mail.send_message"]
    refused = {(row["operation"], row["reason"]) for row in found["refused"]}
    assert ("cancel_pending_order", "superseded") in refused
    delivery = [child for child in found["children"] if child["scope"] == "delivery"]
    assert len(delivery) == 1
    assert delivery[0]["disposition"] == "adopted"
    late = found["late_results"]
    assert len(late) == 1
    assert late[0]["revision"] == 1
    follow_up = next(child for child in found["children"] if child["scope"] == "refund" and child["revision"] == 2)
    stubborn = next(child for child in found["children"] if child["scope"] == "refund" and child["revision"] == 1)
    assert follow_up["follows"] == stubborn["child"]
    assert stubborn["succeeded_by"] == follow_up["child"]
    assert follow_up["task"] != stubborn["task"]
    killed = [row for row in found["processes"] if row["ended"] == "killed by signal 9"]
    assert [row["role"] for row in killed] == ["gateway"]
    checkpoint = next(row for row in found["checkpoints"] if row["scope"] == "refund")
    assert [row["operation"] for row in checkpoint["effects_done"]] == ["refund"]
    assert [row["operation"] for row in checkpoint["pending"]] == ["send_message"]


def test_the_pasted_commands_settle_the_mail(shown: tuple[dict[str, Any], Path]) -> None:
    found, folder = shown
    mail = next(row["id"] for row in found["unresolved"])
    data = found["kept_in"]
    before = regate("run", "show", found["run"]["run"], "--data", data, "-o", "json", cwd=folder)
    assert json.loads(before.stdout)["state"] == "blocked", before.stderr
    settle = ("effect", "resolve", mail, "--happened", "--reason", "asked", "--evidence", "her reply", "--data", data)
    done = regate(*settle, cwd=folder)
    assert done.returncode == 0, done.stderr
    after = regate("run", "show", found["run"]["run"], "--data", data, "-o", "json", cwd=folder)
    assert json.loads(after.stdout)["state"] == "completed"


def test_the_same_seed_gives_the_same_verdicts(shown: tuple[dict[str, Any], Path]) -> None:
    first, folder = shown
    again = regate("demo", "--seed", "7", "-o", "json", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert _verdicts(json.loads(again.stdout)) == _verdicts(first)


def _verdicts(found: dict[str, Any]) -> dict[str, Any]:
    return {
        "effects": sorted((e["operation"], e["target"], e["revision"], e["outcome"]) for e in found["effects"]),
        "refused": sorted((r["operation"], r["revision"], r["reason"]) for r in found["refused"]),
        "children": sorted((c["scope"], c["revision"], c["state"], c["disposition"]) for c in found["children"]),
        "unresolved": [row["what"] for row in found["unresolved"]],
        "promises": {k: found["promises"][k] for k in ("duplicate_effects", "stale_effects", "hidden_unknowns")},
        "state": found["run"]["state"],
    }
