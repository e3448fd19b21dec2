"""The benchmark runs and says what it promises to say. How fast anything is, is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMISED = (
    "commit_over_floor_p50",
    "many_runs_per_s",
    "hot_run_per_s",
    "gateway_added_ms_p50",
    "gateway_over_direct_32",
)


def test_the_benchmark_gives_one_object_with_the_promised_figures(repo_root: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, str(repo_root / "benchmarks" / "admission.py"), "--smoke", "-o", "json", "--dir", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    assert set(found) == {"no", "always"}
    for figures in found.values():
        missing = [name for name in PROMISED if not figures[name] > 0]
        assert not missing
        assert figures["redirects"] > 0
        assert figures["cold_load_ms_by_events"]
        assert figures["rewrites_finished"] > 0
    assert not list(tmp_path.iterdir()), "the benchmark leaves nothing behind"
