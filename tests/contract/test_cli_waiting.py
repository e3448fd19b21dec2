"""The command while it waits, and how it is left: by the run's end, by Ctrl-C, by a reader that has seen enough."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.contract.cli_calls import ask
from tests.contract.fake_api import RUN, TOKEN, Asked, FakeApi, effect, fake_api, view


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with fake_api() as fake:
        yield fake


@pytest.mark.parametrize(("state", "code"), [("completed", 0), ("cancelled", 0), ("failed", 1)])
def test_waiting_ends_as_the_run_does(api: FakeApi, state: str, code: int) -> None:
    looks: list[str] = []

    def look(asked: Asked) -> tuple[int, dict]:
        looks.append(asked.path)
        return 200, view("running" if len(looks) < 3 else state)

    api.answers["GET", f"/v1/runs/{RUN}"] = look
    result = ask(api, "run", "start", "words", "--agent", "plan", "--wait", "-o", "json")
    assert result.exit_code == code
    assert json.loads(result.stdout)["run"]["state"] == state
    assert "running" in result.stderr


def test_leaving_with_ctrl_c_is_no_failure_and_says_how_to_stop_the_run(api: FakeApi) -> None:
    looked = threading.Event()

    def look(asked: Asked) -> tuple[int, dict]:
        looked.set()
        return 200, view("running")

    api.answers["GET", f"/v1/runs/{RUN}"] = look
    command = ["run", "start", "words", "--agent", "plan", "--wait", "--url", api.url, "--token", TOKEN]
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *command], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert looked.wait(20)
        process.send_signal(signal.SIGINT)
        _, words = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, words
    assert f"run {RUN} goes on" in words
    assert f"regate run cancel {RUN}" in words


def test_a_reader_that_leaves_is_no_traceback(api: FakeApi) -> None:
    api.answers["GET", f"/v1/runs/{RUN}/effects"] = (
        200,
        {"effects": [effect(n) for n in range(1, 3000)], "cursor": None},
    )
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "orchestrator",
            "effect",
            "list",
            RUN,
            "--url",
            api.url,
            "--token",
            TOKEN,
            "-o",
            "jsonl",
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    words = process.stderr.read()
    process.stderr.close()
    process.wait(20)
    assert "Traceback" not in words
    assert "BrokenPipe" not in words
