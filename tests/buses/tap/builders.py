"""Short ways to make what a tap hears."""

from typing import Any

import msgspec

from hear.delivery import Sequencer
from hear.messages import DEFAULT_TENANT, Envelope, Key, Message


class Voice:
    """One source, whose messages are numbered as they should be."""

    def __init__(self, name: str, epoch: int = 1, tenant: str = DEFAULT_TENANT) -> None:
        self._sequencer = Sequencer(name, epoch, tenant)

    def say(self, message: Message, time_s: float = 0.0, **key: Any) -> Envelope:
        return self._sequencer.wrap(message, Key(**key), time_s)

    def snapshot(self, message: Message, time_s: float = 0.0, **key: Any) -> Envelope:
        return self._sequencer.wrap_snapshot(message, Key(**key), time_s)

    def restart(self) -> None:
        self._sequencer.restart()


def foreign(kind: str, body: object, *, source: str = "x", category: str = "state") -> Envelope:
    """A message of a kind, or with a body, that this version cannot know."""
    return Envelope(
        id=f"{source}-1-{kind}",
        source=source,
        epoch=1,
        seq=0,
        time_s=0.0,
        category=category,
        kind=kind,
        key=Key(engine="e0"),
        body=msgspec.Raw(body if isinstance(body, bytes) else msgspec.msgpack.encode(body)),
    )
