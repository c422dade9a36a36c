"""The format of recordings: what goes in comes out, however the file ends."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import pack_into

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear import codec, recording
from hear.delivery import Sequencer
from hear.errors import ConfigError
from hear.messages import Envelope, Key, OperationOutcome, QueueChanged, QueueSnapshot
from hear.recording import Header, Heard, Note, Noted, Recorder, Recording, opened

KEY = Key(engine="e0")
HEADER = Header(started_s=5.0, bus="memory://", patterns=("state.>", "outcome.>"))


def some_messages() -> list[Envelope]:
    sequencer = Sequencer("e0")
    messages: list[Envelope] = [sequencer.wrap_snapshot(QueueSnapshot(), KEY, 5.0)]
    for number in range(4):
        messages.append(sequencer.wrap(QueueChanged(started=(f"r{number}",)), KEY, 5.5 + number))
        outcome = OperationOutcome(status="completed", control="prioritise")
        messages.append(sequencer.wrap(outcome, Key(engine="e0", operation=f"o{number}"), 6.0))
    return messages


def written(messages: Sequence[Envelope]) -> tuple[bytes, list[int]]:
    """A recording of messages, and the offsets at which it was whole."""
    recorder = Recorder(HEADER)
    data = recorder.begin()
    whole = [len(data)]
    for number, message in enumerate(messages):
        data += recorder.hear([message], 10.0 + number)
        whole.append(len(data))
    return data, whole


def wire(records: Iterator[Heard | Noted] | Recording) -> list[bytes]:
    return [codec.encode(r.envelope) for r in records if isinstance(r, Heard)]


def test_what_was_heard_comes_out_as_it_went_in() -> None:
    messages = some_messages()
    read = Recording(io.BytesIO(written(messages)[0]))
    assert read.header == HEADER
    records = list(read)
    assert [r.time_s for r in records] == [10.0 + n for n in range(len(messages))]
    assert wire(iter(records)) == [codec.encode(m) for m in messages]
    assert (read.cut_bytes, read.damaged, read.unreadable, read.tail()) == (0, False, 0, "")


def test_cut_at_any_byte_it_opens_and_holds_all_but_the_last_message() -> None:
    messages = some_messages()
    data, whole = written(messages)
    for length in range(whole[0], len(data)):
        read = Recording([data[:length]], name="cut.hear")
        kept = max(n for n, offset in enumerate(whole) if offset <= length)
        assert wire(read) == [codec.encode(m) for m in messages[:kept]]
        assert read.cut_bytes == length - whole[kept]
        assert not read.damaged
        assert ("cut off" in read.tail()) is (read.cut_bytes > 0)
    for length in range(whole[0]):
        with pytest.raises(ConfigError, match="empty" if length == 0 else "header is not whole"):
            Recording([data[:length]])


def test_a_changed_byte_is_found_wherever_it_is_and_nothing_false_is_read() -> None:
    messages = some_messages()
    data, whole = written(messages)
    right = [codec.encode(m) for m in messages]
    for at in range(whole[0], len(data)):
        broken = bytearray(data)
        broken[at] ^= 0x55
        read = Recording(io.BytesIO(bytes(broken)))
        intact = max(n for n, offset in enumerate(whole) if offset <= at)
        assert wire(read) == right[:intact]
        assert read.cut_bytes == len(data) - whole[intact]
        assert read.tail()


@given(st.data())
def test_the_size_of_the_chunks_makes_no_difference(data: st.DataObject) -> None:
    messages = some_messages()
    file = written(messages)[0]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(file)), max_size=20)))
    chunks = [file[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(file)], strict=True)]
    assert wire(Recording(chunks)) == [codec.encode(m) for m in messages]


def test_gaps_are_noted_before_the_message_that_shows_them() -> None:
    messages = some_messages()
    kept = [m for m in messages if m.id not in (messages[3].id, messages[5].id)]
    read = list(Recording([written(kept)[0]]))
    notes = [(n, r.note) for n, r in enumerate(read) if isinstance(r, Noted)]
    stem = "state.default.e0.queue"
    assert notes == [(5, Note(what="gap", source="e0", stem=stem, missed=2))]
    assert isinstance(after := read[6], Heard)
    assert after.envelope == messages[7]


def test_what_was_said_before_the_recording_began_is_no_gap() -> None:
    recorder = Recorder(HEADER)
    recorder.hear(some_messages()[4:], 1.0)
    assert (recorder.gaps, recorder.missed) == (0, 0)


def test_being_cut_off_and_the_end_are_noted() -> None:
    recorder = Recorder(HEADER)
    data = recorder.begin() + recorder.cut_off(3.0, "too slow") + recorder.end(4.0)
    assert list(Recording([data])) == [
        Noted(3.0, Note(what="cut_off", text="too slow")),
        Noted(4.0, Note(what="ended")),
    ]
    assert recorder.cut_offs == 1


def test_unknown_kinds_of_message_and_of_record_are_carried_or_passed_over() -> None:
    known = some_messages()[1]
    fields = {name: getattr(known, name) for name in known.__struct_fields__}
    body = msgspec.Raw(msgspec.msgpack.encode({"kind": "newer", "x": [1, {"y": b"z"}]}))
    newer = Envelope(**fields | {"kind": "newer", "category": "later", "body": body})
    recorder = Recorder(HEADER)
    data = recorder.begin() + recorder.hear([newer], 1.0)
    data += recording._frame(77, 2.0, b"of a newer version")
    data += recording._frame(recording._MESSAGE, 2.0, b"\xc1 no envelope")
    data += recorder.hear([known], 3.0)
    read = Recording([data])
    assert wire(read) == [codec.encode(newer), codec.encode(known)]
    assert read.unreadable == 1


def test_what_has_no_form_on_the_wire_is_noted_and_the_rest_is_kept() -> None:
    bad = Sequencer("e\ud800").wrap(QueueChanged(), KEY, 0.0)
    good = some_messages()[0]
    recorder = Recorder(HEADER)
    read = list(Recording([recorder.begin() + recorder.hear([bad, good], 1.0)]))
    assert isinstance(read[0], Noted)
    assert read[0].note.what == "unwritable"
    assert wire(iter(read)) == [codec.encode(good)]


def test_many_workflows_cost_the_recorder_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_MAX_CHANNELS", 10)
    recorder = Recorder(HEADER)
    for number in range(100):
        recorder.hear([Sequencer(f"s{number}").wrap(QueueChanged(), KEY, 0.0)], 1.0)
    assert len(recorder._channels) <= 10


# -- what is no recording ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"{}", r"begins with b'\{\}'"),
        (b"\x1f\x8b" + bytes(100), "no recording"),
        (recording.MAGIC.replace(b"\r\n", b"\n") + bytes(50), "no recording"),
        (recording.MAGIC + bytes(50), "header is not whole"),
        (recording.MAGIC + recording._frame(1, 0.0, b"x"), "header of a recording"),
        (recording.MAGIC + recording._frame(0, 0.0, b"\xc1"), "header cannot be read"),
    ],
)
def test_a_foreign_file_is_refused_in_one_line(
    content: bytes, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.hear"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught, opened(path):
        pass
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_newer_format_is_refused_and_a_newer_field_is_not() -> None:
    recorder = Recorder(Header(version=2))
    with pytest.raises(ConfigError, match="format 2, this version of hear reads up to 1"):
        Recording([recorder.begin()])
    header = msgspec.msgpack.encode({"bus": "b", "colour": "red"})
    assert Recording([recording.MAGIC + recording._frame(0, 0.0, header)]).header.bus == "b"


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    for path, complaint in ((tmp_path, "Is a directory"), (tmp_path / "no", "No such file")):
        with pytest.raises(ConfigError, match=complaint), opened(path):
            pass


def test_a_file_that_cannot_be_read_on_is_one_error() -> None:
    class Breaks:
        def __init__(self) -> None:
            self.chunks = [written(some_messages())[0]]

        def read(self, size: int, /) -> bytes:
            if self.chunks:
                return self.chunks.pop()
            raise OSError(5, "Input/output error")

    read = Recording(Breaks(), name="x.hear")
    with pytest.raises(ConfigError, match=r"x\.hear: cannot be read: Input/output error"):
        list(read)


def test_a_length_beyond_reason_is_damage_and_not_waited_for() -> None:
    data = bytearray(written(some_messages())[0])
    begin = len(Recorder(HEADER).begin())
    pack_into("<I", data, begin, 2**31)
    read = Recording([bytes(data)])
    assert list(read) == []
    assert read.damaged
