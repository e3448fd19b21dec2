"""Services as they are declared: what is refused, in which words, and that secrets stay where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from admission.contracts import ContractError
from admission.services import Service, ServiceError, blot_credential, load_services

CONTRACT = """\
service: shop
version: "1"
operations:
  act:
    request: {method: POST, path: "/a"}
    arguments: {to: string}
    target: to
    class: OPAQUE
"""
URL = "http://127.0.0.1:8101"


def load(folder: Path, table: dict[str, Any], environment: dict[str, str] | None = None) -> Service:
    (folder / "shop.yaml").write_text(CONTRACT)
    services = load_services({"shop": table}, file="regate.toml", folder=folder, environment=environment or {})
    found = services.get("shop")
    assert found is not None
    return found


def test_a_service_with_a_secret_in_the_environment(tmp_path: Path) -> None:
    table = {"url": URL + "/", "contract": "shop.yaml", "credential": "env:SHOP"}
    service = load(tmp_path, table, {"SHOP": "s3cr3t"})
    assert service.url == URL
    assert service.credential_headers() == {"Authorization": "Bearer s3cr3t"}
    assert "act" in service.contract.operations


def test_a_secret_in_a_file_is_read_when_it_is_used(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("one\n")
    secret.chmod(0o600)
    table = {"url": URL, "contract": "shop.yaml", "credential": "file:secret", "credential_header": "X-Key"}
    service = load(tmp_path, table)
    assert service.credential_headers() == {"X-Key": "one"}
    secret.write_text("two\n")
    assert service.credential_headers() == {"X-Key": "two"}


def test_no_repr_shows_a_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cr3t")
    table = {"url": URL, "contract": "shop.yaml", "credential": "file:secret"}
    service = load(tmp_path, table)
    assert "s3cr3t" not in repr(service)
    assert "s3cr3t" not in str(service.credential_headers)


def test_a_scheme_of_ones_own_is_kept(tmp_path: Path) -> None:
    table = {"url": URL, "contract": "shop.yaml", "credential": "env:SHOP"}
    assert load(tmp_path, table, {"SHOP": "Basic abc"}).credential_headers() == {"Authorization": "Basic abc"}


@pytest.mark.parametrize(
    ("sent", "said", "kept"),
    [
        ({}, {"a": "Bearer x"}, {"a": "Bearer x"}),
        ({"authorization": "Basic abc"}, {"a": "abc", "b": "Basic abc"}, {"a": "***", "b": "Basic ***"}),
        ({"X-Key": "two words"}, {"a": "two words", "b": "two"}, {"a": "***", "b": "two"}),
        ({"X-Key": "1"}, {"a": 1, "b": 10, "c": True, "d": None}, {"a": "***", "b": 10, "c": True, "d": None}),
    ],
)  # fmt: skip
def test_what_was_sent_is_blotted_and_nothing_else(sent: dict[str, str], said: object, kept: object) -> None:
    assert blot_credential(said, sent) == kept


def test_a_secret_that_everybody_can_read_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_text(CONTRACT)
    secret = tmp_path / "secret"
    secret.write_text("s3cr3t")
    table = {"shop": {"url": "http://shop.example", "contract": "shop.yaml", "credential": "file:secret"}}
    secret.chmod(0o644)
    warnings = load_services(table, file="regate.toml", folder=tmp_path, environment={}).warnings
    assert "chmod 600" in warnings[0]
    assert "unencrypted to shop.example" in warnings[1]
    assert not any("s3cr3t" in warning for warning in warnings)
    secret.chmod(0o600)
    assert len(load_services(table, file="regate.toml", folder=tmp_path, environment={}).warnings) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": None}, "`url` is missing"),
        ({"url": "ftp://shop"}, "url must be http(s)://"),
        ({"url": "http://"}, "url must be http(s)://"),
        ({"url": "http://[::1"}, "url is not an address"),
        ({"url": "http://u:s3cr3t@shop"}, "url holds a user name or password"),
        ({"url": URL + "?a=1"}, "without ? and #"),
        ({"contract": "gone.yaml"}, "gone.yaml cannot be read: No such file"),
        ({"credential": "s3cr3t"}, "must be a reference, env:NAME or file:PATH"),
        ({"credential": "env:GONE"}, "env:GONE is not set"),
        ({"credential": "env:ODD"}, "its content cannot stand in a header"),
        ({"credential": "file:gone"}, "file:gone: No such file"),
        ({"token": "s3cr3t"}, "unknown key `token`; known: url, contract, credential, credential_header"),
    ],
)
def test_a_declaration_that_cannot_be_used(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    table = {k: v for k, v in ({"url": URL, "contract": "shop.yaml"} | change).items() if v is not None}
    with pytest.raises(ServiceError) as caught:
        load(tmp_path, table, {"ODD": "s3cr3t\nX: y"})
    assert words in str(caught.value)
    assert str(caught.value).startswith("regate.toml: [services.shop]: ")
    assert "s3cr3t" not in str(caught.value)


def test_a_contract_of_another_service_or_a_bad_one(tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_text(CONTRACT)
    table = {"url": URL, "contract": "shop.yaml"}
    with pytest.raises(ServiceError, match="is the contract of 'shop'; use that name"):
        load_services({"mail": table}, file="regate.toml", folder=tmp_path)
    (tmp_path / "shop.yaml").write_text(CONTRACT.replace("OPAQUE", "SURE"))
    with pytest.raises(ContractError, match=r"shop\.yaml:8: "):
        load_services({"shop": table}, file="regate.toml", folder=tmp_path)
