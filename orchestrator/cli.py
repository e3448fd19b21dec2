"""The command `regate`: its parts put together, other rooms' commands found by name, and how it ends.

Knows which commands there are, and how a server is started from here. What they do is in the other cli files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator import cli_effect, cli_project, cli_run
from orchestrator.cli_output import CommandFailed, Exit, Screen, literal
from orchestrator.cli_session import with_api, with_screen

COMMANDS_GROUP = "regate.commands"

app = typer.Typer(
    name="regate",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Redirect agents that are already running: close the gate on old instructions, find out what happened, go on.",
)
app.add_typer(cli_run.app, name="run")
app.add_typer(cli_effect.app, name="effect")
app.command()(cli_effect.attention)
app.command()(cli_effect.log)
app.command()(with_screen(cli_project.init))
app.command()(with_screen(cli_project.check))
app.command()(with_api(cli_project.doctor))

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="The regate.toml. Default: ./regate.toml.")]


DirectoryOption = Annotated[
    Path | None,
    typer.Option("--data", help="Data directory. Default: REGATE_DATA, the config's, ./regate-data."),
]


@app.command("version")
@with_screen
def show_version(screen: Screen) -> None:
    """Say which version this is."""
    try:
        installed = version("regate")
    except PackageNotFoundError:
        installed = "unknown (not installed)"
    found = {"regate": installed, "python": sys.version.split()[0]}
    screen.show(found, lambda: [literal(f"regate {found['regate']}, Python {found['python']}")])


@app.command()
@with_screen
def demo(
    screen: Screen,
    *,
    seed: Annotated[int, typer.Option(help="The same seed gives the same verdicts.")] = 1,
    data: Annotated[Path | None, typer.Option(help="Where to keep what it leaves. Default: a new directory.")] = None,
) -> None:
    """Watch a running order being redirected, on real processes."""
    _run_part("orchestrator.demo", "demo", seed, data, screen.output)


@app.command()
def serve(
    *,
    data: DirectoryOption = None,
    config: ConfigOption = None,
    roles: Annotated[str, typer.Option(help="orchestrator, gateway, or both, separated by commas.")] = "all",
    redis_url: Annotated[str | None, typer.Option(help="A Redis 7+ or Valkey of your own.")] = None,
    allow_volatile: Annotated[
        bool, typer.Option("--allow-volatile", help="Take a store that may forget what it confirmed.")
    ] = False,
    assume_durable: Annotated[
        bool, typer.Option("--assume-durable", help="You vouch for a store whose settings cannot be read.")
    ] = False,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT of the API.")] = None,
    gateway_listen: Annotated[str | None, typer.Option(help="HOST:PORT of the gateway.")] = None,
    gateway_url: Annotated[str, typer.Option(help="Where agents reach the gateway, if it is elsewhere.")] = "",
) -> None:
    """Serve runs until Ctrl-C: the orchestrator with its API, the gateway, or both."""
    # They load the store and the web server, which no other command needs.
    from orchestrator import app as program
    from orchestrator.process import ROLES_DEFAULT

    chosen = [role.strip() for role in roles.split(",") if role.strip()]
    code = program.serve(
        config=config,
        data=data or _told_directory(),
        roles=ROLES_DEFAULT if chosen == ["all"] else chosen,
        redis_url=redis_url,
        allow_volatile=allow_volatile,
        assume_durable=assume_durable,
        listen=listen,
        gateway_listen=gateway_listen,
        gateway_url=gateway_url,
    )
    raise typer.Exit(code)


@app.command()
def dev(
    *,
    data: DirectoryOption = None,
    config: ConfigOption = None,
    agent: Annotated[list[str] | None, typer.Option(help="[NAME=]URL of an agent of yours. Repeatable.")] = None,
    service: Annotated[
        list[str] | None, typer.Option(help="NAME=URL=CONTRACT, or a contract whose service the config names.")
    ] = None,
    sample: Annotated[bool, typer.Option("--sample/--no-sample", help="With a sample shop, agent and goal.")] = True,
) -> None:
    """Run everything on this machine, with a sample to redirect, until stopped with Ctrl-C."""
    from orchestrator.dev import dev as run  # as for `serve`

    code = run(
        data=data or _told_directory(),
        config=config,
        agents=tuple(agent or ()),
        services=tuple(service or ()),
        sample=sample,
    )
    raise typer.Exit(code)


def _told_directory() -> Path | None:
    told = os.environ.get("REGATE_DATA")
    return Path(told) if told else None


def _run_part(module: str, name: str, *arguments: Any, **options: Any) -> None:
    """Call a function of a part that is loaded only now; what it returns is the exit code (None: 0)."""
    try:
        function: Callable[..., Any] = getattr(import_module(module), name)
    except ImportError as error:
        raise CommandFailed(
            Exit.FAILED, f"{module} cannot be loaded ({error}); install it whole: pip install 'regate[all]'"
        ) from None
    code = function(*arguments, **options)
    if isinstance(code, int) and code:
        raise typer.Exit(code)


def _is_asked(name: str, said: Sequence[str]) -> bool:
    """Whether the command may be called or listed now; all others are not worth the time to load them."""
    return not said or name in said or said[0].startswith("-") or "_REGATE_COMPLETE" in os.environ


def mount(target: typer.Typer, found: Sequence[EntryPoint]) -> None:
    """Add the commands that other packages bring. One that cannot be loaded stands there and says why when called."""
    for point in found:
        try:
            loaded = point.load()
            if not isinstance(loaded, typer.Typer):
                raise TypeError(f"{point.value} is no typer app")
        except Exception as error:  # noqa: BLE001 - whatever a foreign package raises must not take the others down
            _mount_broken(target, point.name, error)
            continue
        target.add_typer(loaded, name=point.name)


def _mount_broken(target: typer.Typer, name: str, error: Exception) -> None:
    reason = f"`regate {name}` cannot be loaded: {type(error).__name__}: {error}"

    def broken(context: typer.Context) -> None:
        typer.echo(f"{reason}; install it whole: pip install 'regate[all]'", err=True)
        raise typer.Exit(int(Exit.FAILED))

    target.command(
        name, help="(cannot be loaded)", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
    )(broken)


def main(arguments: list[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    said = sys.argv[1:] if arguments is None else arguments
    found = sorted(entry_points(group=COMMANDS_GROUP), key=lambda point: point.name)
    mount(app, [point for point in found if _is_asked(point.name, said)])
    try:
        app(arguments, prog_name="regate")
    except BrokenPipeError:
        # The reader of our output has left, as `head` does; Python would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(int(Exit.FAILED))
