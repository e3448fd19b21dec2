"""`regate effect …`, `attention`, `log`: what was done to the world, what nobody knows yet, and the record of it all.

Knows how an effect is named on the command line and how a log is followed. Does not know what settles an effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from admission.vocabulary import TERMINAL_PHASES, RunPhase
from orchestrator.cli_client import new_request_id, next_cursor, part, rows_in
from orchestrator.cli_output import CommandFailed, Exit, Output
from orchestrator.cli_records import attention_table, control_lines, log_lines
from orchestrator.cli_session import (
    LastOption,
    ReasonOption,
    RequestOption,
    RunArgument,
    Session,
    as_object,
    with_api,
)
from orchestrator.cli_tables import change_line, effect_report, effects_table

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

LOG_PAGE_ENTRIES = 500
FOLLOW_INTERVAL_S = 0.5
ENDED = frozenset({*TERMINAL_PHASES, RunPhase.CANCELLED_UNRESOLVED})

EffectArgument = Annotated[str, typer.Argument(help="RUN-e3, or e3 with --run or --last.")]
OfRunOption = Annotated[str | None, typer.Option("--run", help="The run it belongs to.")]


@app.callback()
def effect() -> None:
    """Look at effects, and settle those of which nobody knows what became."""


@app.command("list")
@with_api
def list_effects(
    session: Session,
    name: RunArgument = None,
    *,
    unknown: Annotated[bool, typer.Option("--unknown", help="Only those whose outcome nobody knows.")] = False,
    last: LastOption = False,
) -> None:
    """List the effects of a run, or all unknown ones of all runs."""
    state = "unknown" if unknown else None
    if name is None and not last:
        if not unknown:
            raise CommandFailed(Exit.USAGE, "of which run? Give its id or --last; --unknown alone is for all runs")
        waiting = rows_in(session.api.get("/v1/attention"), "items")
        runs = [str(row["run"]) for row in waiting if row.get("kind") == "effect" and row.get("run")]
    else:
        runs = [session.run_id(name, last)]
    rows: list[dict[str, Any]] = []
    for run in dict.fromkeys(runs):
        rows += session.api.pages(f"/v1/runs/{part(run)}/effects", "effects", state=state)
    session.screen.rows(rows, lambda: [effects_table(rows)])
    if not rows:
        session.screen.say("no unknown effects" if unknown else "no effects yet")


@app.command()
@with_api
def show(session: Session, effect: EffectArgument, *, run: OfRunOption = None, last: LastOption = False) -> None:
    """Show one effect: what was sent, each try, what came back, and what is still open."""
    row = as_object(session.api.get(f"/v1/effects/{part(session.effect_id(effect, run, last))}"))
    session.screen.show(row, lambda: effect_report(row))


@app.command()
@with_api
def resolve(
    session: Session,
    effect: EffectArgument,
    *,
    happened: Annotated[bool, typer.Option("--happened", help="It took effect.")] = False,
    did_not_happen: Annotated[bool, typer.Option("--did-not-happen", help="It did not, and will not.")] = False,
    reason: ReasonOption = "",
    evidence: Annotated[str, typer.Option(help="What shows it: a reference, an entry, who was asked.")] = "",
    run: OfRunOption = None,
    last: LastOption = False,
    request_id: RequestOption = None,
) -> None:
    """State what became of an unknown effect, and sign for it."""
    if happened == did_not_happen:
        raise CommandFailed(Exit.USAGE, "did it happen? Say --happened or --did-not-happen, one of them")
    missing = [flag for flag, given in (("--reason", reason), ("--evidence", evidence)) if not given.strip()]
    if missing:
        raise CommandFailed(Exit.USAGE, f"{' and '.join(missing)} must say how you know; both stay in the record")
    name = session.effect_id(effect, run, last)
    body = {"happened": happened, "reason": reason, "evidence": evidence}
    path = f"/v1/effects/{part(name)}/resolve"
    answer = as_object(session.api.change(path, body, request_id=request_id or new_request_id()))
    row = answer.get("effect")
    session.screen.show(answer, lambda: effect_report(row) if isinstance(row, dict) else ())
    session.screen.result(change_line(answer, name))


@with_api
def attention(session: Session) -> None:
    """List what waits for a person, and why."""
    rows = rows_in(session.api.get("/v1/attention"), "items")
    shown = [{**row, "command": f"{row['command']}{session.flags}"} if row.get("command") else row for row in rows]
    session.screen.rows(rows, lambda: [attention_table(shown)])
    if not rows:
        session.screen.say("nothing waits for a person")


@with_api
def log(
    session: Session,
    name: RunArgument = None,
    *,
    control: Annotated[
        bool, typer.Option("--control", help="Only what was asked, in order: its revision, who was told, who answered.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on as it grows, until Ctrl-C or the run's end.")] = False,
    after: Annotated[int, typer.Option(min=0, help="Begin after this position.")] = 0,
    last: LastOption = False,
) -> None:
    """Show the record of a run: each thing that happened, in order."""
    run_id = session.run_id(name, last)
    pages = _updates(session, run_id) if control else _entries(session, run_id, after)
    draw = control_lines if control else log_lines
    one_document = session.screen.output is Output.JSON and not follow
    kept: list[dict[str, Any]] = []
    try:
        for page, complete in pages:
            if one_document:
                kept += page
            elif page:
                session.screen.rows(page, partial(_drawn, draw, page))
            if complete and not follow:
                break
            if complete:
                if session.view(run_id).get("state") in ENDED and not page:
                    break
                time.sleep(FOLLOW_INTERVAL_S)
    except KeyboardInterrupt:
        session.screen.say(f"no longer following; run {run_id} is not affected")
        return
    if one_document:
        session.screen.json(kept)


Draw = Callable[[Sequence[dict[str, Any]]], RenderableType]


def _drawn(draw: Draw, page: list[dict[str, Any]]) -> list[RenderableType]:
    return [draw(page)]


def _entries(session: Session, run_id: str, after: int) -> Iterator[tuple[list[dict[str, Any]], bool]]:
    """New entries again and again, and whether these were all there are for now."""
    while True:
        answer = session.api.get(f"/v1/runs/{part(run_id)}/log", after=after, limit=LOG_PAGE_ENTRIES)
        page = rows_in(answer, "entries")
        after = max([after, *(int(entry.get("n", 0)) for entry in page)])
        yield page, next_cursor(answer) is None


def _updates(session: Session, run_id: str) -> Iterator[tuple[list[dict[str, Any]], bool]]:
    """The control channel's updates, those again about which more became known."""
    seen: dict[object, dict[str, Any]] = {}
    while True:
        updates = rows_in(session.api.get(f"/v1/runs/{part(run_id)}/log", control=True), "updates")
        fresh = [update for update in updates if seen.get(update.get("seq")) != update]
        seen = {update.get("seq"): update for update in updates}
        yield fresh, True
