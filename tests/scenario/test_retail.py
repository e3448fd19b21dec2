"""`retail` on real processes: every task of a data set redirected in the middle, with shops that lose replies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 240.0


def public_data(root: Path) -> Path | None:
    """The public benchmark's folder where it is present: REGATE_TAU2_DATA, or beside the source tree."""
    told = os.environ.get("REGATE_TAU2_DATA")
    places = [Path(told)] if told else [root.parent / "shared" / "data" / "tau2-retail"]
    return next((place for place in places if (place / "tasks.json").is_file()), None)


def retail(*options: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON object, and what was said."""
    command = [sys.executable, "-m", "simulators.retail_command", "-o", "json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def processes_of(folder: Path) -> list[str]:
    """Command lines of living processes that name the folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line and str(os.getpid()) != place.name:
            found.append(line)
    return found


@pytest.mark.parametrize("shift", ["retract", "replace"])
def test_every_task_of_the_own_data_set_comes_out_right(shift: str, tmp_path: Path) -> None:
    code, found, words = retail("--shift", shift, "--seed", "1", "--faults", "mixed", "--keep", str(tmp_path / "kept"))
    assert code == 0, words
    assert (found["runs"], found["passed"], found["violations"]) == (16, 16, [])
    assert found["not_redirectable"] == {"17": "writes nothing", "18": "writes nothing"}
    assert found["shares"]["in_flight"] >= 0.3
    assert found["shares"]["between_two"] >= 0.2
    assert found["shares"]["two_scopes"] >= 0.2
    assert found["totals"]["tries"] > found["totals"]["attempts"], "nothing went wrong on the way, so nothing was shown"
    assert processes_of(tmp_path) == []


def test_a_shop_that_can_only_be_asked_leaves_the_lost_ones_open_and_listed() -> None:
    code, found, words = retail("--shift", "retract", "--contract", "lookup", "--faults", "lost")
    assert code == 0, words
    assert found["blocked"] >= 1
    assert found["passed"] + found["blocked"] == found["runs"]
    assert len(found["unknown"]) >= found["blocked"]


def test_some_tasks_of_the_public_data_set(repo_root: Path) -> None:
    data = public_data(repo_root)
    if data is None:
        pytest.skip("the public data set is not here; REGATE_TAU2_DATA names its folder")
    code, found, words = retail("--data", str(data), "--tasks", "6", "--shift", "retract", "--seed", "2")
    assert code == 0, words
    assert (found["passed"], found["runs"]) == (6, 6)


def test_it_leaves_no_process_when_it_is_told_to_stop(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    command = [sys.executable, "-m", "simulators.retail_command", "--shift", "retract", "--keep", str(kept)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not list(kept.glob("*/data/endpoint.json")) and time.monotonic() < until and running.poll() is None:
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    _, words = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "stopped by SIGTERM" in words
    assert processes_of(kept) == []


def test_bad_options_are_said(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "simulators.retail_command"]
    bad = subprocess.run([*command, "--tasks", "none"], capture_output=True, text=True, timeout=60, check=False)
    assert bad.returncode == 2
    assert "`all` or a number above 0" in bad.stderr
    bad = subprocess.run([*command, "--data", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert bad.returncode == 2
    assert "holds neither db.json nor shop.json" in bad.stderr
