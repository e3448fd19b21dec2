"""How the code itself must look: lengths, names, clocks, keys, secrets.

Knows: the limits and allow-lists below. A rule takes one file and gives sentences, one for each place that breaks it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.tidy.import_rules import matches
from tests.tidy.sources import Source

FILE_LINES_MAX = 450
LUA_LINES_MAX = 60
FUNCTION_LINES_MAX = 70
POSITIONAL_PARAMETERS_MAX = 5
VAGUE_NAMES = frozenset("util utils helper helpers common commons base bases manager managers misc".split())

#: Where clocks, ids and chance are made and handed in. Pattern → why.
ENTRY_FILES = {
    "admission/embedded.py": "makes the identity of a new store, by default; callers can hand in their own",
    "simulators/entrance.py": "names the wall clock that the simulators' programs hand in",
    "*/__main__.py": "a main program wires the real clock and the real ids",
    "orchestrator/app.py": "builds the server of all roles and hands them their clock and ids",
    "orchestrator/cli*": "the command makes request ids, and people read wall-clock times",
    "orchestrator/demo*": "the demo is a main program",
    "simulators/commands.py": "starts a simulator as a program",
    "simulators/retail_command.py": "is a main program over many runs",
    "workers/commands.py": "starts a worker as a program",
}
_CLOCKS = frozenset(
    "time.time time.time_ns datetime.datetime.now datetime.datetime.utcnow datetime.datetime.today datetime.date.today "
    "uuid.uuid1 uuid.uuid4 uuid.uuid6 uuid.uuid7 os.urandom secrets.token_hex secrets.token_bytes "
    "secrets.token_urlsafe secrets.choice secrets.randbelow secrets.randbits random.SystemRandom".split()
)
_KEY_PART = re.compile(
    r"\{p(\d|$)|^run:|:run:|:(log|head|snapshot|blob|chunk|feed|runs|live|attention|timers|lease)(:|$)"
)
_SECRET_NAME = re.compile(
    r"(^|_)(secrets?|tokens?|passwords?|credentials?|api_keys?|signing_keys?|grant_keys?|authorization)$", re.IGNORECASE
)
_SAYS = frozenset("print echo secho debug info warning error exception critical log".split())
_HARMLESS = frozenset("len bool type isinstance redact fingerprint".split())
# Spelled in pieces, so that this file does not hold what it looks for.
_FOREIGN = re.compile(
    "|".join(
        [
            r"py" + r"pi\.org",
            "python" + "hosted",
            r"registry\.n" + "pm",
            r"deb\.deb" + "ian",
            "/wo" + r"rk/\w",
            "/ro" + r"ot/\w",
            "/ho" + r"me/\w",
            "/Us" + r"ers/\w",
        ]
    )
)


def file_length(file: Source) -> Iterator[str]:
    lines = file.text.count("\n") + 1
    if lines > FILE_LINES_MAX:
        yield f"{file.path}: {lines} lines, at most {FILE_LINES_MAX}"


def vague_name(file: Source) -> Iterator[str]:
    for part in file.path.removesuffix(".py").split("/"):
        if part.strip("_") in VAGUE_NAMES or part.split("_")[-1] in VAGUE_NAMES:
            yield f"{file.path}: {part!r} does not say what is in it"


def _functions(file: Source) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Every function, and whether its first parameter is self or cls."""
    methods: set[int] = set()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ClassDef):
            methods.update(id(child) for child in node.body)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
            yield node, id(node) in methods and not static


def function_length(file: Source) -> Iterator[str]:
    for node, _ in _functions(file):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            yield f"{file.path}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"


def positional_parameters(file: Source) -> Iterator[str]:
    for node, bound in _functions(file):
        count = len(node.args.posonlyargs) + len(node.args.args) - bound
        if count > POSITIONAL_PARAMETERS_MAX:
            yield (
                f"{file.path}:{node.lineno}: {node.name} takes {count} positional parameters, "
                f"at most {POSITIONAL_PARAMETERS_MAX}; put * before the rest"
            )


def clock_by_the_door(file: Source) -> Iterator[str]:
    """A use counts also without a call: a default argument `clock=time.time` hides a clock as well."""
    if matches(file.path, tuple(ENTRY_FILES)):
        return
    names = _imported_names(file.tree)
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            dotted = _dotted(node, names)
            if dotted in _CLOCKS:
                yield f"{file.path}:{node.lineno}: {dotted} must arrive as an argument"
        if isinstance(node, ast.Call):
            dotted = _dotted(node.func, names)
            unseeded = dotted == "random.Random" and not (node.args or node.keywords)
            if unseeded or re.fullmatch(r"random\.[a-z]\w*", dotted):
                yield f"{file.path}:{node.lineno}: {dotted}() is chance without a seed; take a random.Random"


def _imported_names(tree: ast.Module) -> dict[str, str]:
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return names


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value, names)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def _docstrings(tree: ast.Module) -> set[int]:
    """Ids of the string constants that are a statement of their own: they are read by people only."""
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def keys_in_one_file(file: Source) -> Iterator[str]:
    if file.path == "admission/keys.py":
        return
    prose = _docstrings(file.tree)
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found = _KEY_PART.search(node.value)
            if found and " " not in node.value:
                yield f"{file.path}:{node.lineno}: {node.value!r} looks like a store key, spelled in admission/keys.py"


def lua_in_its_own_file(file: Source) -> Iterator[str]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"redis\.p?call", node.value):
            yield f"{file.path}:{node.lineno}: Lua in a Python string; put it in a .lua file"


def lua_length(path: str, text: str) -> Iterator[str]:
    lines = text.count("\n") + (not text.endswith("\n"))
    if lines > LUA_LINES_MAX:
        yield f"{path}: {lines} lines, at most {LUA_LINES_MAX}"


def secrets_unsaid(file: Source) -> Iterator[str]:
    """No value with a secret's name goes into something printed, logged or raised."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call) and _last_name(node.func) in _SAYS:
            spoken: list[ast.AST] = [*node.args, *(k.value for k in node.keywords)]
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            spoken = [*node.exc.args, *(k.value for k in node.exc.keywords)]
        else:
            continue
        for part in spoken:
            yield from (f"{file.path}:{node.lineno}: {name} is said aloud" for name in _secret_names(part))


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _secret_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call) and _last_name(node.func) in _HARMLESS:
        return
    if isinstance(node, ast.Attribute | ast.Name):
        if _SECRET_NAME.search(_last_name(node)):
            yield _last_name(node)
        return
    for child in ast.iter_child_nodes(node):
        yield from _secret_names(child)


def nothing_foreign(path: str, text: str) -> Iterator[str]:
    """No address of a package registry and no path of one machine."""
    for number, line in enumerate(text.splitlines(), 1):
        found = _FOREIGN.search(line)
        if found:
            yield f"{path}:{number}: {found.group()!r} belongs to one machine or one registry"


def documented_events(events: Source, protocol: str) -> Iterator[str]:
    """Every class of an event, or the name it has on the wire, stands in the protocol's page."""
    for node in events.tree.body:
        if isinstance(node, ast.ClassDef) and "Event" in {_last_name(base) for base in node.bases}:
            tags = [k.value.value for k in node.keywords if k.arg == "tag" and isinstance(k.value, ast.Constant)]
            if not any(re.search(rf"\b{re.escape(str(name))}\b", protocol) for name in [node.name, *tags]):
                yield f"{events.path}:{node.lineno}: event {node.name} is not in docs/protocol.md"
