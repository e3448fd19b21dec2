"""The rules of the code, as tests: each is applied to the tree, and each is shown a snippet that it must refuse.

Knows: which rule looks at which files. The rules themselves are in import_rules.py and text_rules.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.tidy import import_rules, text_rules
from tests.tidy.sources import ROOMS, Source, kept_texts, python_files, source


class Rule(NamedTuple):
    """A rule, what it looks at, and for its own test: a path with a bad and a good text under it."""

    check: Callable[[Source], Iterator[str]]
    folders: tuple[str, ...]
    path: str
    bad: tuple[str, ...]
    good: tuple[str, ...] = ()


EVERYWHERE = (*ROOMS, "tests", "benchmarks")
SECRET_RAISE = "def f(token):\n    raise ValueError(f'bad {token}')"

RULES = [
    Rule(
        import_rules.rooms,
        ROOMS,
        "workers/agent.py",
        (
            "import orchestrator",
            "from admission import store",
            "from admission.events import RunStarted",
            "from simulators.shop import Shop",
            "from . import hands",
            "from tests import conftest",
            "import importlib\nimportlib.import_module('admission.store')",
        ),
        ("from admission import wire", "from admission.client import Gateway", "import workers.hands, json"),
    ),
    Rule(
        import_rules.rooms,
        ROOMS,
        "admission/gateway.py",
        ("from orchestrator import settings", "from workers.hands import Hands"),
        ("from admission.store import Store",),
    ),
    Rule(
        import_rules.pure,
        ROOMS,
        "admission/rules.py",
        (
            "import os",
            "from time import monotonic",
            "def f():\n    import anyio",
            "from admission.store import RedisStore",
            "from admission import store",
            "text = open('x').read()",
        ),
        ("import json\nfrom admission.vocabulary import Verdict\nfrom admission import events",),
    ),
    Rule(
        import_rules.doors,
        ROOMS,
        "orchestrator/conductor.py",
        ("import redis.asyncio", "from a2a.client import Client", "from a2a import client", "import httpx"),
        ("from a2a.types import Task",),
    ),
    Rule(
        import_rules.asyncio_by_name,
        (*ROOMS, "tests", "benchmarks"),
        "admission/gateway.py",
        ("import asyncio", "from asyncio import Queue"),
        ("import anyio",),
    ),
    Rule(
        import_rules.core_only,
        ROOMS,
        "workers/hands.py",
        ("import yaml", "from typer import Typer", "import msgspec", "from workers import commands"),
        ("import httpx\nfrom a2a.server.tasks import TaskUpdater",),
    ),
    Rule(
        import_rules.core_only,
        ROOMS,
        "admission/client.py",
        ("from admission.events import Goal",),
        ("from admission.wire import Grant",),
    ),
    Rule(
        text_rules.file_length,
        EVERYWHERE,
        "admission/x.py",
        ("x = 1\n" * (text_rules.FILE_LINES_MAX + 1),),
        ("x = 1\n",),
    ),
    Rule(text_rules.vague_name, EVERYWHERE, "admission/utils.py", ("",)),
    Rule(text_rules.vague_name, EVERYWHERE, "workers/agent_base.py", ("",)),
    Rule(text_rules.vague_name, EVERYWHERE, "simulators/helpers/clock.py", ("",)),
    Rule(
        text_rules.function_length,
        EVERYWHERE,
        "admission/x.py",
        ("def f():\n" + "    x = 1\n" * text_rules.FUNCTION_LINES_MAX,),
        ("def f():\n" + "    x = 1\n" * (text_rules.FUNCTION_LINES_MAX - 1),),
    ),
    Rule(
        text_rules.positional_parameters,
        ROOMS,
        "admission/x.py",
        ("def f(a, b, c, d, e, g): ...", "class A:\n    async def f(self, a, b, c, d, e, g): ..."),
        ("def f(a, b, c, d, e, *, g, h): ...", "class A:\n    def f(self, a, b, c, d, e): ..."),
    ),
    Rule(
        text_rules.clock_by_the_door,
        ROOMS,
        "orchestrator/conductor.py",
        (
            "import time\nnow = time.time()",
            "from time import time as clock\ndef f(now=clock): ...",
            "from datetime import datetime\nx = datetime.now()",
            "import datetime as dt\nx = dt.datetime.now(dt.UTC)",
            "import uuid\nx = uuid.uuid4()",
            "import random\nx = random.random()",
            "import random\nx = random.Random()",
            "import secrets\nx = secrets.token_hex(8)",
        ),
        ("import random, time\ndef f(rng: random.Random):\n    return random.Random(7).random() + time.monotonic()",),
    ),
    Rule(
        text_rules.keys_in_one_file,
        ROOMS,
        "admission/store.py",
        ("key = f'{{p{n:02d}}}:feed'", "key = prefix + ':log'", "key = f'{tag}:run:{run}:head'", "key = '{p07}x'"),
        ("'''The key {p07}:run:x:log is made elsewhere.'''", "text = f'{path} is open'", "url = 'http://127.0.0.1:80'"),
    ),
    Rule(
        text_rules.lua_in_its_own_file,
        EVERYWHERE,
        "admission/store.py",
        ("SCRIPT = '''return redis.call('GET', KEYS[1])'''", "x = 'redis.pcall'"),
        ("import redis",),
    ),
    Rule(
        text_rules.secrets_unsaid,
        ROOMS,
        "orchestrator/settings.py",
        ("print(token)", "log.info('key %s', self.grant_key)", SECRET_RAISE, "console.print(f'{cfg.api_token}')"),
        ("print(len(token), token_path)", "raise ValueError('the token is too short')"),
    ),
]


def scanned(rule: Rule, root: Path) -> list[Source]:
    """The files that the rule looks at; a bad snippet of its own is no sin of the tidy ring's."""
    folders = [folder for folder in rule.folders if (root / folder).is_dir()]
    files = python_files(root, *folders)
    if rule.check is text_rules.lua_in_its_own_file:
        files = [file for file in files if not file.path.startswith("tests/tidy/")]
    return files


def said(sentences: Iterator[str]) -> str:
    return "\n" + "\n".join(sentences)


def by_name(rule: Rule) -> str:
    return f"{rule.check.__name__}-{rule.path}"


@pytest.mark.parametrize("rule", {rule.check: rule for rule in RULES}.values(), ids=lambda rule: rule.check.__name__)
def test_the_tree_keeps_the_rule(rule: Rule, repo_root: Path) -> None:
    files = scanned(rule, repo_root)
    assert {file.room for file in files} >= set(ROOMS), "the rule must have looked at every room"
    broken = [sentence for file in files for sentence in rule.check(file)]
    assert not broken, said(iter(broken))


@pytest.mark.parametrize("rule", RULES, ids=by_name)
def test_the_rule_can_fail(rule: Rule) -> None:
    for text in rule.bad:
        assert list(rule.check(source(rule.path, text))), f"{rule.check.__name__} let through:\n{text}"
    for text in rule.good:
        assert not list(rule.check(source(rule.path, text))), f"{rule.check.__name__} refused:\n{text}"


def test_each_room_has_one_door_for_the_a2a_server(repo_root: Path) -> None:
    assert not list(import_rules.crowded_doors(python_files(repo_root, *ROOMS)))
    two = [source(f"workers/{name}.py", "from a2a.server.tasks import TaskUpdater") for name in ("agent", "other")]
    assert list(import_rules.crowded_doors(two))


def test_allow_lists_name_files_that_exist_with_a_reason(repo_root: Path) -> None:
    tree = {file.path for file in python_files(repo_root, *EVERYWHERE)}
    for path, reason in import_rules.ASYNCIO_BY_NAME.items():
        assert path in tree, f"{path} is allowed to use asyncio, but is not there"
        assert len(reason.split()) >= 3, f"why does {path} use asyncio?"
    assert all(len(reason.split()) >= 3 for reason in text_rules.ENTRY_FILES.values())


def test_lua_is_short(repo_root: Path) -> None:
    scripts = sorted(path for room in ROOMS for path in (repo_root / room).rglob("*.lua"))
    assert scripts, "the store's scripts are Lua files"
    broken = [s for path in scripts for s in text_rules.lua_length(path.name, path.read_text(encoding="utf-8"))]
    assert not broken, said(iter(broken))
    assert list(text_rules.lua_length("x.lua", "return 1\n" * (text_rules.LUA_LINES_MAX + 1)))
    assert not list(text_rules.lua_length("x.lua", "return 1\n" * text_rules.LUA_LINES_MAX))


def test_nothing_names_one_machine_or_one_registry(repo_root: Path) -> None:
    texts = kept_texts(repo_root)
    assert {"pyproject.toml", "constraints.txt", "Makefile"} <= set(texts)
    broken = [sentence for path, text in texts.items() for sentence in text_rules.nothing_foreign(path, text)]
    assert not broken, said(iter(broken))
    for bad in ("https://files.python" + "hosted.example/x", "cd /wo" + "rk/main", "open('/ro" + "ot/x')"):
        assert list(text_rules.nothing_foreign("x", bad)), bad


def test_constraints_are_names_and_versions_only(repo_root: Path) -> None:
    lines = (repo_root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    pin = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+-]+( ; [a-z_]+ [<>=!]+ '[a-z0-9.]+')?")
    assert [line for line in pins if not pin.fullmatch(line)] == []
    assert not pin.fullmatch("x @ https://example.org/x.whl")


def test_every_event_is_documented(repo_root: Path) -> None:
    events, page = repo_root / "admission/events.py", repo_root / "docs/protocol.md"
    if events.exists() and page.exists():
        file = source("admission/events.py", events.read_text(encoding="utf-8"))
        broken = list(text_rules.documented_events(file, page.read_text(encoding="utf-8")))
        assert not broken, said(iter(broken))
    bad = source("admission/events.py", "class RunHeld(Event, tag='run_held'): ...\nclass Goal(Record): ...")
    assert len(list(text_rules.documented_events(bad, "nothing about it"))) == 1
    assert not list(text_rules.documented_events(bad, "| `run_held` | the run is held |"))


def test_the_changelog_has_a_heading(repo_root: Path) -> None:
    text = (repo_root / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[(Unreleased|\d+\.\d+\.\d+)\]", text, re.MULTILINE)
