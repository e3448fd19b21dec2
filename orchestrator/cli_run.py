"""`regate run …`: start, look at, redirect, hold and stop runs.

Knows how flags become the API's requests and when waiting ends. Does not know whether a change is allowed (the API
says) nor how things are drawn (cli_tables.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from admission.vocabulary import TERMINAL_PHASES, RunPhase, UpdateKind
from orchestrator.cli_client import ApiRefused, new_request_id, part
from orchestrator.cli_output import CommandFailed, Exit, literal
from orchestrator.cli_session import (
    ExpectedOption,
    LastOption,
    ReasonOption,
    RequestOption,
    RunArgument,
    Session,
    as_object,
    run_named,
    with_api,
)
from orchestrator.cli_tables import (
    change_line,
    change_report,
    not_achieved,
    revision_of,
    run_report,
    runs_table,
    state_of,
    waiting_words,
)
from orchestrator.goal_lines import refusal_lines
from orchestrator.goals import GoalError, one_scope_goal, read_change_file, read_goal_file

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

WaitOption = Annotated[
    bool,
    typer.Option(
        "--wait",
        help="Show how it goes until it ends or needs a person. Ctrl-C ends the watching only: exit 0, and it goes on.",
    ),
]
FileOption = Annotated[Path | None, typer.Option("--file", "-f", help="YAML or JSON file with the goal.")]

#: A run can be blocked for a moment, while a service is asked; after this long it is told as an outcome, in s.
BLOCKED_PATIENCE_S = 5.0
T = TypeVar("T")
_ENDED = frozenset({*TERMINAL_PHASES, RunPhase.CANCELLED_UNRESOLVED})


@app.callback()
def run() -> None:
    """Start, look at, redirect, hold and stop runs."""


@app.command()
@with_api
def start(
    session: Session,
    text: Annotated[str | None, typer.Argument(help="The goal in words, for one agent.", show_default=False)] = None,
    *,
    file: FileOption = None,
    agent: Annotated[str | None, typer.Option(help="The agent that works on TEXT.")] = None,
    wait: WaitOption = False,
    request_id: RequestOption = None,
) -> None:
    """Start a run from a goal file, or from words for one agent."""
    goal = _whole_goal(text, file, agent)
    body: dict[str, Any] = {"goal": goal}
    with _pointing_into(file):
        answer = as_object(session.api.change("/v1/runs", body, request_id=request_id or new_request_id()))
    view = as_object(answer.get("run"))
    name = run_named(view)
    if not wait:
        session.screen.show(answer, lambda: [literal(name, "bold")])
        session.screen.result(change_line(answer, name))
        same = f"{name}{session.flags}"
        session.screen.say(f"look at it: `regate run show {same}`; change it: `regate run redirect {same} …`")
        return
    session.screen.say(f"run {name}: {change_line(answer, name)}")
    end = session.wait(name, _outcome(), waiting_words)
    if end is not None:
        session.screen.show({**answer, "run": end}, lambda: run_report(end))
        _judge(end)


@app.command("list")
@with_api
def list_runs(
    session: Session, *, limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 50
) -> None:
    """List runs, the newest first."""
    rows = list(session.api.pages("/v1/runs", "runs", rows_max=limit))
    session.screen.rows(rows, lambda: [runs_table(rows)])
    if not rows:
        session.screen.say("no runs yet: `regate run start -f goal.yaml`")


@app.command()
@with_api
def show(session: Session, name: RunArgument = None, *, last: LastOption = False) -> None:
    """Show where a run stands: its revisions, branches, children, and what is unresolved."""
    view = session.view(session.run_id(name, last))
    session.screen.show(view, lambda: run_report(view))


@app.command()
@with_api
def redirect(
    session: Session,
    name: RunArgument = None,
    *,
    file: FileOption = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="FILE is a whole new goal; nothing is carried over.")
    ] = False,
    text: Annotated[
        str | None, typer.Option(help="The goal's new words; with --scope, the new brief of that branch.")
    ] = None,
    scope: Annotated[str | None, typer.Option(help="The branch that --text and --agent are for.")] = None,
    agent: Annotated[str | None, typer.Option(help="The agent that works on --scope from now on.")] = None,
    requirement: Annotated[
        list[str] | None,
        typer.Option(
            help="ID=WORDS: a requirement, changed or new. Repeatable. Words name no branch, so all of them are "
            "redirected; -f FILE with a plan says which ones."
        ),
    ] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Requirement or scope that goes. Repeatable.")] = None,
    expected_revision: ExpectedOption = None,
    reason: ReasonOption = "",
    last: LastOption = False,
    wait: WaitOption = False,
    request_id: RequestOption = None,
) -> None:
    """Change what a run is for, while it runs. What is not named is kept."""
    run_id = session.run_id(name, last)
    if replace:
        if file is None or text or scope or agent or requirement or remove:
            raise CommandFailed(Exit.USAGE, "--replace takes a whole goal from -f FILE, and nothing else")
        body: dict[str, Any] = {"kind": UpdateKind.REPLACE.value, "goal": _read(read_goal_file, file), "remove": []}
    else:
        goal, gone = _read(read_change_file, file) if file else ({}, [])
        _set_requirements(goal, requirement or [])
        if scope:
            read_at = _set_scope(session.view(run_id), goal, scope, text=text, agent=agent)
            expected_revision = expected_revision or read_at
        elif agent:
            raise CommandFailed(Exit.USAGE, "--agent needs --scope: which branch shall it work on?")
        elif text:
            goal["text"] = text
        body = {"kind": UpdateKind.CORRECT.value, "goal": goal, "remove": [*gone, *(remove or [])]}
        if not goal and not body["remove"]:
            raise CommandFailed(
                Exit.USAGE, "what shall change? Give -f FILE, --text, --scope, --requirement or --remove"
            )
    body |= {"reason": reason, "expected_revision": expected_revision}
    with _pointing_into(file):
        answer = _change(session, run_id, "revisions", body, request_id=request_id)
    _finish(session, run_id, answer, _outcome() if wait else None, revised=True)


@app.command()
@with_api
def pause(
    session: Session,
    name: RunArgument = None,
    *,
    reason: ReasonOption = "",
    expected_revision: ExpectedOption = None,
    last: LastOption = False,
    request_id: RequestOption = None,
) -> None:
    """Hold a run: nothing new is done until it is resumed."""
    run_id = session.run_id(name, last)
    answer = _steer(session, run_id, "pause", reason, expected=expected_revision, request_id=request_id)
    _finish(session, run_id, answer)


@app.command()
@with_api
def resume(
    session: Session,
    name: RunArgument = None,
    *,
    reason: ReasonOption = "",
    expected_revision: ExpectedOption = None,
    last: LastOption = False,
    request_id: RequestOption = None,
) -> None:
    """Let a held run go on, under the same revision."""
    run_id = session.run_id(name, last)
    answer = _steer(session, run_id, "resume", reason, expected=expected_revision, request_id=request_id)
    _finish(session, run_id, answer)


@app.command()
@with_api
def cancel(
    session: Session,
    name: RunArgument = None,
    *,
    reason: ReasonOption = "",
    expected_revision: ExpectedOption = None,
    last: LastOption = False,
    wait: WaitOption = False,
    request_id: RequestOption = None,
) -> None:
    """Stop a run for good. What was sent is still followed to its outcome."""
    run_id = session.run_id(name, last)
    answer = _steer(session, run_id, "cancel", reason, expected=expected_revision, request_id=request_id)
    _finish(session, run_id, answer, _has_ended if wait else None)


def _steer(
    session: Session, run_id: str, verb: str, reason: str, *, expected: int | None, request_id: str | None
) -> Any:
    return _change(session, run_id, verb, {"reason": reason, "expected_revision": expected}, request_id=request_id)


def _change(session: Session, run_id: str, what: str, body: dict[str, Any], *, request_id: str | None) -> Any:
    given = {name: value for name, value in body.items() if value is not None}
    path = f"/v1/runs/{part(run_id)}/{what}"
    return as_object(session.api.change(path, given, request_id=request_id or new_request_id()))


def _finish(
    session: Session,
    run_id: str,
    answer: dict[str, Any],
    until: Callable[[dict[str, Any]], bool] | None = None,
    *,
    revised: bool = False,
) -> None:
    """Show what a change did; with `until`, wait for that and show the run then (as JSON: one object for both)."""
    screen = session.screen
    if until is None or not screen.machine:
        screen.show(answer, lambda: change_report(answer) if revised else ())
    screen.result(f"run {run_id}: {change_line(answer, run_id)}")
    if until is None:
        return
    view = session.wait(run_id, until, waiting_words)
    if view is not None:
        screen.show({**answer, "run": view}, lambda: run_report(view))
        _judge(view)


def _whole_goal(text: str | None, file: Path | None, agent: str | None) -> dict[str, Any]:
    if file is not None:
        if text or agent:
            raise CommandFailed(Exit.USAGE, "give -f FILE, or TEXT with --agent, not both: the file names the agents")
        return _read(read_goal_file, file)
    if not text:
        raise CommandFailed(Exit.USAGE, "what is the goal? Give -f goal.yaml, or TEXT with --agent NAME")
    if not agent:
        raise CommandFailed(Exit.USAGE, "who works on it? Give --agent NAME, one of the [agents.*] of regate.toml")
    try:
        return one_scope_goal(text, agent)
    except GoalError as error:
        raise CommandFailed(Exit.USAGE, str(error)) from None


def _read(read: Callable[[Path], T], file: Path) -> T:
    try:
        return read(file)
    except GoalError as error:
        raise CommandFailed(Exit.USAGE, str(error)) from None


@contextmanager
def _pointing_into(file: Path | None) -> Iterator[None]:
    """What the API refuses of a goal from a file is told with file and line, like what was found before asking."""
    try:
        yield
    except ApiRefused as refusal:
        lines = refusal_lines(file, refusal.problem) if file is not None else []
        raise CommandFailed(refusal.code, "\n".join(lines)) if lines else refusal from None


def _set_requirements(goal: dict[str, Any], given: list[str]) -> None:
    for words in given:
        name, equals, text = words.partition("=")
        if not equals or not name.strip() or not text.strip():
            raise CommandFailed(Exit.USAGE, f"--requirement {words!r} is not ID=WORDS")
        rows = [row for row in goal.get("requirements", []) if row["id"] != name.strip()]
        goal["requirements"] = [*rows, {"id": name.strip(), "text": text.strip()}]


def _set_scope(
    view: dict[str, Any], goal: dict[str, Any], scope: str, *, text: str | None, agent: str | None
) -> int | None:
    """Put the changed plan of one branch into `goal`; gives the revision that the change was made from.

    The rest of the branch's plan is taken from the run as it is, so that very revision must still be in force.
    """
    if not text and not agent:
        raise CommandFailed(Exit.USAGE, "--scope needs --text (its new brief), --agent (who works on it), or both")
    current = as_object(view.get("goal", {})).get("plan", {})
    plan = dict(goal.get("plan", {}).get(scope) or current.get(scope) or {})
    if not plan and not agent:
        known = ", ".join(current) or "none"
        words = f"run {view.get('run')} has no scope {scope!r} (it has: {known}); a new one needs --agent"
        raise CommandFailed(Exit.NOT_FOUND, words)
    if text:
        plan["brief"] = text
    if agent:
        plan["agent"] = agent
    goal["plan"] = {**goal.get("plan", {}), scope: plan}
    return revision_of(view)


def _has_ended(view: dict[str, Any]) -> bool:
    return state_of(view) in _ENDED


def _outcome() -> Callable[[dict[str, Any]], bool]:
    """Ended, or blocked for a while: what asking cannot settle needs a person, and whoever waits must be told."""
    since: float | None = None

    def reached(view: dict[str, Any]) -> bool:
        nonlocal since
        if state_of(view) != RunPhase.BLOCKED:
            since = None
        elif since is None:
            since = time.monotonic()
        return _has_ended(view) or (since is not None and time.monotonic() - since >= BLOCKED_PATIENCE_S)

    return reached


def _judge(view: dict[str, Any]) -> None:
    """Raises CommandFailed when the run did not come to a good end."""
    name, phase = view.get("run"), state_of(view)
    if phase == RunPhase.BLOCKED:
        raise CommandFailed(
            Exit.FAILED, f"run {name} needs a person: `regate attention` says why, `regate effect resolve` settles it"
        )
    if phase not in (RunPhase.COMPLETED, RunPhase.CANCELLED):
        raise CommandFailed(Exit.FAILED, f"run {name} ended as {phase}")
    failed = not_achieved(view) if phase == RunPhase.COMPLETED else []
    if failed:
        raise CommandFailed(
            Exit.FAILED, f"run {name} is completed, but failed, and not done otherwise: {', '.join(failed)}"
        )
