"""What the API refuses of a goal is told with the line of the file that it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.goal_lines import refusal_lines

GOAL = """\
text: a goal
requirements:
  - {id: r1, text: one}
  - {id: r1, text: two}
plan:
  a:
    agent: plan
    needs: [zork]
  b:
    agent: nobody
"""


@pytest.mark.parametrize(
    ("problem", "line", "words"),
    [
        ({"code": "invalid", "faults": ["scope 'a' needs 'zork', but there is no scope 'zork'"]}, 8, "needs 'zork'"),
        ({"code": "invalid", "faults": ["scope 'a': an occurrence below 1"]}, 6, "occurrence"),
        ({"code": "invalid", "faults": ["requirement id 'r1' is used twice"]}, 4, "used twice"),
        ({"code": "invalid", "faults": ["the revision changes nothing"]}, 5, "changes nothing"),
        ({"code": "unknown-agent", "known": ["plan", "slow"]}, 10, "'nobody'; known: plan, slow"),
        ({"code": "malformed", "errors": [{"field": "goal.plan.a.agent", "detail": "too long"}]}, 7, "too long"),
    ],
)
def test_a_refusal_has_its_line(tmp_path: Path, problem: dict[str, Any], line: int, words: str) -> None:
    path = tmp_path / "goal.yaml"
    path.write_text(GOAL)
    [told] = refusal_lines(path, problem)
    assert told.startswith(f"{path}:{line}: ")
    assert words in told


def test_what_is_not_about_the_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "goal.yaml"
    path.write_text(GOAL)
    assert refusal_lines(path, {"code": "run-ended"}) == []
    assert refusal_lines(tmp_path / "gone.yaml", {"code": "invalid", "faults": ["x"]}) == []
