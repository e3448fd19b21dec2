"""`regate dev`: everything on this machine, each part a process of its own, until Ctrl-C.

Knows in which order the parts are started, what each of them may know of our environment, and what a person is told who
wants to try it. How processes are kept is in supervise.py, what is run where in dev_settings.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from admission.data_directory import is_locked
from orchestrator.app import EXIT_FAILED, announce, explained, quiet_log, say, wall_ms
from orchestrator.dev_lock import AlreadyRuns, dev_lock
from orchestrator.dev_settings import SAMPLE_AGENTS, SAMPLE_SERVICES, DevPlan, plan_dev
from orchestrator.endpoint import ENDPOINT_FILE
from orchestrator.leash import STORE_ROLE
from orchestrator.settings import GRANT_KEYS_VARIABLE, Settings, SettingsError, find_settings, load_settings
from orchestrator.store_access import data_directory_ready, embedded_server
from orchestrator.supervise import ProcessFailed, Program, Supervisor

PYTHON = (sys.executable, "-m")
WORLD = "world"
OWN_VARIABLES = frozenset({GRANT_KEYS_VARIABLE, "REGATE_TOKEN"})


def dev(
    *,
    data: Path | None = None,
    config: Path | None = None,
    agents: Sequence[str] = (),
    services: Sequence[str | Path] = (),
    sample: bool = True,
) -> int:
    """Run until Ctrl-C or SIGTERM; the exit code. See `plan_dev` for `agents` and `services`."""
    quiet_log()
    try:
        # Not DATA/regate.toml: that is what an earlier start of this command has made of the user's own settings.
        settings = find_settings(config, None, here=Path.cwd())
        if data is not None:
            settings = replace(settings, data_dir=data.absolute())
        anyio.run(_dev, settings, tuple(agents), tuple(str(service) for service in services), sample)
    except BaseException as error:
        code = explained(error)
        if code is None:
            failure = _failure(error)
            if failure is None:
                raise
            say(str(failure))
            code = EXIT_FAILED
        return code
    return 0


def _failure(error: BaseException) -> ProcessFailed | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, ProcessFailed) else None


async def _dev(settings: Settings, agents: tuple[str, ...], services: tuple[str, ...], sample: bool) -> None:
    if not (agents or services or settings.agents or settings.services or sample):
        raise SettingsError("without the sample, name an agent and a service: --agent NAME=URL --service FILE")
    data_directory_ready(settings.data_dir)
    try:
        with dev_lock(settings.data_dir):
            await _kept(settings, agents, services, sample)
    except AlreadyRuns:
        raise ProcessFailed(_already(settings.data_dir)) from None


def _already(data_dir: Path) -> str:
    """Where the other one is."""
    try:
        found = json.loads((data_dir / ENDPOINT_FILE).read_text(encoding="utf-8"))["url"]
        where = f" at {found}"
    except (OSError, ValueError, KeyError, TypeError):
        where = ""
    return f"`regate dev` already runs on {data_dir}{where}: use it, end it with Ctrl-C, or name another --data"


async def _kept(settings: Settings, agents: tuple[str, ...], services: tuple[str, ...], sample: bool) -> None:
    plan = plan_dev(settings, agents=agents, services=services, with_sample=sample)
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with AsyncExitStack() as stack:
            store_row: list[tuple[Supervisor, dict[str, Any]]] = []
            # Called last: by then the store's server was stopped, unless somebody else uses it.
            stack.callback(_note_store, store_row, settings)
            server = None
            if settings.store_url is None:
                server = await stack.enter_async_context(embedded_server(settings.data_dir))
            supervisor = await stack.enter_async_context(Supervisor(plan.data_dir, wall_ms=wall_ms, report=say))
            if server is not None:
                store_row.append((supervisor, supervisor.note(STORE_ROLE, server.pid)))
            url = await start_parts(supervisor, plan, load_settings(plan.file))
            announce({"role": "dev", "url": url, "gateway": f"http://127.0.0.1:{plan.gateway_port}",
                      "data": str(plan.data_dir), "pid": os.getpid()})  # fmt: skip
            for line in how_to(plan, url):
                say(line)
            async for _ in signals:
                say("stopping")
                return


def _note_store(rows: list[tuple[Supervisor, dict[str, Any]]], settings: Settings) -> None:
    for supervisor, row in rows:
        if not is_locked(settings.data_dir):
            supervisor.note_end(row, "stopped")


async def start_parts(supervisor: Supervisor, plan: DevPlan, settings: Settings) -> str:
    """Start everything that the plan names, at once; the API's URL. Raises ProcessFailed."""
    found: dict[str, dict[str, Any]] = {}
    failures: list[ProcessFailed] = []

    async def start(program: Program) -> None:
        try:
            found[program.role] = await supervisor.start(program)
        except ProcessFailed as failure:
            failures.append(failure)

    async with anyio.create_task_group() as tasks:
        for program in programs(plan, settings):
            tasks.start_soon(start, program)
    if failures:
        raise failures[0]
    return str(found["orchestrator"]["url"])


def programs(plan: DevPlan, settings: Settings) -> list[Program]:
    """The processes: services, agents, gateway, orchestrator. Each is told no more secrets than it needs."""
    world = plan.data_dir / WORLD
    world.mkdir(exist_ok=True)
    bare = environment_without(settings, os.environ)
    serve = (*PYTHON, "orchestrator", "serve", "--data", str(plan.data_dir), "--config", str(plan.file), "--roles")
    parts = [
        Program(
            role=f"service:{part.name}",
            command=(
                *PYTHON, "simulators", "service", SAMPLE_SERVICES[part.name], "--port", str(part.port),
                "--journal", str(world / f"{part.name}-journal.jsonl"),
            ),
            environment=bare,
        )
        for part in plan.services
    ]  # fmt: skip
    parts += [
        Program(
            role=f"agent:{part.name}",
            command=(
                *PYTHON, "workers", "plan", "--port", str(part.port), "--name", part.name,
                "--think-ms", str(SAMPLE_AGENTS[part.name]),
            ),
            environment=bare,
        )
        for part in plan.agents
    ]  # fmt: skip
    keyed = bare | {name: os.environ[name] for name in OWN_VARIABLES if name in os.environ}
    parts.append(Program(role="gateway", command=(*serve, "gateway")))
    parts.append(Program(role="orchestrator", command=(*serve, "orchestrator"), environment=keyed))
    return parts


def environment_without(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Our environment without keys and credentials: an agent must not be able to read what opens a service."""
    secret: Collection[str] = OWN_VARIABLES | {
        str(table["credential"]).removeprefix("env:")
        for table in settings.services.values()
        if str(table.get("credential", "")).startswith("env:")
    }
    return {name: value for name, value in environment.items() if name not in secret}


def how_to(plan: DevPlan, url: str) -> list[str]:
    """What a person can do now, as commands that can be pasted."""
    data = f" --data {plan.data_dir}"
    lines = [
        f"regate runs at {url}; data, logs and the token are in {plan.data_dir}. Ctrl-C stops everything.",
        "",
    ]
    if plan.sample:
        goal, change = plan.data_dir / "sample-goal.yaml", plan.data_dir / "sample-change.yaml"
        lines += [
            "A goal that lasts a minute, to be redirected on its way; in another terminal:",
            f"  regate run start -f {goal}{data}",
            f'  regate run redirect --last -f {change} --reason "the depot has moved"{data}',
            f"  regate run show --last{data}",
            f"  regate log --last --control{data}",
        ]
    else:
        lines += ["In another terminal:", f"  regate run start -f goal.yaml{data}", f"  regate run show --last{data}"]
    return lines
