"""The whole stack for one round of `retail`, as processes that are started by their command lines and ended by pid.

Knows directories, settings files and processes. Does not know tasks, runs or verdicts, and imports nothing of what it
starts. Everything of a round lies in one directory: settings, contracts, the data directory, journals, and what the
processes said.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import yaml

from simulators.faults import Profile

START_LIMIT_S = 45.0
STOP_LIMIT_S = 20.0
POLL_INTERVAL_S = 0.05
LOG_TAIL_BYTES = 2_000


class ContractKind(StrEnum):
    """What the shops promise; each has a file in `simulators/contracts`."""

    VOID = "void"
    LOOKUP = "lookup"
    NOT_AFTER = "not_after"


class StackError(Exception):
    """A process of the stack did not start, or ended too early. The message holds the end of what it said."""


@dataclass(frozen=True)
class StackSettings:
    """What a round is started with. `data` None is the data set of the package. Times in ms.

    `credential` is the bearer token that the shops want to see.
    """

    folder: Path
    data: Path | None
    shops: Sequence[str]
    credential: str
    contract: ContractKind = ContractKind.VOID
    profile: Profile = Profile.NONE
    seed: int = 0
    think_ms: int = 400
    work_ms: int = 250
    #: Calls of each shop that get lost before they arrive, whatever the profile draws.
    lost_calls: int = 0


@dataclass(frozen=True)
class Stack:
    """Where a running stack answers, and where its shops write."""

    url: str
    token: str
    shops: dict[str, str]
    journals: dict[str, Path]


def contract_text(kind: ContractKind, service: str) -> str:
    """The contract of a shop under that name, as a YAML text."""
    folder = files("simulators") / "contracts"
    operations = yaml.safe_load((folder / "operations.yaml").read_text(encoding="utf-8"))
    promises = yaml.safe_load((folder / f"{kind.value}.yaml").read_text(encoding="utf-8"))
    contract: dict[str, Any] = {
        "service": service,
        "version": kind.value,
        "source": "the simulated shop that comes with regate",
        "operations": {
            name: {"request": {"method": "POST", "path": f"/actions/{name}"}, **operation, **promises}
            for name, operation in operations.items()
        },
    }
    return str(yaml.safe_dump(contract, sort_keys=False))


@asynccontextmanager
async def running_stack(settings: StackSettings) -> AsyncIterator[Stack]:
    """Shops, worker and orchestrator on loopback; all of them have ended when the block is left. Raises StackError."""
    folder = settings.folder
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise StackError(f"{folder} is there already, and a round starts afresh: choose another place") from None
    started: list[_Part] = []
    try:
        credential = folder / "shop.credential"
        _write_private(credential, settings.credential)
        parts = {name: await _start_shop(settings, name, credential, started) for name in settings.shops}
        command = ["-m", "workers", "plan", "--think-ms", str(settings.think_ms)]
        agent = await _Part.start("worker", command, folder, started)
        hellos = {name: await part.hello() for name, part in parts.items()}
        shops = {name: hello["url"] for name, hello in hellos.items()}
        _write_settings(settings, shops, (await agent.hello())["url"], credential)
        data = folder / "data"
        command = ["-m", "orchestrator", "serve", "--data", str(data), "--config", str(folder / "regate.toml")]
        server = await _Part.start("orchestrator", command, folder, started)
        endpoint = await _endpoint(server, data)
        journals = {name: Path(hello["journal"]) for name, hello in hellos.items()}
        yield Stack(endpoint["url"], endpoint["token"], shops, journals)
        for part in started:
            part.check()
    finally:
        with anyio.CancelScope(shield=True):
            # The orchestrator was started last and goes first, so that nothing looks for what is gone already.
            if started:
                await started.pop().stop()
            async with anyio.create_task_group() as group:
                for part in started:
                    group.start_soon(part.stop)


async def _start_shop(settings: StackSettings, name: str, credential: Path, started: list[_Part]) -> _Part:
    journal = settings.folder / f"{name}.journal.jsonl"
    command = ["-m", "simulators", "service", "retail", "--journal", str(journal), "--faults", settings.profile.value]
    command += ["--seed", str(settings.seed), "--work-ms", str(settings.work_ms), "--credential-file", str(credential)]
    if settings.data is not None:
        command += ["--data", str(settings.data)]
    if settings.contract is ContractKind.LOOKUP:
        command.append("--cannot-void")
    if settings.lost_calls:
        command += ["--fault", f"*:reset::{settings.lost_calls}"]
    return await _Part.start(name, command, settings.folder, started)


def _write_settings(settings: StackSettings, shops: dict[str, str], agent: str, credential: Path) -> None:
    folder = settings.folder
    (folder / "services").mkdir(exist_ok=True)
    lines = ["[store]", 'data_dir = "data"', "", "[agents.plan]", f'url = "{agent}"']
    for name, url in shops.items():
        (folder / "services" / f"{name}.yaml").write_text(contract_text(settings.contract, name), encoding="utf-8")
        lines += ["", f"[services.{name}]", f'url = "{url}"', f'contract = "services/{name}.yaml"']
        lines.append(f'credential = "file:{credential.name}"')
    (folder / "regate.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)


async def _endpoint(server: _Part, data: Path) -> dict[str, Any]:
    """The address and token that the orchestrator wrote down, once it answers there."""
    path = data / "endpoint.json"
    until = anyio.current_time() + START_LIMIT_S
    async with httpx.AsyncClient(timeout=2.0) as http:
        while anyio.current_time() < until:
            server.check()
            try:
                found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                if (await http.get(f"{found['url']}/healthz")).status_code == 200:
                    return found
            except (OSError, ValueError, KeyError, httpx.HTTPError):
                pass
            await anyio.sleep(POLL_INTERVAL_S)
    raise StackError(f"the orchestrator was not ready after {START_LIMIT_S:.0f} s: {server.said()}")


class _Part:
    """One process, with what it said in a file of its own."""

    def __init__(self, name: str, process: anyio.abc.Process, said: Path) -> None:
        self._name = name
        self._process = process
        self._said = said

    @classmethod
    async def start(cls, name: str, arguments: list[str], folder: Path, started: list[_Part]) -> _Part:
        said = folder / f"{name}.stderr"
        with said.open("wb") as errors:
            # A session of its own: Ctrl-C is meant for this command, which then ends its parts in order.
            process = await anyio.open_process(
                [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        part = cls(name, process, said)
        started.append(part)
        return part

    async def hello(self) -> dict[str, Any]:
        """The line of JSON that it prints when it listens."""
        assert self._process.stdout is not None
        heard = b""
        with anyio.move_on_after(START_LIMIT_S):
            while b"\n" not in heard:
                try:
                    heard += await self._process.stdout.receive()
                except anyio.EndOfStream:
                    break
        try:
            hello: dict[str, Any] = json.loads(heard)
        except ValueError:
            raise StackError(f"{self._name} did not start: {self.said()}") from None
        return hello

    def check(self) -> None:
        """Raises StackError if it has ended."""
        if self._process.returncode is not None:
            raise StackError(f"{self._name} ended with code {self._process.returncode}: {self.said()}")

    def said(self) -> str:
        """The end of what it wrote to its standard error."""
        try:
            return self._said.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip() or "it said nothing"
        except OSError:
            return "what it said cannot be read"

    async def stop(self) -> None:
        """End it in order; kill it if that takes too long."""
        with anyio.move_on_after(STOP_LIMIT_S):
            if self._process.returncode is None:
                self._process.send_signal(signal.SIGTERM)
            await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        await self._process.aclose()
