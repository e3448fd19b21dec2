"""Goals as people write them: in a file (YAML, JSON) or in a request, checked and turned into `events.Goal`.

Knows shape and limits of a goal and the sentences for what is wrong, with file and line. Does not know which agents or
services there are, nor whether the plan makes sense (rules_run.goal_faults does).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from admission.events import Goal, PlannedAction, Requirement, ScopePlan
from admission.foreign_json import ForeignJsonError, read_object
from orchestrator.marked_yaml import Marked, Unreadable, read_marked

GOAL_BYTES_MAX = 1024 * 1024
TEXT_BYTES_MAX = 8 * 1024
REQUIREMENTS_MAX = 200
SCOPES_MAX = 100
ACTIONS_MAX = 500
OCCURRENCE_MAX = 1_000


class GoalError(Exception):
    """A goal cannot be used. One line for each problem: file, line, place, and what is wanted."""


def _short(text: str) -> str:
    if len(text.encode(errors="surrogatepass")) > TEXT_BYTES_MAX:
        raise ValueError(f"is longer than {TEXT_BYTES_MAX} bytes")
    return text


Text = Annotated[StrictStr, AfterValidator(_short)]
Words = Annotated[StrictStr, Field(min_length=1), AfterValidator(_short)]
Id = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}$")]
Name = Annotated[StrictStr, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.\-]{0,63}$")]
ScopeName = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.\-]+(/[A-Za-z0-9_.\-]+)*$", max_length=120)]
Need = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_./\-]+(:.+)?$", max_length=200)]


class Part(BaseModel):
    """A mapping in a goal; a key that means nothing is an error, since it was meant to mean something."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RequirementPart(Part):
    """One thing the user wants."""

    id: Id
    text: Words


class ActionPart(Part):
    """One effect that the plan asks for. `occurrence` 2 says: I mean it to happen a second time."""

    service: Name
    action: Name
    arguments: dict[StrictStr, Any] = {}
    occurrence: Annotated[StrictInt, Field(ge=1, le=OCCURRENCE_MAX)] = 1


class ScopePart(Part):
    """What one branch of the plan does."""

    agent: Name
    brief: Text = ""
    actions: Annotated[tuple[ActionPart, ...], Field(max_length=ACTIONS_MAX)] = ()
    needs: Annotated[tuple[Need, ...], Field(max_length=SCOPES_MAX)] = ()


class BudgetPart(Part):
    """How many effects may be admitted in all."""

    effects: Annotated[StrictInt, Field(ge=0, le=1_000_000)] | None = None


class ChangePart(Part):
    """What a correction names: everything else is carried over. `remove`: ids of requirements, names of scopes."""

    text: Text = ""
    requirements: Annotated[tuple[RequirementPart, ...], Field(max_length=REQUIREMENTS_MAX)] = ()
    plan: Annotated[dict[ScopeName, ScopePart], Field(max_length=SCOPES_MAX)] = {}
    budget: BudgetPart | None = None

    def goal(self) -> Goal:
        """The same, as the rules take it."""
        return Goal(
            text=self.text,
            requirements=tuple(Requirement(id=r.id, text=r.text) for r in self.requirements),
            plan={
                name: ScopePlan(
                    agent=scope.agent,
                    brief=scope.brief,
                    actions=tuple(
                        PlannedAction(
                            service=a.service, action=a.action, arguments=a.arguments, occurrence=a.occurrence
                        )
                        for a in scope.actions
                    ),
                    needs=scope.needs,
                )
                for name, scope in self.plan.items()
            },
            budget_effects=self.budget.effects if self.budget else None,
        )


class GoalPart(ChangePart):
    """A whole goal."""

    text: Words
    plan: Annotated[dict[ScopeName, ScopePart], Field(min_length=1, max_length=SCOPES_MAX)]


class ChangeFile(ChangePart):
    """A file that says how a goal changes."""

    remove: Annotated[tuple[StrictStr, ...], Field(max_length=REQUIREMENTS_MAX + SCOPES_MAX)] = ()


P = TypeVar("P", bound=ChangePart)


def read_goal_file(path: Path) -> dict[str, Any]:
    """A whole goal from a file, as the JSON that the API takes. Raises GoalError."""
    return _plain(_read(path, GoalPart))


def read_change_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """What a correction names, as the JSON that the API takes, and what it removes. Raises GoalError."""
    change = _read(path, ChangeFile)
    return _plain(change, exclude={"remove"}), list(change.remove)


def one_scope_goal(text: str, agent: str, *, scope: str = "main") -> dict[str, Any]:
    """The goal of `run start TEXT --agent NAME`: one scope, whose agent is told the text. Raises GoalError."""
    goal = {"text": text, "plan": {scope: {"agent": agent, "brief": text}}}
    try:
        return _plain(GoalPart.model_validate(goal))
    except ValidationError as error:
        raise GoalError("\n".join(problems(error))) from None


def problems(error: ValidationError) -> list[str]:
    """What is wrong with values that have no lines: `place: words`."""
    return [f"{place}: {words}" if place else words for place, words, _ in _found(error)]


def parse_goal(text: str, file: str, kind: type[P]) -> P:
    """A goal text (`.json` files are read as JSON, all others as YAML). Raises GoalError."""
    if len(text.encode(errors="surrogatepass")) > GOAL_BYTES_MAX:
        raise GoalError(f"{file}:1: the goal is larger than {GOAL_BYTES_MAX} bytes")
    try:
        marked = read_marked(text, is_json=file.endswith(".json"))
    except Unreadable as error:
        raise GoalError(f"{file}:{error.line}: {error}") from None
    if not isinstance(marked.value, Mapping):
        raise GoalError(f"{file}:1: expected `text:`, `requirements:` and `plan:`")
    try:
        goal = kind.model_validate(marked.value)
    except ValidationError as error:
        raise GoalError("\n".join(_lines(file, marked, error))) from None
    try:  # whatever the arguments hold must survive the way to the log
        read_object(json.dumps(goal.model_dump()).encode())
    except (ForeignJsonError, TypeError, ValueError) as error:
        raise GoalError(f"{file}:1: an argument cannot be written as JSON: {error}") from None
    return goal


def _read(path: Path, kind: type[P]) -> P:
    try:
        with path.open("rb") as source:
            raw = source.read(GOAL_BYTES_MAX + 1)
        return parse_goal(raw.decode("utf-8"), str(path), kind)
    except OSError as error:
        raise GoalError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise GoalError(f"{path}: is not UTF-8 text") from None


def _plain(part: ChangePart, *, exclude: set[str] | None = None) -> dict[str, Any]:
    return part.model_dump(mode="json", exclude=exclude, exclude_defaults=True)


def _lines(file: str, marked: Marked, error: ValidationError) -> list[str]:
    return [f"{file}:{marked.line(steps)}: {place}: {words}" for place, words, steps in _found(error)]


def _found(error: ValidationError) -> list[tuple[str, str, tuple[str | int, ...]]]:
    """Place, words and steps of each problem."""
    found = []
    for e in error.errors(include_url=False, include_input=False):
        steps = tuple(step for step in e["loc"] if step != "[key]")
        last = str(steps[-1]) if steps else ""
        outer = ".".join(str(s) for s in steps[:-1]) or "goal"
        place = ".".join(str(s) for s in steps)
        match e["type"]:
            case "missing":
                found.append((outer, f"`{last}` is missing", steps))
            case "extra_forbidden":
                found.append((outer, f"unknown key `{last[:64]}`", steps))
            case "string_pattern_mismatch":
                found.append((place, f"this name cannot be used; wanted: {e['ctx']['pattern']}", steps))
            case "string_type":
                found.append((place, "must be a text; put it in quotes", steps))
            case "value_error":
                found.append((place, str(e["ctx"]["error"]), steps))
            case _:
                found.append((place, f"{e['msg'][:1].lower()}{e['msg'][1:]}", steps))
    return found
