"""The command called in this process, as a person types it."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from orchestrator.cli import app
from tests.contract.fake_api import TOKEN, FakeApi


def call(*arguments: str) -> Result:
    """`regate ARGUMENTS`."""
    return CliRunner().invoke(app, list(arguments))


def ask(api: FakeApi, *arguments: str) -> Result:
    """The same, asking the fake."""
    return call(*arguments, "--url", api.url, "--token", TOKEN)
