"""docs/http.md names every route, verdict, problem and field that a client or an agent meets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest

from admission.answers import EffectAnswer
from admission.client import GateReply
from admission.gateway import Gateway
from admission.services import Services
from admission.vocabulary import Claim, GateState, RunPhase, Verdict
from admission.wire import EXTENSION, Stamp
from orchestrator.api import api_app
from workers.brief import Brief


@pytest.fixture
def page(repo_root: Path) -> str:
    return (repo_root / "docs" / "http.md").read_text(encoding="utf-8")


def test_every_route_is_documented(page: str) -> None:
    nobody = cast(Any, None)
    api = api_app(nobody, nobody, "t", new_id=str)
    gateway = Gateway(nobody, Services({}), [b"k"], store=nobody, name="g", incarnation="1")
    routes = {(method, route.path) for route in cast(Any, [*api.routes, *gateway.routes()]) for method in route.methods}
    routes = {(method, path) for method, path in routes if method != "HEAD" and path != "/openapi.json"}
    assert len(routes) > 15
    missing = [f"{method} {path}" for method, path in sorted(routes) if f"{method} {path}`" not in page]
    assert not missing


def test_every_word_that_a_client_must_understand_is_documented(page: str) -> None:
    words = {*Verdict, *Claim, *GateState, *RunPhase} - {RunPhase.NONE}
    words |= {*EffectAnswer.__dataclass_fields__, *GateReply.__dataclass_fields__, *Stamp.__dataclass_fields__}
    words |= {*Brief.model_fields, "about", "grant", "gateway", EXTENSION}
    missing = [word for word in sorted(words) if not re.search(rf"[`\"]{re.escape(word)}[`\"]", page)]
    assert not missing


def test_every_problem_of_the_api_is_documented(page: str, repo_root: Path) -> None:
    found: set[tuple[str, str]] = set()
    for file in (repo_root / "orchestrator").glob("*.py"):
        found |= set(re.findall(r"""Problem\(\s*(\d{3}),\s*"([a-z-]+)\"""", file.read_text(encoding="utf-8")))
    assert len(found) > 12
    rows = [line for line in page.splitlines() if re.match(r"\| \d{3}", line)]
    missing = [f"{s} {code}" for s, code in sorted(found) if not any(s in r and f"`{code}`" in r for r in rows)]
    assert not missing


def test_the_readme_leads_there(repo_root: Path) -> None:
    assert "(docs/http.md)" in (repo_root / "README.md").read_text(encoding="utf-8")
