"""The workers' part of the `regate` command: `regate worker plan`. Only the command loads this file."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def worker() -> None:
    """Agents that know which revision they work for, each in a process of its own."""


@app.command()
def plan(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 0,
    name: Annotated[str, typer.Option(help="The agent's name in its card.")] = "plan",
    think_ms: Annotated[int, typer.Option(min=0, max=600_000, help="Pause between two actions, in ms.")] = 0,
) -> None:
    """Run an agent that carries out the actions of its brief; prints one JSON line with its URL when it listens."""
    from workers.plan_agent import plan_agent
    from workers.serving import Address, serve

    try:
        serve(plan_agent(think_ms), kind="plan", name=name, address=Address(host, port))
    except OSError as failure:
        typer.echo(f"cannot listen on {host}:{port}: {failure}", err=True)
        raise typer.Exit(1) from failure
