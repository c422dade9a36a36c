"""What others have named comes out of every command harmless: on a terminal, in logs, in files."""

import asyncio
import io
import logging
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
from rich.table import Table
from rich.text import Text
from textual.pilot import Pilot

from hear.app import cli, log, output
from hear.app.console import Console
from hear.buses.memory import MemoryBus
from hear.buses.nng import server
from hear.buses.observe.tap import status_command
from hear.buses.observe.tap.board import Board, Picture
from hear.buses.observe.tap.lines import Lines
from hear.buses.observe.tap.reading import read
from hear.buses.observe.tap.records import Records
from hear.buses.observe.tap.screen import LastWarning, TapScreen
from hear.buses.observe.tap.status import look
from hear.buses.observe.why import command as why
from hear.delivery import Sequencer
from hear.engine_view import EngineViews
from hear.errors import ConfigError
from hear.harness_view import HarnessView
from hear.harnesses.eval.replay import play_command
from hear.harnesses.eval.report.page import page
from hear.harnesses.eval.report.table import print_results
from hear.messages import CapabilitiesReported, Key, QueueChanged, RequestDescribed
from hear.policies.runtime import runner
from hear.policies.runtime.runner import PolicyRunner
from tests.buses.nng_peers import Net, tenants
from tests.buses.tap.builders import foreign
from tests.buses.tap.test_follow import Remembering
from tests.buses.tap.test_watch import tapped
from tests.harnesses.test_table import result, row
from tests.security.hostile import FORGED, NAMES, check, check_json, recorded, scene

Capsys = pytest.CaptureFixture[str]

hostile = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)


def said(capsys: Capsys, *, longest: int = 10_000) -> str:
    """All that has come out, which was checked."""
    out, err = capsys.readouterr()
    check(out, longest=longest)
    check(err, longest=longest)
    return out + err


# -- hear why ------------------------------------------------------------------------------------


@hostile
def test_why_of_a_recording(name: str, tmp_path: Path, capsys: Capsys) -> None:
    path = str(recorded(tmp_path / "run.hear", scene(name), cut_off=name))
    assert cli.main(["why", name, "--recording", path, "--all"]) == 0
    text = said(capsys)
    assert "of 3.00 s in the queue" in text
    if name in (NAMES["markup"], NAMES["emoji"]):
        assert name in text
    assert cli.main(["why", name, "--recording", path, "--json"]) == 0
    told = check_json(capsys.readouterr().out)
    assert isinstance(told, dict)
    assert told["facts"]["request"] == name


@hostile
async def test_why_of_a_bus(name: str, capsys: Capsys) -> None:
    bus = Remembering()
    for envelope in scene(name):
        bus.publish(envelope)
    asked = Namespace(request=name, tenant=None, json=False, all=False, follow=False)
    await why.explain(bus, asked)
    assert "of 3.00 s in the queue" in said(capsys)


@hostile
def test_why_of_a_request_that_nobody_knows(name: str, tmp_path: Path, capsys: Capsys) -> None:
    path = str(recorded(tmp_path / "run.hear", scene(name)))
    assert cli.main(["why", f"{name}!", "--recording", path]) == 2
    assert len(said(capsys).splitlines()) == 1


def test_an_argument_that_is_not_utf8_is_named_all_the_same(tmp_path: Path, capsys: Capsys) -> None:
    path = str(recorded(tmp_path / "run.hear", scene("r")))
    assert cli.main(["why", "\udcff", "--recording", path]) == 2
    assert "\\udcff" in said(capsys)
    target = tmp_path / "\udcff.json"
    assert cli.main(["export", path, "--to", str(target)]) == 0
    assert "\\udcff.json: " in said(capsys)


# -- hear tap ------------------------------------------------------------------------------------


@hostile
@pytest.mark.parametrize("form", [Lines, partial(Lines, width=80), Records])
async def test_the_lines_of_a_tap(name: str, form: Any) -> None:
    bus, made = MemoryBus(), form()

    async def play() -> None:
        for envelope in scene(name):
            bus.publish(envelope)
        bus.publish(foreign(name, {name: name}, source=name))
        bus.publish(foreign("queue_changed", {"kind": name}, source=name))

    lines = await tapped(play, bus, form=made, count=len(scene(name)) + 2)
    assert len(lines) >= len(scene(name)) + 2
    for line in lines:
        if form is Records:
            check_json(line)
        else:
            check(line)
    check(made.gap(0.0, name, name, 3), longest=100_000)
    check(made.notice(0.0, name), longest=100_000)


def test_a_tap_in_colours_has_none_but_its_own() -> None:
    line = Lines(colour=True).message(read(scene(NAMES["colour"])[7]))
    for own in ("\x1b[0m", "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[35m"):
        line = line.replace(own, "")
    check(line)
    assert "\\x1b[31mred" in line


@hostile
def test_the_screen(name: str) -> None:
    board = Board()
    for envelope in scene(name):
        board.apply(envelope, 13.0)
    lost = Sequencer(name, tenant=name)
    for _ in range(2):
        board.apply(lost.wrap(QueueChanged(), Key(engine="e2"), 13.0), 13.0)
        lost.wrap(QueueChanged(), Key(engine="e2"), 13.0)
    warning = LastWarning()
    warning.take_over()
    structlog.get_logger("test").warning("bus.lost", peer=name)
    app = TapScreen(_Source(board.picture(13.0)), warning)

    async def look_at_it(pilot: "Pilot[None]") -> None:
        await pilot.pause()
        check(_drawn(app))
        await pilot.press("enter")
        await pilot.pause()
        check(_drawn(app))

    async def run() -> None:
        async with app.run_test(size=(200, 50)) as pilot:
            await look_at_it(pilot)

    asyncio.run(asyncio.wait_for(run(), 30))


class _Source:
    ended = False

    def __init__(self, picture: Picture) -> None:
        self._picture = picture

    def latest(self) -> Picture:
        return self._picture


def _drawn(app: TapScreen) -> str:
    """What Textual sends to the terminal, without styles."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


# -- hear status ---------------------------------------------------------------------------------


@hostile
async def test_status(
    name: str,
    autojump_clock: trio.abc.Clock,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = Remembering()
    for envelope in scene(name):
        bus.publish(envelope)
    async with trio.open_nursery() as nursery, bus.subscribe([">"], name=name):

        async def speak() -> None:
            await trio.sleep(0.1)
            for envelope in scene(name):
                bus.publish(envelope)

        nursery.start_soon(speak)
        status = await look(bus, name="status", policies=[name])
    assert status.engines
    assert status.policies
    assert status_command.show(status, bus="memory://") == 0
    text = said(capsys, longest=400)
    assert "queue" in text
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert status_command.show(status, bus="memory://") == 0
    coloured = capsys.readouterr().out
    assert "\x1b[1m" in coloured
    check(re.sub(r"\x1b\[[0-9;]*m", "", coloured))
    monkeypatch.delenv("FORCE_COLOR")
    assert status_command.show(status, bus="memory://", json=True) == 0
    told = check_json(capsys.readouterr().out)
    assert isinstance(told, dict)
    assert told["engines"][0]["name"] == name


# -- hear replay, play, bench, export ------------------------------------------------------------


@pytest.mark.parametrize("which", ["title", "override", "line", "markup", "long"])
def test_a_replay_of_a_recording(which: str, tmp_path: Path, capsys: Capsys) -> None:
    name = NAMES[which]
    path = str(recorded(tmp_path / "run.hear", scene(name)))
    rows = tmp_path / "rows.json"
    code = cli.main(["replay", path, "--policy", "fcfs", "--jobs", "1", "--json", str(rows)])
    text = said(capsys)
    assert code == 0, text
    assert "1 requests: TTFT P50 2.5 s" in text
    check_json(rows.read_text())


@hostile
def test_the_tables_and_the_page_of_results(name: str, capsys: Capsys) -> None:
    results = [
        result(name, (name,), workload=name, engine=name),
        result("fcfs", workload=name, engine=name),
    ]
    print_results(results)
    assert "turns" in said(capsys, longest=9_000)
    check(page(results, command=name), longest=1_000_000)


@hostile
def test_the_result_of_play(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    @asynccontextmanager
    async def joined(*_: Any, **__: Any) -> AsyncIterator[MemoryBus]:
        yield MemoryBus()

    async def played(*_: Any, **__: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return row(operations={name: 3}), [f"engine {name} gave {name}"]

    async def found(*_: Any, **__: Any) -> dict[str, CapabilitiesReported]:
        await trio.lowlevel.checkpoint()
        return {}

    monkeypatch.setattr(play_command, "connected", joined)
    monkeypatch.setattr(play_command, "find_engines", found)
    monkeypatch.setattr(play_command, "play", played)
    assert cli.main(["play", "scbench", "--bus", "ipc:///tmp/nobody"]) == 1
    assert "turns served" in said(capsys)


@hostile
def test_an_export(name: str, tmp_path: Path, capsys: Capsys) -> None:
    path, trace = recorded(tmp_path / "run.hear", scene(name), cut_off=name), tmp_path / "t.json"
    assert cli.main(["export", str(path), "--to", str(trace)]) == 0
    said(capsys)
    events = check_json(trace.read_text())
    assert isinstance(events, dict)
    assert any(event["args"].get("request") == name for event in events["traceEvents"])


@hostile
def test_the_page_that_prometheus_reads(name: str) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from hear.buses.observe.metrics.bus_statistics import BusStatisticsCollector
    from hear.buses.observe.metrics.families import Families
    from hear.interfaces import BusStatistics, SubscriptionStatistics

    registry = CollectorRegistry()
    families = Families(registry)
    families.queue(name, "waiting").set(1)
    families.forget_state(name)
    families.requests(name, "failed", families.reason(name)).inc()
    bus = BusStatisticsCollector()
    registry.register(bus)
    reader = SubscriptionStatistics(name=name, queued=0, received=1, dropped=0)
    bus.statistics = BusStatistics(published={name: 1}, subscriptions=(reader,))
    text = generate_latest(registry).decode()
    check(text, longest=100_000)
    assert "hear_requests_total{" in text
    assert "hear_queue_requests{" not in text or name.startswith("aa")  # which is counted as other


# -- logs ----------------------------------------------------------------------------------------


@hostile
def test_the_log_of_the_hub_before_any_key_is_checked(
    name: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.to_stderr()
    monkeypatch.setattr(server, "_log", structlog.get_logger("hear.hub"))
    net = Net(keyring=tenants())
    net.connect().join(name, key="acme", secret="00" * 32)
    net.connect().join(name, key=name)
    assert net.hub.events or len(name) > 1_000  # whose hello is no hello
    server._send(_Silent(), net.hub, server._Log(), 0.0)  # type: ignore[arg-type]
    said(capsys)


class _Silent:
    def send(self, connection: int, data: bytes) -> bool:
        return True


class _Broken:
    observes = ("intent.>",)

    def __init__(self, name: str) -> None:
        self.name = name

    def decide(self, h: HarnessView, s: EngineViews) -> Any:
        raise ValueError(self.name)


@hostile
async def test_the_log_of_a_policy_that_fails(
    name: str,
    autojump_clock: trio.abc.Clock,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log.to_stderr()
    monkeypatch.setattr(runner, "_log", structlog.get_logger("hear.policy"))
    bus = MemoryBus()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(PolicyRunner(bus, _Broken(name)).run)
        await trio.testing.wait_all_tasks_blocked()
        bus.publish(Sequencer("h").wrap(RequestDescribed(), Key(request="r"), 0.0))
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert "policy.failed" in said(capsys)


class _Named:
    """Something whose repr() is not Python's."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


@hostile
def test_every_value_of_an_entry(name: str, capsys: Capsys) -> None:
    log.to_stderr()
    logger = structlog.get_logger("test")
    values = {"text": name, "list": [name, _Named(name)], "map": {name: [name]}, "it": _Named(name)}
    logger.info(name, **values)
    with structlog.contextvars.bound_contextvars(peer=name):
        logger.bind(other=Path(name)).warning("event")
    assert len(said(capsys, longest=20_000).rstrip("\n").split("\n")) == 2


@hostile
def test_exceptions_in_the_log(name: str, capsys: Capsys) -> None:
    log.to_stderr()
    logger = structlog.get_logger("test")
    try:
        try:
            raise ConfigError(name)
        except ConfigError as error:
            raise ExceptionGroup(name, [ValueError(name), error]) from error
    except ExceptionGroup as error:
        logger.exception("it.failed")
        logger.error("it.failed", exc_info=error)
        logger.error("it.failed", exc_info=(type(error), error, error.__traceback__))
    text = said(capsys, longest=100_000)
    assert text.count("direct cause") == 3
    assert text.count("it.failed") == 3


def test_the_log_of_a_process_of_somebody_elses_is_left_as_it_is_set_up(capsys: Capsys) -> None:
    log.to_stderr_unless_set_up()
    structlog.get_logger("test").info("bus.joined", engine=NAMES["title"])
    assert "\\x1b]0;owned" in said(capsys)
    structlog.reset_defaults()
    structlog.configure(processors=[structlog.processors.JSONRenderer()])  # noqa: TID251, his own
    log.to_stderr_unless_set_up()
    structlog.get_logger("test").info("bus.joined")
    assert said(capsys) == '{"event": "bus.joined"}\n'


def test_ordinary_entries_are_what_they_were(capsys: Capsys) -> None:
    log.to_stderr()
    structlog.get_logger("test").info("part.started", part="engine0", pid=7, of=["a", "b"], at=0.5)
    entry = capsys.readouterr().err.split(" ", 1)[1]
    assert entry.rstrip() == (
        "[info     ] part.started         at=0.5 of=['a', 'b'] part=engine0 pid=7"
    )


def test_colours_of_the_log_are_structlogs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    log.to_stderr()
    structlog.get_logger("test").info("peer.joined", peer=NAMES["title"])
    text = terminal.getvalue()
    assert "\x1b[" in text
    assert "\x1b]" not in text
    assert "\\x1b]0;owned\\x07" in text


def test_what_libraries_log(capsys: Capsys) -> None:
    log.to_stderr()
    library, last = logging.getLogger("library"), logging.lastResort
    assert last is not None
    try:
        raise ValueError(NAMES["line"])
    except ValueError:
        record = library.makeRecord(
            "library", 40, "f", 1, "failed: %s", (NAMES["title"],), sys.exc_info()
        )
    last.handle(record)
    assert "ValueError: x\\n" in said(capsys)


# -- errors --------------------------------------------------------------------------------------


@hostile
def test_errors_of_the_command_line(name: str, capsys: Capsys) -> None:
    for arguments in (
        [name],
        ["tap", f"--{name}"],
        ["tap", "--category", name],
        ["tap", "--bus", name],
        ["replay", "mooncake", "--policy", name],
        ["replay", "mooncake", "--engine", name],
        ["export", name, "--to", "x"],
        ["up", f"{name}.toml"],
    ):
        assert cli.main(arguments) in (1, 2)
        assert len(said(capsys).splitlines()) == 1, arguments


@pytest.mark.parametrize(
    "how", ["raise E(n)", "t = Thread(target=f); t.start(); t.join()", "g()", "warn(n, W)"]
)
def test_what_nobody_caught(how: str) -> None:
    code = (
        "import sys\nfrom threading import Thread\nfrom warnings import warn\n"
        "from hear.app import output\n"
        "output.show_uncaught()\nE, W, n = ValueError, RuntimeWarning, sys.argv[1]\n"
        "def f(): raise E(n)\n"
        "class D:\n    def __del__(self): raise E(n)\n"
        "def g(): D()\n"
        f"{how}\n"
    )
    for name in ("title", "line", "override"):
        done = subprocess.run(
            [sys.executable, "-c", code, NAMES[name]], capture_output=True, text=True, timeout=60
        )
        check(done.stderr)
        assert "ValueError: " in done.stderr or "RuntimeWarning: " in done.stderr


def test_a_program_shows_what_it_did_not_expect_in_the_same_way() -> None:
    code = (
        "import sys\nfrom hear.app import cli, plugins\n"
        "def load(group, name): raise ValueError(sys.argv[1])\n"
        "plugins.load_installed = load\nsys.exit(cli.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, NAMES["title"]], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    check(done.stderr)
    assert "ValueError: \\x1b]0;owned\\x07" in done.stderr


def test_no_log_of_a_command_is_left_as_it_comes() -> None:
    """hear metrics says nothing of where its log goes."""
    code = (
        "import sys, structlog\nfrom hear.app import cli\n"
        "from hear.buses.observe.metrics import command\n"
        "def run(namespace):\n"
        "    structlog.get_logger('x').warning('spans.failed', error=namespace.bus)\n"
        "    return 0\n"
        "command.COMMAND = command.COMMAND._replace(run=run)\nsys.exit(cli.main())\n"
    )
    command = [sys.executable, "-c", code, "metrics", "--bus", NAMES["title"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    check(done.stderr)
    assert "\\x1b]0;owned\\x07" in done.stderr


# -- what all of them print through --------------------------------------------------------------


@hostile
def test_a_console_is_safe_even_from_what_nobody_made_printable(name: str) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120)
    table = Table(name, title=name, caption=name)
    table.add_row(Text(name))
    table.add_row(name)
    console.print(table)
    console.rule(name)
    console.print(Text(name.replace("\n", " ")))
    check(out.getvalue().replace(FORGED, ""))
    if name in (NAMES["markup"], NAMES["emoji"]):
        assert name in out.getvalue()


def test_a_console_keeps_the_colours_of_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = io.StringIO()
    Console(file=out, width=80).print(Text(NAMES["erase"], "red"))
    assert out.getvalue() == "\x1b[31m�[2J�[H\x1b[0m\n"


def test_an_output_of_another_encoding_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.say("größer █")
    assert raw.getvalue() == b"gr\\xf6\\xdfer \\u2588\n"


def test_where_there_is_no_output_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    output.say("x")
    output.complain("x")
    output.progress("x")
    output.flush()
