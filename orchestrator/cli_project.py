"""`init`, `check` and `doctor`: a folder to begin with, whether its files can be used, and whether what runs is sound.

Knows which files belong to a project and how their mistakes are listed. What may stand in them is known by settings,
contracts and goals; what a running installation looks like is told by its API.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any

import typer

from admission.contracts import ContractError, parse_contract
from admission.goal_rules import goal_faults
from admission.services import ServiceError, Services, load_services
from orchestrator.cli_output import CommandFailed, Exit, Screen
from orchestrator.cli_session import Session
from orchestrator.cli_tables import doctor_report
from orchestrator.goals import ChangeFile, GoalError, GoalPart, parse_goal
from orchestrator.marked_yaml import Marked, Unreadable, read_marked
from orchestrator.settings import SETTINGS_FILE, Settings, SettingsError, load_settings

TEMPLATES = ("regate.toml", "services/shop.yaml", "goal.yaml", "change.yaml")
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


# --- init ------------------------------------------------------------------------------------------------------------


def template(name: str) -> str:
    """The text of a template, by its path in a new project."""
    place: Traversable = files("orchestrator") / "templates"
    for step in name.split("/"):
        place = place / step
    return place.read_text(encoding="utf-8")


def init(
    screen: Screen,
    directory: Annotated[Path, typer.Argument(help="Where; made if it is not there.")] = Path("."),
    *,
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
) -> None:
    """Write a regate.toml, a contract and a goal that work as they stand."""
    there = [name for name in TEMPLATES if (directory / name).exists()]
    if there and not force:
        raise CommandFailed(
            Exit.CONFLICT, f"{', '.join(str(directory / n) for n in there)} exist already; --force writes over them"
        )
    written = []
    try:
        for name in TEMPLATES:
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(template(name), encoding="utf-8")
            written.append(str(path))
    except OSError as error:
        raise CommandFailed(Exit.FAILED, f"{directory} cannot be written: {error.strerror}") from None
    goal = directory / "goal.yaml"
    screen.show({"written": written}, lambda: ())
    screen.result(f"wrote {', '.join(written)}")
    screen.say(
        f"next: `regate check {directory}`; then `regate dev` starts everything on this machine, and "
        f"`regate run start -f {goal}` starts a run"
    )


# --- check -----------------------------------------------------------------------------------------------------------


def check(
    screen: Screen,
    paths: Annotated[list[Path] | None, typer.Argument(help="Files, or folders with a regate.toml. Default: .")] = None,
) -> None:
    """Say what is wrong with settings, contracts and goals, with file and line."""
    found: dict[str, Checked] = {}
    for path in paths or [Path(".")]:
        for checked in check_path(path):
            found[checked.file] = checked
    rows = [checked.row() for checked in found.values()]
    if screen.machine:
        screen.rows(rows, lambda: ())
    for checked in found.values():
        for line in (*checked.problems, *(f"{w} (warning)" for w in checked.warnings)):
            screen.say(line)
        if not checked.problems:
            screen.result(f"{checked.file}: {checked.kind} is usable")
    wrong = sum(len(checked.problems) for checked in found.values())
    if wrong:
        raise CommandFailed(Exit.FAILED, f"{wrong} problem{'s' if wrong > 1 else ''} found")


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
    faults = [f"{path}:{marked.line(('plan',))}: {fault}" for fault in goal_faults(goal)] if kind is GoalPart else []
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


# --- doctor ----------------------------------------------------------------------------------------------------------


def doctor(session: Session) -> None:
    """Look at the running installation: the store's settings, partitions, clock, versions."""
    report = session.api.get("/v1/doctor")
    report = report if isinstance(report, dict) else {"findings": report}
    session.screen.show({**report, "python": sys.version.split()[0]}, lambda: doctor_report(report))
    bad = [str(finding) for finding in report.get("problems") or ()]
    if bad:
        raise CommandFailed(Exit.FAILED, "\n".join(bad))
