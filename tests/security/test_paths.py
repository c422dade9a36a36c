"""What other users of the machine can lay in the way, and what must not be overwritten."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
import trio

from hear.app import cli
from hear.app.config import load_toml
from hear.app.connection import cluster_directory, connected, make_own_folders, run_directory
from hear.app.own_files import check_socket, own_folder
from hear.app.up import ClusterConfig, plan
from hear.buses.nng import client
from hear.buses.nng.access import load_key, load_keyring
from hear.buses.nng.command import check_reach
from hear.buses.nng.server import hub
from hear.engine_operations import KeyedOutcome
from hear.engines.simulated import serving
from hear.engines.simulated.backend import create
from hear.engines.worker.operation_log import OperationLog
from hear.errors import BusError, ConfigError, EngineError, PluginError
from hear.harnesses.eval.report.output import check_recording, write_whole
from hear.messages import Key, OperationOutcome
from hear.policies.runtime.spec import parse
from tests.secret_files import write_secret

HEAR: Final = (sys.executable, "-m", "hear.app.cli")
OTHER: Final = 65_534
SECRET: Final = "0123456789abcdef" * 4

as_root = pytest.mark.skipif(
    os.getuid() != 0, reason="files of another user can be made by root alone"
)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory of a user who has none yet."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("HEAR_BUS", raising=False)
    monkeypatch.delenv("HEAR_KEY", raising=False)
    return tmp_path / "hear"


@pytest.fixture
def everyones() -> Iterator[Path]:
    """A folder as ``/tmp`` is, and in it, since another user cannot reach the one of a test."""
    with tempfile.TemporaryDirectory(prefix="hear-", dir="/tmp") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


def hear(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HEAR, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


@contextmanager
def another_user(code: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    """A process of another user, which has said a line. It imports first: our files are not its."""
    become = f"import os; os.setgroups([]); os.setgid({OTHER}); os.setuid({OTHER})"
    command = [sys.executable, "-c", code.replace("BECOME", become), *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process
        finally:
            process.kill()


LISTEN = """
import socket, sys
BECOME
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
print("listening", flush=True)
sys.stdin.read()
"""

HUB = """
import sys, trio
from hear.buses.nng.server import hub
BECOME
async def main():
    async with hub(sys.argv[1]) as made:
        print("listening", flush=True)
        while True:
            await trio.sleep(0.05)
            if made.peers:
                print("peers", *made.peers, flush=True)
trio.run(main)
"""

ENGINE = """
import sys, trio
from hear.engines.simulated import serving
from hear.engines.simulated.backend import create
from hear.errors import ConfigError
engine = create("h100-qwen3-8b", block_size=512, name="e")
BECOME
async def main():
    with trio.move_on_after(10):
        await serving.serve(engine, "sim+unix://" + sys.argv[1])
try:
    trio.run(main)
except ConfigError as error:
    print(error, flush=True)
"""


# -- the run directory ------------------------------------------------------------------------


def _of_another(path: Path) -> None:
    path.mkdir(0o700)
    os.chown(path, OTHER, OTHER)


def _with_mode(mode: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        path.chmod(mode)

    return make


def _link(path: Path) -> None:
    target = path.with_name("target")
    target.mkdir(0o700)
    path.symlink_to(target)


def _file(path: Path) -> None:
    path.write_text("a file")


UNSAFE = [
    pytest.param(_of_another, rf"is a folder of \S+ \(uid {OTHER}\), mode 0700", marks=as_root),
    (_with_mode(0o777), r"is a folder of .*, mode 0777, expected .*: chmod 700"),
    (_with_mode(0o770), r"is a folder of .*, mode 0770"),
    (_link, r"is a link of .*, expected a folder"),
    (_file, r"is a file of .*, expected a folder"),
]


@pytest.mark.parametrize(("make", "why"), UNSAFE)
async def test_nothing_is_used_in_a_folder_that_others_could_have_filled(
    make: Callable[[Path], None], why: str, base: Path
) -> None:
    make(base)
    url, endpoint = f"ipc://{base}/bus", f"sim+unix://{base}/e.engine"
    engine = create("h100-qwen3-8b", block_size=512, name="e")
    for use in (
        lambda: connected(url, name="x"),
        lambda: connected(url, name="x", key=Path("none")),
        lambda: OperationLog(base / "c" / "state" / "e.operations"),
        lambda: make_own_folders(cluster_directory(url) / "e.engine"),
    ):
        with pytest.raises(ConfigError, match=why) as error:
            use()
        assert "\n" not in str(error.value)
        assert "set XDG_RUNTIME_DIR or give --bus" in str(error.value)
    with pytest.raises(ConfigError, match=why):
        await serving.serve(engine, endpoint)
    with pytest.raises(ConfigError, match=why):
        async with serving.connect(endpoint):
            pass


@pytest.mark.parametrize(("make", "why"), UNSAFE)
def test_a_hub_that_waits_in_such_a_folder_is_not_joined(
    make: Callable[[Path], None], why: str, base: Path, tmp_path: Path
) -> None:
    make(base)
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.bind(str((base if base.is_dir() else tmp_path) / "bus"))
        waiting.listen()
        waiting.setblocking(False)
        for arguments in (("record", "out.hear"), ("status",), ("run", "policy", "guard:40")):
            done = hear(*arguments, cwd=tmp_path)
            assert done.returncode == 2
            assert re.search(why, done.stderr)
            assert done.stderr.count("\n") == 1
        with pytest.raises(BlockingIOError):
            waiting.accept()
    assert hear("run", "bus", cwd=tmp_path).returncode == 2
    assert hear("run", "engine", "e", cwd=tmp_path).returncode == 2
    assert hear("up", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize(("make", "why"), UNSAFE)
def test_the_folder_of_one_cluster_is_looked_at_as_well(
    make: Callable[[Path], None], why: str, base: Path
) -> None:
    base.mkdir(0o700)
    folder = cluster_directory(f"ipc://{base}/bus")
    make(folder)
    with pytest.raises(ConfigError, match=why):
        make_own_folders(folder / "e.engine")


def test_who_joins_makes_the_folder_lest_another_does_while_it_waits(base: Path) -> None:
    connected(f"ipc://{base}/bus", name="x")
    assert base.stat().st_mode & 0o777 == 0o700


def test_the_folder_above_has_to_be_guarded_or_sticky(tmp_path: Path) -> None:
    above = tmp_path / "above"
    above.mkdir()
    for mode, good in ((0o700, True), (0o1777, True), (0o777, False), (0o770, False)):
        above.chmod(mode)
        if good:
            own_folder(above / "hear")
        else:
            with pytest.raises(ConfigError, match="others could replace 'hear' in it"):
                own_folder(above / "hear")


@as_root
def test_a_folder_of_another_user_above_is_refused(tmp_path: Path) -> None:
    above = tmp_path / "above"
    above.mkdir(0o755)
    os.chown(above, OTHER, OTHER)
    with pytest.raises(ConfigError, match="others could replace 'hear' in it"):
        own_folder(above / "hear")


# -- sockets that were named by hand ----------------------------------------------------------


@as_root
async def test_another_users_socket_is_joined_with_a_key_alone(
    everyones: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 0.3)
    url = f"ipc://{everyones}/bus"
    key = write_secret(everyones / "key.toml", f'name = "k"\nsecret = "{SECRET}"\n')
    with another_user(LISTEN, everyones / "bus") as process:
        assert process.stdout is not None
        await trio.to_thread.run_sync(process.stdout.readline)
        with pytest.raises(ConfigError, match=rf"a socket of \S+ \(uid {OTHER}\).*--key FILE"):
            connected(url, name="x")
        with pytest.raises(BusError, match="nobody answers"):
            async with connected(url, name="x", key=key):
                pass
        (everyones / "link").symlink_to("bus")
        with pytest.raises(ConfigError, match=f"uid {OTHER}"):
            connected(f"ipc://{everyones}/link", name="x")


@as_root
def test_a_link_of_another_user_is_not_followed(everyones: Path) -> None:
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(everyones / "own"))
    check_socket(everyones / "own")
    (everyones / "bus").symlink_to("own")
    check_socket(everyones / "bus")
    os.chown(everyones / "bus", OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(ConfigError, match=f"is a link of .*uid {OTHER}"):
        check_socket(everyones / "bus")


@as_root
async def test_another_users_hub_that_comes_later_hears_nothing(
    everyones: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 1.0)
    url = f"ipc://{everyones}/bus"
    with trio.fail_after(60):
        joining = connected(url, name="x")  # nothing is there yet to look at
        with another_user(HUB, url) as process:
            assert process.stdout is not None
            while await trio.to_thread.run_sync(process.stdout.readline) != "listening\n":
                pass
            with pytest.raises(BusError, match="nobody answers"):
                async with joining:
                    pass
            process.kill()
            assert "peer" not in process.stdout.read()


# -- what listening removes -------------------------------------------------------------------


def _a_file(path: Path) -> None:
    path.write_bytes(b"mine\0\xff")


def _a_link(path: Path) -> None:
    path.with_name("kept").write_bytes(b"mine\0\xff")
    path.symlink_to("kept")


@pytest.mark.parametrize("make", [_a_file, _a_link])
async def test_a_file_where_a_socket_should_be_survives_byte_for_byte(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "thesis.tex"
    make(path)
    done = await trio.to_thread.run_sync(
        lambda: hear("run", "bus", "--bus", f"ipc://{path}", cwd=tmp_path)
    )
    assert done.returncode == 2
    assert re.fullmatch(r"hear: .* expected a socket or nothing.*\n", done.stderr)
    with pytest.raises(ConfigError, match="expected a socket or nothing"):
        async with hub(f"ipc://{path}"):
            pass
    engine = create("h100-qwen3-8b", block_size=512, name="e")
    with pytest.raises(ConfigError, match="expected a socket or nothing"):
        await serving.serve(engine, f"sim+unix://{path}")
    assert path.read_bytes() == b"mine\0\xff"
    assert path.is_symlink() is (make is _a_link)


async def test_a_socket_where_nobody_listens_is_replaced(tmp_path: Path) -> None:
    for number, listen in enumerate((False, True)):
        path = tmp_path / f"bus{number}"
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
            if listen:
                left.listen()
                with pytest.raises(ConfigError, match="in use"):
                    async with hub(f"ipc://{path}"):
                        pass
        with trio.fail_after(20):
            async with hub(f"ipc://{path}"), connected(f"ipc://{path}", name="x"):
                pass


@as_root
def test_a_socket_that_may_not_be_opened_is_not_taken_for_a_dead_one(everyones: Path) -> None:
    everyones.chmod(0o777)
    path = everyones / "e.engine"
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(path))
        path.chmod(0o600)
        own.listen()
        with another_user(ENGINE, path) as process:
            assert process.stdout is not None
            assert "cannot be listened on" in process.stdout.readline()
        assert path.is_socket()


async def test_an_engine_that_ends_removes_its_own_socket_alone(tmp_path: Path) -> None:
    path = tmp_path / "e.engine"
    engine = create("h100-qwen3-8b", block_size=512, name="e")
    async with trio.open_nursery() as nursery:
        await nursery.start(serving.serve, engine, f"sim+unix://{path}")
        path.unlink()
        path.write_text("mine")
        nursery.cancel_scope.cancel()
    assert path.read_text() == "mine"


def test_the_socket_of_a_hub_without_keys_is_its_users_alone(tmp_path: Path) -> None:
    for flags, private in (([], True), (["--without-keys"], False)):
        path = tmp_path / f"bus{len(flags)}"
        arguments = ["run", "bus", "--bus", f"ipc://{path}", *flags]
        with running(*arguments, umask=0) as process:
            assert "hub.listening" in next_line(process)
            assert (path.stat().st_mode & 0o077 == 0) is private


# -- files that results are written to --------------------------------------------------------


def test_a_link_laid_beside_a_result_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".out.json.{os.getpid()}").symlink_to(victim)
    write_whole(tmp_path / "out.json", b"rows")
    assert victim.read_text() == "mine"
    assert (tmp_path / "out.json").read_bytes() == b"rows"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "victim"]


def test_an_operation_log_that_is_written_anew_follows_no_link_and_stays_private(
    tmp_path: Path,
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "operations.new").symlink_to(victim)
    log = OperationLog(tmp_path / "operations", remember=1)
    outcome = OperationOutcome(status="completed", control="retain")
    for number in range(20):
        log.note(KeyedOutcome(Key(engine="e", operation=f"o{number}"), outcome))
    log.close()
    assert victim.read_text() == "mine"
    assert not (tmp_path / "operations").is_symlink()
    assert (tmp_path / "operations").stat().st_mode & 0o777 == 0o600
    (tmp_path / "operations").chmod(0o666)
    with pytest.raises(ConfigError, match="mode 0666, expected one of this user or root"):
        OperationLog(tmp_path / "operations")


@as_root
def test_an_operation_log_of_another_user_is_refused(tmp_path: Path) -> None:
    OperationLog(tmp_path / "operations").close()
    os.chown(tmp_path / "operations", OTHER, OTHER)
    with pytest.raises(ConfigError, match=f"uid {OTHER}"):
        OperationLog(tmp_path / "operations")


def test_a_recording_takes_the_place_of_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "thesis.tex"
    path.write_text("mine")
    arguments = ("replay", "mooncake", "--policy", "fcfs", "--load", "1", "--window", "0:5")
    done = hear(*arguments, "--record", str(path), cwd=tmp_path)
    assert done.returncode == 2
    assert "exists and is no recording" in done.stderr
    assert path.read_text() == "mine"
    path.write_bytes(b"")
    check_recording(path)
    check_recording(tmp_path / "none")


# -- keys and certificates --------------------------------------------------------------------

KEY = f'name = "k"\nsecret = "{SECRET}"\n'
KEYRING = f"[[key]]\n{KEY}"
LOADERS = pytest.mark.parametrize(
    ("load", "text"), [(load_key, KEY), (load_keyring, KEYRING)], ids=["key", "keyring"]
)


@LOADERS
@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o601, 0o620, 0o660, 0o777])
def test_a_secret_that_others_may_read_or_write_is_refused(
    load: Callable[[Path], object], text: str, mode: int, tmp_path: Path
) -> None:
    path = write_secret(tmp_path / "k.toml", text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"k\.toml: .* mode {mode:04o}.*chmod 600 .*k\.toml"):
        load(path)


@LOADERS
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_secret_that_the_user_and_a_group_may_read_is_accepted(
    load: Callable[[Path], object], text: str, mode: int, tmp_path: Path
) -> None:
    path = write_secret(tmp_path / "k.toml", text)
    path.chmod(mode)
    assert load(path)
    (tmp_path / "link").symlink_to(path)
    assert load(tmp_path / "link"), "what counts is the file that is read"


@LOADERS
@as_root
def test_a_secret_of_another_user_is_refused(
    load: Callable[[Path], object], text: str, tmp_path: Path
) -> None:
    path = write_secret(tmp_path / "k.toml", text)
    os.chown(path, OTHER, OTHER)
    with pytest.raises(ConfigError, match=rf"of \S+ \(uid {OTHER}\)"):
        load(path)


def test_what_is_no_file_does_not_make_a_command_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "k.toml")
    begun_s = time.monotonic()
    with pytest.raises(ConfigError, match="it is not a file"):
        load_key(tmp_path / "k.toml")
    assert time.monotonic() - begun_s < 5


@pytest.mark.parametrize(
    ("name", "mode", "why"),
    [("own.pem", 0o644, "chmod 600"), ("authority.pem", 0o666, "chmod 644")],
)
async def test_certificates_are_looked_at_too(
    name: str, mode: int, why: str, tmp_path: Path
) -> None:
    tls = '[tls]\nauthority = "authority.pem"\ncertificate = "own.pem"\n'
    key = write_secret(tmp_path / "key.toml", KEY + tls)
    keyring = write_secret(tmp_path / "keyring.toml", KEYRING + tls)
    for file in ("own.pem", "authority.pem"):
        write_secret(tmp_path / file, "not looked at so far")
    (tmp_path / name).chmod(mode)
    for use in (
        lambda: connected("tls+tcp://127.0.0.1:1", name="x", key=key),
        lambda: hub("tls+tcp://127.0.0.1:1", keys=keyring),
    ):
        with pytest.raises(ConfigError, match=rf"{name}: .*mode {mode:04o}.*{why}"):
            async with use():
                pass


# -- hubs without keys ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "[::]", "[::ffff:0.0.0.0]", "10.0.0.7", "host.example", "0"]
)
def test_a_hub_without_keys_where_others_reach_it_has_to_be_meant(
    host: str, tmp_path: Path
) -> None:
    url = f"tcp://{host}:7777"
    with pytest.raises(ConfigError, match=r"give --keys FILE.*without_keys = true") as error:
        check_reach(url, keys=False, without_keys=False)
    assert "\n" not in str(error.value)
    check_reach(url, keys=True, without_keys=False)
    check_reach(url, keys=False, without_keys=True)
    with pytest.raises(ConfigError, match="expected one of them"):
        check_reach(url, keys=True, without_keys=True)
    done = hear("run", "bus", "--bus", url, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"hear: bus {url!r}: without keys, whoever reaches")


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:7", "tcp://localhost:7", "tcp://[::1]:7"])
def test_on_this_machine_it_needs_no_word(url: str) -> None:
    check_reach(url, keys=False, without_keys=False)
    check_reach("ipc:///somewhere", keys=False, without_keys=False)


@contextmanager
def running(*arguments: str, umask: int = -1) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [*HEAR, *arguments], stderr=subprocess.PIPE, text=True, umask=umask
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def next_line(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    return process.stderr.readline()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("host", "flags", "why"),
    [
        ("127.0.0.1", [], "every user of this machine may say and hear everything"),
        ("0.0.0.0", ["--without-keys"], "everyone who reaches it may say and hear everything"),
        ("0.0.0.0", ["--keys", "{tmp}/keyring.toml"], "use tls+tcp://"),
        ("127.0.0.1", ["--keys", "{tmp}/keyring.toml"], None),
    ],
)
def test_what_a_hub_does_not_protect_is_one_warning(
    host: str, flags: list[str], why: str | None, tmp_path: Path
) -> None:
    write_secret(tmp_path / "keyring.toml", KEYRING)
    words = [flag.format(tmp=tmp_path) for flag in flags]
    with running("run", "bus", "--bus", f"tcp://{host}:{free_port()}", *words) as process:
        lines = [next_line(process)]
        if why is not None:
            lines.append(next_line(process))
        process.terminate()
        assert process.stderr is not None
        lines += process.stderr.readlines()
    warnings = [line for line in lines if "warning" in line]
    assert len(warnings) == (why is not None)
    assert why is None or why in warnings[0]


def test_a_cluster_file_says_so_too(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('bus = "tcp://0.0.0.0:7777"\nwithout_keys = true\n')
    _, (bus, *_) = plan(load_toml(path, ClusterConfig), path)
    assert "--without-keys" in bus.command
    path.write_text('bus = "tcp://0.0.0.0:7777"\n')
    _, (bus, *_) = plan(load_toml(path, ClusterConfig), path)
    assert "--without-keys" not in bus.command


# -- code in the folder where one stands ------------------------------------------------------


def test_a_module_that_lies_there_does_not_hide_an_installed_one(tmp_path: Path) -> None:
    (tmp_path / "trio.py").write_text("open('ran', 'w').close()\nraise SystemExit('mine')\n")
    (tmp_path / "c.toml").write_text("")
    _, (bus, *_) = plan(load_toml(tmp_path / "c.toml", ClusterConfig), tmp_path / "c.toml")
    done = subprocess.run([*bus.command, "--help"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0
    assert not (tmp_path / "ran").exists()


def test_that_folder_is_looked_into_only_for_a_policy_that_is_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    parse("cache-aware+guard:40")
    assert str(tmp_path) not in sys.path
    with pytest.raises(PluginError, match="nothing_like_it"):
        parse("nothing_like_it:Policy")
    assert sys.path[-1] == str(tmp_path)


_TRAP = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n"


def test_a_replay_imports_nothing_from_where_one_stands(tmp_path: Path) -> None:
    """Python looks there first for the modules of a process that it starts for a replay."""
    for module in ("multiprocessing", "random", "trio", "msgspec", "hear"):
        (tmp_path / f"{module}.py").write_text(_TRAP)
    hear = str(Path(sys.executable).with_name("hear"))
    done = subprocess.run(
        [hear, "replay", "mooncake", "--window", "0:10", "--load", "10", "--policy", "fcfs"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


async def test_an_endpoint_that_was_told_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in the place of the bus's socket would keep its user from ever listening there."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(EngineError, match="nobody listens there"):
        async with serving.connect(f"sim+unix://{tmp_path}/hear/bus/e.sock"):
            raise AssertionError
    assert not (tmp_path / "hear").exists()


def test_a_run_directory_is_a_whole_path_without_detours(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (
        ("relative", f"/tmp/hear-{os.getuid()}"),
        ("", f"/tmp/hear-{os.getuid()}"),
        ("/run/../run/user/7", "/run/user/7/hear"),
    ):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        assert run_directory() == Path(expected)


def test_no_option_is_taken_for_another_that_begins_alike() -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(cli.main(["run", "bus", "--key", "keyring.toml"]))
    assert ended.value.code == 2
