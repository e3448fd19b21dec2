"""Where in a person's file the parts stand that a goal was refused for.

Knows the sentences of goal rules and of the API's problems as far as they name scopes, agents and fields. Does not know
whether a goal is right: it only finds lines for what somebody else found wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.goals import GOAL_BYTES_MAX
from orchestrator.marked_yaml import Marked, Unreadable, read_marked

_SCOPE = re.compile(r"^scope '([^']+)'(:? needs)?")
_REQUIREMENT = re.compile(r"^requirement id '([^']+)'")
_REMOVED = re.compile(r"^cannot remove ")


def fault_line(marked: Marked, fault: str) -> int:
    """The line that a sentence of the goal rules is about; that of the plan, or 1, where it names nothing."""
    scope, requirement = _SCOPE.match(fault), _REQUIREMENT.match(fault)
    if scope:
        return marked.line(("plan", scope[1], *(["needs"] if scope[2] else [])))
    if requirement:
        rows = _list(marked.value, "requirements")
        numbers = [n for n, row in enumerate(rows) if isinstance(row, Mapping) and row.get("id") == requirement[1]]
        return marked.line(("requirements", numbers[-1])) if numbers else 1
    return marked.line(("remove",) if _REMOVED.match(fault) else ("plan",))


def refusal_lines(path: Path, problem: Mapping[str, Any]) -> list[str]:
    """`FILE:LINE: words` for what the API refused in a goal that came from this file; empty for other problems."""
    try:
        with path.open("rb") as source:
            marked = read_marked(source.read(GOAL_BYTES_MAX).decode(), is_json=path.suffix == ".json")
    except (OSError, UnicodeDecodeError, Unreadable):
        return []
    if not isinstance(marked.value, Mapping):
        return []
    match problem.get("code"):
        case "invalid":
            faults = [str(fault) for fault in _list(problem, "faults")]
            return [f"{path}:{fault_line(marked, fault)}: {fault}" for fault in faults]
        case "unknown-agent":
            return _unknown_agents(path, marked, problem)
        case "malformed":
            rows = [row for row in _list(problem, "errors") if isinstance(row, Mapping)]
            return [f"{path}:{_field_line(marked, str(e.get('field')))}: {e.get('detail')}" for e in rows]
        case _:
            return []


def _unknown_agents(path: Path, marked: Marked, problem: Mapping[str, Any]) -> list[str]:
    known = [str(name) for name in _list(problem, "known")]
    plan = marked.value.get("plan")
    return [
        f"{path}:{marked.line(('plan', scope, 'agent'))}: no agent is called {row['agent']!r}; "
        f"known: {', '.join(known) or 'none; name one in [agents.NAME] of regate.toml'}"
        for scope, row in (plan.items() if isinstance(plan, Mapping) else ())
        if isinstance(row, Mapping) and "agent" in row and row["agent"] not in known
    ]


def _field_line(marked: Marked, field: str) -> int:
    steps: list[str | int] = [int(step) if step.isdigit() else step for step in field.split(".")]
    return marked.line(steps[1:] if steps[:1] == ["goal"] else steps)


def _list(value: Any, name: str) -> Sequence[Any]:
    found = value.get(name) if isinstance(value, Mapping) else None
    return found if isinstance(found, list) else []
