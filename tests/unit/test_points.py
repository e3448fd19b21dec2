"""Points: nothing without a folder, a line for each hit with one, and one death for one order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from admission import points

PROGRAM = "from admission.points import point\nfor n in range(5):\n    point('here')\n    point('there')\n"


def run(folder: Path, **more: str) -> int:
    """A process that reaches two points five times each; how it ended."""
    environment = {**os.environ, "REGATE_POINTS": str(folder), "REGATE_ROLE": "gateway", **more}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=False).returncode


def test_without_a_folder_a_point_is_nothing() -> None:
    assert points.made({}) is points.made({"REGATE_POINT": "here:1"})
    assert points.point is points.made({}), "the tests themselves run without points"


def test_every_hit_is_written_down_under_the_role(tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    assert (tmp_path / "gateway.hits").read_text().split() == ["here", "there"] * 5


def test_the_process_dies_at_the_hit_that_was_named_and_only_once(tmp_path: Path) -> None:
    assert run(tmp_path, REGATE_POINT="there:3") == -signal.SIGKILL
    assert (tmp_path / "gateway.hits").read_text().split() == ["here", "there"] * 3
    assert run(tmp_path, REGATE_POINT="there:3") == 0, "it was carried out already"


def test_an_order_for_another_role_or_another_point_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "worker.kill").write_text("here:1")
    (tmp_path / "gateway.kill").write_text("nowhere:1")
    assert run(tmp_path) == 0


def test_an_order_counts_from_when_it_was_given(tmp_path: Path) -> None:
    reached = points.Points(tmp_path, role="gateway").hit
    for _ in range(3):
        reached("here")
    (tmp_path / "gateway.kill").write_text("here:2")
    reached("here")
    assert (tmp_path / "gateway.kill").exists(), "the first hit since the order"
