"""Short ways to make what the tests of the protocol core need."""

from hear.codec import encode_body, kind_of
from hear.messages import Control, Envelope, Key, Message, Prioritise
from hear.operation import Operation


def envelope(
    message: Message,
    key: Key | None = None,
    *,
    source: str = "policy",
    epoch: int = 1,
    seq: int = 1,
    time_s: float = 0.0,
    id: str = "",
) -> Envelope:
    """Put a message into an envelope, with a chosen number."""
    kind = kind_of(message)
    return Envelope(
        id=id or f"{source}-{epoch}-{kind.name}-{seq}",
        source=source,
        epoch=epoch,
        seq=seq,
        time_s=time_s,
        category=kind.category,
        kind=kind.name,
        key=key or Key(engine="e0"),
        body=encode_body(message),
    )


def operation(
    id: str = "op",
    *,
    control: Control | None = None,
    key: Key | None = None,
    source: str = "policy",
) -> Operation:
    """Make an operation that was just submitted."""
    return Operation(
        id=id,
        control=control or Prioritise(priority=-1),
        key=key or Key(engine="e0", request="r", operation=id),
        source=source,
        submitted_s=0.0,
        deadline_s=60.0,
    )
