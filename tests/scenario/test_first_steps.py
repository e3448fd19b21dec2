"""What a new user does first, as the README says, at any typing speed; and what happens beside a running dev."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WAIT_LIMIT_S = 60.0


def regate(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command, as a user calls it."""
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *arguments],
        cwd=cwd, env=environment(), capture_output=True, text=True, timeout=WAIT_LIMIT_S, check=False,
    )  # fmt: skip


def environment() -> dict[str, str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("REGATE_")}
    return bare | {"PYTHONPATH": os.pathsep.join(sys.path)}


def as_json(*arguments: str, cwd: Path) -> Any:
    done = regate(*arguments, "-o", "json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new project with `regate dev` at work in it."""
    folder = tmp_path_factory.mktemp("first") / "mine"
    assert regate("init", str(folder), cwd=folder.parent).returncode == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "dev"],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["role"] == "dev"
        yield folder
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=40)


def test_the_first_goal_can_be_redirected_however_slowly_one_types(project: Path) -> None:
    assert regate("run", "start", "-f", "goal.yaml", cwd=project).returncode == 0
    until = time.monotonic() + WAIT_LIMIT_S
    while as_json("run", "show", "--last", cwd=project)["effect_counts"].get("succeeded", 0) < 2:
        assert time.monotonic() < until
    # Everything that is quick is done by now, and the rest still lasts.
    redirected = regate("run", "redirect", "--last", "-f", "change.yaml", "--reason", "changed my mind", cwd=project)
    assert redirected.returncode == 0, redirected.stderr
    view = as_json("run", "show", "--last", cwd=project)
    assert view["revision"]["in_force"] == 2
    assert view["scopes"]["cancel"]["cur"] == 1


def test_the_doctor_shows_the_settings_that_matter(project: Path) -> None:
    found = as_json("doctor", cwd=project)["redis"]
    wanted = {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no"}
    wanted |= {"maxmemory-policy": "noeviction", "role": "master"}
    assert {name: found[name] for name in wanted} == wanted
    assert found["replicas"] == 0
    assert found["used_memory_bytes"] > 0
    assert found["maxmemory_bytes"]
    assert found["version"].split()[0] in ("Valkey", "Redis")
    text = regate("doctor", cwd=project).stdout
    assert all(f"{name} " in text and value in text for name, value in wanted.items())


def test_a_second_dev_says_where_the_first_one_is(project: Path) -> None:
    url = json.loads((project / "regate-data" / "endpoint.json").read_text())["url"]
    second = regate("dev", cwd=project)
    assert second.returncode == 1
    assert f"already runs on {project / 'regate-data'} at {url}" in second.stderr


def test_a_command_while_the_orchestrator_is_started_again_is_answered(project: Path) -> None:
    rows = json.loads((project / "regate-data" / "processes.json").read_text())["processes"]
    os.kill(next(row["pid"] for row in reversed(rows) if row["role"] == "orchestrator"), signal.SIGKILL)
    done = regate("run", "list", "-o", "json", cwd=project)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_a_server_beside_it_leaves_it_where_it_was_found(project: Path) -> None:
    endpoint = project / "regate-data" / "endpoint.json"
    before = json.loads(endpoint.read_text())
    beside = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "serve"],
        cwd=project, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert beside.stdout is not None
        assert json.loads(beside.stdout.readline())["url"] != before["url"]
    finally:
        beside.send_signal(signal.SIGTERM)
        beside.communicate(timeout=30)
    assert json.loads(endpoint.read_text()) == before
    assert regate("run", "list", cwd=project).returncode == 0
