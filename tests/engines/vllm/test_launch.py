"""What is added to vLLM's command line, and what contradicts it. Needs no vLLM."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from hear.app import up
from hear.app.config import load_toml
from hear.engines.vllm import versions
from hear.engines.vllm.launch import serve_command
from hear.engines.vllm.launch.server_command import (
    ASYNC_SCHEDULER,
    SCHEDULER,
    LaunchSettings,
    Plan,
    plan,
)
from hear.engines.vllm.versions import Installed
from hear.errors import ConfigError

CPU = Installed("0.32.0", cpu=True, named_vllm=False)
GPU = Installed("0.32.0", cpu=False, named_vllm=True)


def planned(*arguments: str, vllm: Installed = CPU, **settings: Any) -> Plan:
    made = LaunchSettings(**{"bus": "ipc:///run/bus", "name": "vllm0", **settings})
    return plan(["some/model", *arguments], made, vllm, {})


def value(made: Plan, option: str) -> Any:
    """The value of an option that is there once; JSON is read."""
    assert made.command.count(option) == 1
    text = made.command[made.command.index(option) + 1]
    return json.loads(text) if text.startswith("{") else text


def test_what_hear_needs_is_added_and_the_rest_stays_as_it_is() -> None:
    made = planned("--max-model-len", "4096", "-tp", "2")
    assert made.command[1:8] == (
        *("-P", "-m", "vllm.entrypoints.openai.api_server", "--model", "some/model"),
        *("--max-model-len", "4096"),
    )
    assert value(made, "--scheduler-cls") == SCHEDULER
    assert "--scheduling-policy" not in made.command
    assert "--enable-prefix-caching" in made.command
    assert value(made, "--prefix-caching-hash-algo") == "sha256_cbor"
    assert value(made, "--kv-events-config") == {
        "enable_kv_cache_events": True,
        "publisher": "null",
    }
    assert value(made, "--additional-config") == {
        "hear": {
            "name": "vllm0",
            "bus": "ipc:///run/bus",
            "key": None,
            "ranks": {},
            "tenants": ["default"],
            "operation_log": None,
            "endpoint": "http://127.0.0.1:8000",
        }
    }
    assert "--kv-transfer-config" not in made.command
    assert made.environment == {"PYTHONHASHSEED": "0"}
    assert (made.host, made.port) == ("", 8000)


def test_a_vllm_of_its_own_name_is_started_by_its_own_command() -> None:
    made = planned(vllm=GPU)
    assert made.command[1:6] == ("-P", "-m", "vllm.entrypoints.cli.main", "serve", "some/model")


def test_on_a_gpu_scheduling_is_asynchronous_unless_that_is_not_wanted() -> None:
    made = planned(vllm=GPU)
    assert value(made, "--scheduler-cls") == ASYNC_SCHEDULER
    assert "--async-scheduling" in made.command
    made = planned("--no-async-scheduling", vllm=GPU)
    assert value(made, "--scheduler-cls") == SCHEDULER
    assert "--async-scheduling" not in made.command
    assert value(planned("--async-scheduling", vllm=CPU), "--scheduler-cls") == SCHEDULER


def test_what_the_user_says_stands() -> None:
    made = planned(
        *("--scheduler-cls", ASYNC_SCHEDULER, "--scheduling-policy=priority"),
        *("--prefix-caching-hash-algo", "sha256", "--enable-prefix-caching"),
        *("--kv-events-config", '{"publisher": "zmq"}', "--kv_events_config.topic", "t"),
        *("--additional-config", '{"mine": 1}'),
    )
    assert value(made, "--scheduler-cls") == ASYNC_SCHEDULER
    assert made.command.count("--enable-prefix-caching") == 1
    assert "--scheduling-policy=priority" in made.command
    assert value(made, "--prefix-caching-hash-algo") == "sha256"
    assert value(made, "--kv-events-config") == {
        "publisher": "zmq",
        "topic": "t",
        "enable_kv_cache_events": True,
    }
    additional = value(made, "--additional-config")
    assert additional["mine"] == 1
    assert additional["hear"]["name"] == "vllm0"


def test_a_hash_seed_in_the_environment_stands() -> None:
    settings = LaunchSettings(bus="ipc:///run/bus", name="vllm0")
    assert plan(["m"], settings, CPU, {"PYTHONHASHSEED": "7"}).environment == {}


def test_a_cpu_tier_is_an_offloading_connector() -> None:
    config = value(planned(cpu_tier_gib=1.5), "--kv-transfer-config")
    assert config["kv_connector"] == "OffloadingConnector"
    extra = config["kv_connector_extra_config"]
    assert extra["spec_module_path"] == "hear.engines.vllm.plugin.tier"
    assert extra["cpu_bytes_to_use"] == 3 << 29


def test_a_key_and_ranks_reach_the_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = planned(key=Path("key.toml"), ranks={"guard:40": 2})
    own = value(made, "--additional-config")["hear"]
    assert own["key"] == str(tmp_path / "key.toml")
    assert own["ranks"] == {"guard:40": 2}


@pytest.mark.parametrize(
    ("arguments", "bus", "endpoint"),
    [
        (["--port", "8001"], "ipc://b", "http://127.0.0.1:8001"),
        (["--host", "0.0.0.0"], "ipc://b", "http://127.0.0.1:8000"),
        (["--host", "10.0.0.7"], "ipc://b", "http://10.0.0.7:8000"),
        (["--host", "fd00::7"], "ipc://b", "http://[fd00::7]:8000"),
        ([], "tcp://10.0.0.1:7777", f"http://{socket.gethostname()}:8000"),
        (["--ssl-certfile", "c", "--ssl-keyfile", "k"], "ipc://b", "https://127.0.0.1:8000"),
        (["--uds", "/run/vllm"], "ipc://b", None),
    ],
)
def test_clients_are_told_where_the_server_listens(
    arguments: list[str], bus: str, endpoint: str | None
) -> None:
    own = value(planned(*arguments, bus=bus), "--additional-config")["hear"]
    assert own["endpoint"] == endpoint
    given = planned(*arguments, bus=bus, endpoint="http://front:80")
    assert value(given, "--additional-config")["hear"]["endpoint"] == "http://front:80"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--scheduler-cls", "a.B"], "--scheduler-cls: got 'a.B', but HEAR needs its own"),
        (["--no-enable-prefix-caching"], "--no-enable-prefix-caching: without a prefix cache"),
        (["--data-parallel-size", "2"], "--data-parallel-size: got '2', expected 1"),
        (["-dp", "2"], "--data-parallel-size: got '2', expected 1"),
        (["--kv-events-config.enable_kv_cache_events", "false"], "--kv-events-config: enable_kv"),
        (["--kv-events-config", "x"], "--kv-events-config: got 'x', expected a JSON object"),
        (["--additional-config", '{"hear": {}}'], "--additional-config: has a key 'hear'"),
        (["--port", "70000"], "--port: got '70000', expected a number from 1 to 65535"),
    ],
)
def test_what_contradicts_hear_is_one_clear_line(arguments: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        planned(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [["--kv-transfer-config", "{}"], ["--kv-transfer-config.x", "1"], ["--kv_offloading_size=4"]],
)
def test_one_tier_is_enough(arguments: list[str]) -> None:
    planned(*arguments)
    with pytest.raises(ConfigError, match="expected one of them"):
        planned(*arguments, cpu_tier_gib=1.0)


def test_an_engine_of_a_cluster_is_started_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed", lambda: CPU)
    path = tmp_path / "cluster.toml"
    path.write_text(
        """
        bus = "tcp://127.0.0.1:7777"
        [[engine]]
        kind = "vllm"
        name = "real"
        model = "some/model"
        options = ["--port", "8001"]
        cpu_tier_gib = 2
        [[policy]]
        policy = "guard:40"
        """
    )
    _, parts = up.plan(load_toml(path, up.ClusterConfig), path)
    [command] = [part.command for part in parts if part.name == "real"]
    assert command[1:7] == ("-P", "-m", "hear.app.cli", "vllm", "serve", "some/model")
    own, rest = serve_command.own_options().parse_known_args(command[6:])
    assert rest == ["some/model", "--port", "8001"]
    assert (own.name, own.bus, own.cpu_tier_gib) == ("real", "tcp://127.0.0.1:7777", 2)
    assert own.ranks == "guard:40=1"
    assert own.with_parent

    path.write_text('[[engine]]\nkind = "vllm"\nmodel = "m"\noptions = ["--port", "x"]')
    with pytest.raises(ConfigError, match=r"cluster\.toml:2: --port: got 'x'"):
        up.plan(load_toml(path, up.ClusterConfig), path)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    settings = LaunchSettings(bus="ipc://b", name="e")
    with pytest.raises(ConfigError, match=r"expected a config\.json in this folder"):
        plan([str(tmp_path)], settings, CPU, {})
    with pytest.raises(ConfigError, match="there is no such folder"):
        plan([str(tmp_path / "nix")], settings, CPU, {})
    (tmp_path / "config.json").write_text("{}")
    plan([str(tmp_path)], settings, CPU, {})
