"""A name that came in a message or a recording chooses among what is installed, and runs nothing.

First what a stranger on the bus may try, on the parts that listen to it; then every place in the
tree where a name could turn into code, so that a new one has to be thought about here.
"""

import ast
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import trio
import trio.testing

from hear.app import cli, plugins
from hear.app.config import load_toml
from hear.blocks import pack
from hear.buses.memory import MemoryBus
from hear.endpoints import is_host, scheme_of
from hear.engines.simulated import profile, serving
from hear.engines.simulated.backend import create
from hear.errors import ConfigError, HearError, PluginError
from hear.harnesses.eval.bench import places
from hear.harnesses.eval.replay.live import find_engines, play
from hear.harnesses.eval.workloads import scbench
from hear.harnesses.openai.http import Address
from hear.harnesses.pool.reaching import client_of, hasher_of
from hear.interfaces import Bus
from hear.messages import (
    DEFAULT_TENANT,
    CapabilitiesReported,
    Envelope,
    Key,
    Message,
    RequestDescribed,
    RequestOutcome,
)
from hear.recording import Header, Recorder
from tests.hear.builders import envelope
from tests.security.uses import Found, Use, uses

ROOT = Path(__file__).resolve().parents[2]
EVIL = "evil\x1b]0;mine\x07\nhear: all is well"


class Trap(NamedTuple):
    """A module that leaves a mark when it is imported or called, and what is left if it was."""

    module: str
    mark: Path


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trap:
    mark = tmp_path / "somebody-was-here"
    folder = tmp_path / "on-the-path"
    folder.mkdir()
    (folder / "hear_trap.py").write_text(
        f"import pathlib\nmark = pathlib.Path({str(mark)!r})\nmark.write_text('imported')\n"
        "def run(*words, **more):\n    mark.write_text('called')\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(folder)
    return Trap("hear_trap", mark)


def words_of(error: BaseException) -> str:
    """What an error says, once it is seen that it can be shown as it is."""
    said = str(error)
    assert said.isprintable(), said
    assert len(said) < 700
    return said


# -- an engine's endpoint and its hash scheme -------------------------------------------------

ATTACKS = [
    "{module}:run://anything",
    "os:system://;touch {mark}",
    "builtins:exec://open('{mark}', 'w')",
    "builtins:open://{mark}",
    "{module}://",
    "{module}:run",
    ":run://x",
    "policies.guard:Guard://x",
    "guard://of another group",
    "x" * 200_000 + "://",
    "x" * 900 + "://h",
    "\x1b[2J://h",
    "",
]


def capabilities(endpoint: str, hash_scheme: str = "hear-blake2b-64") -> CapabilitiesReported:
    return CapabilitiesReported(
        endpoint=endpoint, hash_scheme=hash_scheme, block_size=512, model="m"
    )


async def keep_telling(bus: Bus, message: Message, engine: str = EVIL) -> None:
    """What any worker on a bus can do."""
    seq = 0
    while True:
        seq += 1
        bus.publish(envelope(message, Key(engine=engine), source=engine, seq=seq))
        await trio.sleep(0.05)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_endpoint_on_the_bus_runs_nothing_in_who_plays(
    attack: str, trap: Trap, autojump_clock: trio.testing.MockClock
) -> None:
    endpoint = attack.format(module=trap.module, mark=trap.mark)
    workload = scbench.generate("fitted", sessions=2, seed=1)
    async with MemoryBus() as bus, trio.open_nursery() as nursery:
        nursery.start_soon(keep_telling, bus, capabilities(endpoint))
        engines = await find_engines(bus)
        with pytest.raises((PluginError, ConfigError)) as caught:
            await play(bus, workload, engines, load=100, seed=1, loop="closed")
        nursery.cancel_scope.cancel()
    said = words_of(caught.value)
    assert not trap.mark.exists()
    if not endpoint:
        assert "no engine on this bus" in said  # it takes no requests, as far as anyone can tell
        return
    assert said.startswith(f"engine {EVIL!r} at {endpoint!r:.150}"), "who has said what"
    if isinstance(caught.value, PluginError):
        assert said.endswith("expected one of http, https, sim+tcp, sim+unix")


@asynccontextmanager
async def the_bus(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Have ``hear bench`` join this bus, and look at it shortly."""

    @asynccontextmanager
    async def connected(url: str, **more: object) -> AsyncIterator[Bus]:
        yield bus

    with monkeypatch.context() as patched:
        patched.setattr(places, "connected", connected)
        patched.setattr(places, "find_engines", partial(find_engines, within_s=0.2))
        yield


@pytest.mark.parametrize("attack", ATTACKS[:-1])
async def test_an_endpoint_on_the_bus_runs_nothing_in_a_bench(
    attack: str, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the user has typed the very same: it is an engine's endpoint all the same."""
    endpoint = attack.format(module=trap.module, mark=trap.mark)
    async with MemoryBus() as bus, trio.open_nursery() as nursery, the_bus(bus, monkeypatch):
        nursery.start_soon(keep_telling, bus, capabilities(endpoint))
        with pytest.raises((PluginError, ConfigError)) as caught:
            async with places.joined("ipc:///nowhere", endpoint, salt="s"):
                pass
        nursery.cancel_scope.cancel()
    assert words_of(caught.value).startswith(f"engine {EVIL!r} at {endpoint!r:.150}")
    assert not trap.mark.exists()


@pytest.mark.parametrize(
    "scheme", ["{module}:run", "builtins:exec", "guard", "", "s" * 200_000, "\x1b[2J\n"]
)
async def test_a_hash_scheme_on_the_bus_runs_nothing_in_a_bench(
    scheme: str, trap: Trap, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named = scheme.format(module=trap.module)
    engine = create("h100-qwen3-8b", block_size=512, name="engine0")
    with trio.fail_after(20):
        async with MemoryBus() as bus, trio.open_nursery() as nursery, the_bus(bus, monkeypatch):
            endpoint = await nursery.start(serving.serve, engine, f"sim+unix://{tmp_path}/e")
            nursery.start_soon(keep_telling, bus, capabilities(endpoint, named))
            with pytest.raises(PluginError) as caught:
                async with places.joined("ipc:///nowhere", endpoint, salt="s"):
                    pass
            nursery.cancel_scope.cancel()
    said = words_of(caught.value)
    assert not trap.mark.exists()
    assert said.startswith(f"engine {EVIL!r}")
    assert "(hash_scheme)" in said or "expected one of hear-blake2b-64, vllm-sha256-64" in said


async def test_engines_that_crowd_a_bus_do_not_crowd_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with MemoryBus() as bus, trio.open_nursery() as nursery, the_bus(bus, monkeypatch):
        for number in range(50):
            told = capabilities(f"http://h:1/{'x' * 500}")
            nursery.start_soon(keep_telling, bus, told, f"{number}{'e' * 500}")
        with pytest.raises(ConfigError, match=r" and 42 more$") as caught:
            async with places.joined("ipc:///nowhere", "http://other:1", salt="s"):
                pass
        nursery.cancel_scope.cancel()
    assert len(str(caught.value)) < 3_000


# -- where an endpoint leads ------------------------------------------------------------------

NOWHERE = [
    "http://h:1/\r\nX-Injected: 1",
    "http://h:1/ HTTP/1.1\r\nHost: other",
    "http://h\t:1",
    " http://h:1",
    "http://user:secret@h:1",
    "http://@h:1",
    "http://h:1\\@other",
    "http://h\x00:1",
    "http://[::1",
    "http://[h]x:1",
    "http://h:65536",
    "http://h:1?q",
    "http://b\N{LATIN SMALL LETTER U WITH DIAERESIS}cher:1",
    f"http://{'a' * 64}:1",
    f"http://{'a.' * 200}a:1",
    "http://-h:1",
    "https://.h:1",
    f"http://h:1/{'p' * 5_000}",
    "sim+tcp://h\x00:1",
    "sim+tcp://h h:1",
    f"sim+tcp://{'a' * 64}:1",
    "sim+tcp://h:\N{ARABIC-INDIC DIGIT THREE}",
    f"sim+tcp://h:{'9' * 5_000}",
    "sim+unix://\x00abstract",
    "sim+unix:///tmp/a\nb",
    f"sim+unix:///{'p' * 5_000}",
]


@pytest.mark.parametrize("endpoint", NOWHERE)
async def test_what_is_no_place_is_one_error_before_anyone_connects(endpoint: str) -> None:
    with pytest.raises((ConfigError, PluginError)) as refused:
        async with client_of("engine0", endpoint)():
            pass
    words_of(refused.value)
    with pytest.raises(ConfigError) as caught:  # nor where the client alone is asked
        async with plugins.load_installed("clients", endpoint.strip().partition(":")[0])(endpoint):
            pass
    words_of(caught.value)


def test_a_line_end_in_an_address_is_not_read_over() -> None:
    assert str(Address.parse("http://h:1/prefix/")) == "http://h:1/prefix"
    assert str(Address.parse("https://[::1]")) == "https://[::1]:443"
    for end in "\r\n\t":
        with pytest.raises(ConfigError):
            Address.parse(f"http://h:1/prefix{end}")


def test_hosts_and_schemes() -> None:
    for good in (
        "localhost",
        "a-b.example.",
        "127.0.0.1",
        "::1",
        "fe80::1%eth0",
        "node_7",
        "a" * 63,
    ):
        assert is_host(good), good
    for bad in (
        "",
        ".",
        "a..b",
        "-a",
        "a-",
        "a b",
        "a\n",
        "::1\n",
        "fe80::1%e\n",
        "*",
        "a/b",
        "1:2",
    ):
        assert not is_host(bad), bad
    assert scheme_of("sim+unix:///tmp/e") == "sim+unix"
    assert [
        scheme_of(text) for text in ("", "x", "x:y", "x://", "x://\n", "x://" + "y" * 1024)
    ] == [None] * 6


def test_a_servers_address_that_would_be_told_to_all_holds_no_password() -> None:
    pytest.importorskip("httpx")
    pytest.importorskip("zmq")
    from hear.engines.vllm.attach.kv_sockets import check_endpoint
    from hear.engines.vllm.launch.server import check_url

    for url in [url for url in NOWHERE if url.strip().startswith("http")]:
        with pytest.raises(ConfigError) as caught:
            check_url(url)
        words_of(caught.value)
        with pytest.raises(ConfigError) as caught:
            check_endpoint(url.replace("https", "http").replace("http", "tcp"))
        words_of(caught.value)
    assert check_url("https://h.example:1/x/") == "https://h.example:1/x"
    check_endpoint("tcp://127.0.0.1:5557")
    assert cli.main(["vllm", "serve", "--endpoint", "http://u:p@h:1", "m", "--dry-run"]) == 2


def test_a_salt_that_looks_like_a_tenants_and_is_none_is_read() -> None:
    """Whoever sends requests to an attached server chooses their salts, also absurd ones."""
    from hear.engines.vllm.identity import Tenants, salt_of

    tenants = Tenants(["acme"])
    for length in ("9" * 5_000, "\N{ARABIC-INDIC DIGIT FOUR}" * 5_000, "-1", ""):
        assert tenants.of_salts([f"tenant:{length}:acme"]) == DEFAULT_TENANT
    assert tenants.of_salts([salt_of("acme", "own") or ""]) == "acme"


# -- recordings -------------------------------------------------------------------------------

NAMES = [
    "../../../../etc/passwd.toml",
    "/etc/passwd.toml",
    "hear_trap:run",
    "--json=stolen.json",
    "{0.__class__}",
    "%s%n",
    "$(touch stolen)",
    "[link=file:///etc/passwd]x[/link]",
    EVIL,
    "n" * 5_000,
]


def hostile_recording(path: Path, name: str) -> None:
    """A recording of two requests in which everything that can be named is named so."""
    recorder = Recorder(Header(bus=name, clock="virtual", patterns=(name,)))
    told: list[Envelope] = []

    def tell(message: Message, time_s: float, request: str | None = None) -> None:
        made = envelope(
            message,
            Key(engine=name, request=request, context=name, workflow=name),
            source=name,
            time_s=time_s,
            seq=0,
            id=f"{len(told)}",
        )
        told.append(msgspec.structs.replace(made, tenant=name))

    tell(
        CapabilitiesReported(
            controls=(name,),
            modes=(name,),
            block_size=512,
            hash_scheme=name,
            model=name,
            endpoint=name,
            targets=(name,),
            at_submission=(name,),
        ),
        0.0,
    )
    for number in range(2):
        request = f"{name}{number}"
        described = RequestDescribed(
            role=name,
            stage=name,
            depends_on=(name,),
            turn=number + 1,
            prompt_tokens=1024,
            block_size=512,
            prefix_hashes=pack([1, 2]),
        )
        tell(described, number + 1.0, request)
        for status in ("accepted", "completed"):
            outcome = RequestOutcome(
                status=status,
                mode=name,
                prompt_tokens=1024,
                output_tokens=4,
                reused_tokens={name: 0},
            )
            tell(outcome, number + 1.5, request)
    path.write_bytes(
        recorder.begin() + b"".join(recorder.hear([e], e.time_s) for e in told) + recorder.end(9.0)
    )


@pytest.mark.parametrize("name", NAMES)
def test_no_name_in_a_recording_is_opened_or_run_by_a_replay(
    name: str, trap: Trap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []

    def noting(path: Path, type_: type[profile.EngineProfile]) -> profile.EngineProfile:
        opened.append(path)
        return load_toml(path, type_)

    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(profile, "load_toml", noting)
    hostile_recording(tmp_path / "r.hear", name)
    from hear.harnesses.eval.replay import command, plan

    def run_here(runs: list[plan.Run], *more: object) -> list[object]:
        """What else the processes of a replay would do."""
        for run in runs:
            plan.execute(run, lambda done: None)
        return []

    monkeypatch.setattr(command, "run_all", run_here)
    arguments = ["replay", str(tmp_path / "r.hear"), "--policy", "fcfs,cache-aware"]
    assert cli.main(arguments) == 0
    shipped = Path(profile.__file__).parent / "profiles"
    assert opened
    assert {path.resolve().parent for path in opened} == {shipped.resolve()}
    assert not trap.mark.exists()
    assert list(here.iterdir()) == []


# -- the doors --------------------------------------------------------------------------------


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, points: str) -> None:
    """Put a distribution with these entry points on the path."""
    made = folder / "hear_stranger-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: hear-stranger\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(folder)


def test_what_was_received_finds_an_entry_point_of_its_own_group_by_what_that_declares(
    trap: Trap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        monkeypatch,
        "[hear.clients]\n"
        f"{trap.module} = hear.blocks:hash_tokens\n"
        f"{trap.module}:run = {trap.module}:run\n"
        f"[hear.hash_schemes]\nelsewhere = {trap.module}:run\n"
        f"[clients]\nnot-hear = {trap.module}:run\n",
    )
    from hear.blocks import hash_tokens

    # By a name that is the name of a module too, it is not that module that is imported.
    assert plugins.load_received("clients", trap.module, "engine 'e'") is hash_tokens
    for name in ("elsewhere", "not-hear", f"{trap.module}:run", "hear.blocks:hash_tokens"):
        with pytest.raises(PluginError, match=r"^engine 'e': no client named "):
            plugins.load_received("clients", name, "engine 'e'")
        with pytest.raises(PluginError, match=r"^no client named "):
            plugins.load_installed("clients", name)
    assert not trap.mark.exists()
    plugins.load_typed("clients", f"{trap.module}:run")
    assert trap.mark.exists(), "what the user types may be anything, and the trap works"


@pytest.mark.parametrize("name", [*NAMES, "\x00", "\N{RIGHT-TO-LEFT OVERRIDE}" * 90, ""])
@pytest.mark.parametrize("ask", [hasher_of, client_of])
def test_an_error_about_a_received_name_is_a_short_line(
    name: str, ask: Callable[[str, str], object]
) -> None:
    with pytest.raises(HearError) as caught:
        ask(name, name)
    assert words_of(caught.value).startswith(f"engine {name!r:.80}")
    with pytest.raises(HearError) as caught:
        ask(name, f"{name}://x")
    words_of(caught.value)


# -- every place where a name could become code -----------------------------------------------

FOLDERS = ("hear", "buses", "engines", "harnesses", "policies", "benchmarks", "examples")

TYPED = {
    ("policies/runtime/spec.py", "parse"): "policies that the user names; see POLICIES",
    ("engines/worker/command.py", "run"): "--kind of hear run engine",
}
"""Who may load what is named by a path: each with where the path is typed."""

POLICIES = {
    ("hear/app/cluster.py", "running"): "an argument that code gives; what gives it is in RUNNING",
    ("hear/app/up.py", "_policies"): "the user's cluster.toml",
    ("harnesses/eval/replay/command.py", "_plan"): "--policy of hear replay",
    ("harnesses/eval/bench/command.py", "_arms"): "--policy of hear bench",
    ("harnesses/eval/bench/arm.py", "_policies"): "an arm of --policy of hear bench",
    ("harnesses/eval/bench/places.py", "fresh"): "an arm of --policy of hear bench",
    ("policies/runtime/command.py", "run"): "the policy of hear run policy",
}
"""Who may have policies parsed, whose names may be paths."""

RUNNING = {
    ("harnesses/eval/replay/runner.py", "Replay.main"): "--policy and --engine of hear replay",
    ("benchmarks/engine.py", "serve"): "names written there",
    ("benchmarks/soak.py", "soak"): "names written there",
    ("examples/in_process.py", "main"): "names written there",
}
"""Who may start a cluster in one process, by names of policies and of a profile."""

PROFILES = {
    ("hear/app/cluster.py", "running"): "as in POLICIES",
    ("hear/app/up.py", "_simulated"): "the user's cluster.toml",
    ("engines/worker/command.py", "run"): "--profile of hear run engine",
    ("engines/simulated/backend.py", "create"): "what all of these go through",
    (
        "harnesses/eval/replay/command.py",
        "_plan",
    ): "--engine, or the nearest of those written there",
    ("harnesses/eval/replay/nearest.py", "nearest_profile.differs"): "those written in the command",
    ("harnesses/eval/bench/command.py", "_engine"): "--engine of hear bench",
    ("benchmarks/engine.py", "serve_alone"): "a name written there",
    ("benchmarks/day.py", "Day._engine"): "a name written there",
}
"""Who may make an engine of a profile, whose name may be the path of a file."""

COMPUTED = {
    ("hear/app/cli.py", "main"): "one of names()",
    ("hear/app/run.py", "configure"): "one of names()",
    ("hear/app/connection.py", "connected"): "a scheme that check_url has found among names()",
    ("hear/app/up.py", "plan"): "a kind that was found among names()",
    ("hear/app/up.py", "_simulated"): "a kind that plan has found among names()",
    ("hear/app/cluster.py", "running"): "an argument that code gives; see RUNNING",
}
"""Who may ask ``load_installed`` for a name that is not written in the call."""

IMPORTING = {
    ("importlib.import_module", "hear/app/plugins.py", "_load"): "all doors lead here",
    ("importlib.metadata.EntryPoint", "hear/app/plugins.py", "load_typed"): "of what was typed",
    ("importlib.metadata.EntryPoint", "hear/app/plugins.py", "_installed"): "its type",
    ("importlib.metadata.EntryPoint", "hear/app/plugins.py", "_load"): "its type",
    ("importlib.metadata.entry_points", "hear/app/plugins.py", "_installed"): "of one group",
    ("importlib.metadata.entry_points", "hear/app/plugins.py", "names"): "of one group",
    ("importlib.import_module", "benchmarks/peer.py", "make_radix_tree"): "a literal, optional",
    ("importlib.util.find_spec", "benchmarks/bus.py", "measure"): "a literal",
    ("importlib.util.find_spec", "engines/vllm/versions.py", "installed"): "a literal",
    ("importlib.util.find_spec", "harnesses/eval/bench/command.py", "_engine"): "a literal",
}
"""What imports by name or finds what can be imported."""

PROCESSES = {
    ("subprocess.Popen", "benchmarks/attacks.py", "process"): "this module again, and the hub",
    ("subprocess.Popen", "benchmarks/bus.py", "Child.__init__"): "this module again",
    ("subprocess.Popen", "benchmarks/faults.py", "measure_ended"): "commands written there",
    ("subprocess.Popen", "benchmarks/kills.py", "cluster"): "hear, with a file written there",
    ("trio.run_process", "benchmarks/vllm_overhead.py", "_flooded.send"): "this module again",
    (
        "subprocess.Popen",
        "engines/vllm/launch/process.py",
        "run_under_supervisor",
    ): "what was typed",
    ("os.execve", "engines/vllm/launch/process.py", "become"): "what was typed",
    ("subprocess.run", "engines/vllm/launch/install_command.py", "run"): "pip, with typed options",
    ("subprocess.run", "harnesses/eval/bench/servers.py", "carry_out"): "hear, with typed options",
    ("trio.lowlevel.open_process", "harnesses/eval/bench/servers.py", "running"): "the same",
    (
        "trio.lowlevel.open_process",
        "hear/app/supervisor.py",
        "Supervisor._run_once",
    ): "cluster.toml",
}
"""What starts a process, and whose words its command line holds: those of nobody on a bus."""

_RUNS = re.compile(
    r"exec|eval|compile|globals|__import__|__builtins__|shell=|.*\.\*|sys\.modules(\..*)?|"
    r"(builtins|imp|runpy|code|codeop|pkgutil|zipimport|marshal|shelve|dill|cloudpickle)(\..*)?|"
    r"importlib(\.(?!resources\b|metadata\.(version|PackageNotFoundError)$).*)?|"
    r"pickle(\.(?!dumps$).*)?|yaml(\.(?!(safe_load|YAMLError)$).*)?"
)
_STARTS = re.compile(
    r"os\.(system|popen|exec\w*|spawn\w*|posix_spawn\w*)|trio\.(lowlevel\.open_process|run_process)|"
    r"subprocess\.(?!DEVNULL$|PIPE$|TimeoutExpired$).*|asyncio\.create_subprocess_\w+"
)
_DOOR = re.compile(r"hear\.app\.plugins\.load\w*")


@pytest.fixture(scope="module")
def tree() -> list[Found]:
    return list(uses(ROOT, *FOLDERS))


def where(found: list[Found]) -> set[tuple[str, str]]:
    return {(use.path, use.function) for use, _ in found}


def doors(tree: list[Found]) -> list[tuple[Use, ast.Call]]:
    """Every use of a door, which has to be a call of it."""
    found = []
    for use, call in tree:
        if _DOOR.fullmatch(use.what):
            assert call is not None, f"{use}: a door is called where it stands, and not handed on"
            found.append((use, call))
    return found


def is_literal(node: ast.expr, *texts: str) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and (not texts or ast.literal_eval(node) in texts)


def calls(tree: list[Found], group: str, name: str | None = None) -> set[tuple[str, str]]:
    """Where the doors are asked for a group, and a name."""
    return {
        (use.path, use.function)
        for use, call in doors(tree)
        if is_literal(call.args[0], group) and (name is None or is_literal(call.args[1], name))
    }


def test_the_walk_sees_what_is_there(tree: list[Found]) -> None:
    assert {use.path.partition("/")[0] for use, _ in tree} == set(FOLDERS)
    assert not any(use.path.startswith("hear/engines/") for use, _ in tree), "links are left out"
    assert len({use.path for use, _ in tree}) > 200


def test_only_what_a_user_has_typed_may_be_a_path(tree: list[Found]) -> None:
    typed = [found for found in tree if found.use.what == "hear.app.plugins.load_typed"]
    assert where(typed) == set(TYPED)


def test_every_door_is_asked_for_a_group_that_is_written_there(tree: list[Found]) -> None:
    asked = doors(tree)
    kinds = {use.what.rpartition(".")[2] for use, _ in asked}
    assert kinds == {"load_typed", "load_received", "load_installed"}
    for use, call in asked:
        assert not call.keywords, use
        assert is_literal(call.args[0]), f"{use}: the group is computed"
    computed = {
        (use.path, use.function)
        for use, call in asked
        if use.what.endswith(".load_installed") and not is_literal(call.args[1])
    }
    assert computed == set(COMPUTED), "a name that was received goes through load_received"


def test_policies_and_profiles_are_named_by_users_and_code_alone(tree: list[Found]) -> None:
    parsed = [found for found in tree if found.use.what == "hear.policies.runtime.spec.parse"]
    assert calls(tree, "parts", "policy-spec") | where(parsed) == set(POLICIES)
    named = ("hear.engines.simulated.profile.load_profile", "hear.engines.simulated.backend.create")
    made = [found for found in tree if found.use.what in named]
    assert calls(tree, "engines") | where(made) == set(PROFILES)
    started = [found for found in tree if found.use.what == "hear.app.cluster.running"]
    assert where(started) == set(RUNNING)


def test_nothing_else_runs_what_it_was_given(tree: list[Found]) -> None:
    found = {use for use, _ in tree if _RUNS.fullmatch(use.what)}
    assert {(use.what, use.path, use.function) for use in found} == set(IMPORTING)
    for use, call in tree:
        if use in found and IMPORTING[use].startswith("a literal"):
            assert call is not None
            assert is_literal(call.args[0]), use


def test_processes_are_started_here_alone(tree: list[Found]) -> None:
    found = {use for use, _ in tree if _STARTS.fullmatch(use.what)}
    assert {(use.what, use.path, use.function) for use in found} == set(PROCESSES)


@pytest.mark.parametrize(
    "source",
    [
        "import importlib as i\ndef f(x):\n    return i.import_module(x)",
        "from importlib import import_module as harmless\nharmless('x')",
        "from importlib.metadata import entry_points\nentry_points()",
        "class A:\n    def f(self, x):\n        return eval(x)",
        "run = exec",
        "@eval\ndef f(): ...",
        "import pickle\nload = pickle.loads",
        "import pickle as p\nq = p",
        "import yaml\nyaml.load(x)",
        "from marshal import *",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "import os\nos.system('x')",
        "import sys\nsys.modules['os']",
        "from hear.app.plugins import load_typed as load\nload('clients', x)",
        "import hear.app.plugins\nhear.app.plugins.load_typed('clients', x)",
        "from hear.app import plugins as p\nf(p.load_typed)",
    ],
)
def test_a_new_use_is_seen_whatever_it_is_called(source: str, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "module.py").write_text(source, encoding="utf-8")
    seen = [use.what for use, _ in uses(tmp_path, "new")]
    assert any(p.fullmatch(what) for what in seen for p in (_RUNS, _STARTS, _DOOR)), seen
