"""`regate dev`: everything on this machine, a sample goal redirected by hand, a killed gateway, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest

from orchestrator.goals import read_change_file, read_goal_file

pytestmark = pytest.mark.anyio

WAIT_LIMIT_S = 90.0


def rows(data: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((data / "processes.json").read_text())["processes"]
    return found


async def seen(http: httpx.AsyncClient, path: str, holds: Any) -> Any:
    """The answer, once it is as wanted."""
    with anyio.fail_after(WAIT_LIMIT_S):
        while True:
            answer = (await http.get(path)).json()
            if holds(answer):
                return answer
            await anyio.sleep(0.1)


async def test_the_sample_goal_is_redirected_while_the_gateway_is_killed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "orchestrator", "dev", "--data", str(data)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=tmp_path, start_new_session=True
    )
    try:
        assert process.stdout is not None
        line = json.loads(await anyio.to_thread.run_sync(process.stdout.readline))
        token = json.loads((data / "endpoint.json").read_text())["token"]
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=line["url"], headers=headers, timeout=60) as http:
            goal = read_goal_file(data / "sample-goal.yaml")
            run = (await http.post("/v1/runs", json={"goal": goal})).json()["run"]["run"]
            await seen(http, f"/v1/runs/{run}", lambda view: view["effect_counts"].get("succeeded", 0) >= 2)
            letters = next(c for c in (await http.get(f"/v1/runs/{run}")).json()["children"] if c["scope"] == "letters")
            os.kill(next(row["pid"] for row in rows(data) if row["role"] == "gateway"), signal.SIGKILL)
            change, remove = read_change_file(data / "sample-change.yaml")
            body = {"kind": "correct", "goal": change, "remove": remove, "expected_revision": 1, "reason": "it moved"}
            answer = (await http.post(f"/v1/runs/{run}/revisions", json=body)).json()
            assert answer["changed"]["kept"]["scopes"] == ["letters"]
            view = await seen(http, f"/v1/runs/{run}", lambda view: view["scopes"]["orders"]["done"])
            still = next(c for c in view["children"] if c["scope"] == "letters")
            assert (still["task"], still["current"]) == (letters["task"], True)
            listed = (await http.get("/v1/processes")).json()["processes"]
            gateways = [row["ended"] for row in listed if row["role"] == "gateway"]
            assert gateways == ["killed by signal 9", "running"]
    finally:
        process.send_signal(signal.SIGINT)
        _, said = await anyio.to_thread.run_sync(process.communicate)
    assert process.returncode == 0, said.decode()
    assert "regate run redirect --last" in said.decode()
    assert {row["ended"] for row in rows(data)} == {"killed by signal 9", "stopped"}
    assert not (data / "endpoint.json").exists()
