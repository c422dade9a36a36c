"""``hear why``: from a recording, from a bus that remembers, and what it says of bad input."""

import argparse
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from hear import codec
from hear.app import cli, connection
from hear.buses.memory import MemoryBus
from hear.buses.observe.why import command
from hear.delivery import Sequencer
from hear.messages import Envelope, Key, QueueChanged, RequestDescribed, RequestOutcome
from hear.messages import WaitingRequest as Waiting
from hear.recording import Header, Recorder
from hear.subjects import Matcher, subject


class RememberingMemoryBus(MemoryBus):
    """A memory bus that remembers, as the hub does."""

    def __init__(self) -> None:
        super().__init__()
        self.past: list[Envelope] = []

    def publish(self, envelope: Envelope) -> None:
        self.past.append(envelope)
        super().publish(envelope)

    async def history(self, patterns: Iterable[str]) -> Sequence[Envelope]:
        await trio.lowlevel.checkpoint()
        matcher = Matcher(patterns)
        return [e for e in self.past if matcher.matches(subject(e))]


class Scene:
    """A request that waits behind another, and is served."""

    def __init__(self, bus: MemoryBus | None = None) -> None:
        self.bus = bus
        self.engine = Sequencer("e")
        self.harness = Sequencer("h")
        self.messages: list[Envelope] = []

    def _say(self, envelope: Envelope) -> None:
        self.messages.append(envelope)
        if self.bus is not None:
            self.bus.publish(envelope)

    def arrive(self) -> None:
        for name, at_s in (("first", 10.0), ("second", 11.0)):
            key = Key(engine="e", request=name, workflow="w")
            self._say(self.harness.wrap(RequestDescribed(prompt_tokens=9), key, at_s))
            self._say(self.engine.wrap(RequestOutcome(status="accepted"), key, at_s))
            waiting = Waiting(request=name, since_s=at_s)
            self._say(self.engine.wrap(QueueChanged(waiting=(waiting,)), Key(engine="e"), at_s))

    def serve(self) -> None:
        for name, at_s in (("first", 12.0), ("second", 13.0)):
            started = QueueChanged(started=(name,))
            self._say(self.engine.wrap(started, Key(engine="e"), at_s))
        end = RequestOutcome(
            status="completed",
            mode="dense",
            queue_s=2.0,
            prefill_s=0.5,
            decode_s=0.5,
            prompt_tokens=9,
            output_tokens=3,
        )
        self._say(self.engine.wrap(end, Key(engine="e", request="second"), 14.0))


HEADLINE = (
    "second waited 2.00 s of 3.00 s in the queue of e: 1 request went before it: 1 came earlier."
)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    scene = Scene()
    scene.arrive()
    scene.serve()
    recorder = Recorder(Header(started_s=10.0, bus="memory://"))
    path = tmp_path / "out.hear"
    path.write_bytes(recorder.begin() + recorder.hear(scene.messages, 14.0))
    return path


def test_the_first_line_is_the_reason_and_the_table_follows(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["why", "second", "--recording", str(recording)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == HEADLINE
    rows = [line.split(maxsplit=2) for line in lines[lines.index("") + 2 :]]
    assert [(row[0], row[2].strip()) for row in rows] == [
        ("+0.000", "described, ready"),
        ("+0.000", "accepted the request, 9 tokens"),
        ("+0.000", "waits at priority 0"),
        ("+1.000", "started first: it came earlier"),
        ("+2.000", "started the request"),
        ("+2.500", "gave its first token"),
        ("+3.000", "completed the request"),
    ]


def test_json_gives_words_and_facts(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording.write_bytes(recording.read_bytes() + b"cut")
    assert cli.main(["why", "second", "--recording", str(recording), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["summary"][0] == HEADLINE
    assert "was cut off while it was written: its last 3 bytes" in told["notes"][0]
    assert told["facts"]["passed"] == [
        {
            "request": "first",
            "arrived_s": 10.0,
            "started_s": 12.0,
            "ground": "earlier",
            "by": "",
            "why": "",
            "prompt_tokens": 0,
        }
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["secon", "--recording", "out.hear"], "nothing was heard of it; of 2 the nearest are sec"),
        (["second", "--recording", "none.hear"], "No such file"),
        (["second", "--recording", "."], "is no file"),
        (["second", "--recording", "foreign.hear"], "is no recording"),
        (["second", "--recording", "empty.hear"], "is empty"),
        (["second", "--recording", "out.hear", "--follow"], "a recording has no future"),
        (["second", "--bus", "carrier-pigeon://x"], "expected an address that begins with"),
        (["second", "--for", "-1"], "positive number of seconds"),
        ([], "REQUEST"),
    ],
)
@pytest.mark.usefixtures("recording")
def test_bad_input_is_one_line(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("foreign.hear").write_text("something else")
    Path("empty.hear").touch()
    assert cli.main(["why", *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


# -- on a bus ------------------------------------------------------------------------------------


def options(**changed: object) -> argparse.Namespace:
    defaults = {
        "request": "second",
        "follow": False,
        "seconds": 60.0,
        "json": False,
        "all": False,
        "tenant": None,
    }
    return argparse.Namespace(**defaults | changed)


async def test_on_a_bus_what_it_remembers_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    bus = RememberingMemoryBus()
    scene = Scene(bus)
    scene.arrive()
    scene.serve()
    await command.explain(bus, options())
    assert capsys.readouterr().out.splitlines()[0] == HEADLINE


async def test_followed_it_is_told_at_once_and_again_when_it_has_ended(
    capsys: pytest.CaptureFixture[str], autojump_clock: trio.abc.Clock
) -> None:
    bus = RememberingMemoryBus()
    scene = Scene(bus)
    scene.arrive()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(command.explain, bus, options(follow=True))
        await trio.testing.wait_all_tasks_blocked()
        first = capsys.readouterr().out.splitlines()[0]
        assert first == (
            "second waits in the queue of e, for 0.00 s so far: "
            "none went before it, as far as was heard."
        )
        scene.serve()
    assert capsys.readouterr().out.splitlines()[0] == HEADLINE


async def test_following_has_an_end_if_the_request_has_none(
    capsys: pytest.CaptureFixture[str], autojump_clock: trio.abc.Clock
) -> None:
    bus = RememberingMemoryBus()
    Scene(bus).arrive()
    with trio.fail_after(61):
        await command.explain(bus, options(follow=True))
    assert "second waits" in capsys.readouterr().out


def test_a_bus_that_does_not_remember_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def connected(
        url: str, *, name: str, key: Path | None = None
    ) -> AsyncIterator[MemoryBus]:
        async with MemoryBus() as bus:
            yield bus

    monkeypatch.setattr(connection, "connected", connected)
    assert cli.main(["why", "second", "--bus", "memory://"]) == 2
    assert "does not remember what has passed; use hear record" in capsys.readouterr().err


def test_of_other_engines_not_even_the_envelopes_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.hear"
    recorder, elsewhere = Recorder(Header()), Sequencer("elsewhere")
    scene = Scene()
    scene.arrive()
    scene.serve()
    other = [
        elsewhere.wrap(QueueChanged(started=("x",)), Key(engine="other"), 12.0) for _ in range(999)
    ]
    heard = [*scene.messages[:6], *other, *scene.messages[6:]]
    # The engine that is asked about is called "e", which occurs in everything.
    renamed = [replace(m, key=replace(m.key, engine=m.key.engine and "it-is-me")) for m in heard]
    for place in range(6, 1005):
        renamed[place] = heard[place]
    path.write_bytes(recorder.begin() + recorder.hear(renamed, 14.0))
    decoded: list[Envelope] = []

    def decode(frame: bytes) -> Envelope:
        decoded.append(codec_decode(frame))
        return decoded[-1]

    codec_decode = codec.decode
    monkeypatch.setattr(codec, "decode", decode)
    assert cli.main(["why", "second", "--recording", str(path)]) == 0
    assert "1 came earlier" in capsys.readouterr().out
    assert 0 < len(decoded) < 30
