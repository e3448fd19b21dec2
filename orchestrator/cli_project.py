"""`init`, `check` and `doctor`: a folder to begin with, whether its files can be used, and whether what runs is sound.

Knows what is written at the beginning and how mistakes are listed. They are found by cli_check.py; what a running
installation looks like is told by its API.
"""

from __future__ import annotations

import shlex
import sys
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli_output import CommandFailed, Exit, Screen
from orchestrator.cli_records import doctor_report
from orchestrator.cli_session import Session

TEMPLATES = ("regate.toml", "services/shop.yaml", "goal.yaml", "change.yaml")


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
    screen.show({"written": written}, lambda: ())
    screen.result(f"wrote {', '.join(written)}")
    there_first = "" if directory.resolve() == Path.cwd() else f"`cd {shlex.quote(str(directory))}`, then "
    screen.say(
        f"next: {there_first}`regate check`; `regate dev` starts everything on this machine; in another terminal "
        "`regate run start -f goal.yaml` starts a run, and `regate run redirect --last -f change.yaml` changes it"
    )


# --- check -----------------------------------------------------------------------------------------------------------


def check(
    screen: Screen,
    paths: Annotated[list[Path] | None, typer.Argument(help="Files, or folders with a regate.toml. Default: .")] = None,
) -> None:
    """Say what is wrong with settings, contracts and goals, with file and line."""
    from orchestrator.cli_check import Checked, check_path  # it loads much that no other command needs

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


# --- doctor ----------------------------------------------------------------------------------------------------------


def doctor(session: Session) -> None:
    """Look at the running installation: the store's settings, partitions, clock, versions."""
    report = session.api.get("/v1/doctor")
    report = report if isinstance(report, dict) else {"findings": report}
    session.screen.show({**report, "python": sys.version.split()[0]}, lambda: doctor_report(report))
    bad = [str(finding) for finding in report.get("problems") or ()]
    if bad:
        raise CommandFailed(Exit.FAILED, "\n".join(bad))
