"""`regate demo`: a user changes their mind while two agents work, on real processes.

Theory of operation. Services, agents, gateway and orchestrator are started as processes of their own. The story waits
for things to be true (an effect in a service's journal, a row in the API), acts as the user and as bad luck, and shows
at the end what the API says and what an independent program finds when it holds the log against the services' own
journals. Nothing on the last screen comes from this script (demo_report.py).

The seed decides how long the payment service keeps its answer and when exactly the gateway is killed.
"""

from __future__ import annotations

import random
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import yaml

from orchestrator.cli_client import Api, Where, new_request_id, read_endpoint
from orchestrator.cli_output import CommandFailed, Exit, Output, screen_for
from orchestrator.demo_report import draw, report
from orchestrator.supervise import ProcessFailed, Program, Supervisor

#: Longest that the story may take, and waits within it (seconds).
STORY_DEADLINE_S = 60.0
POLL_S = 0.05
SERVICES = ("shop", "payments", "mail")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where everything is, and what the seed decided."""

    data: Path
    seed: int
    ports: Mapping[str, int]
    answer_kept_ms: int
    redirect_after_ms: int
    kill_after_ms: int
    journals: Mapping[str, Path] = field(default_factory=dict)


def demo(seed: int, data: Path | None, output: Output) -> int:
    """Run the story; the exit code. Its data directory is kept."""
    screen = screen_for(output)
    try:
        shown = anyio.run(_run, prepared(seed, data), screen.say)
    except ProcessFailed as error:
        raise CommandFailed(Exit.FAILED, str(error)) from None
    except TimeoutError:
        raise CommandFailed(Exit.FAILED, "the story did not come to its end in time; the logs are kept") from None
    screen.show(shown, lambda: draw(shown))
    promises = shown["promises"]
    broken = promises["duplicate_effects"] + promises["stale_effects"] + promises["hidden_unknowns"]
    return Exit.FAILED if broken or promises["violations"] else Exit.DONE


def prepared(seed: int, data: Path | None) -> Setting:
    """Choose directory, ports and what the seed decides; write the files that the processes read."""
    folder = data or _next_folder(Path("regate-demo"))
    if (folder / "regate.toml").exists():
        raise CommandFailed(Exit.USAGE, f"{folder} holds a demo already; look at it, or name another with --data")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    chance = random.Random(seed)  # noqa: S311 - a story's moments, nothing secret
    ports = _free_ports("shop", "payments", "mail", "careful", "plan", "stubborn", "gateway", "api")
    setting = Setting(
        data=folder,
        seed=seed,
        ports=ports,
        answer_kept_ms=chance.randrange(4_000, 6_000),
        redirect_after_ms=chance.randrange(100, 300),
        kill_after_ms=chance.randrange(50, 250),
        journals={name: folder / "journals" / f"{name}.jsonl" for name in SERVICES},
    )
    (folder / "journals").mkdir(exist_ok=True)
    with as_file(files("orchestrator") / "templates" / "demo") as templates:
        shutil.copytree(templates, folder / "files", dirs_exist_ok=True)
    (folder / "regate.toml").write_text(_toml(ports), encoding="utf-8")
    return setting


def _next_folder(parent: Path) -> Path:
    n = 1
    while (parent / str(n)).exists():
        n += 1
    return parent / str(n)


def _free_ports(*names: str) -> dict[str, int]:
    """Ports that are free now; fixed, so that a process that is started again listens where it did."""
    sockets = {name: socket.socket() for name in names}
    try:
        for opened in sockets.values():
            opened.bind(("127.0.0.1", 0))
        return {name: opened.getsockname()[1] for name, opened in sockets.items()}
    finally:
        for opened in sockets.values():
            opened.close()


def _toml(ports: Mapping[str, int]) -> str:
    lines = ["# Written by `regate demo`.", "[store]", 'data_dir = "."']
    lines += ["[gateway]", f'listen = "127.0.0.1:{ports["gateway"]}"', f'url = "http://127.0.0.1:{ports["gateway"]}"']
    lines += ["[api]", f'listen = "127.0.0.1:{ports["api"]}"']
    for name in SERVICES:
        lines += [f"[services.{name}]", f'url = "http://127.0.0.1:{ports[name]}"', f'contract = "files/{name}.yaml"']
    for name in ("careful", "plan", "stubborn"):
        lines += [f"[agents.{name}]", f'url = "http://127.0.0.1:{ports[name]}"']
    return "\n".join(lines) + "\n"


def _programs(setting: Setting) -> list[Program]:
    python = sys.executable

    def service(name: str, kind: str, *more: str) -> Program:
        command = (python, "-m", "simulators", "service", kind, "--port", str(setting.ports[name]))
        return Program(role=name, command=(*command, "--journal", str(setting.journals[name]), *more))

    def worker(name: str, think_ms: int) -> Program:
        command = (python, "-m", "workers", "plan", "--name", name, "--port", str(setting.ports[name]))
        return Program(role=f"worker {name}", command=(*command, "--think-ms", str(think_ms)))

    stubborn = (python, "-m", "simulators.children", "late", "--port", str(setting.ports["stubborn"]))
    config = str(setting.data / "regate.toml")
    serve = (python, "-m", "orchestrator", "serve", "--config", config, "--roles")
    return [
        service("shop", "retail"),
        service("payments", "payments", "--fault", f"refund:delay:{setting.answer_kept_ms}:1"),
        service("mail", "mail", "--fault", "send_message:lose::1"),
        worker("careful", 1_000),
        worker("plan", 0),
        Program(role="child stubborn", command=(*stubborn, "--delay-ms", "800")),
        Program(role="gateway", command=(*serve, "gateway")),
        Program(role="orchestrator", command=(*serve, "orchestrator")),
    ]


async def _run(setting: Setting, say: Callable[[str], None]) -> dict[str, Any]:
    with anyio.fail_after(STORY_DEADLINE_S):
        async with Supervisor(setting.data, wall_ms=_wall_ms, report=say) as supervisor:
            say(f"starting services, agents, gateway and orchestrator (everything is kept in {setting.data})")
            async with anyio.create_task_group() as tasks:
                for program in _programs(setting):
                    tasks.start_soon(supervisor.start, program)
            endpoint = read_endpoint(setting.data)
            if endpoint is None:
                raise ProcessFailed("the orchestrator wrote no endpoint.json")
            with Api(endpoint, Where(data=setting.data)) as api:
                run = await _story(setting, supervisor, api, say)
                shown = await report(api, run, setting.data, setting.journals, paste=_command())
        # What was running when the API was asked has been ended since, and the supervisor saw how.
        ended = {row["pid"]: row["ended"] for row in supervisor.processes()}
        for row in shown["processes"]:
            row["ended"] = ended.get(row["pid"], row["ended"])
        return shown


async def _story(setting: Setting, supervisor: Supervisor, api: Api, say: Callable[[str], None]) -> str:
    started = await _change(api, "/v1/runs", {"goal": _file(setting, "goal.yaml")})
    run = str(started["run"]["run"])
    say(f"the user starts run {run}: two agents in two scopes, delivery and refund, work on one customer's orders")
    await _until(lambda: _journalled(setting, "mail"))
    say("the mail service has sent a mail; its answer is lost, and it cannot be asked")
    await _until(lambda: _journalled(setting, "payments"))
    say("the payment service has recorded a refund; it keeps its answer")
    await anyio.sleep(setting.redirect_after_ms / 1000)
    change = {"kind": "correct", "goal": _file(setting, "change.yaml"), "expected_revision": 1}
    redirected = await _change(api, f"/v1/runs/{run}/revisions", change | {"reason": "order #S40126 is kept after all"})
    say(f"the user changes the goal of scope refund: {redirected['line']}")
    await anyio.sleep(setting.kill_after_ms / 1000)
    pid = supervisor.kill("gateway")
    await supervisor.wait_gone("gateway", pid)
    say(f"the gateway (pid {pid}) is killed with kill -9, with the refund's answer still under way")
    await supervisor.ready("gateway")
    say("the gateway is back; the orchestrator has it ask what became of the refund")
    last = ""
    while True:
        view = await anyio.to_thread.run_sync(lambda: api.get(f"/v1/runs/{run}"))
        line = _where(view)
        if line != last:
            say(line)
            last = line
        if _is_over(view):
            return run
        await anyio.sleep(POLL_S * 2)


async def _change(api: Api, path: str, body: dict[str, Any]) -> Any:
    return await anyio.to_thread.run_sync(lambda: api.change(path, body, request_id=new_request_id()))


def _where(view: Mapping[str, Any]) -> str:
    gates = ", ".join(f"{name} {row['gate']} at revision {row['cur']}" for name, row in view["scopes"].items())
    counts = ", ".join(f"{n} {outcome}" for outcome, n in view["effect_counts"].items())
    return f"run {view['state']}; {gates}; effects: {counts}"


def _is_over(view: Mapping[str, Any]) -> bool:
    """Every scope has its result and every child was seen to end: what is left, only a person can settle."""
    done = all(scope["done"] for scope in view["scopes"].values())
    ended = all(child["state"] in ("ended", "stop_confirmed", "lost") for child in view["children"])
    late = any(result["disposition"] == "dropped" for result in view["results"])
    return done and ended and late


def _file(setting: Setting, name: str) -> Any:
    return yaml.safe_load((setting.data / "files" / name).read_text(encoding="utf-8"))


def _journalled(setting: Setting, name: str) -> bool:
    path = setting.journals[name]
    return path.exists() and '"executed"' in path.read_text(encoding="utf-8")


async def _until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - what is waited for happens in another process
        await anyio.sleep(POLL_S)


def _command() -> str:
    """How `regate` is called from where this was called, so that the last lines can be pasted as they stand."""
    beside = Path(sys.executable).parent / "regate"
    if shutil.which("regate") and Path(str(shutil.which("regate"))).resolve() == beside.resolve():
        return "regate"
    if not beside.exists():
        return f"{sys.executable} -m orchestrator"
    try:
        return str(beside.relative_to(Path.cwd()))
    except ValueError:
        return str(beside)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
