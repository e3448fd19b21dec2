"""Where the files are that the rules of the code look at, and one parsed Python file.

Knows: the rooms, which files git would keep. Does not know any rule.
"""

from __future__ import annotations

import ast
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOMS = ("admission", "orchestrator", "workers", "simulators")
_NOT_OURS = set(".git .venv build dist __pycache__ .mypy_cache .ruff_cache .pytest_cache .hypothesis".split())
TEXT_BYTES_MAX = 2_000_000


@dataclass(frozen=True)
class Source:
    """One Python file: its path in the tree (with slashes), its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.path.split("/", 1)[0]

    @property
    def module(self) -> str:
        dotted = self.path.removesuffix(".py").replace("/", ".")
        return dotted.removesuffix(".__init__")


def source(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text, path))


def python_files(root: Path, *folders: str) -> list[Source]:
    """Every Python file below these folders of the tree."""
    found: list[Source] = []
    for folder in folders:
        names = (path.relative_to(root) for path in sorted((root / folder).rglob("*.py")))
        ours = (name for name in names if not _NOT_OURS.intersection(name.parts))
        found.extend(source(name.as_posix(), (root / name).read_text(encoding="utf-8")) for name in ours)
    return found


def kept_texts(root: Path) -> dict[str, str]:
    """Path → text of every file that git keeps or would keep; without git, of every file not built."""
    if (root / ".git").exists():
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            check=True,
            capture_output=True,
        )
        names = [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    else:
        below = (path.relative_to(root) for path in root.rglob("*"))
        names = [path.as_posix() for path in below if not _NOT_OURS.intersection(path.parts)]
    texts = {}
    for name in names:
        path = root / name
        if not path.is_file() or path.stat().st_size > TEXT_BYTES_MAX:
            continue
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a binary file holds no sentence
    return texts
