"""The whole stack as processes, each of which a test may kill, stop for a while, and start again where it was.

Knows command lines, settings, ports and process ids. A stack has an orchestrator, a gateway, a worker and whatever
services and difficult children a test names; the store is the embedded one, run on REGATE_TEST_SERVER when that is set.
Does not know runs (story.py does). Everything is started by its command line and ended by its own process id, and
leaving a stack checks that nothing of it is left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

START_LIMIT_S = 30.0
STOP_LIMIT_S = 15.0
POLL_S = 0.01
#: Below the range from which the system takes ports for outgoing connections, so that a killed process finds its own.
PORTS = range(20_000, 32_000)

_KEYED = {
    "class": "VOID",
    "idempotency": {"header": "Idempotency-Key", "retention_ms": 86_400_000, "late_arrival_max_ms": 60_000},
    "lookup": {"path": "/keys/{key}"},
    "void": {"path": "/keys/{key}/void"},
    "refused_statuses": [422],
    "unavailable_statuses": [503, 410, 412],
    "tries_max": 3,
    "timeout_ms": 4_000,
    "reconcile_deadline_ms": 3_000,
}
_FORGETFUL = {
    "class": "OPAQUE",
    "refused_statuses": [422],
    "unavailable_statuses": [503],
    "tries_max": 1,
    "timeout_ms": 4_000,
    "reconcile_deadline_ms": 700,
}
_OPERATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "retail": {
        "cancel_pending_order": {
            "request": {"method": "POST", "path": "/actions/cancel_pending_order"},
            "arguments": {"order_id": "string", "reason": "string"},
            "target": "order_id",
            "generated": ["reason"],
        },
        "modify_user_address": {
            "request": {"method": "POST", "path": "/actions/modify_user_address"},
            "arguments": dict.fromkeys("user_id address1 address2 city state country zip".split(), "string"),
            "target": "user_id",
        },
    },
    "payments": {
        "refund": {
            "request": {"method": "POST", "path": "/actions/refund"},
            "arguments": {"order_id": "string", "amount_cents": "integer", "payment_method_id": "string"},
            "target": "order_id",
        },
    },
    "mail": {
        "send_message": {
            "request": {"method": "POST", "path": "/messages"},
            "arguments": {"to": "string", "template": "string", "body?": "string"},
            "target": "to",
            "identity": ["to", "template"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A simulated service: what it is, what it promises beyond the usual, how it is started."""

    kind: str
    contract: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def contract_text(self, name: str) -> str:
        """Its contract, as YAML."""
        promises = (_FORGETFUL if self.kind == "mail" else _KEYED) | dict(self.contract)
        operations = {action: {**body, **promises} for action, body in _OPERATIONS[self.kind].items()}
        return str(yaml.safe_dump({"service": name, "version": "1", "operations": operations}, sort_keys=False))


PAYMENTS = ServiceSpec("payments")
SHOP = ServiceSpec("retail")
#: A lost mail blocks its own slot, and nothing else.
MAIL = ServiceSpec("mail", {"unknown_blocks": "slot"})
#: A lost letter blocks its scope until somebody says what became of it.
LETTERS = ServiceSpec("mail", {"unknown_blocks": "scope"})


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on."""
    chance, found = random.Random(), list[int]()
    while len(found) < count:
        port = chance.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


class StackError(Exception):
    """A process did not start, or ended by itself; the message holds the end of what it said."""


class Part:
    """One process of the stack. It can be started again after it ended."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.arguments = list(arguments)
        self.environment = dict(environment)
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs or before it was started."""
        return self._process.poll() if self._process is not None else None

    def start(self, *more: str, **environment: str) -> None:
        """Start it; `wait_ready` says when it listens. `more` are arguments for this start alone."""
        assert not self.alive, f"{self.name} runs already"
        with self._out.open("wb") as out, self._err.open("ab") as err:
            self._process = subprocess.Popen(
                [sys.executable, *self.arguments, *more], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env={**self.environment, **environment}, start_new_session=True,
            )  # fmt: skip

    def ready(self) -> dict[str, Any] | None:
        """The line that says where it listens, if it has been printed. Raises StackError if the process ended."""
        first, end, _ = self._out.read_bytes().partition(b"\n")
        if end:
            hello: dict[str, Any] = json.loads(first)
            return hello
        if not self.alive:
            raise StackError(f"{self.name} ended with code {self.returncode}: {self.said()}")
        return None

    def wait_ready(self) -> dict[str, Any]:
        """Wait for that line. Raises StackError."""
        until = time.monotonic() + START_LIMIT_S
        while (hello := self.ready()) is None:
            if time.monotonic() > until:
                raise StackError(f"{self.name} was not ready in {START_LIMIT_S:.0f} s: {self.said()}")
            time.sleep(POLL_S)
        return hello

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it with SIGKILL, and take note of its end."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """End it in order; kill it if that takes too long."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise StackError(f"{self.name} did not end on SIGTERM: {self.said()}") from None

    def said(self, limit: int = 3_000) -> str:
        """The end of what it wrote to its standard error."""
        text = self._err.read_bytes() if self._err.exists() else b""
        return text[-limit:].decode(errors="replace").strip() or "it said nothing"


@dataclass(frozen=True, slots=True)
class StackSpec:
    """What a stack is made of. `agents` are difficult children by name, started only when a test asks for them."""

    services: Mapping[str, ServiceSpec]
    children: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    think_ms: int = 0
    partitions: int = 2
    #: Whether orchestrator, gateway and worker have points at which they can be told to die (admission/points.py).
    points: bool = False


class Stack:
    """A running stack; made by `running_stack`."""

    def __init__(self, folder: Path, binary: Path, spec: StackSpec) -> None:
        self.folder = folder
        self.spec = spec
        self.data = folder / "data"
        self.points = folder / "points"
        self.parts: dict[str, Part] = {}
        self.environment = _environment(folder, binary)
        names = ["api", "gateway", "api2", "plan", *spec.services, *spec.children]
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._settings()
        for name, service in spec.services.items():
            options = ["--journal", str(self.journal(name)), "--port", str(self.ports[name]), *service.options]
            self._part(name, "-m", "simulators", "service", service.kind, *options)
        think = ["--think-ms", str(spec.think_ms)]
        self._part("plan", "-m", "workers", "plan", "--port", str(self.ports["plan"]), *think)
        for name, (kind, *rest) in spec.children.items():
            self._part(name, "-m", "simulators", "child", kind, "--port", str(self.ports[name]), *rest)
        serve = ["-m", "orchestrator", "serve", "--config", str(folder / "regate.toml")]
        self._part("gateway", *serve, "--roles", "gateway")
        self._part("orchestrator", *serve, "--roles", "orchestrator")
        self._part("orchestrator2", *serve, "--roles", "orchestrator", "--listen", f"127.0.0.1:{self.ports['api2']}")

    def _part(self, name: str, *arguments: str) -> None:
        points = {"REGATE_POINTS": str(self.points), "REGATE_ROLE": name} if self.spec.points else {}
        self.parts[name] = Part(name, arguments, self.folder, {**self.environment, **points})

    def _settings(self) -> None:
        (self.folder / "services").mkdir(parents=True)
        self.points.mkdir()
        lines = [f'[store]\ndata_dir = "data"\npartitions = {self.spec.partitions}']
        lines.append(f'[gateway]\nlisten = "127.0.0.1:{self.ports["gateway"]}"\nurl = "{self.url("gateway")}"')
        lines.append(f'[api]\nlisten = "127.0.0.1:{self.ports["api"]}"')
        for name, service in self.spec.services.items():
            (self.folder / "services" / f"{name}.yaml").write_text(service.contract_text(name), encoding="utf-8")
            lines.append(f'[services.{name}]\nurl = "{self.url(name)}"\ncontract = "services/{name}.yaml"')
        lines += [f'[agents.{name}]\nurl = "{self.url(name)}"' for name in ("plan", *self.spec.children)]
        (self.folder / "regate.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    # -- what there is ------------------------------------------------------------------------------------------------

    def url(self, name: str) -> str:
        """Where a part answers."""
        return f"http://127.0.0.1:{self.ports[name]}"

    def journal(self, service: str) -> Path:
        """A service's own record."""
        return self.folder / f"{service}.journal.jsonl"

    def lines(self, service: str, *events: str) -> list[dict[str, Any]]:
        """What a service itself wrote down: all of it, or lines of these kinds."""
        path = self.journal(service)
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if not events or line["event"] in events]

    def effects(self, service: str, target: str) -> list[dict[str, Any]]:
        """What really happened to a target (an order, an address)."""
        return [line for line in self.lines(service, "executed") if target in line["arguments"].values()]

    @property
    def token(self) -> str:
        """What opens the API."""
        return (self.data / "api.token").read_text().strip()

    @property
    def grant_key(self) -> bytes:
        """The key that signs grants: with it a test can ask the gateway in a child's name."""
        return bytes.fromhex((self.data / "grant.keys").read_text().split()[0])

    @property
    def store_pid(self) -> int:
        """The embedded server's process id."""
        return int((self.data / "valkey.pid").read_text())

    # -- starting and ending ------------------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        """Start parts together and wait until all of them listen."""
        for name in names:
            self.parts[name].start()
        for name in names:
            self.parts[name].wait_ready()

    def start_all(self) -> None:
        """Everything but difficult children and the second orchestrator."""
        self.start(*self.spec.services, "plan", "gateway", "orchestrator")

    def ensure(self, *names: str) -> None:
        """Start what does not run of these parts."""
        self.start(*(name for name in names if not self.parts[name].alive))

    def kill9(self, name: str) -> None:
        """End a part, or the "store", with SIGKILL."""
        if name == "store":
            os.kill(self.store_pid, signal.SIGKILL)
        else:
            self.parts[name].kill()

    def restart(self, name: str) -> None:
        """Start a part again, on the port that it had."""
        self.parts[name].kill()
        self.start(name)

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """A part, or the "store", stands still (SIGSTOP) for the length of the block."""
        pid = self.store_pid if name == "store" else self.parts[name].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def fault(self, service: str, action: str, kind: str, *, ms: int = 0, calls: int = 1) -> None:
        """Make the next calls of an action go wrong. The service is started anew on its journal, which is quick."""
        before = sum(line["action"] == action and line["fault"] is not None for line in self.lines(service))
        self.parts[service].kill()
        self.parts[service].start("--fault", f"{action}:{kind}:{ms or ''}:{before + calls}")
        self.parts[service].wait_ready()

    def close(self) -> None:
        """End everything; raises StackError if something does not end. Stopped processes are woken first."""
        store = self.store_pid if (self.data / "valkey.pid").exists() else None
        failures = []
        order: list[str] = [name for name in self.parts if name not in ("gateway", "orchestrator", "orchestrator2")]
        for name in ("orchestrator2", "orchestrator", "gateway", *order):
            try:
                self.parts[name].stop()
            except StackError as failure:
                failures.append(str(failure))
        if store is not None and not _gone(store, STOP_LIMIT_S):
            os.kill(store, signal.SIGKILL)
            killed = [name for name, part in self.parts.items() if part.returncode == -signal.SIGKILL]
            # Whoever leaves last ends the store; if that one was killed, nobody did.
            if "gateway" not in killed and "orchestrator" not in killed:
                failures.append("the embedded store was left running")
        if failures:
            raise StackError("; ".join(failures))

    def said(self) -> str:
        """What orchestrators, gateway and worker have complained of."""
        names = ("orchestrator", "orchestrator2", "gateway", "plan")
        return "\n".join(f"--- {name}: {self.parts[name].said()}" for name in names)


def _environment(folder: Path, binary: Path) -> dict[str, str]:
    """What all parts get: no settings of the person who runs the tests, and the named server first on PATH."""
    shelf = folder / "bin"
    shelf.mkdir(parents=True)
    (shelf / "valkey-server").symlink_to(binary)
    # Compiled files are written even where the tests' own are not: these processes start again and again.
    kept = {n: v for n, v in os.environ.items() if not n.startswith("REGATE_") and n != "PYTHONDONTWRITEBYTECODE"}
    path = f"{shelf}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PATH": path, "OTEL_INSTRUMENTATION_A2A_SDK_ENABLED": "false"}


def _gone(pid: int, limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        stat = Path(f"/proc/{pid}/stat")
        with suppress(OSError):  # where there is no /proc, whoever has no parent is reaped at once
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        time.sleep(POLL_S)
    return False


@contextmanager
def running_stack(folder: Path, binary: Path, spec: StackSpec, *, start: bool = True) -> Iterator[Stack]:
    """A stack for the length of the block; nothing of it is left afterwards."""
    stack = Stack(folder, binary, spec)
    try:
        if start:
            stack.start_all()
        yield stack
    finally:
        stack.close()
