"""The command against everything it commands: `regate dev` on real processes, a real store, real agents and services.

Knows what a person types and reads. That the rules behind it are right is shown elsewhere.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

START_TIMEOUT_S = 60.0
WAIT_TIMEOUT_S = 40.0
ROW_FIELDS = {"target", "input_ref", "operation_id", "observed_result", "revision", "child", "outcome"}


def cancelling(*orders: str) -> list[dict[str, Any]]:
    return [
        {
            "service": "shop",
            "action": "cancel_pending_order",
            "arguments": {"order_id": o, "reason": "no longer needed"},
        }
        for o in orders
    ]


def goal_of(slow: list[str], quick: list[str]) -> dict[str, Any]:
    """One branch whose agent rests for seconds after each action, so that there is time to do something about it."""
    return {
        "text": "Cancel [bold]some[/bold] orders.",
        "requirements": [{"id": "one", "text": "these"}, {"id": "two", "text": "those"}],
        "plan": {
            "slow": {"agent": "slow", "actions": cancelling(*slow)},
            "quick": {"agent": "plan", "actions": cancelling(*quick)},
        },
    }


@dataclass(frozen=True)
class Dev:
    """`regate dev` at work, and how commands reach it."""

    data: Path
    process: subprocess.Popen[str]

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_command(*arguments, "--data", str(self.data))

    def json(self, *arguments: str) -> Any:
        done = self.call(*arguments, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def file(self, name: str, content: dict[str, Any]) -> str:
        path = self.data / name
        path.write_text(json.dumps(content))
        return str(path)

    def start(self, slow: list[str], quick: list[str], *more: str) -> str:
        answer = self.json("run", "start", "-f", self.file("goal.json", goal_of(slow, quick)), *more)
        return str(answer["run"]["run"])

    def until(self, run: str, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        view: dict[str, Any] = {}
        while time.monotonic() < deadline:
            view = self.json("run", "show", run)
            if reached(view):
                return view
        pytest.fail(f"not reached; the run is {json.dumps(view)[:2000]}")


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REGATE_")}
    command = [sys.executable, "-m", "orchestrator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=90, check=False)


def succeeded(view: dict[str, Any]) -> int:
    return sum(row["outcome"] == "succeeded" for row in view["effects"])


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    data = tmp_path_factory.mktemp("dev") / "data"
    command = [sys.executable, "-m", "orchestrator", "dev", "--data", str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            assert json.loads(line)["url"].startswith("http://127.0.0.1:")
            yield Dev(data, process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def test_a_run_is_started_held_redirected_and_stopped(dev: Dev) -> None:
    run = dev.start(["#S40100", "#S40126", "#S40165"], ["#S40204"])
    dev.until(run, lambda view: succeeded(view) == 2)

    paused = dev.call("run", "pause", run, "--reason", "let me think")
    assert paused.returncode == 0, paused.stderr
    assert f"run {run}: now paused, from running under revision 1" in paused.stdout
    assert "2 effects had completed" in paused.stdout

    change = dev.file("change.json", {"plan": {"slow": {"agent": "plan", "actions": cancelling("#S40100", "#S40230")}}})
    stale = dev.call("run", "redirect", run[:6], "-f", change, "--expected-revision", "7", "-o", "json")
    assert (stale.returncode, stale.stdout) == (3, "")
    assert "in force: revision 1" in stale.stderr

    redirected = dev.call(
        "run", "redirect", "--last", "-f", change, "--expected-revision", "1", "--reason", "other ones"
    )
    assert redirected.returncode == 0, redirected.stderr
    shown = redirected.stdout
    assert shown.index("changed") < shown.index("kept") < shown.index("finished before") < shown.index("still open")
    assert "cancel_pending_order on #S40100: succeeded" in shown
    assert "revision 2 is in force" in shown

    dev.until(run, lambda view: view["state"] == "paused")
    resumed = dev.call("run", "resume", run[:6], "--reason", "go on")
    assert f"run {run}: now running, from paused under revision 2" in resumed.stdout

    ended = dev.until(run, lambda view: view["state"] == "completed")
    assert {row["target"] for row in ended["effects"] if row["outcome"] == "succeeded"} == {
        "#S40100",
        "#S40204",
        "#S40230",
    }
    assert len([row for row in ended["effects"] if row["target"] == "#S40100"]) == 1, "done before, so not done again"
    assert ended["run"] == dev.json("run", "show", "--last")["run"] == dev.json("run", "show", run[:6])["run"]
    assert "Cancel [bold]some[/bold] orders." in dev.call("run", "show", run).stdout

    updates = dev.json("log", run, "--control")
    assert [update["kind"] for update in updates] == ["start", "pause", "correct", "resume"]
    assert updates[2]["revision"] == 2
    assert updates[2]["told"], "the superseded child was asked to stop"
    entries = dev.json("log", run)
    assert [entry["n"] for entry in entries] == list(range(1, len(entries) + 1))

    late = dev.call("run", "redirect", run, "--text", "too late", "--reason", "r")
    assert late.returncode == 3
    assert "takes no more changes" in late.stderr


def test_a_run_is_cancelled_for_good(dev: Dev) -> None:
    run = dev.start(["#S40256", "#S40295"], ["#S40334"])
    dev.until(run, lambda view: succeeded(view) == 2)
    done = dev.call("run", "cancel", "--last", "--reason", "changed my mind", "--wait", "-o", "json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["run"]["state"] == "cancelled"
    assert "cancelling" in answer["line"]
    assert {row["target"] for row in answer["run"]["effects"]} == {"#S40256", "#S40334"}


def test_effects_are_listed_with_all_that_names_them(dev: Dev) -> None:
    run = dev.start([], ["#S40360"])
    dev.until(run, lambda view: succeeded(view) == 1)
    listed = dev.call("effect", "list", run[:8], "-o", "jsonl")
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [row["attempt"] for row in rows] == [f"{run}-e1"]
    assert set(rows[0]) >= ROW_FIELDS
    one = dev.json("effect", "show", "e1", "--last")
    assert set(one) >= ROW_FIELDS
    assert one["observed_result"]["target"] == "#S40360"
    assert "#S40360" in dev.call("effect", "show", f"{run[:8]}-e1").stdout
    assert dev.call("effect", "list", run, "--unknown", "-o", "jsonl").stdout == ""
    assert dev.call("effect", "show", f"{run}-e9").returncode == 4
    settled = ["effect", "resolve", f"{run}-e1", "--happened", "--reason", "r", "--evidence", "e"]
    refused = dev.call(*settled)
    assert refused.returncode == 3
    assert "only an unknown one" in refused.stderr


def test_sending_twice_under_one_request_id_is_one_run(dev: Dev) -> None:
    goal = dev.file("twice.json", goal_of([], ["#S40386"]))
    runs = {dev.json("run", "start", "-f", goal, "--request-id", "twice")["run"]["run"] for _ in range(2)}
    assert len(runs) == 1
    other = dev.call("run", "start", "something else", "--agent", "plan", "--request-id", "twice")
    assert other.returncode == 2
    assert "request id" in other.stderr


def test_one_agent_is_told_in_words(dev: Dev) -> None:
    answer = dev.json("run", "start", "nothing to do", "--agent", "plan", "--wait")
    assert answer["run"]["state"] == "completed"
    unknown = dev.call("run", "start", "nothing to do", "--agent", "nobody")
    assert unknown.returncode == 2
    assert "known: plan, slow" in unknown.stderr


def test_what_cannot_be_done_ends_with_its_code(dev: Dev, tmp_path: Path) -> None:
    assert dev.call("run", "show", "ffffffffffff").returncode == 4
    assert dev.call("run", "pause", "ffffffffffff").returncode == 4
    assert dev.call("run", "start").returncode == 2
    several = dev.call("run", "show", "")
    assert several.returncode == 2
    nobody = run_command("run", "list", "--data", str(tmp_path))
    assert nobody.returncode == 5
    assert "regate dev" in nobody.stderr


def test_the_doctor_finds_it_well(dev: Dev) -> None:
    report = dev.json("doctor")
    assert report["problems"] == []
    assert report["server"]["durable"] is True
    assert dev.json("attention") == []


def test_a_directory_that_nobody_serves_is_served_for_one_command(dev: Dev) -> None:
    """The last test of this file: it ends `regate dev`."""
    run = dev.json("run", "list")[0]["run"]
    dev.process.send_signal(signal.SIGTERM)
    assert dev.process.wait(40) == 0
    assert not (dev.data / "endpoint.json").exists()

    unserved = run_command("run", "list", "--url", "http://127.0.0.1:9", "--token", "x")
    assert unserved.returncode == 5
    done = dev.call("run", "show", run[:8], "-o", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run"] == run
    assert "starting a server for this command" in done.stderr

    assert not (dev.data / "endpoint.json").exists()
    for lock in ("users.lock", "valkey.lock"):
        with (dev.data / lock).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if a server or a store is left
