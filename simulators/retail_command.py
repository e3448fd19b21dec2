"""`regate retail`: the tasks of a data set through the whole stack, each redirected in the middle.

Knows options, rounds, progress and exit codes. One round is one shift with one seed: fresh shops and a stack of their
own. Exit code 1 on any violation, with the command line that repeats it. Also `python -m simulators.retail_command`.
"""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from simulators.faults import Profile
from simulators.retail_cases import Case, Cases, make_cases
from simulators.retail_report import COLUMNS, Asked, Report, Round, table_rows
from simulators.retail_runs import Api, client, drive
from simulators.retail_stack import ContractKind, StackError, StackSettings, running_stack
from simulators.retail_verdict import Outcome, Verdict, judge
from simulators.shop import DataError
from simulators.tasks import Shift, Task, TaskSet, load, why_not_redirectable

SHOWN_MAX = 20
#: With a shop that can only be asked, so many of its first calls never arrive, so that there is something to stay open.
LOST_CALLS = 1

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_errors = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)


class Shifts(StrEnum):
    """How customers change their minds."""

    RETRACT = "retract"
    REPLACE = "replace"
    BOTH = "both"


class Output(StrEnum):
    """What is written to standard output."""

    TEXT = "text"
    JSON = "json"
    JSONL = "jsonl"


@dataclass(frozen=True)
class Options:
    """One command's settings."""

    asked: Asked
    folder: Path | None
    shifts: tuple[Shift, ...]
    seeds: tuple[int, ...]
    concurrency: int
    think_ms: int
    work_ms: int
    room: Path


# A callback and not a command, since it is mounted under its name: `regate retail --tasks 6`.
@app.callback(invoke_without_command=True, subcommand_metavar="")
def retail(
    *,
    data: Annotated[
        Path | None, typer.Option(help="A folder with db.json and tasks.json. Default: the data set of the package.")
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="`all`, or a number: so many, drawn by the seed, half of them with several writes.")
    ] = "all",
    faults: Annotated[Profile, typer.Option(help="What goes wrong with the shops' replies.")] = Profile.MIXED,
    shift: Annotated[Shifts, typer.Option(help="retract: a write is taken back; replace: another task.")] = Shifts.BOTH,
    seed: Annotated[int, typer.Option(min=0, help="What moments, extra writes and faults are drawn from.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="So many seeds, from --seed on.")] = 1,
    contract: Annotated[ContractKind, typer.Option(help="What the shops promise.")] = ContractKind.VOID,
    output: Annotated[
        Output, typer.Option("--output", "-o", help="json, jsonl: one object on one line of stdout.")
    ] = Output.TEXT,
    concurrency: Annotated[int, typer.Option(min=1, max=200, help="Runs at the same time.")] = 10,
    keep: Annotated[Path | None, typer.Option(help="Keep logs, journals and data directories here.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run just this task of the round. Repeatable.")] = None,
    think_ms: Annotated[int, typer.Option(min=0, max=10_000, help="The agent's pause between two actions.")] = 400,
    work_ms: Annotated[int, typer.Option(min=0, max=10_000, help="How long a shop works on an action.")] = 250,
) -> None:
    """Run a data set's tasks on real processes, redirect each in the middle, and check what came out."""
    if tasks != "all" and not (tasks.isascii() and tasks.isdigit() and int(tasks) > 0):
        raise typer.BadParameter("`all` or a number above 0", param_hint="--tasks")
    kinds = tuple(Shift) if shift is Shifts.BOTH else (Shift(shift.value),)
    asked = Asked(str(data) if data else None, tasks, faults, contract, tuple(only or ()))
    room = keep or Path(tempfile.mkdtemp(prefix="regate-retail-"))
    options = Options(
        asked, data, kinds, tuple(range(seed, seed + seeds)), concurrency, think_ms=think_ms, work_ms=work_ms, room=room
    )
    try:
        room.mkdir(parents=True, exist_ok=True)
        report = anyio.run(_all_rounds, options)
    except DataError as wrong:
        _errors.print(f"the data cannot be used: {wrong}")
        raise typer.Exit(2) from wrong
    finally:
        if keep is None:
            shutil.rmtree(room, ignore_errors=True)
    _show(report, output)
    if keep is not None:
        _errors.print(f"logs, journals and data directories: {room}")
    if report.failures():
        raise typer.Exit(1)


def _show(report: Report, output: Output) -> None:
    found = report.as_json()
    if output is not Output.TEXT:
        print(json.dumps(found, ensure_ascii=False))
    else:
        table = Table(*(name.replace("_", " ") for name in COLUMNS))
        for row in table_rows(report):
            table.add_row(*row)
        Console(width=max(160, Console().width)).print(table)
        shares = ", ".join(f"{name} {share:.0%}" for name, share in report.shares().items())
        print(f"redirects: {shares} of {found['runs']} runs")
        print("in all: " + ", ".join(f"{count} {name}" for name, count in found["totals"].items()))
        names = ", ".join(f"{task} ({why})" for task, why in found["not_redirectable"].items())
        print(f"not redirectable: {names or 'none'}")
        for row in found["unknown"]:
            print(f"unknown: {row['shift']} seed {row['seed']} task {row['task']} run {row['run']}: {row['what']}")
    for row in found["violations"][:SHOWN_MAX]:
        place = f"{row['shift']} seed {row['seed']} task {row['task']} run {row['run'] or '(none)'}"
        _errors.print(f"VIOLATION {place}, {row['hit']}: {row['what']}\n  repeat: {row['repeat']}")
    if len(found["violations"]) > SHOWN_MAX:
        _errors.print(f"… and {len(found['violations']) - SHOWN_MAX} more")
    for words in report.failures():
        _errors.print(f"failed: {words}")


# --- rounds ----------------------------------------------------------------------------------------------------------


async def _all_rounds(options: Options) -> Report:
    task_set = load(options.folder)
    report = Report(options.asked, stopped=True)
    violated: Counter[Outcome] = Counter()
    async with anyio.create_task_group() as group:
        group.start_soon(_until_told_to_stop, group.cancel_scope)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=_errors, transient=True) as progress:
            for shift in options.shifts:
                for seed in options.seeds:
                    name = f"{shift.value}, seed {seed}"
                    line = progress.add_task(name, total=None)
                    cases = cases_of(task_set, options, shift, seed)
                    progress.update(line, total=len(cases.runs))

                    def tick(verdict: Verdict, line: TaskID = line) -> None:
                        progress.advance(line)
                        violated.update([verdict.outcome])
                        if verdict.outcome is Outcome.VIOLATED and violated[verdict.outcome] <= SHOWN_MAX:
                            where = f"task {verdict.case.task_id}, run {verdict.run}"
                            _errors.print(f"{where}: {verdict.violations[0]}")

                    done = await _round(task_set, cases, options, shift=shift, seed=seed, tick=tick)
                    report.rounds.append(done)
                    progress.remove_task(line)
        report.stopped = False
        group.cancel_scope.cancel()
    return report


async def _until_told_to_stop(scope: anyio.CancelScope) -> None:
    """SIGTERM and Ctrl-C end the command in order, so that no process is left behind."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            _errors.print(f"stopped by {signal.Signals(number).name}; ending all processes")
            scope.cancel()
            return


def cases_of(task_set: TaskSet, options: Options, shift: Shift, seed: int) -> Cases:
    """The cases of a round. With `--only` the others are left out, and everything else stays as it was."""
    cases = make_cases(task_set, drawn(task_set, options.asked.tasks, seed), shift, seed)
    if not options.asked.only:
        return cases
    return Cases(tuple(case for case in cases.runs if case.task_id in options.asked.only), cases.not_redirectable)


def drawn(task_set: TaskSet, tasks: str, seed: int) -> list[Task]:
    """All tasks, or as many as wanted, in the file's order; half of them have several writes, as long as there are."""
    if tasks == "all":
        return list(task_set.tasks)
    pool = [task for task in task_set.tasks if why_not_redirectable(task) is None]
    Random(f"{seed}/tasks").shuffle(pool)
    several = [task for task in pool if len(task.actions) > 1]
    rest = [task for task in pool if len(task.actions) <= 1]
    half = min(len(several), max(int(tasks) - int(tasks) // 2, int(tasks) - len(rest)))
    chosen = {task.id for task in (*several[:half], *rest[: int(tasks) - half])}
    return [task for task in task_set.tasks if task.id in chosen]


async def _round(
    task_set: TaskSet, cases: Cases, options: Options, *, shift: Shift, seed: int, tick: Callable[[Verdict], None]
) -> Round:
    began = time.monotonic()
    settings = StackSettings(
        options.room / f"{shift.value}-{seed}",
        options.folder,
        cases.services,
        secrets.token_hex(16),
        options.asked.contract,
        options.asked.faults,
        seed,
        think_ms=options.think_ms,
        work_ms=options.work_ms,
        lost_calls=_lost_calls(options),
    )
    verdicts: dict[str, Verdict] = {}
    trouble = ""
    try:
        if cases.runs:
            async with running_stack(settings) as stack, client() as http:
                limit = anyio.CapacityLimiter(options.concurrency)
                api = Api(http, stack, f"{shift.value}-{seed}")

                async def one(case: Case) -> None:
                    async with limit:
                        verdict = await _one_run(task_set, api, case, settings.folder)
                    verdicts[case.task_id] = verdict
                    tick(verdict)

                async with anyio.create_task_group() as group:
                    for case in cases.runs:
                        group.start_soon(one, case)
    except StackError as error:
        trouble = str(error)
    found = tuple(verdicts[case.task_id] for case in cases.runs if case.task_id in verdicts)
    if len(found) < len(cases.runs) and not trouble:
        trouble = f"{len(cases.runs) - len(found)} runs were not made"
    return Round(shift, seed, found, cases.not_redirectable, time.monotonic() - began, trouble)


def _lost_calls(options: Options) -> int:
    loses = options.asked.faults in (Profile.LOST, Profile.MIXED)
    return LOST_CALLS if loses and options.asked.contract is ContractKind.LOOKUP else 0


async def _one_run(task_set: TaskSet, api: Api, case: Case, folder: Path) -> Verdict:
    evidence = await drive(api, case)
    verdict = judge(case, task_set.database, evidence)
    lines = [{"n": e.n, "at": e.at, "commit": e.commit, "event": e.event} for e in evidence.log]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (folder / f"task-{case.task_id}.log.jsonl").write_text(text, encoding="utf-8")
    return verdict


if __name__ == "__main__":
    sys.exit(app())
