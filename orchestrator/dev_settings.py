"""The settings of `regate dev`: what the user brings, the sample beside it, and a fixed port for everything.

Knows which parts of the sample there are, where each of them is to listen, and how all of it is written down as
DATA/regate.toml, which every process of `regate dev` and every later command reads. Does not start anything.
"""

from __future__ import annotations

import json
import re
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from admission.contracts import ContractError, parse_contract
from orchestrator.settings import Settings, SettingsError, is_loopback

HOST = "127.0.0.1"
#: Below the range that systems take for outgoing connections, so that a port is still free after a restart.
PORT_FIRST, PORT_COUNT = 18_000, 10_000
SAMPLE_SERVICES: Mapping[str, str] = {"shop": "retail", "mail": "mail"}
#: Name and pause between two actions (ms). Six actions of the slow one last about a minute.
SAMPLE_AGENTS: Mapping[str, int] = {"plan": 0, "slow": 11_000}
SAMPLE_FILES = ("sample-goal.yaml", "sample-change.yaml")
CONTRACTS = "services"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the sample that is to be started."""

    name: str
    port: int


@dataclass(slots=True)
class DevPlan:
    """Everything that `regate dev` is about to run. `file` is the settings file that says so."""

    data_dir: Path
    file: Path
    api_port: int
    gateway_port: int
    services: list[Part] = field(default_factory=list)
    agents: list[Part] = field(default_factory=list)

    @property
    def sample(self) -> bool:
        """Whether the sample goal can be run here."""
        wanted = {*SAMPLE_SERVICES, *SAMPLE_AGENTS}
        return wanted <= {part.name for part in (*self.services, *self.agents)}


class _Ports:
    """Free ports, the same ones from start to start where possible."""

    def __init__(self, data_dir: Path) -> None:
        self._next = zlib.crc32(str(data_dir).encode()) % PORT_COUNT
        self._taken: set[int] = set()

    def take(self) -> int:
        """The next port that nobody listens on. Raises SettingsError."""
        for _ in range(PORT_COUNT):
            port = PORT_FIRST + self._next
            self._next = (self._next + 1) % PORT_COUNT
            if port not in self._taken and is_free(port):
                self._taken.add(port)
                return port
        raise SettingsError(f"no free port from {PORT_FIRST} to {PORT_FIRST + PORT_COUNT - 1} on {HOST}")


def is_free(port: int) -> bool:
    """Whether one could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def plan_dev(settings: Settings, *, agents: Sequence[str], services: Sequence[str], with_sample: bool) -> DevPlan:
    """Decide what to run where, and write it down in the data directory. Raises SettingsError.

    `agents`: NAME=URL, or a URL alone. `services`: NAME=URL=CONTRACT, or a contract whose service the settings name.
    """
    data_dir = settings.data_dir
    ports = _Ports(data_dir)
    brought_agents = dict(settings.agents) | dict(_brought_agents(agents, settings.agents))
    brought_services = {name: _absolute(table, settings.folder) for name, table in settings.services.items()}
    brought_services |= dict(_brought_services(services, brought_services))
    api_port = settings.api.port or ports.take()
    gateway_port = settings.gateway.port or ports.take()
    plan = DevPlan(data_dir, data_dir / "regate.toml", api_port, gateway_port)
    if with_sample:
        _add_sample(plan, ports, brought_agents, brought_services)
    plan.file.write_text("\n".join(_toml(settings, plan, brought_agents, brought_services)) + "\n", encoding="utf-8")
    return plan


def sample_text(name: str) -> str:
    """A file of the sample."""
    place = files("orchestrator") / "templates"
    for step in name.split("/"):
        place = place / step
    return place.read_text(encoding="utf-8")


def _add_sample(plan: DevPlan, ports: _Ports, agents: dict[str, str], services: dict[str, dict[str, Any]]) -> None:
    """The sample's parts, but for those whose name the user gave to something that is already there."""
    (plan.data_dir / CONTRACTS).mkdir(exist_ok=True)
    for name in SAMPLE_SERVICES:
        port = _port_for(services[name]["url"]) if name in services else ports.take()
        if port is None:
            continue
        plan.services.append(Part(name, port))
        if name not in services:
            contract = plan.data_dir / CONTRACTS / f"{name}.yaml"
            contract.write_text(sample_text(f"{CONTRACTS}/{name}.yaml"), encoding="utf-8")
            services[name] = {"url": f"http://{HOST}:{port}", "contract": str(contract)}
    for name in SAMPLE_AGENTS:
        port = _port_for(agents[name]) if name in agents else ports.take()
        if port is None:
            continue
        plan.agents.append(Part(name, port))
        agents[name] = f"http://{HOST}:{port}"
    for file in SAMPLE_FILES:
        (plan.data_dir / file).write_text(sample_text(file), encoding="utf-8")


def _port_for(url: str) -> int | None:
    """The port of a loopback address where nobody listens yet: the sample takes that part. None: leave it alone."""
    parts = urlsplit(url)
    port = parts.port
    return port if port and is_loopback(parts.hostname or "") and is_free(port) else None


# --- what the user brings --------------------------------------------------------------------------------------------


def _brought_agents(given: Sequence[str], known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for n, text in enumerate(given, start=1):
        name, equals, url = text.partition("=")
        if not equals or "/" in name:
            name, url = ("agent" if n == 1 else f"agent{n}"), text
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}", name):
            raise SettingsError(f"--agent {text}: {name!r} cannot be a name; give NAME=URL")
        yield name, _address(url, f"--agent {text}")


def _brought_services(
    given: Sequence[str], known: Mapping[str, dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for text in given:
        match = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_.\-]{0,63})=(https?:/.+)=([^=]+)", text)
        name, url, file = match.groups() if match else ("", "", text)
        path = Path(file).absolute()
        try:
            contract = parse_contract(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"--service {text}: {path} cannot be read ({error})") from None
        except ContractError as error:
            raise SettingsError(str(error)) from None
        name = name or contract.service
        table = dict(known.get(name, {}))
        if not url and "url" not in table:
            words = f"--service {text}: where is {name}? Give {name}=URL={file}, or its url in regate.toml"
            raise SettingsError(words)
        yield name, table | {"contract": str(path)} | ({"url": _address(url, f"--service {text}")} if url else {})


def _address(url: str, where: str) -> str:
    url = re.sub(r"^(https?):/(?!/)", r"\1://", url)  # a path type on the way may have taken one slash
    if not re.match(r"https?://[^/]", url):
        raise SettingsError(f"{where}: {url!r} is no address; give http(s)://HOST[:PORT]")
    return url.rstrip("/")


def _absolute(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A service's table as it reads from another folder."""
    moved = dict(table)
    if isinstance(moved.get("contract"), str):
        moved["contract"] = str(folder / moved["contract"])
    credential = moved.get("credential")
    if isinstance(credential, str) and credential.startswith("file:"):
        moved["credential"] = f"file:{folder / credential.removeprefix('file:')}"
    return moved


# --- written down ----------------------------------------------------------------------------------------------------


def _toml(
    settings: Settings, plan: DevPlan, agents: Mapping[str, str], services: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    yield "# Written anew by `regate dev` at each of its starts; change your own regate.toml instead."
    yield "[store]"
    yield f"data_dir = {_text(str(plan.data_dir))}"
    if settings.store_url is not None:
        yield f"url = {_text(settings.store_url)}"
    for name in ("allow_volatile", "assume_durable"):
        if getattr(settings, name):
            yield f"{name} = true"
    if settings.partitions is not None:
        yield f"partitions = {settings.partitions}"
    for name, listen, port in (
        ("api", settings.api, plan.api_port),
        ("gateway", settings.gateway, plan.gateway_port),
    ):
        shown = f"[{listen.host}]" if ":" in listen.host else listen.host
        yield f"\n[{name}]\nlisten = {_text(f'{shown}:{port}')}"
        scheme = "https" if listen.cert else "http"
        if listen.url or name == "gateway":
            yield f"url = {_text(listen.url or f'{scheme}://{shown}:{port}')}"
        if listen.cert and listen.key:
            yield f"tls_cert = {_text(str(listen.cert))}\ntls_key = {_text(str(listen.key))}"
    for name, table in services.items():
        yield f"\n[services.{_key(name)}]"
        for key, value in table.items():
            yield f"{key} = {_text(str(value))}"
    for name, url in agents.items():
        yield f"\n[agents.{_key(name)}]\nurl = {_text(url)}"


def _text(value: str) -> str:
    """A TOML text; JSON's escapes are a part of TOML's."""
    return json.dumps(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_\-]+", name) else _text(name)


__all__ = ["SAMPLE_AGENTS", "SAMPLE_SERVICES", "DevPlan", "Part", "plan_dev", "sample_text"]
