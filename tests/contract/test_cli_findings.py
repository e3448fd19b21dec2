"""What a person meets when not all went well: effects that failed, refused goals, a server that is coming back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import cli_client
from orchestrator.cli_output import PIPE_WIDTH_COLUMNS
from orchestrator.dev_lock import AlreadyRuns, dev_lock, is_supervised
from orchestrator.endpoint import forget_endpoint, living_endpoint, write_endpoint
from tests.contract.cli_calls import ask, call
from tests.contract.fake_api import RUN, Asked, FakeApi, effect, fake_api, problem, view


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with fake_api() as fake:
        yield fake


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("REGATE_URL", "REGATE_TOKEN", "REGATE_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_client, "RESEND_DELAYS_S", (0.0, 0.0))


def ended(**more: Any) -> dict[str, Any]:
    """A completed run with one effect that the service refused."""
    failed = effect(2, "failed") | {
        "slot": "s2", "observed_result": {"error": "the order is cancelled already"},
        "tries": [{"n": 1, "outcome": "not_executed", "detail": "shop answered 422"}], **more,
    }  # fmt: skip
    scopes = {"main": {"gate": "open", "cur": 1, "waits_for": []}}
    counts = {"failed": 1, "succeeded": 1}
    return view("completed", effects=[effect(1) | {"slot": "s1"}, failed], effect_counts=counts, scopes=scopes)


def test_a_completed_run_says_what_failed_and_in_the_words_of_the_service(api: FakeApi) -> None:
    api.answers["GET", f"/v1/runs/{RUN}"] = (200, ended())
    shown = ask(api, "run", "show", RUN)
    assert shown.exit_code == 0
    assert "completed, 1 effect failed" in shown.stdout
    section = shown.stdout.partition("failed: the service said no")[2]
    assert f"{RUN}-e2" in section
    assert "shop.cancel on #1" in section
    assert "shop answered 422" in section
    assert "the order is cancelled already" in section
    assert f"{RUN}-e1" not in section.partition("unresolved")[0]


@pytest.mark.parametrize(
    ("more", "code"),
    [({}, 1), ({"slot": "s1"}, 0), ({"revision": 0}, 0)],
    ids=["not done at all", "done by another attempt", "of a superseded revision"],
)
def test_waiting_for_a_run_that_achieved_less_is_a_failure(api: FakeApi, more: dict[str, Any], code: int) -> None:
    api.answers["GET", f"/v1/runs/{RUN}"] = (200, ended(**more))
    result = ask(api, "run", "start", "words", "--agent", "plan", "--wait")
    assert result.exit_code == code, result.stderr
    assert (f"{RUN}-e2 (shop.cancel on #1)" in result.stderr) == bool(code)


@pytest.mark.parametrize("command", [["run", "start"], ["run", "redirect", RUN, "--replace"]])
def test_what_the_api_refuses_of_a_file_is_told_with_its_line(api: FakeApi, tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "goal.yaml"
    path.write_text("text: x\nplan:\n  a:\n    agent: plan\n    needs: [zork]\n")
    fault = "scope 'a' needs 'zork', but there is no scope 'zork'"
    refusal = (422, problem(422, fault, code="invalid", faults=[fault], in_force=0))
    api.answers["POST", "/v1/runs"] = api.answers["POST", f"/v1/runs/{RUN}/revisions"] = refusal
    result = ask(api, *command, "-f", str(path))
    assert result.exit_code == 2
    assert result.stderr.strip() == f"{path}:5: {fault}"
    words = ask(api, "run", "start", "words", "--agent", "plan")
    assert words.stderr.strip() == fault


def test_a_wrong_token_is_told_in_one_sentence(api: FakeApi) -> None:
    words = "send `Authorization: Bearer TOKEN`"
    api.answers["GET", "/v1/runs"] = (401, problem(401, words, code="unauthorized"))
    result = ask(api, "run", "list")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"the token does not open {api.url}: give the one in")
    assert words not in result.stderr


def test_it_cannot_both_have_happened_and_not(api: FakeApi) -> None:
    flags = ["--happened", "--did-not-happen", "--reason", "r", "--evidence", "e"]
    assert ask(api, "effect", "resolve", f"{RUN}-e1", *flags).exit_code == 2
    assert not api.changes()
    for flag, happened in (("--happened", True), ("--did-not-happen", False)):
        assert ask(api, "effect", "resolve", f"{RUN}-e1", flag, *flags[2:]).exit_code == 0
        assert api.changes()[-1].body["happened"] is happened


@pytest.mark.parametrize(
    ("kind", "name", "what", "words"),
    [
        ("effect", f"{RUN}-e1", "mail.send on x", f"unknown effect {RUN}-e1: mail.send on x"),
        ("alarm", f"{RUN}-e1", "mail.send on x", f"contradicted effect {RUN}-e1: mail.send on x"),
        ("child", "c1", "plan, task t1", "agent not seen to end c1: plan, task t1"),
        ("result", "c1", "plan, task t1", "result to be looked at c1: plan, task t1"),
        ("budget", "main", "scope main", "budget overdrawn main  "),
        ("scope", "main", "scope main", "branch given up main  "),
        ("need", "main", "scope main", "branch lacks an artifact main  "),
    ],
)
def test_whatever_waits_for_a_person_is_shown_in_words(
    api: FakeApi, kind: str, name: str, what: str, words: str
) -> None:
    item = {
        "kind": kind, "id": name, "run": RUN, "scope": "main", "revision": 2, "since": 1_796_076_072_048, "what": what,
        "why": "because of it", "blocks": "scope", "command": f"regate run show {RUN}",
    }  # fmt: skip
    api.answers["GET", "/v1/attention"] = (200, {"items": [item]})
    shown = ask(api, "attention")
    assert shown.exit_code == 0
    [line] = [line for line in shown.stdout.splitlines() if "because of it" in line]
    assert words in f"{line}  "
    assert "branch main" in line
    assert f"regate run show {RUN} --url {api.url}" in line
    assert json.loads(ask(api, "attention", "-o", "json").stdout)[0]["command"] == item["command"]


def test_unknown_effects_are_asked_of_runs_that_have_some(api: FakeApi) -> None:
    other = {"kind": "need", "id": "main", "run": "ffffffffffff"}
    api.answers["GET", "/v1/attention"] = (200, {"items": [other, {"kind": "effect", "id": f"{RUN}-e2", "run": RUN}]})
    assert ask(api, "effect", "list", "--unknown").exit_code == 0
    assert not [asked for asked in api.asked if "ffffffffffff" in asked.path]


@pytest.mark.parametrize("columns", [80, PIPE_WIDTH_COLUMNS])
def test_ids_and_outcomes_are_whole_on_any_screen(api: FakeApi, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator import cli_output

    monkeypatch.setattr(cli_output, "PIPE_WIDTH_COLUMNS", columns)
    shown = ask(api, "effect", "list", RUN)
    lines = shown.stdout.splitlines()
    assert all(len(line) <= columns for line in lines)
    [line] = [line for line in lines if f"{RUN}-e2" in line]
    assert "succeeded" in line
    assert ("rg-2" in line) == (columns > 80)


# --- a server that is coming back ------------------------------------------------------------------------------------


def test_one_dev_keeps_a_directory(tmp_path: Path) -> None:
    assert not is_supervised(tmp_path)
    with dev_lock(tmp_path):
        assert is_supervised(tmp_path)
        with pytest.raises(AlreadyRuns), dev_lock(tmp_path):
            pass
    assert not is_supervised(tmp_path)


def test_a_server_that_is_being_started_again_is_waited_for(api: FakeApi, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    come_back = threading.Timer(0.3, api.endpoint, [data])
    with dev_lock(data):
        come_back.start()
        result = call("run", "list", "--data", str(data))
        come_back.join()
    assert result.exit_code == 0, result.stderr
    assert "is being started again" in result.stderr


def test_one_that_does_not_come_back_is_no_reason_to_start_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_client, "RESTART_TIMEOUT_S", 0.1)
    with dev_lock(tmp_path):
        result = call("run", "list", "--data", str(tmp_path))
    assert result.exit_code == 5
    assert "is being started again" in result.stderr
    assert "start one with" not in result.stderr


def test_a_request_that_broke_off_is_sent_again_to_the_server_that_came_back(api: FakeApi, tmp_path: Path) -> None:
    def accepted(asked: Asked) -> tuple[int, Any]:
        return 201, {"line": "started", "run": view()}

    api.answers["POST", "/v1/runs"] = accepted
    api.drops = 3  # as many as it is sent by itself
    with dev_lock(api.endpoint(tmp_path / "data")):
        result = call("run", "start", "words", "--agent", "plan", "--data", str(tmp_path / "data"))
    assert result.exit_code == 0, result.stderr
    assert len({asked.body["request_id"] for asked in api.changes()}) == 1


def test_a_second_server_leaves_the_first_one_where_it_is_found(tmp_path: Path) -> None:
    import os

    parent, ours = os.getppid(), os.getpid()
    write_endpoint(tmp_path, url="http://127.0.0.1:1", token="t" * 16, gateway="", pid=parent)
    earlier = living_endpoint(tmp_path)
    write_endpoint(tmp_path, url="http://127.0.0.1:2", token="t" * 16, gateway="", pid=ours)
    assert living_endpoint(tmp_path) is None
    forget_endpoint(tmp_path, pid=ours, earlier=earlier)
    assert json.loads((tmp_path / "endpoint.json").read_text())["url"] == "http://127.0.0.1:1"
    forget_endpoint(tmp_path, pid=ours)
    assert (tmp_path / "endpoint.json").exists()
    forget_endpoint(tmp_path, pid=parent)
    assert not (tmp_path / "endpoint.json").exists()
