"""What is tied to a supervisor's life: a small process that ends everything when the supervisor is gone.

Theory of operation. The supervisor holds the writing end of this process's standard input and tells it each process
that it starts (`+PID`) and sees ended (`-PID`). A supervisor that was killed cannot end anything, but its pipe closes:
then every process group that is still noted is killed, what became of them is written down, and the store's server is
stopped if nobody else uses it. A supervisor that ends in order says `bye`.

Imports little, so that it stands within a few milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

PROCESSES_FILE = "processes.json"
STORE_ROLE = "store"
GONE = "killed by signal 9 (its supervisor was gone)"
STORE_TRIES = 100
STORE_PAUSE_S = 0.05


def watch(lines: Iterable[str]) -> list[int] | None:
    """Read until the supervisor is gone: the processes that it left behind, or None when it ended in order."""
    noted: list[int] = []
    for line in lines:
        word = line.strip()
        if word == "bye":
            return None
        number = int(word[1:])
        if word.startswith("+"):
            noted.append(number)
        elif number in noted:
            noted.remove(number)
    return noted


def end(pids: Iterable[int]) -> None:
    """Kill the groups that these processes lead; each was started as the leader of its own."""
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def note_ends(data_dir: Path, ended: str, *, role: str | None = None) -> None:
    """Write into processes.json how those that ran have ended, in the supervisor's place: all, or those of one role."""
    path = data_dir / PROCESSES_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for row in content["processes"]:
            if row["ended"] == "running" and (row["role"] == role or (role is None and row["role"] != STORE_ROLE)):
                row["ended"] = ended
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        new.replace(path)
    except (OSError, ValueError, KeyError, TypeError):
        return


def stop_store(data_dir: Path) -> bool:
    """Stop the embedded server if it is not used. Its users were killed a moment ago and may not be gone yet."""
    import anyio

    from orchestrator.store_access import stop_if_unused

    for _ in range(STORE_TRIES):
        if anyio.run(stop_if_unused, data_dir):
            return True
        time.sleep(STORE_PAUSE_S)
    return False


def main(arguments: list[str]) -> int:
    """`python -m orchestrator.leash DATA_DIR`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    data_dir = Path(arguments[0])
    left = watch(sys.stdin)
    if left is None:
        return 0
    end(left)
    note_ends(data_dir, GONE)
    if stop_store(data_dir):
        note_ends(data_dir, "stopped", role=STORE_ROLE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
