"""Processes that belong together: started, watched, started again, written down, and ended together.

Theory of operation. Each process leads a group of its own, so that a signal to one reaches no other, and Ctrl-C reaches
the supervisor alone. It is ready when it has printed one JSON line. One that ends by itself is started again with the
same command (ports are fixed beforehand, so it listens where it did), after a pause that grows, a bounded number of
times; an exit code that says "starting again does not help" is believed. DATA/processes.json holds one row for every
process that ever ran here, with how it ended. leash.py ends everything if the supervisor itself is killed.

Knows processes. Does not know what they do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

from orchestrator.leash import PROCESSES_FILE

READY_TIMEOUT_S = 30.0
READY_LINE_BYTES_MAX = 64 * 1024
STOP_TIMEOUT_S = 8.0
RESTART_PAUSE_FIRST_S, RESTART_PAUSE_MAX_S = 0.1, 5.0
RESTARTS_MAX = 20
#: A process that lived for so long is not counted as failing at once.
STEADY_S = 30.0
LOG_TAIL_BYTES = 4096
#: Exit codes after which the same command would end the same way: wrong usage, and an alarm that a person must see.
NO_RESTART_CODES = frozenset({2, 70})
LOGS = "logs"


class ProcessFailed(Exception):
    """A process did not become ready. The message says how it ended and what its log ends with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to run. `environment` None passes ours on; `restarts` False leaves an ended process ended."""

    role: str
    command: tuple[str, ...]
    environment: Mapping[str, str] | None = None
    restarts: bool = True


@dataclass(slots=True)
class _Running:
    program: Program
    process: anyio.abc.Process
    row: dict[str, Any]
    began_s: float
    ready: anyio.Event = field(default_factory=anyio.Event)
    gone: anyio.Event = field(default_factory=anyio.Event)
    line: dict[str, Any] | None = None
    stopping: bool = False
    failures: int = 0


class Supervisor:
    """Use as `async with`; leaving it ends every process, the last started first."""

    def __init__(
        self, data_dir: Path, *, wall_ms: Callable[[], int], report: Callable[[str], None], cwd: Path | None = None
    ) -> None:
        """`wall_ms`: the time for people, in ms. `report`: told in a sentence when something ends by itself."""
        self._data_dir = data_dir
        self._wall_ms = wall_ms
        self._report = report
        self._cwd = cwd
        self._running: dict[str, _Running] = {}
        self._rows: list[dict[str, Any]] = []
        self._tasks: anyio.abc.TaskGroup | None = None
        self._leash: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        (self._data_dir / LOGS).mkdir(parents=True, exist_ok=True)
        self._leash = subprocess.Popen(  # noqa: ASYNC220 - starting does not wait, and it is never waited for
            [sys.executable, "-m", "orchestrator.leash", str(self._data_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd=self._cwd,
            start_new_session=True,
        )
        self._tasks = await anyio.create_task_group().__aenter__()
        self._write()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._tasks is not None
        with anyio.CancelScope(shield=True):
            for role in reversed(list(self._running)):
                await self.stop(role)
            self._let_go()
        self._tasks.cancel_scope.cancel()
        if isinstance(error, anyio.get_cancelled_exc_class()):
            return await self._tasks.__aexit__(kind, error, trace)
        # What the block raised leaves as it is: given to the task group, it would come out wrapped in a group.
        await self._tasks.__aexit__(None, None, None)
        return None

    # --- what callers use

    async def start(self, program: Program, *, timeout_s: float = READY_TIMEOUT_S) -> dict[str, Any]:
        """Start a program; its ready line, once it has printed it. Raises ProcessFailed."""
        running = await self._spawn(program, restarts=0, failures=0)
        return await self._until_ready(running, timeout_s)

    async def ready(self, role: str, *, timeout_s: float = READY_TIMEOUT_S) -> dict[str, Any]:
        """Wait until a process of this role is (again) ready. Raises ProcessFailed."""
        with anyio.move_on_after(timeout_s):
            while True:
                running = self._running[role]
                if running.gone.is_set():
                    await anyio.sleep(0.01)  # the next one is about to be started
                    continue
                with contextlib.suppress(ProcessFailed):
                    return await self._until_ready(running, timeout_s)
        raise ProcessFailed(f"{role} did not come back within {timeout_s:g} s")

    async def stop(self, role: str, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End a process in order; kill its group if it does not end in time. It is not started again."""
        running = self._running.pop(role, None)
        if running is None:
            return
        running.stopping = True
        if not running.gone.is_set():
            with contextlib.suppress(ProcessLookupError):
                running.process.terminate()
            with anyio.move_on_after(timeout_s):
                await running.gone.wait()
        if not running.gone.is_set():
            self._kill_group(running)
            await running.gone.wait()

    def kill(self, role: str) -> int:
        """Kill a process of ours with SIGKILL; its pid. It is started again if its program says so."""
        running = self._running[role]
        running.process.kill()
        return running.process.pid

    async def wait_gone(self, role: str, pid: int) -> None:
        """Wait until the process with that pid has been seen ended."""
        for running in list(self._running.values()):
            if running.program.role == role and running.process.pid == pid:
                await running.gone.wait()

    def processes(self) -> list[dict[str, Any]]:
        """One row for each process that ever ran here."""
        return [dict(row) for row in self._rows]

    def note(self, role: str, pid: int | None, **more: Any) -> dict[str, Any]:
        """Write down a process that others watch (the store's server); change the row with `note_end`."""
        row = {"role": role, "pid": pid, "started_at": self._wall_ms(), "ended": "running", "restarts": 0, **more}
        self._rows.append(row)
        self._write()
        return row

    def note_end(self, row: dict[str, Any], ended: str) -> None:
        """Say how a noted process ended."""
        row |= {"ended": ended, "ended_at": self._wall_ms()}
        self._write()

    # --- one process

    async def _spawn(self, program: Program, *, restarts: int, failures: int) -> _Running:
        assert self._tasks is not None
        log = (self._data_dir / LOGS / f"{program.role.replace(':', '-')}.log").open("ab")
        with log:
            process = await anyio.open_process(
                list(program.command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=program.environment,
                cwd=self._cwd,
                start_new_session=True,
            )
        self._tell(f"+{process.pid}")
        row = self.note(program.role, process.pid, restarts=restarts, url=None, command=list(program.command))
        running = _Running(program, process, row, anyio.current_time(), failures=failures)
        self._running[program.role] = running
        self._tasks.start_soon(self._listen, running)
        self._tasks.start_soon(self._watch, running)
        return running

    async def _until_ready(self, running: _Running, timeout_s: float) -> dict[str, Any]:
        with anyio.move_on_after(timeout_s):
            await running.ready.wait()
        role = running.program.role
        if running.line is not None:
            return running.line
        how = running.row["ended"] if running.gone.is_set() else f"not ready within {timeout_s:g} s"
        raise ProcessFailed(f"{role}: {how}; its log ends with: {self._tail(role)}")

    async def _listen(self, running: _Running) -> None:
        """The first line says that it is ready; the rest is let through, so that the pipe never fills."""
        assert running.process.stdout is not None
        stream = BufferedByteReceiveStream(running.process.stdout)
        with contextlib.suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.IncompleteRead, ValueError):
            line = json.loads(await stream.receive_until(b"\n", READY_LINE_BYTES_MAX))
            running.line = line
            running.row["url"] = line.get("url") or line.get("gateway")
            self._write()
            running.ready.set()
            while True:
                await stream.receive()

    async def _watch(self, running: _Running) -> None:
        code = await running.process.wait()
        asked = running.stopping and code in (0, -signal.SIGTERM)
        running.row |= {"ended": "stopped" if asked else how_it_ended(code), "ended_at": self._wall_ms()}
        self._tell(f"-{running.process.pid}")
        self._kill_group(running)  # what it may have started is nobody's now
        self._write()
        running.gone.set()
        running.ready.set()
        role = running.program.role
        if not self._wanted(running):
            return
        lived_s = anyio.current_time() - running.began_s
        failures = 0 if lived_s > STEADY_S else running.failures + 1
        if not running.program.restarts or code in NO_RESTART_CODES or failures > RESTARTS_MAX:
            self._report(f"{role} ended ({running.row['ended']}) and stays down; its log ends with: {self._tail(role)}")
            return
        pause_s = min(RESTART_PAUSE_FIRST_S * 2 ** max(0, failures - 1), RESTART_PAUSE_MAX_S)
        self._report(f"{role} ended ({running.row['ended']}); starting it again in {pause_s:g} s")
        await anyio.sleep(pause_s)
        if self._wanted(running):
            await self._spawn(running.program, restarts=running.row["restarts"] + 1, failures=failures)

    def _wanted(self, running: _Running) -> bool:
        return not running.stopping and self._running.get(running.program.role) is running

    def _kill_group(self, running: _Running) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(running.process.pid, signal.SIGKILL)

    # --- files and the leash

    def _tail(self, role: str) -> str:
        try:
            with (self._data_dir / LOGS / f"{role.replace(':', '-')}.log").open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return "nothing"
        return " / ".join(line.strip() for line in lines[-4:]) or "nothing"

    def _write(self) -> None:
        content = {"supervisor": {"pid": os.getpid()}, "processes": self._rows}
        path = self._data_dir / PROCESSES_FILE
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        new.replace(path)

    def _tell(self, word: str) -> None:
        assert self._leash is not None
        assert self._leash.stdin is not None
        with contextlib.suppress(OSError):
            self._leash.stdin.write(f"{word}\n".encode())
            self._leash.stdin.flush()

    def _let_go(self) -> None:
        assert self._leash is not None
        assert self._leash.stdin is not None
        self._tell("bye")
        with contextlib.suppress(OSError):
            self._leash.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._leash.wait(2)


def how_it_ended(code: int) -> str:
    """An exit code as subprocess gives it, in words; one that ended because we asked it to is "stopped"."""
    return f"exit {code}" if code >= 0 else f"killed by signal {-code}"
