"""A service's own record of what really happened: a JSON object a line, never rewritten, fsynced before a reply leaves.

Knows files and line numbers. Does not know what the events mean; the services do, when they replay the lines.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

Line = dict[str, Any]


class JournalError(Exception):
    """The journal cannot be used: damaged in the middle, held by another process, or the disk refused a sync."""


class Journal:
    """An append-only JSONL file with one writer.

    `append` puts a line into the file at once, so that a killed process does not lose it; `durable` returns when all
    lines appended so far are on the disk. Callers that arrive together share one fsync.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`, creating it and its directory, and read what is there into `lines`.

        A last line without its newline is what a kill in the middle of a write leaves: no reply was built on it, so
        it is cut off.

        Raises:
            JournalError: another process has the file, or a line that is not the last is damaged.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as busy:
            os.close(self._fd)
            raise JournalError(f"{path} belongs to a running process; stop it or name another --journal") from busy
        self.lines: list[Line] = self._read()
        self._sync_directory()
        self._synced = len(self.lines)
        self._broken: str | None = None
        self._turn = anyio.Lock()

    def append(self, line: Line) -> int:
        """Number the line, write it to the file (not yet to the disk) and return its number, counted from 1."""
        if self._broken is not None:
            raise JournalError(self._broken)
        number = len(self.lines) + 1
        numbered = {"n": number, **line}
        rest = memoryview(json.dumps(numbered, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self.lines.append(numbered)
        return number

    async def durable(self) -> None:
        """Return once every line appended before this call is on the disk.

        Raises:
            JournalError: the disk refused; from then on the journal refuses everything, since a second fsync may lie.
        """
        wanted = len(self.lines)
        while self._synced < wanted:
            async with self._turn:
                if self._broken is not None:
                    raise JournalError(self._broken)
                if self._synced >= wanted:
                    return
                reached = len(self.lines)
                try:
                    await anyio.to_thread.run_sync(os.fsync, self._fd)
                except OSError as failure:
                    self._broken = f"{self.path} could not be synced: {failure}"
                    raise JournalError(self._broken) from failure
                self._synced = reached

    def close(self) -> None:
        """Give the file back. Appending afterwards is a mistake of the caller."""
        os.close(self._fd)

    def _read(self) -> list[Line]:
        raw = self.path.read_bytes()
        whole = raw.rfind(b"\n") + 1
        if whole < len(raw):
            os.ftruncate(self._fd, whole)
        os.fsync(self._fd)
        lines: list[Line] = []
        for number, text in enumerate(raw[:whole].splitlines(), start=1):
            try:
                line = json.loads(text)
            except ValueError as damage:
                raise JournalError(f"{self.path}:{number}: not JSON; the journal is damaged") from damage
            if not isinstance(line, dict) or line.get("n") != number:
                raise JournalError(f"{self.path}:{number}: expected line number {number}; the journal is damaged")
            lines.append(line)
        return lines

    def _sync_directory(self) -> None:
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
