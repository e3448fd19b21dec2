"""The command line of the simulators, usable alone (`python -m simulators`) or under another command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simulators.children.commands import child
from simulators.faults import FaultSpecError, Profile, parse_rule
from simulators.journal import JournalError
from simulators.service import ServiceKind, ServiceSettings, serve
from simulators.shop import DataError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def simulate() -> None:
    """Services and children that stand where the world stands, each in a process of its own."""


app.command()(child)


@app.command()
def service(
    kind: Annotated[ServiceKind, typer.Argument(help="Which service.")],
    *,
    data: Annotated[
        Path | None,
        typer.Option(help="db.json, or a folder with db.json or shop.json. Default: the built-in data set."),
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(help="The service's own record; kept between starts. Default: KIND-journal.jsonl.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    faults: Annotated[Profile, typer.Option(help="A mixture of faults.")] = Profile.NONE,
    seed: Annotated[int, typer.Option(help="What the mixture is drawn from.")] = 0,
    fault: Annotated[
        list[str] | None, typer.Option(help="ACTION:KIND[:MS][:COUNT]; the first COUNT calls fail so. Repeatable.")
    ] = None,
    cannot_void: Annotated[bool, typer.Option("--cannot-void", help="No void, X-Not-After ignored.")] = False,
    credential_file: Annotated[Path | None, typer.Option(help="Holds the bearer token that is wanted.")] = None,
    clock_skew_ms: Annotated[int, typer.Option(help="How far the service's clock is off, in ms.")] = 0,
    clock_drift_ppm: Annotated[int, typer.Option(help="How fast it runs away, in millionths.")] = 0,
    work_ms: Annotated[int, typer.Option(min=0, max=60_000, help="How long the shop takes before it executes.")] = 0,
) -> None:
    """Run a simulated service; prints one JSON line with its URL when it listens."""
    try:
        credential = credential_file.read_text().strip() if credential_file else None
        if credential == "":
            raise typer.BadParameter(f"{credential_file} is empty", param_hint="--credential-file")
        settings = ServiceSettings(
            kind,
            journal or Path(f"{kind.value}-journal.jsonl"),
            data,
            port,
            faults,
            seed=seed,
            rules=tuple(parse_rule(text) for text in fault or ()),
            can_void=not cannot_void,
            credential=credential,
            clock_skew_ms=clock_skew_ms,
            clock_drift_ppm=clock_drift_ppm,
            work_ms=work_ms,
        )
        serve(settings)
    except FaultSpecError as wrong:
        raise typer.BadParameter(str(wrong), param_hint="--fault") from wrong
    except (DataError, JournalError, OSError) as failure:
        typer.echo(f"the {kind.value} service cannot start: {failure}", err=True)
        raise typer.Exit(1) from failure
