"""The children's part of the simulators' command line: a function to be mounted as `child`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class ChildKind(StrEnum):
    """The ways to misbehave; the same words as `behaviours.KINDS`."""

    IGNORES_CANCEL = "ignores_cancel"
    LATE = "late"
    COMPLETES_DURING_CANCEL = "completes_during_cancel"
    NEVER_ANSWERS = "never_answers"
    AUTONOMOUS = "autonomous"


def child(
    kind: Annotated[ChildKind, typer.Argument(help="How it misbehaves.")],
    *,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 0,
    delay_ms: Annotated[int, typer.Option(min=0, max=600_000, help="The delay of its behaviour, in ms.")] = 1_500,
    patience_ms: Annotated[
        int, typer.Option(min=0, max=3_600_000, help="How long some kinds wait to be cancelled, in ms.")
    ] = 60_000,
) -> None:
    """Run an A2A agent that misbehaves; prints one JSON line with its URL when it listens."""
    from simulators.children.behaviours import Tempo  # the A2A SDK takes a second to load, `--help` need not
    from simulators.children.serving import serve

    try:
        serve(kind.value, Tempo(delay_ms, patience_ms), port=port)
    except OSError as failure:
        typer.echo(f"the child {kind.value} cannot start on port {port}: {failure}", err=True)
        raise typer.Exit(1) from failure
