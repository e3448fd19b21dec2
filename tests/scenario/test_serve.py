"""`serve` as a process: what it refuses, how it lives through its store's death, and when it must not go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest

from admission.store import make_client

pytestmark = pytest.mark.anyio

WAIT_LIMIT_S = 60.0
GOAL = {"text": "t", "plan": {"main": {"agent": "plan"}}}
SETTINGS = '[agents.plan]\nurl = "http://127.0.0.1:9"\n'


def command(data: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator", "serve", "--data", str(data), *options]


@pytest.fixture
def environment(valkey_binary: Path, tmp_path: Path) -> dict[str, str]:
    """Ours, with the server under test first on the PATH, and our packages where we found them."""
    shelf = tmp_path / "bin"
    shelf.mkdir()
    (shelf / "valkey-server").symlink_to(valkey_binary)
    path = f"{shelf}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "regate.toml").write_text(SETTINGS)
    return folder


class Served:
    """A process that serves, its endpoint, and a client with the token."""

    def __init__(self, process: subprocess.Popen[bytes], line: dict[str, Any], http: httpx.AsyncClient) -> None:
        self.process = process
        self.line = line
        self.http = http

    async def ended(self) -> tuple[int, str]:
        """Its exit code and what it said on standard error."""
        with anyio.fail_after(WAIT_LIMIT_S):
            _, err = await anyio.to_thread.run_sync(self.process.communicate)
        return self.process.returncode, err.decode()

    async def patiently(self, path: str) -> Any:
        """The answer, once the store is there."""
        with anyio.fail_after(WAIT_LIMIT_S):
            while True:
                reply = await self.http.get(path)
                if reply.status_code == 200:
                    return reply.json()
                assert reply.json()["code"] == "store-unavailable"
                await anyio.sleep(0.05)


@asynccontextmanager
async def served(data: Path, environment: dict[str, str], *options: str) -> AsyncIterator[Served]:
    process = subprocess.Popen(
        command(data, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=data
    )
    try:
        assert process.stdout is not None
        line = json.loads(await anyio.to_thread.run_sync(process.stdout.readline))
        endpoint = json.loads((data / "endpoint.json").read_text())
        assert (endpoint["url"], endpoint["pid"]) == (line["url"], process.pid)
        headers = {"Authorization": f"Bearer {endpoint['token']}"}
        async with httpx.AsyncClient(base_url=endpoint["url"], headers=headers, timeout=30) as http:
            yield Served(process, line, http)
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=WAIT_LIMIT_S)


def run(data: Path, environment: dict[str, str], options: Sequence[str]) -> tuple[int, str]:
    """A start that must end by itself."""
    done = subprocess.run(
        command(data, *options), capture_output=True, env=environment, cwd=data, timeout=WAIT_LIMIT_S, check=False
    )
    return done.returncode, done.stderr.decode()


def server_of(data: Path) -> int:
    return int((data / "store.pid").read_text())


async def test_a_run_outlives_its_process_and_nothing_is_left_running(data: Path, environment: dict[str, str]) -> None:
    async with served(data, environment) as first:
        assert (data / "endpoint.json").stat().st_mode & 0o777 == 0o600
        started = (await first.http.post("/v1/runs", json={"goal": GOAL})).json()
        store = server_of(data)
        first.process.terminate()
        assert (await first.ended())[0] == 0
    assert not (data / "endpoint.json").exists()
    assert not (data / "store.pid").exists()
    assert not _lives(store)
    async with served(data, environment) as second:
        view = (await second.http.get("/v1/runs/last")).json()
        assert (view["run"], view["state"]) == (started["run"]["run"], "running")


def _lives(pid: int) -> bool:
    """Whether it runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_work_goes_on_after_the_store_was_killed(data: Path, environment: dict[str, str]) -> None:
    async with served(data, environment) as process:
        started = (await process.http.post("/v1/runs", json={"goal": GOAL})).json()
        os.kill(server_of(data), signal.SIGKILL)
        view = await process.patiently(f"/v1/runs/{started['run']['run']}")
        assert view["state"] == "running"
        process.process.terminate()
        assert (await process.ended())[0] == 0
        assert not (data / "store.pid").exists()


async def test_a_store_that_lost_acknowledged_data_ends_the_process_with_an_alarm(
    data: Path, environment: dict[str, str]
) -> None:
    async with served(data, environment) as process:
        started = (await process.http.post("/v1/runs", json={"goal": GOAL})).json()
        run_id = started["run"]["run"]
        assert (await process.http.get(f"/v1/runs/{run_id}")).status_code == 200
        client = make_client(f"unix://{(data / 'valkey.socket').read_text()}")
        await client.flushall()
        await client.aclose()
        await client.connection_pool.aclose()
        try:
            reply = await process.http.get(f"/v1/runs/{run_id}")
            assert (reply.status_code, reply.json()["code"]) == (503, "store-behind")
        except httpx.TransportError:
            pass  # the conductor was the first to see it
        code, said = await process.ended()
    assert code == 70
    assert "ALARM: run " in said
    assert "acknowledged data was lost" in said


@contextmanager
def volatile_server(binary: Path, folder: Path, port: int) -> Iterator[str]:
    server = subprocess.Popen(
        [str(binary), "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


async def test_a_volatile_store_is_refused_unless_it_is_allowed(
    data: Path, environment: dict[str, str], valkey_binary: Path, free_port: int
) -> None:
    with volatile_server(valkey_binary, data, free_port) as url:
        client = make_client(url)
        with anyio.fail_after(WAIT_LIMIT_S):
            while True:
                try:
                    await client.ping()
                    break
                except Exception:  # noqa: BLE001 - it is about to listen
                    await anyio.sleep(0.02)
        await client.aclose()
        await client.connection_pool.aclose()
        code, said = run(data, environment, ["--redis-url", url])
        assert code == 1
        assert "set `appendonly yes`" in said
        assert "--allow-volatile" in said
        async with served(data, environment, "--redis-url", url, "--allow-volatile") as process:
            report = (await process.http.get("/v1/doctor")).json()
            assert report["server"]["durable"] is False
            assert any("appendonly" in problem for problem in report["problems"])
        client = make_client(url)
        await client.flushall()
        await client.aclose()
        await client.connection_pool.aclose()
        code, said = run(data, environment, ["--redis-url", url, "--allow-volatile"])
        assert code == 1, "an emptied store is not what was promised to be kept"
        assert "is not the one that" in said
        assert "store.identity" in said


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--redis-url", "redis://:hidden@127.0.0.1:9"], 5, "no server answers at redis://…@127.0.0.1:9"),
        (["--listen", "0.0.0.0:0"], 2, "give tls_cert and tls_key, or listen on 127.0.0.1"),
        (["--roles", "orchestrator"], 2, "needs its address: --gateway-url"),
        (["--roles", "conductor"], 2, "roles are"),
    ],
)
async def test_what_cannot_work_is_refused_with_what_to_do(
    data: Path, environment: dict[str, str], options: list[str], code: int, words: str
) -> None:
    ended, said = run(data, environment, options)
    assert (ended, words in said) == (code, True), said
    assert "hidden" not in said
    assert "Traceback" not in said


async def test_a_data_directory_of_another_version_is_left_alone(data: Path, environment: dict[str, str]) -> None:
    (data / "regate-data.json").write_text('{"format": 99, "identity": "x"}')
    code, said = run(data, environment, [])
    assert code == 1
    assert "format 99" in said
    assert "Nothing was changed" in said
    assert not (data / "appendonlydir").exists()
