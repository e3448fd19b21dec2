"""`regate retail -o json|jsonl`: one object on one line of standard output."""

from __future__ import annotations

import json

import pytest

from simulators.faults import Profile
from simulators.retail_command import Output, _show
from simulators.retail_report import Asked, Report
from simulators.retail_stack import ContractKind


@pytest.mark.parametrize("output", [Output.JSON, Output.JSONL])
def test_the_report_is_one_line(output: Output, capsys: pytest.CaptureFixture[str]) -> None:
    _show(Report(Asked(None, "all", Profile.NONE, ContractKind.VOID)), output)
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["failures"][0] == "nothing was run"
