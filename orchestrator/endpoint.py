"""DATA/endpoint.json: where the API of a data directory is and what opens it, for the commands of the same user.

Knows the file, 0600 and written in one step. The token stays the same from start to start, so that whoever was told it
need not be told again. Of several servers on one directory the newest stands there; when it ends, the one before it
does again. Does not know who reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ENDPOINT_FILE = "endpoint.json"
TOKEN_FILE = "api.token"  # noqa: S105 - the name of the file
TOKEN_CHARS_MIN = 16


def endpoint_token(data_dir: Path, new_token: Callable[[], str]) -> str:
    """The data directory's token, made at the first use and kept in a 0600 file."""
    path = data_dir / TOKEN_FILE
    try:
        kept = path.read_text(encoding="ascii").strip()
        if len(kept) >= TOKEN_CHARS_MIN and not path.stat().st_mode & 0o077:
            return kept
    except (OSError, UnicodeDecodeError):
        pass
    made = new_token()
    _write_private(path, made + "\n")
    return made


def write_endpoint(data_dir: Path, *, url: str, token: str, gateway: str, pid: int) -> None:
    """Say where the API is."""
    content = {"url": url, "token": token, "gateway": gateway, "pid": pid}
    _write_private(data_dir / ENDPOINT_FILE, json.dumps(content) + "\n")


def living_endpoint(data_dir: Path) -> dict[str, Any] | None:
    """What another process that still lives has written there."""
    found = _read(data_dir)
    return found if found is not None and _lives(found.get("pid")) else None


def forget_endpoint(data_dir: Path, *, pid: int, earlier: Mapping[str, Any] | None = None) -> None:
    """Take the file away, if it is still about this process; put back what another one had written, if it lives."""
    found = _read(data_dir)
    if found is None or found.get("pid") != pid:
        return
    with contextlib.suppress(OSError):
        if earlier is not None and _lives(earlier.get("pid")):
            _write_private(data_dir / ENDPOINT_FILE, json.dumps(earlier) + "\n")
        else:
            (data_dir / ENDPOINT_FILE).unlink()


def _read(data_dir: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((data_dir / ENDPOINT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _lives(pid: object) -> bool:
    if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0 or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _write_private(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)
