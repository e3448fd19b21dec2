"""Supervised processes: restarted where they were, written down, and all gone afterwards, even after kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from orchestrator.leash import GONE
from orchestrator.supervise import ProcessFailed, Program, Supervisor

pytestmark = pytest.mark.anyio

WAIT_LIMIT_S = 20.0
PROGRAM = """
import json, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"url": "http://nowhere", "other": other.pid}), flush=True)
time.sleep(600)
"""
SUPERVISOR = """
import anyio, sys
from pathlib import Path
from orchestrator.store_access import embedded_server
from orchestrator.supervise import Program, Supervisor

async def main(data):
    async with embedded_server(data) as server:
        async with Supervisor(data, wall_ms=lambda: 0, report=print) as supervisor:
            supervisor.note("store", server.pid)
            await supervisor.start(Program(role="part", command=(sys.executable, "-c", sys.argv[2])))
            print("ready", flush=True)
            await anyio.sleep_forever()

anyio.run(main, Path(sys.argv[1]))
"""


def lives(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(WAIT_LIMIT_S):
        while not holds():  # noqa: ASYNC110 - another process holds it
            await anyio.sleep(0.02)


def rows(data: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((data / "processes.json").read_text())["processes"]
    return found


def program(role: str = "part", code: str = PROGRAM, **more: Any) -> Program:
    return Program(role=role, command=(sys.executable, "-c", code), **more)


async def test_a_killed_process_comes_back_and_both_stand_in_the_file(tmp_path: Path) -> None:
    said: list[str] = []
    async with Supervisor(tmp_path, wall_ms=lambda: 7, report=said.append) as supervisor:
        first = await supervisor.start(program())
        killed = supervisor.kill("part")
        await supervisor.wait_gone("part", killed)
        # What it had started goes with it: the next one must find its ports free.
        await until(lambda: not lives(first["other"]))
        second = await supervisor.ready("part")
        assert [(row["pid"] == killed, row["ended"], row["restarts"]) for row in rows(tmp_path)] == [
            (True, "killed by signal 9", 0),
            (False, "running", 1),
        ]
    assert said == ["part ended (killed by signal 9); starting it again in 0.1 s"]
    assert [row["ended"] for row in rows(tmp_path)] == ["killed by signal 9", "stopped"]
    assert not lives(second["other"])


async def test_one_that_does_not_become_ready_says_how_it_ended(tmp_path: Path) -> None:
    code = "import sys; sys.exit('the contract is wrong')"
    async with Supervisor(tmp_path, wall_ms=lambda: 7, report=lambda words: None) as supervisor:
        with pytest.raises(ProcessFailed, match=r"part: exit 1; its log ends with: the contract is wrong"):
            await supervisor.start(program(code=code, restarts=False))


@pytest.mark.parametrize("code", [2, 70])
async def test_wrong_usage_and_an_alarm_are_not_started_again(tmp_path: Path, code: int) -> None:
    said: list[str] = []
    async with Supervisor(tmp_path, wall_ms=lambda: 7, report=said.append) as supervisor:
        await supervisor.start(program(code=f"import sys; print('{{}}', flush=True); sys.exit({code})"))
        await until(lambda: bool(said))
        assert said[0].startswith(f"part ended (exit {code}) and stays down")
        assert len(rows(tmp_path)) == 1


async def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); time.sleep(600)"
    )
    async with Supervisor(tmp_path, wall_ms=lambda: 7, report=lambda words: None) as supervisor:
        await supervisor.start(program(code=code))
        await supervisor.stop("part", timeout_s=0.2)
        assert [row["ended"] for row in rows(tmp_path)] == ["killed by signal 9"]


async def test_kill_9_of_the_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    data = tmp_path / "data"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(data), PROGRAM], stdout=subprocess.PIPE, env=environment
    )
    assert supervisor.stdout is not None
    try:
        assert await anyio.to_thread.run_sync(supervisor.stdout.readline) == b"ready\n"
        store, part = rows(data)
        assert lives(store["pid"])
        assert lives(part["pid"])
    finally:
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait()
        supervisor.stdout.close()
    await until(lambda: not lives(part["pid"]) and not lives(store["pid"]))
    await until(lambda: [row["ended"] for row in rows(data)] == ["stopped", GONE])
