"""A server for the length of one command, on a data directory that nobody serves at the moment.

Knows how it is started, waited for and ended; the server ends the store that it started. The lock file keeps two
commands on one directory from starting two of them. Does not know what the command then asks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

import anyio

from admission.data_directory import MARKER
from orchestrator.cli_client import Endpoint, Where, is_alive, read_endpoint, restarted, unavailable
from orchestrator.cli_output import CommandFailed, Exit

if sys.platform != "win32":  # where no embedded store runs either, so that only distant servers are commanded
    import fcntl

SETTINGS_FILE = "regate.toml"
#: Held shared by every process that uses the directory's store.
USERS_LOCK = "users.lock"
LOCK_FILE = "temporary-server.lock"
START_TIMEOUT_S = 30.0
STARTING_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 15.0
LOCK_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.05
LOG_TAIL_BYTES = 4096
#: Exit codes of a server that are ours as well: it refuses the directory, or its settings are wrong.
_ENDS = {int(Exit.FAILED): Exit.FAILED, int(Exit.USAGE): Exit.USAGE}


@contextmanager
def endpoint_for(where: Where, say: Callable[[str], None]) -> Iterator[tuple[Endpoint, bool]]:
    """The endpoint to use, and whether its server lives only as long as this block.

    With a data directory given by flag, in use before, and nobody serving it, a server is started for the block.
    Raises CommandFailed.
    """
    endpoint = where.find()
    local = where.url is None and (where.data is not None or endpoint is None or endpoint.data is not None)
    if not local or (endpoint is not None and is_alive(endpoint)):
        if endpoint is None:
            raise unavailable(where, f"no server is known in {where.directory}")
        yield endpoint, False
        return
    again = restarted(where.directory, say)
    if again is not None:
        yield (Endpoint(again.url, where.token, again.data) if where.token else again), False
        return
    if where.data is None:
        detail = f"no server is known in {where.directory}" if endpoint is None else f"{endpoint.url} does not answer"
        if (where.directory / MARKER).exists():
            detail += f"; --data {where.directory} would have it served for this command"
        raise unavailable(where, detail)
    if not (where.data / MARKER).exists():
        raise unavailable(where, f"{where.data} holds no runs, and no server is alive there")
    with _only_one(where.data):
        endpoint = read_endpoint(where.data)  # another command's server may have been replaced by a lasting one
        if endpoint is not None and is_alive(endpoint):
            yield endpoint, False
            return
        endpoint = _starting(where.data, say)
        if endpoint is not None:
            yield endpoint, False
            return
        with _temporary(where, say) as started:
            yield started, True


def _starting(data: Path, say: Callable[[str], None]) -> Endpoint | None:
    """The endpoint of a server that is just being started by somebody else; None when nobody is starting one."""
    until = time.monotonic() + STARTING_TIMEOUT_S
    told = False
    while _in_use(data) and time.monotonic() < until:
        if not told:
            say(f"the store of {data} is in use: waiting for a server that answers")
            told = True
        time.sleep(POLL_INTERVAL_S)
        endpoint = read_endpoint(data)
        if endpoint is not None and is_alive(endpoint):
            return endpoint
    return None


def _in_use(data: Path) -> bool:
    """Whether a process of ours holds the store of this directory open."""
    try:
        with (data / USERS_LOCK).open("rb") as users:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextmanager
def _only_one(data: Path) -> Iterator[None]:
    with (data / LOCK_FILE).open("a") as file:
        until = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CommandFailed(
                        Exit.UNAVAILABLE, f"another command has been serving {data} for {LOCK_TIMEOUT_S:.0f} s; wait"
                    ) from None
                time.sleep(POLL_INTERVAL_S)
        yield


@contextmanager
def _temporary(where: Where, say: Callable[[str], None]) -> Iterator[Endpoint]:
    data = where.directory
    say(f"nobody serves {data}: starting a server for this command")
    command = [sys.executable, "-m", "orchestrator", "serve", "--data", str(data), *_config_of(data)]
    with tempfile.TemporaryFile() as log, _ended_by_term():
        # A session of its own: Ctrl-C is meant for the command, which then ends the server in order.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield _wait_ready(process, log, where)
        finally:
            _stop(process, data)
            say(f"the server for this command has ended; {data} is kept")


def _config_of(data: Path) -> list[str]:
    """The settings beside the directory, where a project keeps them, unless there are some that go before."""
    beside = data.absolute().parent / SETTINGS_FILE
    found = (data / SETTINGS_FILE).exists() or Path(SETTINGS_FILE).exists()
    return ["--config", str(beside)] if beside.exists() and not found else []


@contextmanager
def _ended_by_term() -> Iterator[None]:
    """SIGTERM ends the block like an exception, so that the server does not outlive the command."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_ready(process: subprocess.Popen[bytes], log: IO[bytes], where: Where) -> Endpoint:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        if process.poll() is not None:
            # It said itself what to do; starting another one in another way would end just the same.
            raise CommandFailed(_ENDS.get(process.returncode, Exit.UNAVAILABLE), f"{where.directory}: {_tail(log)}")
        endpoint = read_endpoint(where.directory)
        ours = endpoint is not None and endpoint.pid in (None, process.pid)
        if endpoint is not None and ours and is_alive(endpoint):
            return endpoint
        time.sleep(POLL_INTERVAL_S)
    raise unavailable(where, f"a server on {where.directory} was not ready in {START_TIMEOUT_S:.0f} s: {_tail(log)}")


def _tail(log: IO[bytes]) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - LOG_TAIL_BYTES))
    lines = log.read().decode(errors="replace").strip().splitlines()
    return " / ".join(line.strip() for line in lines[-4:]) or "it said nothing"


def _stop(process: subprocess.Popen[bytes], data: Path) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        from orchestrator.store_access import stop_if_unused  # it loads the store's client, seldom needed

        process.kill()  # everything acknowledged is in the store
        process.wait()
        anyio.run(stop_if_unused, data)
