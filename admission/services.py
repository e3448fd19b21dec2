"""Which services there are: name, address, contract, and where the credential is kept.

Knows the `[services.*]` tables of regate.toml and the two kinds of reference to a secret (`env:`, `file:`). A secret is
read when it is used, so that it can be changed without a restart; it is in no repr and no message. Does not know HTTP.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from admission.contracts import Contract, ContractError, parse_contract

CREDENTIAL_MAX_BYTES = 8 * 1024
#: What stands where a credential stood.
BLOT = "***"
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_HEADER_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")


class ServiceError(Exception):
    """The services cannot be used as they are declared. The message names file and table, and what to change."""


class CredentialError(Exception):
    """A secret cannot be read. The message holds the reference (`env:NAME`), never the secret."""


class ServiceSettings(BaseModel):
    """One `[services.NAME]` table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Annotated[str, Field(min_length=1)]
    contract: Annotated[str, Field(min_length=1)]
    credential: Annotated[str, Field(pattern=r"^(env:[A-Za-z_][A-Za-z0-9_]*|file:.+)$")] | None = None
    credential_header: Annotated[str, Field(pattern=r"^[A-Za-z0-9\-]{1,64}$")] = "Authorization"


@dataclass(frozen=True, slots=True)
class SecretReference:
    """Where a secret is kept: `env:NAME`, or `file:PATH` relative to `folder`."""

    reference: str
    folder: Path
    environment: Mapping[str, str]

    @property
    def file(self) -> Path | None:
        """The file it is kept in, None for a variable."""
        kind, _, where = self.reference.partition(":")
        return self.folder / where if kind == "file" else None

    def read(self) -> str:
        """The secret, without the white space around it. Raises CredentialError."""
        file = self.file
        if file is None:
            found = self.environment.get(self.reference.partition(":")[2], "").strip()
        else:
            try:
                with file.open("rb") as source:
                    found = source.read(CREDENTIAL_MAX_BYTES + 1).decode("ascii").strip()
            except UnicodeDecodeError:
                raise CredentialError(f"{self.reference}: its content cannot stand in a header") from None
            except OSError as error:
                raise CredentialError(f"{self.reference}: {error.strerror} ({file})") from None
        if not found:
            raise CredentialError(f"{self.reference} is {'empty' if file else 'not set'}")
        if len(found) > CREDENTIAL_MAX_BYTES or not _HEADER_VALUE.fullmatch(found):
            raise CredentialError(f"{self.reference}: its content cannot stand in a header")
        return found


@dataclass(frozen=True, slots=True)
class Service:
    """A service as the gateway speaks to it. `url` has no slash at its end."""

    name: str
    url: str
    contract: Contract
    secret_reference: SecretReference | None = None
    credential_header: str = "Authorization"

    def credential_headers(self) -> dict[str, str]:
        """The header that carries the credential, read now. Raises CredentialError."""
        if self.secret_reference is None:
            return {}
        value = self.secret_reference.read()
        if self.credential_header.lower() == "authorization" and " " not in value:
            value = f"Bearer {value}"
        return {self.credential_header: value}


def blot_credential(said: Any, sent: Mapping[str, str]) -> Any:
    """What a service said, at every depth, with the credential blotted out should it be echoed there.

    `said` is decoded JSON, since JSON can spell one text in many ways; `sent` are the `credential_headers` that went
    out with the request, since the secret may have been changed between the request and its answer.
    """
    # A scheme ("Bearer") is no secret, and a service may echo what stands behind it alone.
    secrets = [v.partition(" ")[2].strip() if n.lower() == "authorization" else v for n, v in sent.items()]
    return _blotted(said, secrets) if secrets else said


def _blotted(value: Any, secrets: Sequence[str]) -> Any:
    match value:
        case str():
            for secret in secrets:
                value = value.replace(secret, BLOT)
            return value
        case dict():
            return {_blotted(name, secrets): _blotted(inner, secrets) for name, inner in value.items()}
        case list():
            return [_blotted(inner, secrets) for inner in value]
        case int() | float() if not isinstance(value, bool) and str(value) in secrets:
            return BLOT
        case _:
            return value


@dataclass(frozen=True, slots=True)
class Services:
    """All services by name. `warnings` are sentences for the operator, found while loading."""

    by_name: Mapping[str, Service]
    warnings: tuple[str, ...] = ()

    def get(self, name: str) -> Service | None:
        """The service of that name, if there is one."""
        return self.by_name.get(name)


def load_services(
    tables: Mapping[str, Any], *, file: str, folder: Path, environment: Mapping[str, str] | None = None
) -> Services:
    """The services that `[services.*]` declares. `file` names the settings file in messages; paths start at `folder`.

    Every credential is read once, so that a missing one is found at the start. Raises ServiceError, ContractError.
    """
    known = os.environ if environment is None else environment
    by_name: dict[str, Service] = {}
    warnings: list[str] = []
    for name, table in tables.items():
        place = f"{file}: [services.{name}]"
        try:
            settings = ServiceSettings.model_validate(table)
        except ValidationError as error:
            raise ServiceError("\n".join(_worded(place, error))) from None
        _check_url(place, settings.url)
        contract = _read_contract(place, folder / settings.contract)
        if contract.service != name:
            raise ServiceError(f"{place}: {settings.contract} is the contract of {contract.service!r}; use that name")
        secret = SecretReference(settings.credential, folder, known) if settings.credential else None
        if secret is not None:
            try:
                secret.read()
            except CredentialError as error:
                raise ServiceError(f"{place}: the credential cannot be read: {error}") from None
            warnings += _openness(place, secret, settings.url)
        by_name[name] = Service(name, settings.url.rstrip("/"), contract, secret, settings.credential_header)
    return Services(by_name, tuple(warnings))


def _worded(place: str, error: ValidationError) -> Iterator[str]:
    for e in error.errors(include_url=False, include_input=False):
        where = ".".join(str(step) for step in e["loc"])
        match e["type"]:
            case "extra_forbidden":
                yield f"{place}: unknown key `{where}`; known: {', '.join(ServiceSettings.model_fields)}"
            case "missing":
                yield f"{place}: `{where}` is missing"
            case _ if where == "credential":
                yield f"{place}: credential must be a reference, env:NAME or file:PATH, never the secret itself"
            case _:
                yield f"{place}: {where}: {e['msg']}"


def _check_url(place: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ServiceError(f"{place}: url is not an address") from None
    if not usable or parts.query or parts.fragment:
        raise ServiceError(f"{place}: url must be http(s)://HOST[:PORT][/PATH], without ? and #")
    if parts.username is not None or parts.password is not None:
        raise ServiceError(f"{place}: url holds a user name or password; put it where `credential` refers to")


def _read_contract(place: str, path: Path) -> Contract:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ServiceError(f"{place}: the contract {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ServiceError(f"{place}: the contract {path} is not UTF-8 text") from None
    return parse_contract(text, str(path))


def _openness(place: str, secret: SecretReference, url: str) -> Iterator[str]:
    if secret.file is not None and stat.S_IMODE(secret.file.stat().st_mode) & stat.S_IROTH:
        yield f"{place}: {secret.file} can be read by everybody on this machine; chmod 600 it"
    parts = urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        yield f"{place}: the credential travels unencrypted to {parts.hostname}; use https"


__all__ = [
    "ContractError", "CredentialError", "SecretReference", "Service", "ServiceError", "ServiceSettings", "Services",
    "blot_credential", "load_services",
]  # fmt: skip
