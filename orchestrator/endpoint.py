"""DATA/endpoint.json: where the API of a data directory is and what opens it, for the commands of the same user.

Knows the file, 0600 and written in one step. The token stays the same from start to start, so that whoever was told it
need not be told again. Does not know who reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

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


def forget_endpoint(data_dir: Path, *, pid: int) -> None:
    """Take the file away, if it is still about this process."""
    path = data_dir / ENDPOINT_FILE
    try:
        if json.loads(path.read_text(encoding="utf-8")).get("pid") == pid:
            path.unlink()
    except (OSError, ValueError, AttributeError):
        return


def _write_private(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)
