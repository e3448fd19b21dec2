"""How regate's words travel: grants as tokens, and A2A metadata.

Knows: the grant's format and signature, the extension's URI and the fields of its metadata.
Does not know: who may hold a grant *now*. A valid signature says "regate once made this child"; only the log says
whether the child is still current.
"""

import base64
import binascii
import hashlib
import hmac
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: The A2A extension that makes an agent revision-aware.
EXTENSION = "urn:regate:a2a:revision:v1"

#: A grant is void this long after it was made even if nothing else ends it (milliseconds).
GRANT_LIFETIME_MS = 24 * 60 * 60 * 1000


#: A body and a sha256 mac, both base64url.
_LOOKS_LIKE_A_GRANT = re.compile(r"[A-Za-z0-9_-]{40,}\.[A-Za-z0-9_-]{43}")
#: The same, and the body begins as `sign_grant` begins every one: `{"run":"`.
_GRANT = re.compile(r"eyJydW4iOi[A-Za-z0-9_-]{30,}\.[A-Za-z0-9_-]{43}")


class BadGrant(Exception):
    """The token is not one of ours, was altered, or is too old. The message holds no part of the token."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a worker may claim to be. `expires_ms` is on the store's clock."""

    run: str
    scope: str
    child: str
    revision: int
    expires_ms: int


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a result says it answers. Compared with the log before a result is adopted."""

    run: str
    scope: str
    child: str
    revision: int
    goal_hash: str


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _mac(key: bytes, purpose: bytes, body: bytes) -> bytes:
    return hmac.new(key, purpose + b"\x00" + body, hashlib.sha256).digest()


def sign_grant(grant: Grant, key: bytes) -> str:
    """The token for a grant, signed with the current key."""
    body = json.dumps(asdict(grant), separators=(",", ":")).encode()
    return f"{_b64(body)}.{_b64(_mac(key, b'grant', body))}"


def read_grant(token: str, keys: Sequence[bytes], now_ms: int) -> Grant:
    """The grant in a token, checked against the current and the previous key. Raises BadGrant."""
    try:
        head, _, tail = token.partition(".")
        body, mac = _unb64(head), _unb64(tail)
    except (ValueError, binascii.Error):
        raise BadGrant("the grant is not readable: send the one that came with the task") from None
    if not any(hmac.compare_digest(_mac(key, b"grant", body), mac) for key in keys):
        raise BadGrant("the grant's signature does not match any key of this gateway")
    try:
        fields = json.loads(body)
        grant = Grant(
            run=str(fields["run"]),
            scope=str(fields["scope"]),
            child=str(fields["child"]),
            revision=int(fields["revision"]),
            expires_ms=int(fields["expires_ms"]),
        )
    except (KeyError, TypeError, ValueError):
        raise BadGrant("the grant is signed but lacks a field: it was made by another version") from None
    if now_ms > grant.expires_ms:
        raise BadGrant("the grant has expired: only a new child or a re-attached one gets a new grant")
    return grant


def blot(text: str, grant: str = "") -> str:
    """Replace a grant, either half of it, and all that looks like one, by a sign that says what stood there."""
    text = _LOOKS_LIKE_A_GRANT.sub("[grant]", text)
    for piece in (grant, *grant.split(".")):
        if len(piece) >= 8:
            text = text.replace(piece, "[grant]")
    return text


def without_grants(value: Any) -> Any:
    """JSON that others wrote, with the grants of ours in it blotted out, at every depth.

    Stricter than `blot` about what a grant is: a result may hold things that only resemble one, and they are kept.
    """
    if isinstance(value, str):
        return _GRANT.sub("[grant]", value)
    if isinstance(value, Mapping):
        return {without_grants(key): without_grants(item) for key, item in value.items()}
    return [without_grants(item) for item in value] if isinstance(value, list) else value


def internal_token(key: bytes) -> str:
    """The bearer token with which the orchestrator speaks to the gateway's internal door."""
    return _b64(_mac(key, b"internal", b"door"))


def is_internal_token(token: str, keys: Sequence[bytes]) -> bool:
    """Whether a token opens the internal door."""
    return any(hmac.compare_digest(internal_token(key).encode(), token.encode()) for key in keys)


#: Doubles hold whole numbers exactly below this; above it, nobody can tell which one was meant.
_WHOLE_MAX = 2.0**53


def whole(value: Any) -> Any:
    """JSON numbers as they were meant: A2A carries every number as a double, so 3 arrives as 3.0.

    Whole numbers become int again, at any depth; without it the same action would have another slot each way.
    """
    if isinstance(value, float) and math.isfinite(value) and value.is_integer() and abs(value) < _WHOLE_MAX:
        return int(value)
    if isinstance(value, Mapping):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


def stamp_metadata(stamp: Stamp) -> dict[str, Any]:
    """A2A metadata that carries a stamp. Numbers travel as strings: a protobuf Struct would turn them into floats."""
    return {EXTENSION: {**asdict(stamp), "revision": str(stamp.revision)}}


def read_stamp(metadata: Mapping[str, Any]) -> Stamp | None:
    """The stamp in A2A metadata, or None when it is missing or incomplete (such a result is never adopted)."""
    fields = metadata.get(EXTENSION)
    if not isinstance(fields, Mapping):
        return None
    try:
        return Stamp(
            run=str(fields["run"]),
            scope=str(fields["scope"]),
            child=str(fields["child"]),
            revision=int(fields["revision"]),
            goal_hash=str(fields["goal_hash"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def launch_metadata(stamp: Stamp, *, grant: str, gateway: str) -> dict[str, Any]:
    """Metadata of the launching request: the stamp, the grant, and where the gate is.

    It goes into SendMessageRequest.metadata, which A2A servers do not keep in histories, because it holds the grant.
    An agent without the extension gets the stamp alone (`grant` is empty): it has no use for a gate, and what it does
    with metadata that it does not know is not known.
    """
    fields = stamp_metadata(stamp)
    if grant:
        fields[EXTENSION] |= {"grant": grant, "gateway": gateway}
    return fields
