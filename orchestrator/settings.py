"""One `regate.toml`: where the store is, where to listen, which services and agents there are, and which keys sign.

Knows the tables of the file, what a wrong one is told, and where the grant keys come from. Does not know how a store is
opened, what a contract says, or whether anybody answers at an address. Secrets are not in the file: services refer to
theirs (`env:`, `file:`), and grant keys stand in REGATE_GRANT_KEYS or in a 0600 file of the data directory.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SETTINGS_FILE = "regate.toml"
SETTINGS_BYTES_MAX = 256 * 1024
GRANT_KEYS_FILE = "grant.keys"
GRANT_KEYS_VARIABLE = "REGATE_GRANT_KEYS"
GRANT_KEY_BYTES = 32
GRANT_KEY_BYTES_MIN = 16
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_NAME = r"^[A-Za-z_][A-Za-z0-9_.\-]{0,63}$"


class SettingsError(Exception):
    """The settings cannot be used. One line for each problem, with file, line where it is known, and what to do."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoreTable(_Table):
    """`[store]`. Without `url`, an embedded server runs on `data_dir`, which also holds keys and the endpoint file."""

    data_dir: Annotated[str, Field(min_length=1)] = "regate-data"
    url: Annotated[str, Field(pattern=r"^(redis|rediss|unix)://")] | None = None
    allow_volatile: bool = False
    assume_durable: bool = False
    partitions: Annotated[int, Field(ge=1, le=1024)] | None = None


class ListenTable(_Table):
    """`[api]` and `[gateway]`. `url` is the address that others reach it at, when that is not where it listens."""

    listen: Annotated[str, Field(min_length=1)] = "127.0.0.1:0"
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    tls_cert: Annotated[str, Field(min_length=1)] | None = None
    tls_key: Annotated[str, Field(min_length=1)] | None = None


class AgentTable(_Table):
    """`[agents.NAME]`: an A2A agent, whose card is found at `url`."""

    url: Annotated[str, Field(pattern=r"^https?://[^/]")]


class _File(_Table):
    store: StoreTable = StoreTable()
    gateway: ListenTable = ListenTable()
    api: ListenTable = ListenTable()
    services: dict[Annotated[str, Field(pattern=_NAME)], dict[str, Any]] = {}
    agents: dict[Annotated[str, Field(pattern=_NAME)], AgentTable] = {}


@dataclass(frozen=True, slots=True)
class Listen:
    """One listener. Port 0 takes a free one. `cert` and `key` are given together or not at all."""

    host: str
    port: int
    url: str | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What one process of regate is told. All paths are absolute; `services` are the tables as they stand."""

    file: str
    folder: Path
    data_dir: Path
    store_url: str | None
    allow_volatile: bool
    assume_durable: bool
    partitions: int | None
    gateway: Listen
    api: Listen
    services: Mapping[str, Mapping[str, Any]]
    agents: Mapping[str, str]


def load_settings(path: Path) -> Settings:
    """The settings in a file. Raises SettingsError."""
    try:
        with path.open("rb") as source:
            raw = source.read(SETTINGS_BYTES_MAX + 1)
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be read ({error.strerror}); `regate init` writes one that works as it stands"
        ) from None
    if len(raw) > SETTINGS_BYTES_MAX:
        raise SettingsError(f"{path}: is larger than {SETTINGS_BYTES_MAX} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: is not UTF-8 text") from None
    return parse_settings(text, file=str(path), folder=path.parent.absolute())


def find_settings(config: Path | None, data_dir: Path | None, *, here: Path) -> Settings:
    """The settings of a command: from the file that is named, else DATA/regate.toml, else ./regate.toml, else defaults.

    A data directory that is named goes before the one in the file. Raises SettingsError.
    """
    if config is not None:
        settings = load_settings(config / SETTINGS_FILE if config.is_dir() else config)
    elif data_dir is not None and (data_dir / SETTINGS_FILE).is_file():
        settings = load_settings(data_dir / SETTINGS_FILE)
    elif (here / SETTINGS_FILE).is_file():
        settings = load_settings(here / SETTINGS_FILE)
    else:
        settings = parse_settings("", file="(defaults)", folder=here.absolute())
    return settings if data_dir is None else replace(settings, data_dir=data_dir.absolute())


def parse_settings(text: str, *, file: str, folder: Path) -> Settings:
    """The settings in a TOML text; `file` is for messages, relative paths start at `folder`. Raises SettingsError."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"\(at line (\d+), column \d+\)", str(error))
        words = re.sub(r" \(at .*\)$", "", str(error))
        raise SettingsError(f"{file}:{at[1] if at else 1}: not TOML: {words}") from None
    try:
        tables = _File.model_validate(data)
    except ValidationError as error:
        raise SettingsError("\n".join(_worded(file, text, error))) from None
    return Settings(
        file=file,
        folder=folder,
        data_dir=(folder / Path(tables.store.data_dir).expanduser()).absolute(),
        store_url=tables.store.url,
        allow_volatile=tables.store.allow_volatile,
        assume_durable=tables.store.assume_durable,
        partitions=tables.store.partitions,
        gateway=parse_listen(tables.gateway, "gateway", place=(file, text), folder=folder),
        api=parse_listen(tables.api, "api", place=(file, text), folder=folder),
        services=tables.services,
        agents={name: agent.url.rstrip("/") for name, agent in tables.agents.items()},
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host`."""
    return host in _LOOPBACK or bool(re.fullmatch(r"127\.\d{1,3}\.\d{1,3}\.\d{1,3}", host))


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` (`[::1]:80` for IPv6). Raises ValueError with words for people."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{text!r} is no HOST:PORT; for instance 127.0.0.1:8080, port 0 takes a free one")
    host = host.removeprefix("[").removesuffix("]")
    if not host:
        raise ValueError(f"{text!r} names no host; 127.0.0.1 is this machine alone")
    return host, int(port)


def parse_listen(table: ListenTable, name: str, *, place: tuple[str, str], folder: Path) -> Listen:
    """The listener of `[name]`. `place` is file name and text, for messages. Raises SettingsError."""
    file, text = place
    where = f"{file}:{_line(text, (name, 'listen'))}: [{name}]" if text else f"{file}: [{name}]"
    try:
        host, port = parse_address(table.listen)
    except ValueError as error:
        raise SettingsError(f"{where} listen: {error}") from None
    if (table.tls_cert is None) != (table.tls_key is None):
        raise SettingsError(f"{where} tls_cert and tls_key belong together: give both or none")
    if not is_loopback(host) and table.tls_cert is None:
        raise SettingsError(
            f"{where} listen: {host} can be reached from other machines, and tokens travel over it: "
            "give tls_cert and tls_key, or listen on 127.0.0.1"
        )
    if table.url is not None and not is_loopback(urlsplit(table.url).hostname or "") and table.url.startswith("http:"):
        raise SettingsError(f"{where} url: tokens would travel unencrypted to {table.url}; use https")
    cert = folder / table.tls_cert if table.tls_cert else None
    key = folder / table.tls_key if table.tls_key else None
    for path in (cert, key):
        if path is not None and not path.is_file():
            raise SettingsError(f"{where} {path} does not exist")
    return Listen(host, port, table.url.rstrip("/") if table.url else None, cert, key)


def _worded(file: str, text: str, error: ValidationError) -> Iterator[str]:
    for e in error.errors(include_url=False, include_input=False):
        steps = tuple(str(step) for step in e["loc"] if step != "[key]")
        where = f"{file}:{_line(text, steps)}"
        table = ".".join(steps[:-1])
        match e["type"]:
            case "extra_forbidden":
                known = ", ".join(_known(steps[:-1]))
                what = f"key `{steps[-1]}` in [{table}]" if table else f"table [{steps[-1]}]"
                yield f"{where}: unknown {what}; known: {known}"
            case "missing":
                yield f"{where}: [{table}] lacks `{steps[-1]}`"
            case _:
                yield f"{where}: {'.'.join(steps)}: {e['msg'][:1].lower()}{e['msg'][1:]}"


def _known(steps: tuple[str, ...]) -> list[str]:
    models: dict[str, type[BaseModel]] = {"store": StoreTable, "gateway": ListenTable, "api": ListenTable}
    if not steps:
        return [f"[{name}]" for name in _File.model_fields]
    return list((AgentTable if steps[0] == "agents" else models.get(steps[0], _File)).model_fields)


def _line(text: str, steps: tuple[str, ...]) -> int:
    """The line of the key, or of its table, or 1. tomllib keeps no places, so headers and keys are looked for."""
    found, table = 1, ""
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        header = re.match(r"\[\s*([^\[\]]+?)\s*\]", stripped)
        if header:
            table = header[1].replace(" ", "").replace('"', "")
            if steps and table in (".".join(steps), ".".join(steps[:-1])):
                found = number
        key = re.match(r'"?([A-Za-z0-9_.\-]+)"?\s*=', stripped)
        if key and f"{table}.{key[1]}".lstrip(".") == ".".join(steps):
            return number
    return found


# --- keys ------------------------------------------------------------------------------------------------------------


def grant_keys(data_dir: Path, environment: Mapping[str, str], new_key: Callable[[int], bytes]) -> list[bytes]:
    """The keys that sign grants, the current one first.

    From REGATE_GRANT_KEYS (hex, separated by commas), else from DATA/grant.keys (one a line), which is made at the
    first use. Raises SettingsError; no message holds a part of a key.
    """
    given = environment.get(GRANT_KEYS_VARIABLE, "").strip()
    if given:
        return _keys(given.split(","), GRANT_KEYS_VARIABLE)
    path = data_dir / GRANT_KEYS_FILE
    while True:
        try:
            text = path.read_text(encoding="ascii")
        except FileNotFoundError:
            _write_keys(path, new_key(GRANT_KEY_BYTES).hex())
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path}: the grant keys cannot be read ({type(error).__name__})") from None
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise SettingsError(f"{path}: others can read it; `chmod 600 {path}`, or remove it to have new keys made")
        return _keys(text.split(), str(path))


def _write_keys(path: Path, text: str) -> None:
    """Several processes may start at once: the first whole file wins."""
    mine = path.with_name(f".{path.name}.{os.getpid()}")
    mine.unlink(missing_ok=True)
    descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(mine, path)
    except FileExistsError:
        pass
    finally:
        mine.unlink()


def _keys(texts: list[str], where: str) -> list[bytes]:
    keys = []
    for text in texts:
        try:
            key = bytes.fromhex(text.strip())
        except ValueError:
            raise SettingsError(f"{where}: a grant key is not hexadecimal; `openssl rand -hex 32` makes one") from None
        if len(key) < GRANT_KEY_BYTES_MIN:
            raise SettingsError(f"{where}: a grant key has {len(key)} bytes, at least {GRANT_KEY_BYTES_MIN} are needed")
        keys.append(key)
    if not keys:
        raise SettingsError(f"{where}: holds no grant key; remove it to have one made")
    return keys
