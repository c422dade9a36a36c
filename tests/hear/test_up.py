"""What ``hear up`` makes of a configuration. That it runs is in tests/test_processes.py."""

from pathlib import Path

import pytest

from hear.app.config import load_toml
from hear.app.supervisor import Part
from hear.app.up import DEFAULT, ClusterConfig, plan
from hear.errors import ConfigError, HearError


def planned(tmp_path: Path, text: str) -> tuple[str, dict[str, Part]]:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    url, parts = plan(load_toml(path, ClusterConfig), path)
    return url, {part.name: part for part in parts}


def option(part: Part, name: str) -> str:
    (value,) = (w.removeprefix(f"{name}=") for w in part.command if w.startswith(f"{name}="))
    return value


def test_the_default_is_a_bus_two_engines_and_two_policies() -> None:
    url, parts = plan(DEFAULT, None)
    assert url.startswith("ipc://")
    assert [part.name for part in parts] == ["bus", "engine0", "engine1", "cache-aware", "guard:40"]
    assert all(part.command[-1] == "--with-parent" for part in parts)


def test_a_file_names_all_and_paths_are_its_own(tmp_path: Path) -> None:
    url, parts = planned(
        tmp_path,
        """
        bus = "tcp://127.0.0.1:7777"
        keys = "keyring.toml"
        key = "operator.toml"
        state = "kept"
        [[engine]]
        [[engine]]
        name = "big"
        profile = "rtx-pro-6000-qwen3-8b"
        endpoint = "sim+tcp://127.0.0.1:9000"
        [[policy]]
        policy = "session-aware"
        [[policy]]
        policy = "guard:40"
        name = "guard"
        rank = 9
        """,
    )
    assert url == "tcp://127.0.0.1:7777"
    assert option(parts["bus"], "--keys") == str(tmp_path / "keyring.toml")
    assert option(parts["big"], "--ranks") == "session-aware=2,guard=9"
    assert option(parts["big"], "--profile") == "rtx-pro-6000-qwen3-8b"
    assert option(parts["big"], "--endpoint") == "sim+tcp://127.0.0.1:9000"
    assert option(parts["engine0"], "--operation-log") == str(
        tmp_path / "kept" / "engine0.operations"
    )
    for name in ("engine0", "big", "session-aware", "guard"):
        assert option(parts[name], "--key") == str(tmp_path / "operator.toml")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("engines = 3", r"cluster.toml:1: unknown key 'engines': did you mean 'engine'"),
        ('[[engine]]\nprofil = "x"', r"cluster.toml:2: unknown key 'profil'.*'profile'"),
        ('[[engine]]\nname = "a b"', r"cluster.toml:2: engine\[0\].name"),
        ('[[engine]]\nname = "../e"', r"cluster.toml:2: engine\[0\].name"),
        ("[[engine]]\nblock_size = 0", r"cluster.toml:2: engine\[0\].block_size"),
        ('[[policy]]\npolicy = "cache-awre"', "did you mean 'cache-aware'"),
        ('[[policy]]\npolicy = "cache-aware+guard:40"', r"cluster.toml:2: .*expected one policy"),
        ('[[policy]]\npolicy = "fcfs"', "expected one policy"),
        ('[[engine]]\nname = "x"\n[[engine]]\nname = "x"', "two parts are named 'x'"),
        ('[[engine]]\nname = "guard:40"\n[[policy]]\npolicy = "guard:40"', "two parts are named"),
        ('[[engine]]\nname = "bus"', "two parts are named 'bus'"),
        ('keys = "k.toml"', "keys and key go together"),
        ("bus = ", "not TOML"),
        ('bus = "smoke://signals"', "expected an address that begins with one of"),
        ('[[engine]]\nkind = "simulatd"', "toml:2: 'simulatd': expected one of simulated, vllm"),
        ('[[engine]]\nkind = "vlm"\nmodel = "m"', "toml:2: 'vlm': expected one of simulated, vllm"),
        ('[[engine]]\nprofile = "h200"', "h200"),
        (
            '[[engine]]\nmodel = "m"',
            "cluster.toml:2: an engine of kind 'simulated' has no 'model'",
        ),
        ('[[engine]]\nkind = "vllm"\nblock_size = 16', "toml:3: .* 'vllm' has no 'block_size'"),
        ('[[engine]]\nkind = "vllm"', "cluster.toml:2: .* needs a model"),
        ("[[engine]]\ncpu_tier_gib = 0", r"cluster.toml:2: engine\[0\].cpu_tier_gib"),
    ],
)
def test_what_cannot_be_used_is_one_error_before_anything_starts(
    tmp_path: Path, text: str, why: str
) -> None:
    with pytest.raises(HearError, match=why):
        planned(tmp_path, text)


def test_a_file_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_toml(tmp_path / "none.toml", ClusterConfig)


def test_policies_name_the_tenants_that_engines_tell_from_the_start(tmp_path: Path) -> None:
    _, parts = planned(
        tmp_path,
        """
        [[engine]]
        [[engine]]
        tenants = ["acme"]
        [[policy]]
        policy = "cache-aware"
        [[policy]]
        policy = "guard:40"
        tenant = "acme"
        [[policy]]
        policy = "guard:60"
        tenant = "umbra"
        """,
    )

    def told(name: str) -> list[str]:
        words = parts[name].command
        return [w.partition("=")[2] for w in words if w.startswith("--tenant=")]

    assert told("engine0") == ["default", "acme", "umbra"]
    assert told("engine1") == ["acme"]
    assert told("cache-aware") == ["default"]
    assert told("guard:60") == ["umbra"]


def test_without_policies_engines_tell_the_default_tenant() -> None:
    _, parts = plan(ClusterConfig(engine=DEFAULT.engine[:1]), None)
    assert option(parts[1], "--tenant") == "default"
