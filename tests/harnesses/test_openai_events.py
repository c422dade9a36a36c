"""Server-sent events are put together from whatever pieces they come in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.errors import RemoteProtocolError
from hear.harnesses.openai.events import MAX_EVENT_BYTES, EventReader

_DATA = st.binary(min_size=1, max_size=30).filter(lambda d: not set(d) & {10, 13} and d[0] != 32)


@given(st.lists(_DATA, max_size=8), st.lists(st.integers(1, 7), min_size=1), st.booleans())
def test_events_come_out_as_they_went_in_however_they_are_cut(
    events: list[bytes], cuts: list[int], returns: bool
) -> None:
    newline = b"\r\n" if returns else b"\n"
    stream = b"".join(b"data: " + event + newline * 2 for event in events)
    reader = EventReader()
    got: list[bytes] = []
    place = 0
    while stream:
        size = cuts[place % len(cuts)]
        got += reader.feed(stream[:size])
        stream = stream[size:]
        place += 1
    assert got == events


def test_several_lines_of_data_are_one_event_and_other_fields_and_comments_are_read_over() -> None:
    reader = EventReader()
    said = b": hello\n\nevent: x\nid: 7\ndata: one\ndata:two\nretry: 5\n\n\n\n"
    assert list(reader.feed(said)) == [b"one\ntwo"]


def test_an_event_without_its_end_is_not_told() -> None:
    assert list(EventReader().feed(b"data: one\n")) == []


@pytest.mark.parametrize("piece", [b"x" * 4096, b"data: " + b"x" * 4096 + b"\n"])
def test_an_event_without_end_is_given_up(piece: bytes) -> None:
    reader = EventReader()
    for _ in range(MAX_EVENT_BYTES // len(piece) - 1):
        assert not list(reader.feed(piece))
    with pytest.raises(RemoteProtocolError, match="an event of more than"):
        list(reader.feed(piece * 9))
