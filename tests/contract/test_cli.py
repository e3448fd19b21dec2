"""The command against the API's contract: what it asks, what it prints, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import cli_client
from tests.contract.cli_calls import ask, call
from tests.contract.fake_api import RUN, TOKEN, FakeApi, effect, fake_api, problem, view

GOAL = """\
text: a goal
requirements: [{id: r1, text: one}]
plan:
  main: {agent: plan, brief: do it}
"""


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with fake_api() as fake:
        yield fake


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the developer's own environment, and no waiting between two sendings."""
    for name in ("REGATE_URL", "REGATE_TOKEN", "REGATE_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_client, "RESEND_DELAYS_S", (0.0, 0.0))


@pytest.fixture
def goal(tmp_path: Path) -> str:
    path = tmp_path / "goal.yaml"
    path.write_text(GOAL)
    return str(path)


# --- where the API is ------------------------------------------------------------------------------------------------


def test_the_data_directory_says_where_the_api_is(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("run", "list", "--data", str(api.endpoint(tmp_path / "by-flag"))).exit_code == 0
    monkeypatch.setenv("REGATE_DATA", str(api.endpoint(tmp_path / "by-variable")))
    assert call("run", "list").exit_code == 0
    monkeypatch.delenv("REGATE_DATA")
    assert call("run", "list").exit_code == 5
    api.endpoint(tmp_path / "regate-data")
    assert call("run", "list").exit_code == 0
    assert {asked.token for asked in api.asked if asked.path == "/v1/runs"} == {TOKEN}


def test_variables_say_where_the_api_is(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGATE_URL", api.url)
    assert call("run", "list").exit_code == 2
    monkeypatch.setenv("REGATE_TOKEN", "another")
    assert call("run", "list").exit_code == 0
    assert api.asked[-1].token == "another"


def test_a_directory_given_by_flag_goes_before_variables(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGATE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("REGATE_TOKEN", "another")
    assert call("run", "list", "--data", str(api.endpoint(tmp_path / "data"))).exit_code == 0
    assert api.asked[-1].token == TOKEN


def test_a_noted_token_goes_to_the_noted_address_only(api: FakeApi, tmp_path: Path) -> None:
    with fake_api() as other:
        other.endpoint(tmp_path / "regate-data")
        result = call("run", "list", "--url", api.url)
    assert result.exit_code == 2
    assert "--token" in result.stderr
    assert not api.asked


def test_an_endpoint_that_others_can_read_is_refused(api: FakeApi, tmp_path: Path) -> None:
    result = call("run", "list", "--data", str(api.endpoint(tmp_path / "data", mode=0o644)))
    assert result.exit_code == 1
    assert "chmod 600" in result.stderr
    assert TOKEN not in result.stderr
    assert not api.asked


def test_a_damaged_endpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "endpoint.json").write_text('["token-in-the-wrong-place"]')
    result = call("run", "list", "--data", str(tmp_path))
    assert result.exit_code == 1
    assert "endpoint.json is damaged" in result.stderr
    assert "token-in-the-wrong-place" not in result.stderr


def test_an_endpoint_of_a_process_that_is_gone_is_not_asked(api: FakeApi, tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    result = call("run", "list", "--data", str(api.endpoint(tmp_path / "data", pid=gone.pid)))
    assert result.exit_code == 5
    assert not api.asked, "somebody else may have its port, and would be shown the token"


@pytest.mark.parametrize("arguments", [[], ["--url", "http://127.0.0.1:9", "--token", "x"]])
def test_unavailable_names_the_command_that_starts_it(arguments: list[str]) -> None:
    result = call("run", "list", *arguments)
    assert result.exit_code == 5
    assert "`regate dev`" in result.stderr
    assert result.stdout == ""


def test_unavailable_names_the_directory_that_was_meant(tmp_path: Path) -> None:
    result = call("run", "list", "--data", str(tmp_path))
    assert result.exit_code == 5
    assert f"regate serve --data {tmp_path}" in result.stderr


# --- how it ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "more", "code"),
    [
        (400, {}, 2), (401, {}, 1), (403, {}, 1), (404, {}, 4), (409, {"in_force": 3}, 3), (412, {}, 3), (413, {}, 2),
        (409, {"code": "ambiguous"}, 2), (422, {"faults": ["no scope"]}, 2), (500, {}, 1), (503, {}, 5), (504, {}, 5),
    ],
)  # fmt: skip
def test_a_problem_becomes_an_exit_code_and_its_reason(api: FakeApi, status: int, more: dict, code: int) -> None:
    api.answers["POST", f"/v1/runs/{RUN}/pause"] = (status, problem(status, "it is so [bold]because[/bold]", **more))
    result = ask(api, "run", "pause", RUN, "-o", "json")
    assert result.exit_code == code
    assert result.stdout == ""
    assert "it is so [bold]because[/bold]" in result.stderr
    if "in_force" in more:
        assert "revision 3 is in force" in result.stderr
    if "faults" in more:
        assert "no scope" in result.stderr


def test_an_answer_that_is_no_problem_document_is_told_by_its_status(api: FakeApi) -> None:
    api.answers["GET", "/v1/runs"] = (500, b"<html>oh</html>")
    result = ask(api, "run", "list")
    assert (result.exit_code, "status 500" in result.stderr) == (1, True)


def test_an_answer_that_is_not_json_is_told(api: FakeApi) -> None:
    api.answers["GET", "/v1/runs"] = (200, b"<html>oh</html>")
    result = ask(api, "run", "list")
    assert (result.exit_code, "is not JSON" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "start"],
        ["run", "start", "words"],
        ["run", "start", "words", "--agent", "plan", "-f", "GOAL"],
        ["run", "start", "-f", "missing.yaml"],
        ["run", "show"],
        ["run", "show", RUN, "--last"],
        ["run", "redirect", RUN],
        ["run", "redirect", RUN, "--replace"],
        ["run", "redirect", RUN, "--agent", "plan"],
        ["run", "redirect", RUN, "--scope", "main"],
        ["run", "redirect", RUN, "--requirement", "r1"],
        ["run", "redirect", RUN, "--text", "x", "--expected-revision", "0"],
        ["effect", "list"],
        ["effect", "show", "e1"],
        ["effect", "resolve", f"{RUN}-e1", "--reason", "r", "--evidence", "e"],
        ["effect", "resolve", f"{RUN}-e1", "--happened", "--reason", "r"],
        ["effect", "resolve", f"{RUN}-e1", "--happened", "--evidence", "e"],
        ["run", "list", "-o", "xml"],
        ["run", "fly"],
        ["log", "--last", RUN],
    ],
)
def test_what_was_typed_wrongly_is_told_before_anything_is_asked(api: FakeApi, arguments: list[str], goal: str) -> None:
    result = ask(api, *[goal if word == "GOAL" else word for word in arguments])
    assert result.exit_code == 2
    assert result.stderr.strip()
    assert not api.changes()


def test_a_malformed_goal_is_told_with_file_and_line(api: FakeApi, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("text: x\nplan:\n  main:\n    agnet: plan\n")
    result = ask(api, "run", "start", "-f", str(path))
    assert result.exit_code == 2
    assert f"{path}:4: " in result.stderr
    assert not api.asked


# --- what it prints --------------------------------------------------------------------------------------------------

COMMANDS = [
    ["run", "start", "words", "--agent", "plan"],
    ["run", "list"],
    ["run", "show", RUN],
    ["run", "redirect", RUN, "--text", "x"],
    ["run", "pause", RUN, "--reason", "r"],
    ["run", "resume", RUN, "--reason", "r"],
    ["run", "cancel", RUN, "--reason", "r"],
    ["effect", "list", RUN],
    ["effect", "list", "--unknown"],
    ["effect", "show", f"{RUN}-e1"],
    ["effect", "resolve", f"{RUN}-e1", "--did-not-happen", "--reason", "r", "--evidence", "e"],
    ["attention"],
    ["log", RUN],
    ["log", RUN, "--control"],
    ["doctor"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_standard_output_is_json_when_asked(api: FakeApi, arguments: list[str]) -> None:
    whole = ask(api, *arguments, "-o", "json")
    assert whole.exit_code == 0, whole.stderr
    assert json.loads(whole.stdout)
    lines = ask(api, *arguments, "-o", "jsonl")
    assert lines.exit_code == 0
    assert all(isinstance(json.loads(line), dict) for line in lines.stdout.splitlines())
    assert lines.stdout


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_standard_output_is_words_otherwise(api: FakeApi, arguments: list[str]) -> None:
    result = ask(api, *arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel", "redirect"])
def test_after_a_change_stands_the_api_line(api: FakeApi, verb: str) -> None:
    more = ["--text", "x"] if verb == "redirect" else []
    words = ask(api, "run", verb, RUN, *more)
    assert "it changed; next: nothing" in words.stdout
    machine = ask(api, "run", verb, RUN, *more, "-o", "json")
    assert "it changed; next: nothing" in machine.stderr
    assert json.loads(machine.stdout)["line"] == "it changed; next: nothing"


def test_texts_of_others_are_shown_and_not_obeyed(api: FakeApi) -> None:
    api.answers["GET", f"/v1/runs/{RUN}"] = (200, view(text="[red]pay[/red]\x1b[2J"))
    result = ask(api, "run", "show", RUN)
    assert "[red]pay[/red]\\x1b[2J" in result.stdout
    assert "\x1b" not in result.stdout


def test_pages_are_read_to_the_end(api: FakeApi) -> None:
    api.answers["GET", f"/v1/runs/{RUN}/effects"] = lambda asked: (
        200,
        {
            "effects": [effect(1 if "cursor" not in asked.query else 2)],
            "cursor": None if "cursor" in asked.query else 1,
        },
    )
    found = json.loads(ask(api, "effect", "list", RUN, "-o", "json").stdout)
    assert [row["attempt"] for row in found] == [f"{RUN}-e1", f"{RUN}-e2"]


def test_a_log_is_followed_until_the_run_has_ended(api: FakeApi) -> None:
    def entries(asked) -> tuple[int, dict]:
        after = int(asked.query["after"])
        page = [{"n": after + 1, "at": 1, "event": {"type": "x"}}] if after < 3 else []
        return 200, {"entries": page, "cursor": after + 1 if after < 2 else None}

    api.answers["GET", f"/v1/runs/{RUN}/log"] = entries
    api.answers["GET", f"/v1/runs/{RUN}"] = (200, view("completed"))
    result = ask(api, "log", RUN, "--follow", "-o", "jsonl")
    assert [json.loads(line)["n"] for line in result.stdout.splitlines()] == [1, 2, 3]


# --- what it asks ----------------------------------------------------------------------------------------------------


def test_a_change_is_sent_again_under_the_same_request_id(api: FakeApi) -> None:
    api.drops = 2
    assert ask(api, "run", "pause", RUN, "--reason", "r").exit_code == 0
    sent = api.changes()
    assert len(sent) == 3
    assert len({asked.body["request_id"] for asked in sent}) == 1
    assert ask(api, "run", "pause", RUN).exit_code == 0
    assert api.changes()[-1].body["request_id"] != sent[0].body["request_id"]


def test_when_it_stays_unknown_the_request_id_is_told(api: FakeApi) -> None:
    api.drops = 9
    result = ask(api, "run", "start", "words", "--agent", "plan")
    assert result.exit_code == 5
    name = api.changes()[0].body["request_id"]
    assert f"--request-id {name}" in result.stderr
    api.drops = 0
    assert ask(api, "run", "start", "words", "--agent", "plan", "--request-id", name).exit_code == 0
    assert api.changes()[-1].body == api.changes()[0].body


def test_a_run_is_named_by_its_beginning_or_as_the_last(api: FakeApi) -> None:
    for given in (["01"], ["--last"], [RUN]):
        assert ask(api, "run", "cancel", *given, "--reason", "r").exit_code == 0
        # The whole id: sent again, "the last" could be another one.
        assert api.changes()[-1].path == f"/v1/runs/{RUN}/cancel"
    assert ask(api, "run", "cancel", "zz").exit_code == 4


def test_an_effect_is_named_in_three_ways(api: FakeApi) -> None:
    for given in ([f"{RUN}-e1"], ["01-e1"], ["e1", "--last"], ["e1", "--run", "01"]):
        assert ask(api, "effect", "show", *given).exit_code == 0, given
        assert api.asked[-1].path == f"/v1/effects/{RUN}-e1"


def test_starting_sends_the_goal(api: FakeApi, goal: str) -> None:
    ask(api, "run", "start", "-f", goal)
    body = api.changes()[-1].body
    assert body["goal"]["requirements"] == [{"id": "r1", "text": "one"}]
    ask(api, "run", "start", "do this", "--agent", "plan")
    assert api.changes()[-1].body["goal"] == {
        "text": "do this",
        "plan": {"main": {"agent": "plan", "brief": "do this"}},
    }


def test_a_redirect_names_what_changes(api: FakeApi, goal: str) -> None:
    arguments = ["--text", "new words", "--requirement", "r2=second", "--remove", "r1", "--reason", "because"]
    ask(api, "run", "redirect", RUN, *arguments, "--expected-revision", "4")
    body = api.changes()[-1].body
    body.pop("request_id")
    assert body == {
        "kind": "correct", "goal": {"text": "new words", "requirements": [{"id": "r2", "text": "second"}]},
        "remove": ["r1"], "reason": "because", "expected_revision": 4,
    }  # fmt: skip
    ask(api, "run", "redirect", RUN, "-f", goal, "--replace")
    assert api.changes()[-1].body["kind"] == "replace"
    assert api.changes()[-1].body["goal"]["plan"] == {"main": {"agent": "plan", "brief": "do it"}}


def test_a_branch_keeps_what_is_not_named_and_its_revision_is_expected(api: FakeApi) -> None:
    api.answers["GET", f"/v1/runs/{RUN}"] = (200, view(revision=5))
    ask(api, "run", "redirect", RUN, "--scope", "main", "--text", "new brief")
    body = api.changes()[-1].body
    assert body["goal"] == {"plan": {"main": {"agent": "plan", "brief": "new brief", "needs": ["other"]}}}
    # The rest was read at revision 5: had another one come in between, it would be carried over unseen.
    assert body["expected_revision"] == 5
    assert ask(api, "run", "redirect", RUN, "--scope", "nowhere", "--text", "x").exit_code == 4


def test_a_doctor_that_finds_something_fails(api: FakeApi) -> None:
    api.answers["GET", "/v1/doctor"] = (200, {"problems": ["appendfsync is everysec"]})
    result = ask(api, "doctor", "-o", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"] == ["appendfsync is everysec"]
    assert "appendfsync is everysec" in result.stderr
