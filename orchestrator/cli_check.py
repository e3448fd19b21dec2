"""What is wrong with the files of a project: settings, contracts, goals, each with file and line.

Knows which files belong together and which names a goal may use. What may stand in them is known by settings, contracts
and goals. Loaded by `regate check` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from admission.contracts import ContractError, parse_contract
from admission.goal_rules import goal_faults
from admission.services import ServiceError, Services, load_services
from orchestrator.cli_output import CommandFailed, Exit
from orchestrator.goal_lines import fault_line
from orchestrator.goals import ChangeFile, GoalError, GoalPart, parse_goal
from orchestrator.marked_yaml import Marked, Unreadable, read_marked
from orchestrator.settings import SETTINGS_FILE, Settings, SettingsError, load_settings

CONTRACT_FOLDER = "services"
GOAL_FILES = ("goal.yaml", "goal.yml", "goal.json", "change.yaml")
FILE_BYTES_MAX = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Checked:
    """One file that was looked at, and what is wrong with it: one line each, with file and line."""

    file: str
    kind: str
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"file": self.file, "kind": self.kind, "problems": list(self.problems), "warnings": list(self.warnings)}


def check_path(path: Path) -> Iterator[Checked]:
    """Everything that belongs to a path: one file, or the settings, contracts and goals of a folder."""
    if path.is_dir():
        settings_file = path / SETTINGS_FILE
        contracts = sorted((*(path / CONTRACT_FOLDER).glob("*.yaml"), *(path / CONTRACT_FOLDER).glob("*.yml")))
        goals = [path / name for name in GOAL_FILES if (path / name).exists()]
        if not (settings_file.exists() or contracts or goals):
            raise CommandFailed(Exit.NOT_FOUND, f"{path} holds no {SETTINGS_FILE}; `regate init {path}` writes one")
        settings, services = None, None
        for contract in contracts:
            yield _check_contract(contract)
        if settings_file.exists():
            checked, settings, services = _check_settings(settings_file)
            yield checked
        for goal in goals:
            yield _check_goal(goal, settings, services)
    elif not path.exists():
        raise CommandFailed(Exit.NOT_FOUND, f"{path} does not exist")
    elif path.suffix == ".toml":
        yield _check_settings(path)[0]
    elif _is_contract(path):
        yield _check_contract(path)
    else:
        yield _check_goal(path, None, None)


def _check_settings(path: Path) -> tuple[Checked, Settings | None, Services | None]:
    try:
        settings = load_settings(path)
    except SettingsError as error:
        return Checked(str(path), "settings", tuple(str(error).splitlines())), None, None
    try:
        services = load_services(settings.services, file=str(path), folder=settings.folder)
    except (ServiceError, ContractError) as error:
        return Checked(str(path), "settings", tuple(str(error).splitlines())), settings, None
    return Checked(str(path), "settings", warnings=services.warnings), settings, services


def _check_contract(path: Path) -> Checked:
    try:
        parse_contract(_text(path), str(path))
    except ContractError as error:
        return Checked(str(path), "contract", tuple(str(error).splitlines()))
    return Checked(str(path), "contract")


def _check_goal(path: Path, settings: Settings | None, services: Services | None) -> Checked:
    text = _text(path)
    kind = ChangeFile if path.stem == "change" else GoalPart
    try:
        goal = parse_goal(text, str(path), kind).goal()
        marked = read_marked(text, is_json=path.suffix == ".json")
    except GoalError as error:
        return Checked(str(path), "goal", tuple(str(error).splitlines()))
    except Unreadable as error:
        return Checked(str(path), "goal", (f"{path}:{error.line}: {error}",))
    faults = [f"{path}:{fault_line(marked, fault)}: {fault}" for fault in goal_faults(goal)] if kind is GoalPart else []
    unknown = list(_unknown_names(path, marked, settings, services))
    return Checked(str(path), "goal" if kind is GoalPart else "change", (*faults, *unknown))


def _unknown_names(path: Path, marked: Marked, settings: Settings | None, services: Services | None) -> Iterator[str]:
    """Agents, services and operations that a goal names and the project does not have."""
    for scope, plan in (marked.value.get("plan") or {}).items():
        here = ("plan", scope)
        if settings is not None and plan["agent"] not in settings.agents:
            known = ", ".join(settings.agents) or "none"
            yield f"{path}:{marked.line((*here, 'agent'))}: agent `{plan['agent']}` is unknown; known: {known}"
        for number, action in enumerate(plan.get("actions") or () if services is not None else ()):
            assert services is not None
            place = (*here, "actions", number)
            service = services.get(action["service"])
            if service is None:
                known = ", ".join(services.by_name) or "none"
                yield f"{path}:{marked.line(place)}: service `{action['service']}` is unknown; known: {known}"
            elif action["action"] not in service.contract.operations:
                known = ", ".join(service.contract.operations)
                yield (
                    f"{path}:{marked.line((*place, 'action'))}: {action['service']} has no operation "
                    f"`{action['action']}`; known: {known}"
                )


def _is_contract(path: Path) -> bool:
    try:
        value = read_marked(_text(path)).value
    except Unreadable:
        return path.parent.name == CONTRACT_FOLDER
    return isinstance(value, dict) and ("operations" in value or "service" in value)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as source:
            return source.read(FILE_BYTES_MAX + 1).decode("utf-8")
    except OSError as error:
        raise CommandFailed(Exit.NOT_FOUND, f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandFailed(Exit.FAILED, f"{path}:1: is not UTF-8 text") from None
