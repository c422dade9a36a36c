"""What the fuzzer feeds: a table of targets, each a reader of bytes that strangers can send.

A target is made anew for each batch of inputs and may keep state over them, as a reader on a bus
does. It refuses an input with a ``HearError``; anything else that it raises is a failure, and so is
a promise that it finds broken (``BrokenPromiseError``).
"""

import re
from collections.abc import Callable
from random import Random
from typing import Final, NamedTuple
from zlib import crc32

from msgspec import Raw
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks import fuzz_frames, fuzz_inputs
from benchmarks.fuzz_frames import Links
from benchmarks.fuzz_inputs import KIND_NAMES
from hear import codec
from hear.blocks import unpack
from hear.buses.observe.metrics.collecting import Collecting
from hear.buses.observe.metrics.exporting import readable
from hear.buses.observe.metrics.spans import SpanData
from hear.codec import KINDS
from hear.delivery import GapDetector
from hear.engine_operations import Actions, EngineOperations
from hear.engine_view import EngineViews
from hear.harness_view import HarnessView
from hear.interfaces import ApplyResult, OperationEnded
from hear.messages import Envelope, Key, Message, OperationOutcome, RequestDescribed, RequestOutcome
from hear.operation import TERMINAL, Operation
from hear.subjects import Matcher, Pattern, subject, token

Reader = Callable[[bytes], None]


class BrokenPromiseError(Exception):
    """A promise was broken, though nothing else was raised."""


class Target(NamedTuple):
    """``make`` gives a fresh reader, ``generate`` an input; ``weight`` is its share of batches."""

    make: Callable[[], Reader]
    generate: Callable[[Random], bytes]
    weight: int = 1


class Messages:
    """Everything that an envelope goes through in a policy and in an engine's worker."""

    def __init__(self) -> None:
        self._views = EngineViews()
        self._harness = HarnessView(max_requests=100, max_contexts=100)
        self._gaps = GapDetector()
        controls = [name for name, kind in KINDS.items() if kind.category == "control"]
        self._engine = _Engine(
            EngineOperations(engine="e0", controls=controls, max_open=50, remember=5_000)
        )

    def __call__(self, frame: bytes) -> None:
        envelope = codec.decode(frame)
        if codec.encode(codec.decode(codec.encode(envelope))) != codec.encode(envelope):
            raise BrokenPromiseError("an envelope changes on its way")
        if subject(envelope).count(".") != 4:
            raise BrokenPromiseError(f"subject {subject(envelope)!r}")
        self._gaps.observe(envelope)
        if envelope.category == "control":
            self._engine.control(envelope)
        message = codec.open_body(envelope)
        if message is None:
            return
        codec.encode_body(message)
        self._engine.hear(envelope, message)
        try:
            if KINDS[envelope.kind].category == "state":
                self._views.apply(envelope, message)
            else:
                self._harness.apply(envelope, message)
        finally:
            self._views.clear_changes()
            self._harness.clear_changes()
        for _ in self._harness.ready_requests():
            pass
        if isinstance(message, RequestDescribed):
            self._watch(envelope, message)

    def _watch(self, envelope: Envelope, message: RequestDescribed) -> None:
        hashes = unpack(message.prefix_hashes)
        for view in self._views.values():
            directory = view.residency
            if directory.watch(envelope.key.request or "", hashes) > len(hashes):
                raise BrokenPromiseError("more blocks can be reused than there are")
            directory.match_by_tier(hashes)
            directory.take_changed()


class _Engine:
    """Drives an engine's operations as a worker does, with a backend that the input decides for."""

    _RESULTS: Final = (
        ApplyResult("completed"),
        ApplyResult("accepted"),
        ApplyResult("accepted", standing=True),
        ApplyResult("rejected", "no_room"),
        ApplyResult("unsupported"),
        ApplyResult("failed", "engine_error"),
    )

    def __init__(self, operations: EngineOperations) -> None:
        self._operations = operations
        self._now = 0.0
        self._accepted: dict[str, Operation] = {}
        self._ends: dict[str, OperationOutcome] = {}
        self._choice = 0

    def control(self, envelope: Envelope) -> None:
        self._choice = crc32(envelope.body)
        self._now += 0.1
        self._carry_out(self._operations.receive(envelope, self._now))
        self._carry_out(self._operations.expire(self._now))
        due = self._operations.next_expiry()
        if due is not None and due <= self._now:
            raise BrokenPromiseError(f"what was due at {due} has not ended at {self._now}")

    def hear(self, envelope: Envelope, message: Message) -> None:
        """Requests come and go as messages say."""
        request = envelope.key.request
        if isinstance(message, RequestDescribed) and request is not None:
            self._carry_out(self._operations.request_arrived(envelope.key, self._now))
        elif isinstance(message, RequestOutcome) and request is not None:
            self._carry_out(self._operations.request_ended(request, self._now))
        elif isinstance(message, OperationOutcome) and self._accepted:
            operation = self._accepted.pop(next(iter(self._accepted)))
            end = OperationOutcome(status="completed")
            self._carry_out(self._operations.ended(OperationEnded(operation.id, end)))

    def _carry_out(self, actions: Actions) -> None:
        for operation in actions.revert:
            self._accepted.pop(operation.id, None)
        for answer in actions.outcomes:
            self._note(answer.key.operation, answer.outcome)
        for operation in actions.apply:
            result = self._RESULTS[self._choice % len(self._RESULTS)]
            self._choice //= len(self._RESULTS)
            if result.status == "accepted":
                self._accepted[operation.id] = operation
            self._carry_out(self._operations.applied(operation, result))

    def _note(self, operation: str | None, outcome: OperationOutcome) -> None:
        if operation is None:
            raise BrokenPromiseError("an outcome of no operation")
        if outcome.status in TERMINAL:
            if self._ends.setdefault(operation, outcome) != outcome:
                raise BrokenPromiseError(f"operation {operation!r} ended twice")
            self._accepted.pop(operation, None)
        elif operation in self._ends:
            raise BrokenPromiseError(f"operation {operation!r} was accepted after its end")


def _bodies() -> Reader:
    """Bodies alone, which no reading of an envelope has looked through before."""

    def read(data: bytes) -> None:
        kind = KIND_NAMES[data[0] % len(KIND_NAMES)] if data else KIND_NAMES[0]
        message = codec.open_body(
            Envelope(
                id="fuzz",
                source="fuzz",
                epoch=1,
                seq=1,
                time_s=0.0,
                category=KINDS[kind].category,
                kind=kind,
                key=Key(),
                body=Raw(data[1:]),
            )
        )
        if type(message) is not KINDS[kind].type:
            raise BrokenPromiseError(f"a {kind} was read as {message!r:.200}")
        packed = codec.encode_body(message)
        if codec.encode_body(KINDS[kind].decoder.decode(packed)) != packed:
            raise BrokenPromiseError(f"a {kind} changes on its way: {message!r:.200}")

    return read


_TOKEN = re.compile(r"[A-Za-z0-9_\-:/@+=%]+")


def _subjects() -> Reader:
    """Names, patterns and matchers."""

    def read(data: bytes) -> None:
        text = data.decode("utf-8", "surrogatepass") if _is_text(data) else data.decode("latin-1")
        made = token(text)
        if not _TOKEN.fullmatch(made):
            raise BrokenPromiseError(f"token {made!r} of {text!r}")
        if not Pattern(made).matches(made) or not Pattern("*").matches(made):
            raise BrokenPromiseError(f"token {made!r} is no subject of one token")
        pattern = Pattern(text)
        matcher = Matcher([text, "control.*.e1.>"])
        for example in (text, made, "state.default.e0.queue.-", f"{text}.a", "control.a.e1.b.c"):
            wanted = pattern.matches(example) or Pattern("control.*.e1.>").matches(example)
            if matcher.matches(example) != wanted or matcher.matches(example) != wanted:
                raise BrokenPromiseError(f"pattern {text!r} and its matcher differ at {example!r}")

    return read


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


class Metrics:
    """What counts messages and makes spans of them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._collecting = Collecting(
            self._registry, on_span=self._span, max_series=50, max_open=100
        )
        self._now = 0.0

    def __call__(self, frame: bytes) -> None:
        envelope = codec.decode(frame)
        self._now += 100.0
        self._collecting.hear(envelope, self._now)
        if crc32(frame) % 500 == 0:
            self._collecting.settle(self._now)
            text = generate_latest(self._registry)
            if text.count(b"\n") > 20_000:
                raise BrokenPromiseError(f"{text.count(10)} lines of metrics")

    @staticmethod
    def _span(span: SpanData) -> None:
        encode_spans([readable(span)]).SerializeToString()


TARGETS: Final[dict[str, Target]] = {
    "messages": Target(Messages, fuzz_inputs.message, weight=4),
    "bodies": Target(_bodies, fuzz_inputs.body),
    "metrics": Target(Metrics, fuzz_inputs.message),
    "subjects": Target(_subjects, fuzz_inputs.subject),
    "links": Target(Links, fuzz_frames.frame, weight=2),
}
"""By name. A new reader of bytes needs a row here and nothing else."""
