"""What comes from outside in a form that nobody can use is refused where it is read.

Nesting without end, numbers that are not finite, damaged hashes: each costs whoever sent it one
message, one request or one line, and never a process of ours.
"""

import ast
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest
import trio

from hear import codec
from hear.app import cli, config
from hear.app.up import ClusterConfig, plan
from hear.blocks import pack
from hear.buses.memory import MemoryBus
from hear.buses.nng.access import load_keyring
from hear.buses.observe.why.around import Around
from hear.buses.observe.why.residence import Residence
from hear.engines.simulated import serving
from hear.engines.simulated.backend import create
from hear.engines.vllm.attach.requests import OwnRequest, _take
from hear.engines.vllm.metrics_page import read_page
from hear.engines.worker.operation_log import OperationLog
from hear.errors import ConfigError, EngineError, RemoteProtocolError
from hear.harnesses.eval.bench import script
from hear.harnesses.eval.replay import live
from hear.harnesses.eval.workloads import recorded
from hear.harnesses.openai.client import connect
from hear.harnesses.openai.dialect import Answer, failure
from hear.interfaces import InferenceRequest
from hear.messages import (
    BlocksStored,
    CapabilitiesReported,
    ContextOpened,
    Envelope,
    Key,
    Message,
    RequestDescribed,
    RequestOutcome,
    ResidencySnapshot,
)
from hear.recording import MAGIC, Header, Heard, Recorder, opened
from tests.harnesses.http_server import begin, end, say_raw
from tests.harnesses.http_server import serving as http_serving
from tests.hear.builders import envelope

ROOT = Path(__file__).resolve().parents[2]
encode = msgspec.msgpack.encode
DEEP = b"\x91" * 50_000 + b"\x90"
DEEP_JSON = b"[" * 100_000 + b"]" * 100_000
OUTLANDISH = [math.nan, math.inf, -math.inf, 1e308, -1e308]


def with_field(packed: bytes, value: bytes = DEEP) -> bytes:
    """A small map with one more field, which no version knows."""
    assert 0x80 <= packed[0] < 0x8F
    return bytes([packed[0] + 1]) + packed[1:] + b"\xa1x" + value


def altered(sent: Envelope, **fields: Any) -> Envelope:
    """An envelope whose body says something else."""
    body = msgspec.msgpack.decode(sent.body) | fields
    return msgspec.structs.replace(sent, body=msgspec.Raw(encode(body)))


# -- nesting without end --------------------------------------------------------------------------

# Decoders of what a process has made itself: nobody else can write there.
OUR_OWN = {
    "harnesses/eval/replay/processes.py",  # from a child of ours, over a pipe
    "engines/vllm/hints.py",  # what was encoded in the same line, and plain values
    "engines/vllm/plugin/settings.py",  # values that were read already
    "engines/vllm/launch/model_command.py",
}


def _decodes(call: ast.Call) -> bool:
    """Whether a call reads what is in bytes or in a text, and more than the characters of it."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr in ("loads", "safe_load"):
        return True
    of = call.func.value
    return (
        call.func.attr == "decode"
        and bool(call.args)
        and not isinstance(call.args[0], ast.Constant)  # the name of an encoding
        and not isinstance(of, ast.Call)  # as in text.encode(...).decode(...)
        and ast.unparse(of) not in ("codec", "frames")  # our own, which tell it in our words
    )


def _guards(handler: ast.ExceptHandler) -> bool:
    caught = ast.unparse(handler.type) if handler.type else ""
    return "UNREADABLE" in caught or "RecursionError" in caught


def _unguarded(node: ast.AST, guarded: bool = False) -> Iterator[int]:
    if isinstance(node, ast.Call) and _decodes(node) and not guarded:
        yield node.lineno
    for child in ast.iter_child_nodes(node):
        here = isinstance(node, ast.Try | ast.TryStar) and (
            child in node.body and any(map(_guards, node.handlers))
        )
        yield from _unguarded(child, guarded or here)


def test_every_decoder_is_ready_for_nesting_without_end() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in ("hear", "buses", "engines", "harnesses", "policies")
        for path in (ROOT / folder).rglob("*.py")
        if str(path.relative_to(ROOT)) not in OUR_OWN and not path.is_symlink()
        for line in _unguarded(ast.parse(path.read_text(encoding="utf-8")))
    ]
    # The helpers of a check that is guarded as a whole.
    assert {at.partition(":")[0] for at in found} <= {"hear/codec.py", "buses/nng/frames.py"}


async def test_a_deep_request_costs_its_connection_and_not_the_engine() -> None:
    engine = create("h100-qwen3-8b", block_size=512, name="engine0")
    request = InferenceRequest("r", 64, 4, ())
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run, lambda report: None)
            told: str = await nursery.start(serving.serve, engine, "sim+tcp://127.0.0.1:0")
            async with await trio.open_tcp_stream("127.0.0.1", int(told.rpartition(":")[2])) as s:
                data = b"\x92\x01" + with_field(
                    encode({"id": "r", "prompt_tokens": 1, "output_tokens": 1, "prompt_hashes": []})
                )
                await s.send_all(len(data).to_bytes(4, "big") + data)
                assert await s.receive_some() == b""
            async with serving.connect(told) as client:
                assert (await client.generate(request)).outcome.status == "completed"
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("what", ["header", "note"])
def test_a_deep_record_is_unreadable(what: str, tmp_path: Path) -> None:
    def record(kind: int, payload: bytes) -> bytes:
        body = struct.pack("<Bd", kind, 1.0) + payload
        return struct.pack("<II", len(body), crc32(body)) + body

    path = tmp_path / "deep.hear"
    if what == "header":
        path.write_bytes(MAGIC + record(0, with_field(b"\x80")))
        with pytest.raises(ConfigError, match="header cannot be read"), opened(path):
            pass
        return
    path.write_bytes(Recorder(Header()).begin() + record(2, with_field(encode({"what": "gap"}))))
    with opened(path) as recording:
        assert list(recording) == []
        assert recording.unreadable == 1


def test_a_deep_entry_of_a_operation_log_is_none(tmp_path: Path) -> None:
    path = tmp_path / "e.operations"
    data = b"\x93" + with_field(b"\x80") + encode(None) + encode("")
    path.write_bytes(len(data).to_bytes(4, "big") + data)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="no entry of one"):
        OperationLog(path)


def test_deep_scripts_of_a_bench_are_none(tmp_path: Path) -> None:
    path = tmp_path / "scripts.json"
    path.write_bytes(b'[{"x":' + DEEP_JSON + b"}]")
    with pytest.raises(ConfigError, match="holds no workload of hear bench"):
        script.load(path)


def test_a_deep_event_or_error_of_a_server_is_unreadable() -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        Answer().take(b'{"x":' + DEEP_JSON + b"}")
    assert failure(b'{"x":' + DEEP_JSON + b"}").startswith('{"x":[[[')


async def test_deep_models_of_a_server_are_an_error_in_one_line() -> None:
    async def converse(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        body = b'{"data":[{"id":"m"}],"x":' + DEEP_JSON + b"}"
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n"
        await stream.send_all(head.encode() + body)

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, converse, [listener])
            port = listener.socket.getsockname()[1]
            with pytest.raises(EngineError, match="answers not as a server"):
                async with connect(f"http://127.0.0.1:{port}"):
                    pass
            nursery.cancel_scope.cancel()


# -- numbers that are not finite ------------------------------------------------------------------


@pytest.mark.parametrize("number", OUTLANDISH)
def test_an_envelope_is_of_a_time(number: float) -> None:
    sent = envelope(ContextOpened(), time_s=number)
    with pytest.raises(RemoteProtocolError, match=r"Expected `float` [<>]= .*time_s"):
        codec.decode(codec.encode(sent))


def _floats(described: msgspec.inspect.Type, at: str) -> Iterator[str]:
    """Where a type holds a float that may be anything."""
    match described:
        case msgspec.inspect.FloatType(ge=low, gt=above, le=high):
            if high is None or (low is None and above is None):
                yield at
        case msgspec.inspect.Metadata(type=inner):
            yield from _floats(inner, at)
        case msgspec.inspect.UnionType(types=types):
            for type_ in types:
                yield from _floats(type_, at)
        case msgspec.inspect.VarTupleType(item_type=inner):
            yield from _floats(inner, f"{at}[]")
        case msgspec.inspect.DictType(value_type=inner):
            yield from _floats(inner, f"{at}{{}}")
        case msgspec.inspect.StructType(fields=fields):
            for field in fields:
                yield from _floats(field.type, f"{at}.{field.name}")


def test_no_number_of_a_message_is_without_bounds() -> None:
    types: list[type[msgspec.Struct]] = [Envelope, Header, *(k.type for k in codec.KINDS.values())]
    assert [at for t in types for at in _floats(msgspec.inspect.type_info(t), t.__name__)] == []


def completed(request: str, at_s: float, **more: Any) -> list[Envelope]:
    """What is said of one request that is served."""
    key = Key(request=request, context="c", engine="e")
    described = RequestDescribed(turn=1, prompt_tokens=64, block_size=16, prefix_hashes=hashes())
    done = RequestOutcome(status="completed", prompt_tokens=64, output_tokens=4)
    said: tuple[Message, ...] = (described, RequestOutcome(status="accepted"), done)
    *before, last = (envelope(m, key, source="e", seq=0, time_s=at_s) for m in said)
    return [*before, altered(last, **more)]


def hashes() -> bytes:
    return bytes(pack((1, 2, 3, 4)))


def recording(
    path: Path, envelopes: list[Envelope], heard_s: Callable[[Envelope], float] | None = None
) -> Path:
    recorder = Recorder(Header())
    said = [recorder.hear([e], heard_s(e) if heard_s else 10.0) for e in envelopes]
    path.write_bytes(recorder.begin() + b"".join(said))
    return path


@pytest.mark.parametrize("number", OUTLANDISH)
def test_a_recording_is_used_without_what_has_no_time(number: float, tmp_path: Path) -> None:
    path = recording(
        tmp_path / "r.hear",
        [*completed("r1", 10.0), *completed("r2", number), *completed("r3", 20.0, queue_s=number)],
    )
    (session,) = recorded.load(path).workload.sessions
    assert len(session.turns) == 1
    out = tmp_path / "trace.json"
    assert cli.main(["export", str(path), "--to", str(out)]) == 0
    assert out.stat().st_size > 100


@pytest.mark.parametrize("number", OUTLANDISH)
def test_a_record_is_of_a_time(number: float, tmp_path: Path) -> None:
    said = completed("r1", 10.0)
    path = recording(
        tmp_path / "r.hear", said, lambda sent: number if sent is said[1] else sent.time_s
    )
    with opened(path) as records:
        assert len(list(records)) == len(said) - 1
        assert records.unreadable == 1


def test_the_farthest_times_can_be_exported(tmp_path: Path) -> None:
    said = [*completed("r1", -1e12), *completed("r2", 1e12)]
    path = recording(tmp_path / "r.hear", said, lambda sent: sent.time_s)
    assert cli.main(["export", str(path), "--to", str(tmp_path / "trace.json")]) == 0


@pytest.mark.parametrize("field", ["sent_s", "started_s", "first_token_s", "finished_s", "queue_s"])
@pytest.mark.parametrize("number", [math.nan, math.inf, 1e308])
async def test_a_result_that_nobody_can_reckon_with_is_an_error(field: str, number: float) -> None:
    times = dict.fromkeys(("sent_s", "started_s", "first_token_s", "finished_s"), 1.0)
    outcome: dict[str, Any] = {"kind": "request_outcome", "status": "completed"}
    (outcome if field == "queue_s" else times)[field] = number
    data = encode((1, {"outcome": outcome, **times}, ""))

    async def converse(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(len(data).to_bytes(4, "big") + data)
        await stream.receive_some()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, converse, [listener])
            port = listener.socket.getsockname()[1]
            async with serving.connect(f"sim+tcp://127.0.0.1:{port}") as client:
                with pytest.raises(EngineError, match="an answer that cannot be read"):
                    await client.generate(InferenceRequest("r", 1, 1, ()))
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "said",
    [
        b'{"metrics":{"queue_time_ms":1e308}}',
        b'{"metrics":{"queue_time_ms":-1}}',
        b'{"usage":{"completion_tokens":-1}}',
        b'{"usage":{"prompt_tokens_details":{"cached_tokens":-1}}}',
    ],
)
async def test_numbers_of_a_server_that_nobody_can_reckon_with_fail_the_request(
    said: bytes,
) -> None:
    async def behaviour(stream: trio.SocketStream) -> None:
        await begin(stream)
        await say_raw(stream, b"data: " + said + b"\n\n")
        await end(stream)

    with trio.fail_after(20):
        async with http_serving(behaviour) as server, connect(server.url) as client:
            result = await client.generate(InferenceRequest("r", 5, 3, (), prompt="x"))
    assert result.outcome.status == "failed"
    assert result.outcome.reason.startswith("broken_stream: an event that cannot be read")


@pytest.mark.parametrize(
    "said",
    [
        '{"usage":{"prompt_tokens":1e999}}',
        '{"usage":{"completion_tokens":-1}}',
        '{"usage":{"prompt_tokens_details":7}}',
        '{"usage":[7]}',
        '{"choices":[{"token_ids":[1e999]}]}',
        '{"x":' + DEEP_JSON.decode() + "}",
    ],
)
def test_an_event_of_an_attached_server_that_nobody_can_use_is_unreadable(said: str) -> None:
    own = OwnRequest(InferenceRequest("r", 5, 3, ()), 1, 0.0, 0)
    assert not _take(own, f"data: {said}", lambda: None)


@pytest.mark.parametrize("number", ["NaN", "+Inf", "-Inf"])
def test_a_metric_is_a_finite_number(number: str) -> None:
    with pytest.raises(EngineError, match="expected a finite number"):
        read_page(f'vllm:num_requests_running{{engine="0"}} {number}\n', "http://x")


# -- what engines say of themselves ---------------------------------------------------------------


def snapshot(packed: bytes, part: int = 0, parts: int = 1) -> ResidencySnapshot:
    chain = BlocksStored(tier="gpu", prefix_hashes=packed)
    return ResidencySnapshot(chains=(chain,), part=part, parts=parts)


def test_a_snapshot_with_damaged_hashes_is_passed_over() -> None:
    described = RequestDescribed(prompt_tokens=64, block_size=16, prefix_hashes=hashes())
    around = Around(Key(request="r", engine="e"), described, tenant="default")

    def hear(message: Message) -> None:
        around.hear(Heard(1.0, envelope(message, Key(engine="e"), source="e", time_s=1.0)))

    hear(snapshot(hashes()))
    hear(snapshot(bytes(7)))
    assert (around.residence.known, around.residence.prefix) == (True, 4)


def test_a_snapshot_of_which_a_part_was_not_read_makes_nothing_known() -> None:
    residence = Residence((1, 2, 3, 4), lambda stored: [])
    with pytest.raises(RemoteProtocolError):
        residence.replace(snapshot(bytes(7)).chains, 0, 2, 1.0)
    residence.replace(snapshot(hashes(), 1, 2).chains, 1, 2, 1.0)
    assert not residence.known


async def test_who_plays_passes_over_unreadable_engines_and_takes_no_end_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "MAX_ENGINES", 3)
    told = CapabilitiesReported(endpoint="sim+tcp://127.0.0.1:1")

    def of(name: str) -> Envelope:
        return envelope(told, Key(engine=name), source=name)

    async def say(bus: MemoryBus) -> None:
        await trio.sleep(0.05)
        bus.publish(altered(of("evil"), controls=5))
        for number in range(5):
            bus.publish(of(f"e{number}"))
        bus.publish(of("e0"))

    async with MemoryBus() as bus, trio.open_nursery() as nursery:
        nursery.start_soon(say, bus)
        assert list(await live.find_engines(bus, within_s=0.3)) == ["e0", "e1", "e2"]


# -- files that people write ----------------------------------------------------------------------


class _Anything(msgspec.Struct):
    x: int = 0


@pytest.mark.parametrize("text", ["x = " + "[" * 5_000 + "]" * 5_000, "x = " + "9" * 5_000])
def test_toml_without_end_is_not_toml(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not TOML"):
        config.parse_toml(tmp_path / "x.toml", text, _Anything)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (1, 'bus = "ipc:///x\\u0000"'),
        (1, 'state = "\\u0000"'),
        (1, 'keys = "\\u001b"'),
        (2, '[[engine]]\ntenants = ["\\u0000"]'),
        (2, '[[engine]]\noptions = ["\\u0000"]'),
        (2, '[[policy]]\npolicy = "guard:40"\ntenant = "\\n"'),
    ],
)
def test_a_setting_has_no_control_characters(line: int, text: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cluster\.toml:\d+: .*matching regex"):
        config.load_toml(path, ClusterConfig)


def test_no_setting_is_taken_for_an_option(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'state = "--help"\n[[engine]]\ntenants = ["--help"]\nendpoint = "--help"\n'
        '[[policy]]\npolicy = "guard:40"\ntenant = "-h"\n',
        encoding="utf-8",
    )
    _, parts = plan(config.load_toml(path, ClusterConfig), Path("cluster.toml"))
    for part in parts:
        options = [word for word in part.command if word.startswith("-h") or "--help" in word]
        assert all("=" in word for word in options), part.command
    assert any("--tenant=--help" in part.command for part in parts)


def test_a_key_has_a_name(tmp_path: Path) -> None:
    path = tmp_path / "keyring.toml"
    path.write_text(f'[[key]]\nname = ""\nsecret = "{"0a" * 16}"\n', encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"keyring\.toml:2: key\[0\]\.name"):
        load_keyring(path)
