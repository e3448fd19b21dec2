"""What every command that asks the API shares: its options, its connection, the naming of runs, the way it fails.

Knows `-o`, `--url`, `--token`, `--data`, how `--last` and the beginning of an id name a run, and how waiting is shown
and left with Ctrl-C. Does not know what a command asks.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, get_type_hints

import typer

from orchestrator.cli_client import Api, Where, part
from orchestrator.cli_output import CommandFailed, Exit, Output, Screen, literal, screen_for
from orchestrator.cli_server import endpoint_for

#: The API answers at the first change, at the latest after this.
WAIT_MS = 1_000
#: What the API takes for the run that was started last.
LAST = "last"
_WHOLE_RUN_ID = re.compile(r"[0-9a-f]{12}(\.[0-9a-f]{12})*")
P = ParamSpec("P")

OutputOption = Annotated[Output, typer.Option("--output", "-o", help="What standard output holds.")]
UrlOption = Annotated[str | None, typer.Option(help="Address of the API. Else REGATE_URL, or the data directory's.")]
TokenOption = Annotated[str | None, typer.Option(help="What opens it. Else REGATE_TOKEN, or the data directory's.")]
DataOption = Annotated[
    Path | None,
    typer.Option(
        help="Data directory; served for this command if nobody does. Else REGATE_DATA, ./regate-data, if served."
    ),
]
RunArgument = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="The run's id, or a unique beginning of it.", show_default=False)
]
LastOption = Annotated[bool, typer.Option("--last", help="The run that was started last.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; stands in the record for ever.")]
ExpectedOption = Annotated[
    int | None, typer.Option("--expected-revision", min=1, help="Refuse if another revision is in force (exit 3).")
]
RequestOption = Annotated[
    str | None, typer.Option("--request-id", help="To send the same request again after a broken connection.")
]


class Session:
    """One command at work: where it writes, whom it asks, and whether the server ends with it."""

    def __init__(self, screen: Screen, where: Where, closing: ExitStack) -> None:
        self.screen = screen
        self.where = where
        self._closing = closing
        self._temporary = False

    @cached_property
    def api(self) -> Api:
        """The connection, opened when it is first needed: a command that was typed wrongly starts no server."""
        endpoint, self._temporary = self._closing.enter_context(endpoint_for(self.where, self.screen.say))
        return self._closing.enter_context(Api(endpoint, self.where))

    def run_id(self, given: str | None, last: bool) -> str:
        """The id of the run that is meant. Raises CommandFailed: none given, none found, or several.

        A beginning is looked up once, here, so that a request that is sent again still means the same run.
        """
        if given and last:
            raise CommandFailed(Exit.USAGE, "give a run or --last, not both")
        if not given and not last:
            raise CommandFailed(Exit.USAGE, "which run? Give its id, a unique beginning of it, or --last")
        if given and _WHOLE_RUN_ID.fullmatch(given):
            return given
        return run_named(self.api.get(f"/v1/runs/{part(given or LAST)}/effects", limit=1))

    def effect_id(self, given: str, run: str | None, last: bool) -> str:
        """The id of the effect that is meant: whole, RUN-e3 with RUN's beginning, or e3 of a named run."""
        head, dash, tail = given.rpartition("-")
        if run or last:
            return f"{self.run_id(run, last)}-{tail if dash else given}"
        if not dash:
            raise CommandFailed(Exit.USAGE, f"{given!r} names no run: give RUN-{given}, or --run RUN, or --last")
        return f"{self.run_id(head, False)}-{tail}"

    def view(self, run: str) -> dict[str, Any]:
        """The run as it is now."""
        return as_object(self.api.get(f"/v1/runs/{part(run)}"))

    def wait(self, run: str, until: Callable[[dict[str, Any]], bool], describe: Callable[[dict[str, Any]], str]) -> Any:
        """Look at the run until `until` holds, showing `describe` meanwhile; None when Ctrl-C ended the watching."""
        try:
            with progress(self.screen) as tell:
                view = self.view(run)
                while not until(view):
                    tell(describe(view))
                    since = view.get("version")
                    path = f"/v1/runs/{part(run)}"
                    view = as_object(self.api.get(path, changed_since=since, timeout_ms=WAIT_MS))
                return view
        except KeyboardInterrupt:
            self.screen.say(self._detached(run))
            return None

    @property
    def flags(self) -> str:
        """What a command that is shown to be pasted needs, to ask the same API as this one."""
        words = (("--url", self.where.url), ("--data", self.where.data))
        return "".join(f" {flag} {shlex.quote(str(given))}" for flag, given in words if given is not None)

    def _detached(self, run: str) -> str:
        goes_on = "rests until a server is started again" if self._temporary else "goes on"
        return (
            f"detached; run {run} {goes_on}. Look at it: `regate run show {run}{self.flags}`. "
            f'Stop it: `regate run cancel {run}{self.flags} --reason "..."`'
        )


def as_object(answer: Any) -> dict[str, Any]:
    """The answer if it is a JSON object. Raises CommandFailed."""
    if not isinstance(answer, dict):
        raise CommandFailed(Exit.FAILED, "the API answered something unexpected: is it of another version?")
    return answer


def run_named(answer: Any) -> str:
    """The run's id in an answer that holds one. Raises CommandFailed."""
    found = as_object(answer).get("run")
    if not isinstance(found, str):
        raise CommandFailed(Exit.FAILED, "the API answered without naming a run: is it of another version?")
    return found


@contextmanager
def progress(screen: Screen) -> Iterator[Callable[[str], None]]:
    """A moving line on a terminal; elsewhere a line for each change of what is told."""
    if screen.err.is_terminal:
        with screen.err.status(literal("…"), spinner="dots") as status:
            yield lambda text: status.update(literal(text))
        return
    told = ""

    def tell(text: str) -> None:
        nonlocal told
        if text != told:
            told = text
            screen.say(text)

    yield tell


@contextmanager
def failing(screen: Screen) -> Iterator[None]:
    """A CommandFailed inside becomes its reason on standard error and its exit code."""
    try:
        yield
    except CommandFailed as failure:
        screen.say(str(failure))
        raise typer.Exit(int(failure.code)) from None


def with_api(function: Callable[Concatenate[Session, P], None]) -> Callable[..., None]:
    """A command that gets a Session first, and has the options that lead to one."""

    @wraps(function)
    def command(
        *args: Any, output: Output, url: str | None, token: str | None, data: Path | None, **given: Any
    ) -> None:
        screen = screen_for(output)
        with failing(screen), ExitStack() as closing:
            function(Session(screen, Where(url, token, data), closing), *args, **given)

    shared: dict[str, tuple[Any, Any]] = {
        "output": (OutputOption, Output.TEXT),
        "url": (UrlOption, None),
        "token": (TokenOption, None),
        "data": (DataOption, None),
    }
    return _published(command, function, shared)


def with_screen(function: Callable[Concatenate[Screen, P], None]) -> Callable[..., None]:
    """A command that asks no API: it gets a Screen first, and has `-o`."""

    @wraps(function)
    def command(*args: Any, output: Output, **given: Any) -> None:
        screen = screen_for(output)
        with failing(screen):
            function(screen, *args, **given)

    return _published(command, function, {"output": (OutputOption, Output.TEXT)})


def _published(
    command: Callable[..., None], function: Callable[..., None], shared: dict[str, tuple[Any, Any]]
) -> Callable[..., None]:
    """The command under the signature that typer shall see: the function's but its first, and the shared options."""
    hints = get_type_hints(function, include_extras=True)
    own = list(inspect.signature(function).parameters.values())[1:]
    parameters = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in shared.items()
    ]
    del command.__wrapped__  # type: ignore[attr-defined]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
