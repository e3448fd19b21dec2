"""regate.toml: what a right one means, what a wrong one is told, and where grant keys come from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.settings import (
    SettingsError,
    find_settings,
    grant_keys,
    is_loopback,
    load_settings,
    parse_address,
    parse_settings,
)

WHOLE = """
[store]
data_dir = "data"
allow_volatile = true
partitions = 4

[gateway]
listen = "127.0.0.1:8201"

[api]
listen = "[::1]:8200"

[services.shop]
url = "http://127.0.0.1:8101"
contract = "services/shop.yaml"
credential = "env:SHOP_TOKEN"

[agents.plan]
url = "http://127.0.0.1:9001/"
"""


def parsed(text: str):
    return parse_settings(text, file="regate.toml", folder=Path("/project"))


def refused(text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        parsed(text)
    return str(caught.value)


def test_a_whole_file_is_read_and_paths_start_at_it() -> None:
    settings = parsed(WHOLE)
    assert settings.data_dir == Path("/project/data")
    assert (settings.store_url, settings.allow_volatile, settings.partitions) == (None, True, 4)
    assert (settings.gateway.host, settings.gateway.port) == ("127.0.0.1", 8201)
    assert (settings.api.host, settings.api.port) == ("::1", 8200)
    assert settings.agents == {"plan": "http://127.0.0.1:9001"}
    assert settings.services["shop"]["credential"] == "env:SHOP_TOKEN"


def test_an_empty_file_means_everything_on_this_machine() -> None:
    settings = parsed("")
    assert settings.data_dir == Path("/project/regate-data")
    assert settings.partitions is None
    assert is_loopback(settings.api.host)
    assert is_loopback(settings.gateway.host)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        (
            '[store]\ndata_dir = "d"\nvolatile = true\n',
            "regate.toml:3:",
            "unknown key `volatile` in [store]; known:",
        ),
        ("\n\n[stor]\n", "regate.toml:3:", "unknown table [stor]; known: [store], [gateway]"),
        ('[store]\ndata_dir = "d\n', "regate.toml:2:", "not TOML"),
        ('[store]\nurl = "http://x"\n', "regate.toml:2:", "store.url"),
        ("[store]\npartitions = 0\n", "regate.toml:2:", "greater than or equal to 1"),
        ('[api]\nlisten = "8080"\n', "regate.toml:2:", "no HOST:PORT"),
        ('[api]\nlisten = ":8080"\n', "regate.toml:2:", "names no host"),
        ('[api]\n\nlisten = "127.0.0.1:99999"\n', "regate.toml:3:", "no HOST:PORT"),
        ('[gateway]\nlisten = "0.0.0.0:80"\n', "regate.toml:2:", "give tls_cert and tls_key, or listen on 127.0.0.1"),
        ('[gateway]\nlisten = "127.0.0.1:0"\ntls_cert = "c.pem"\n', "regate.toml:2:", "belong together"),
        ('[gateway]\nurl = "http://gate.example"\n', "regate.toml:", "use https"),
        ("[agents.plan]\nadress = 1\n", "regate.toml:1:", "[agents.plan] lacks `url`"),
        ('[agents."a b"]\nurl = "http://x"\n', "regate.toml:", "pattern"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_what_to_do(text: str, place: str, words: str) -> None:
    told = refused(text)
    assert told.startswith(place), told
    assert words in told


def test_tls_files_must_exist_before_anything_listens_off_loopback(tmp_path: Path) -> None:
    text = '[api]\nlisten = "0.0.0.0:0"\ntls_cert = "c.pem"\ntls_key = "k.pem"\n'
    with pytest.raises(SettingsError, match=r"c\.pem does not exist"):
        parse_settings(text, file="f", folder=tmp_path)
    (tmp_path / "c.pem").touch()
    (tmp_path / "k.pem").touch()
    settings = parse_settings(text, file="f", folder=tmp_path)
    assert settings.api.cert == tmp_path / "c.pem"


def test_a_missing_file_says_how_one_is_made(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="regate init"):
        load_settings(tmp_path / "regate.toml")


def test_the_named_file_goes_before_the_data_directory_s_and_that_before_the_one_here(tmp_path: Path) -> None:
    here, data, named = tmp_path / "here", tmp_path / "data", tmp_path / "named.toml"
    here.mkdir()
    data.mkdir()
    assert find_settings(None, None, here=here).data_dir == here / "regate-data"
    (here / "regate.toml").write_text("[store]\npartitions = 1\n")
    assert find_settings(None, data, here=here).partitions == 1
    assert find_settings(None, data, here=here).data_dir == data
    (data / "regate.toml").write_text("[store]\npartitions = 2\n")
    assert find_settings(None, data, here=here).partitions == 2
    named.write_text('[store]\npartitions = 3\ndata_dir = "elsewhere"\n')
    assert find_settings(named, data, here=here).partitions == 3
    assert find_settings(named, data, here=here).data_dir == data
    assert find_settings(named, None, here=here).data_dir == tmp_path / "elsewhere"


@pytest.mark.parametrize(("text", "expected"), [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0))])
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


# --- keys ------------------------------------------------------------------------------------------------------------


def test_keys_of_the_environment_come_in_their_order(tmp_path: Path) -> None:
    keys = grant_keys(tmp_path, {"REGATE_GRANT_KEYS": "aa" * 16 + ", " + "bb" * 32}, os.urandom)
    assert keys == [b"\xaa" * 16, b"\xbb" * 32]
    assert not (tmp_path / "grant.keys").exists()


def test_a_key_is_made_once_private_and_found_again(tmp_path: Path) -> None:
    first = grant_keys(tmp_path, {}, os.urandom)
    assert (tmp_path / "grant.keys").stat().st_mode & 0o777 == 0o600
    assert [len(key) for key in first] == [32]
    assert grant_keys(tmp_path, {}, lambda n: b"z" * n) == first


def test_two_that_start_at_once_agree_on_one_key(tmp_path: Path) -> None:
    def slow(n: int) -> bytes:
        other = grant_keys(tmp_path, {}, lambda count: b"o" * count)
        assert other == [b"o" * 32]
        return b"s" * n

    assert grant_keys(tmp_path, {}, slow) == [b"o" * 32]


@pytest.mark.parametrize("text", ["", "zz", "ab"])
def test_a_key_that_is_no_key_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    (tmp_path / "grant.keys").write_text(text)
    (tmp_path / "grant.keys").chmod(0o600)
    with pytest.raises(SettingsError, match=r"grant\.keys"):
        grant_keys(tmp_path, {}, os.urandom)


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "grant.keys").write_text("ab" * 32)
    (tmp_path / "grant.keys").chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600") as caught:
        grant_keys(tmp_path, {}, os.urandom)
    assert "abab" not in str(caught.value)
