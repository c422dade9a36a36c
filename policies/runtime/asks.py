"""What a policy may ask for: controls, addressed to an engine, and predictions marked as such."""

from hear.codec import KINDS
from hear.errors import LocalProtocolError
from hear.interfaces import Ask
from hear.messages import Control, Key, ReuseExpected


def check_ask(ask: object) -> Ask:
    """Return what a policy asked for, if it may.

    Raises:
        LocalProtocolError: it may not; the message says why.
    """
    if not isinstance(ask, tuple) or len(ask) != 2:
        raise LocalProtocolError(f"asked for {ask!r:.200}, expected an Ask of message and key")
    message, key = ask
    what = type(message).__name__
    if not isinstance(message, Control | ReuseExpected):
        raise LocalProtocolError(f"asked for {what}, expected a control or a prediction")
    if str(message.__struct_config__.tag) not in KINDS:
        raise LocalProtocolError(f"asked for {what}, which is not a control of the protocol")
    if not isinstance(key, Key) or not all(
        value is None or isinstance(value, str)
        for value in (key.request, key.context, key.engine, key.operation, key.workflow)
    ):
        raise LocalProtocolError(f"asked for {what} about {key!r:.200}, expected a Key of texts")
    if isinstance(message, Control):
        if not key.engine:
            raise LocalProtocolError(f"asked for {what} without an engine in the key")
    elif message.basis != "predicted":
        raise LocalProtocolError(f"said of reuse that it is {message.basis}, expected predicted")
    return Ask(message, key)
