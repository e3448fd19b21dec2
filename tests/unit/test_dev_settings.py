"""What `regate dev` makes of the user's settings: the sample beside them, fixed ports, no secrets where none belong."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from admission.services import load_services
from orchestrator.dev import environment_without, how_to, programs
from orchestrator.dev_settings import SAMPLE_AGENTS, SAMPLE_SERVICES, DevPlan, plan_dev, sample_text
from orchestrator.settings import Settings, SettingsError, load_settings, parse_settings


def settings_of(tmp_path: Path, text: str = "") -> Settings:
    (tmp_path / "regate-data").mkdir(exist_ok=True)
    return parse_settings(text, file="regate.toml", folder=tmp_path)


def planned(settings: Settings, *, agents: tuple[str, ...] = (), services: tuple[str, ...] = (), sample: bool = True):
    plan = plan_dev(settings, agents=agents, services=services, with_sample=sample)
    return plan, load_settings(plan.file)


def test_the_sample_is_whole_and_its_contracts_are_sound(tmp_path: Path) -> None:
    plan, written = planned(settings_of(tmp_path))
    assert plan.sample
    assert set(written.agents) == set(SAMPLE_AGENTS)
    services = load_services(written.services, file=written.file, folder=written.folder)
    assert set(services.by_name) == set(SAMPLE_SERVICES)
    assert written.data_dir == tmp_path / "regate-data"
    assert written.gateway.url == f"http://127.0.0.1:{plan.gateway_port}"
    ports = [plan.api_port, plan.gateway_port, *(part.port for part in (*plan.services, *plan.agents))]
    assert len(set(ports)) == len(ports) == 6
    # Below what systems take for outgoing connections, so that a port is still free when its process comes back.
    assert all(18_000 <= port < 28_000 for port in ports)


def test_the_same_directory_gets_the_same_ports_again(tmp_path: Path) -> None:
    first, _ = planned(settings_of(tmp_path))
    again, _ = planned(settings_of(tmp_path))
    assert (first.api_port, first.services, first.agents) == (again.api_port, again.services, again.agents)


def test_what_the_user_brings_stands_beside_the_sample(tmp_path: Path) -> None:
    contract = tmp_path / "bank.yaml"
    contract.write_text(sample_text("services/mail.yaml").replace("service: mail", "service: bank"))
    _, written = planned(
        settings_of(tmp_path),
        agents=("mine=http://127.0.0.1:5001/", "http://127.0.0.1:5002"),
        services=(f"bank=http://127.0.0.1:5003={contract}",),
    )
    assert written.agents["mine"] == "http://127.0.0.1:5001"
    assert written.agents["agent2"] == "http://127.0.0.1:5002"
    assert written.services["bank"] == {"url": "http://127.0.0.1:5003", "contract": str(contract)}


def test_the_sample_takes_a_part_that_the_user_names_only_where_nobody_listens(tmp_path: Path, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        taken = busy.getsockname()[1]
        text = f'[agents.plan]\nurl = "http://127.0.0.1:{taken}"\n[agents.slow]\nurl = "http://127.0.0.1:{free_port}"\n'
        plan, written = planned(settings_of(tmp_path, text))
    assert [(part.name, part.port) for part in plan.agents] == [("slow", free_port)]
    assert written.agents["plan"] == f"http://127.0.0.1:{taken}"
    assert not plan.sample


def test_paths_and_references_of_the_user_s_file_are_kept(tmp_path: Path) -> None:
    text = (
        '[store]\nurl = "redis://127.0.0.1:6379"\nassume_durable = true\npartitions = 3\n'
        '[services.bank]\nurl = "https://bank.example"\ncontract = "c/bank.yaml"\ncredential = "file:secrets/bank"\n'
    )
    _, written = planned(settings_of(tmp_path, text), sample=False)
    assert (written.store_url, written.assume_durable, written.partitions) == ("redis://127.0.0.1:6379", True, 3)
    assert written.services["bank"]["contract"] == str(tmp_path / "c/bank.yaml")
    assert written.services["bank"]["credential"] == f"file:{tmp_path / 'secrets/bank'}"
    assert written.agents == {}


@pytest.mark.parametrize(
    ("agents", "services", "words"),
    [
        (("mine=ftp://x",), (), "is no address"),
        (("a b=http://x",), (), "cannot be a name"),
        ((), ("/nowhere/c.yaml",), "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, agents: tuple[str, ...], services: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        planned(settings_of(tmp_path), agents=agents, services=services)


def test_a_contract_alone_needs_an_address_in_the_settings(tmp_path: Path) -> None:
    contract = tmp_path / "bank.yaml"
    contract.write_text(sample_text("services/mail.yaml").replace("service: mail", "service: bank"))
    with pytest.raises(SettingsError, match="where is bank"):
        planned(settings_of(tmp_path), services=(str(contract),))
    text = '[services.bank]\nurl = "http://127.0.0.1:5003"\ncontract = "old.yaml"\n'
    _, written = planned(settings_of(tmp_path, text), services=(str(contract),))
    assert written.services["bank"] == {"url": "http://127.0.0.1:5003", "contract": str(contract)}


def test_agents_see_neither_keys_nor_credentials(tmp_path: Path) -> None:
    text = '[services.bank]\nurl = "http://127.0.0.1:1"\ncontract = "c.yaml"\ncredential = "env:BANK"\n'
    settings = settings_of(tmp_path, text)
    kept = environment_without(settings, {"BANK": "s", "REGATE_GRANT_KEYS": "k", "REGATE_TOKEN": "t", "PATH": "p"})
    assert kept == {"PATH": "p"}


def test_every_part_is_a_process_and_only_the_gateway_has_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGATE_GRANT_KEYS", "ab" * 32)
    plan, written = planned(settings_of(tmp_path))
    found = {program.role: program for program in programs(plan, written)}
    assert set(found) == {"service:shop", "service:mail", "agent:plan", "agent:slow", "gateway", "orchestrator"}
    for role in ("service:shop", "agent:plan", "agent:slow"):
        environment = found[role].environment
        assert environment is not None
        assert "REGATE_GRANT_KEYS" not in environment
    orchestrator = found["orchestrator"].environment
    assert orchestrator is not None
    assert "REGATE_GRANT_KEYS" in orchestrator
    assert found["gateway"].environment is None


def test_a_person_is_told_commands_that_can_be_pasted(tmp_path: Path) -> None:
    plan: DevPlan = planned(settings_of(tmp_path))[0]
    told = "\n".join(how_to(plan, "http://127.0.0.1:1"))
    assert f"regate run start -f {plan.data_dir / 'sample-goal.yaml'} --data {plan.data_dir}" in told
    assert "regate run redirect --last -f" in told
