"""Recordings: the format of a file that holds all that was heard on a bus (docs/recording.md).

``Recorder`` turns what is heard into bytes to append; ``Recording`` turns bytes into what was
heard. Each record carries its length and checksum and is whole in itself, so that a recording
whose writer was killed is good up to its last whole record. Envelopes are kept as they travel:
nothing here opens a body. Apart from ``opened`` there is no I/O.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from struct import Struct as Layout
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable
from zlib import crc32

import msgspec
from msgspec import Struct

from hear import codec
from hear.delivery import Arrival, GapDetector
from hear.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from hear.messages import Envelope
from hear.messages.envelope import MAX_S, Time
from hear.subjects import stem_of

MAGIC: Final = b"\x89HEAR\r\n\x1a"
"""The first bytes of each recording; a transfer that changes line ends is seen here."""

FORMAT_VERSION: Final = 1
MAX_RECORD_BYTES: Final = 2**26
"""A longer record is taken for damage, so that a broken length makes nobody read on for ever."""

_HEADER, _MESSAGE, _NOTE = 0, 1, 2
_FRAME = Layout("<II")  # length and CRC-32 of what follows
_PREFIX = Layout("<Bd")  # what it is, when it was heard
_FRAME_AND_PREFIX = Layout("<IIBd")
_CHUNK = 1 << 20
_MAX_CHANNELS = 65_536

_encode = msgspec.msgpack.Encoder().encode


class Header(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a recording says of itself. ``started_s`` is a time on the clock of the bus."""

    version: int = FORMAT_VERSION
    started_s: Time = 0.0
    bus: str = ""
    clock: Literal["unix", "virtual"] = "unix"
    patterns: tuple[str, ...] = (">",)


class Note(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the recorder itself has to say.

    ``what`` is ``gap`` (``missed`` messages of ``source`` on the stem ``stem`` were not heard),
    ``cut_off`` (the bus ended the subscription, so anything may have been missed), ``unwritable``
    (a message had no form on the wire) or ``ended`` (no more was recorded, and on purpose).
    """

    what: str
    text: str = ""
    source: str = ""
    stem: str = ""
    missed: int = 0


class Heard(NamedTuple):
    """A message, and when it was heard."""

    time_s: float
    envelope: Envelope


class Noted(NamedTuple):
    """A note, and when it was made."""

    time_s: float
    note: Note


Record = Heard | Noted


@runtime_checkable
class Readable(Protocol):
    """The part of a binary file object that is used here."""

    def read(self, size: int, /) -> bytes: ...


_header_decoder = msgspec.msgpack.Decoder(Header)
_note_decoder = msgspec.msgpack.Decoder(Note)


def _frame(what: int, time_s: float, payload: bytes) -> bytes:
    body = _PREFIX.pack(what, time_s) + payload
    return _FRAME.pack(len(body), crc32(body)) + body


class Recorder:
    """Turns what is heard into the bytes of a recording, and counts it."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.messages = 0
        self.cut_offs = 0
        self.gaps = 0
        self.missed = 0
        self._detector = GapDetector()
        self._channels: set[tuple[str, str]] = set()

    def begin(self) -> bytes:
        """The bytes that a recording starts with."""
        return MAGIC + _frame(_HEADER, self.header.started_s, _encode(self.header))

    def hear(self, envelopes: Iterable[Envelope], time_s: float) -> bytes:
        """The records of messages that were heard at ``time_s``, and of the gaps before them."""
        records: list[bytes] = []
        for envelope in envelopes:
            missed = self._missed_before(envelope)
            if missed:
                self.gaps += 1
                self.missed += missed
                note = Note(
                    what="gap", source=envelope.source, stem=stem_of(envelope), missed=missed
                )
                records.append(_frame(_NOTE, time_s, _encode(note)))
            try:
                wire = codec.encode(envelope)
            except LocalProtocolError as error:
                note = Note(what="unwritable", text=repr(str(error)), source=repr(envelope.source))
                records.append(_frame(_NOTE, time_s, _encode(note)))
                continue
            self.messages += 1
            records.append(_frame(_MESSAGE, time_s, wire))
        return b"".join(records)

    def cut_off(self, time_s: float, why: str) -> bytes:
        """The record that the bus has ended the subscription."""
        self.cut_offs += 1
        return _frame(_NOTE, time_s, _encode(Note(what="cut_off", text=why)))

    def end(self, time_s: float) -> bytes:
        """The record that nothing more was recorded."""
        return _frame(_NOTE, time_s, _encode(Note(what="ended")))

    def _missed_before(self, envelope: Envelope) -> int:
        channel = envelope.source, stem_of(envelope)
        known = channel in self._channels
        if not known:
            if len(self._channels) >= _MAX_CHANNELS:  # each workflow brings its own
                self._channels.clear()
                self._detector = GapDetector()
            self._channels.add(channel)
        before = self._detector.missed
        if self._detector.observe(envelope) is not Arrival.GAP or not known:
            return 0  # what was said before a channel was first heard is no gap
        return self._detector.missed - before


class Recording:
    """Reads a recording once: ``header`` is there at once, iterating gives the records in order.

    When the iteration has ended, ``cut_bytes`` tells how many bytes at the end were not a whole
    record (the last one of a writer that was killed), or, if ``damaged``, how many follow the
    point where the file is broken. ``unreadable`` counts records that hold no readable envelope.
    Records of kinds that this version does not know are passed over.
    """

    def __init__(self, source: Readable | Iterable[bytes], *, name: str = "recording") -> None:
        """Begin to read from a file object, or from chunks of bytes of any size.

        Raises:
            ConfigError: this is no recording, or one of a newer format.
        """
        self.name = name
        self.cut_bytes = 0
        self.damaged = False
        self.unreadable = 0
        self._read_bytes = 0
        chunks = self._chunks_of(source) if isinstance(source, Readable) else iter(source)
        self._whole = self._whole_records(chunks)
        self.header = self._read_header()

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    def records(self, naming: Sequence[str] = ()) -> Iterator[Record]:
        """The records in order; with ``naming``, of the messages those in which a text occurs.

        That is seen from their bytes, so what is passed over costs next to nothing.
        """
        needles = [text.encode(errors="surrogatepass") for text in naming]
        decode = codec.decode
        for what, time_s, body in self._whole:
            if not -MAX_S <= time_s <= MAX_S:
                self.unreadable += 1
            elif what == _MESSAGE:
                if needles:
                    for needle in needles:
                        if needle in body:
                            break
                    else:
                        continue
                try:
                    envelope = decode(body[_PREFIX.size :])
                except RemoteProtocolError:
                    self.unreadable += 1
                    continue
                yield Heard(time_s, envelope)
            elif what == _NOTE:
                try:
                    note = _note_decoder.decode(body[_PREFIX.size :])
                except codec.UNREADABLE:
                    self.unreadable += 1
                    continue
                yield Noted(time_s, note)

    def tail(self) -> str:
        """What is to be said of the end of the file; empty if it is whole."""
        if not self.cut_bytes:
            return ""
        if self.damaged:
            return (
                f"{self.name} is damaged: its last {self.cut_bytes:,} bytes cannot be read, "
                "what stands before them can"
            )
        return (
            f"{self.name} was cut off while it was written: its last {self.cut_bytes:,} bytes "
            "are no whole record, and were left out"
        )

    def _read_header(self) -> Header:
        first = next(self._whole, None)
        if first is None:
            if not self._read_bytes:
                raise ConfigError(f"{self.name}: is empty, expected a recording")
            raise ConfigError(
                f"{self.name}: its header is not whole, so it holds nothing "
                f"({self._read_bytes:,} bytes)"
            )
        what, _, body = first
        if what != _HEADER:
            raise ConfigError(f"{self.name}: does not begin with the header of a recording")
        try:
            header = _header_decoder.decode(body[_PREFIX.size :])
        except codec.UNREADABLE as error:
            raise ConfigError(f"{self.name}: its header cannot be read: {error}") from error
        if header.version > FORMAT_VERSION:
            raise ConfigError(
                f"{self.name}: is a recording of format {header.version}, "
                f"this version of hear reads up to {FORMAT_VERSION}"
            )
        return header

    def _whole_records(self, chunks: Iterator[bytes]) -> Iterator[tuple[int, float, bytes]]:
        """What each whole record is, when it was heard, and its bytes from there on."""
        unpack, size, least = _FRAME_AND_PREFIX.unpack_from, _FRAME.size, _PREFIX.size
        buffer = b""
        for chunk in chunks:  # until the magic is there
            self._read_bytes += len(chunk)
            buffer += chunk
            if len(buffer) >= len(MAGIC):
                break
        if not buffer.startswith(MAGIC[: len(buffer)]):
            raise ConfigError(f"{self.name}: is no recording: it begins with {buffer[:8]!r}")
        at = len(MAGIC)
        while True:
            last = len(buffer) - size - least  # where the last record could begin
            while at <= last:
                length, checksum, what, time_s = unpack(buffer, at)
                if not least <= length <= MAX_RECORD_BYTES:
                    self.damaged = True
                    break
                begin = at + size
                body = buffer[begin : begin + length]
                if len(body) < length:
                    break
                if crc32(body) != checksum:
                    self.damaged = True
                    break
                at = begin + length
                yield what, time_s, body
            if self.damaged:
                break
            following = next(chunks, None)
            if following is None:
                break
            self._read_bytes += len(following)
            buffer = buffer[at:] + following
            at = 0
        self.cut_bytes = max(len(buffer) - at, 0) + sum(map(len, chunks))

    def _chunks_of(self, file: Readable) -> Iterator[bytes]:
        while True:
            try:
                chunk = file.read(_CHUNK)
            except OSError as error:
                raise ConfigError(f"{self.name}: cannot be read: {error.strerror}") from error
            if not chunk:
                return
            yield chunk


@contextmanager
def opened(path: Path) -> Iterator[Recording]:
    """Open the recording at ``path``.

    Raises:
        ConfigError: it cannot be opened, or is no recording.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        yield Recording(file, name=str(path))
