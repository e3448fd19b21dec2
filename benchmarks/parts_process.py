"""Processes that a benchmark starts: each is this program again with the name of a part, and says hello in JSON.

Knows how they are started and ended. A part ends when its standard input does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

PROGRAM = Path(__file__).parent / "admission.py"
LINE_BYTES_MAX = 1024 * 1024
HELLO_MAX_S = 30.0


class Part:
    """A running part. `hello` is its first line."""

    def __init__(self, process: Process, hello: Mapping[str, Any], lines: BufferedByteReceiveStream) -> None:
        self.hello = hello
        self._process = process
        self._lines = lines

    async def end(self) -> dict[str, Any]:
        """Tell it to end; its last line."""
        assert self._process.stdin is not None
        await self._process.stdin.aclose()
        with anyio.fail_after(HELLO_MAX_S):
            last = await _line(self._lines)
            await self._process.wait()
        return last


async def _line(lines: BufferedByteReceiveStream) -> dict[str, Any]:
    found = json.loads(await lines.receive_until(b"\n", LINE_BYTES_MAX))
    assert isinstance(found, dict)
    return found


@asynccontextmanager
async def part(name: str, settings: Mapping[str, Any]) -> AsyncIterator[Part]:
    """Start a part; at the end it is killed if it still runs. Raises TimeoutError when it does not say hello."""
    command = [sys.executable, str(PROGRAM), "--part", name, "--settings", json.dumps(settings)]
    async with await anyio.open_process(command, stdin=PIPE, stdout=PIPE, stderr=None) as process:
        try:
            assert process.stdout is not None
            lines = BufferedByteReceiveStream(process.stdout)
            with anyio.fail_after(HELLO_MAX_S):
                hello = await _line(lines)
            yield Part(process, hello, lines)
        finally:
            if process.returncode is None:
                process.kill()


def say(**fields: Any) -> None:
    """A line to whoever started this part."""
    print(json.dumps(fields), flush=True)


async def until_input_ends() -> None:
    """Return when whoever started this part closed its input, or is gone."""
    while await anyio.to_thread.run_sync(sys.stdin.buffer.read, 1, abandon_on_cancel=True):
        pass
