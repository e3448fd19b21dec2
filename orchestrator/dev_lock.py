"""DATA/dev.lock: held for as long as a `regate dev` keeps the processes of a data directory.

A lock and no pid: it is let go by dying, whoever has the number afterwards. Does not know what the processes are.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":  # where `regate dev` does not run either
    import fcntl

DEV_LOCK = "dev.lock"
#: Whoever only looks holds the lock for a moment; so long a starter tries again.
LOOKERS_PATIENCE_S = 1.0
POLL_INTERVAL_S = 0.02


class AlreadyRuns(Exception):
    """Another `regate dev` keeps this directory."""


@contextmanager
def dev_lock(data_dir: Path) -> Iterator[None]:
    """Keep the directory for the length of the block. Raises AlreadyRuns, OSError."""
    with (data_dir / DEV_LOCK).open("a") as file:
        until = time.monotonic() + LOOKERS_PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise AlreadyRuns(str(data_dir)) from None
                time.sleep(POLL_INTERVAL_S)
        yield


def is_supervised(data_dir: Path) -> bool:
    """Whether a `regate dev` keeps this directory now."""
    if sys.platform == "win32":
        return False
    try:
        with (data_dir / DEV_LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
