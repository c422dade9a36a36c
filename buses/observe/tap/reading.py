"""One message as a tap has it: its envelope, how it stands to those before it, and its body.

A kind that is not known and a body that cannot be read are no errors here: both are shown.
"""

from dataclasses import dataclass

from hear.buses.observe.tap.words import say, say_unknown, say_unreadable
from hear.codec import open_body
from hear.delivery import Arrival
from hear.errors import RemoteProtocolError
from hear.messages import Envelope, Message


@dataclass(frozen=True, slots=True)
class Reading:
    """``arrival`` is None where the tap does not see all of the stream.

    ``message`` is None if the kind is not known or the body cannot be read; then ``problem`` says
    which.
    """

    envelope: Envelope
    arrival: Arrival | None
    message: Message | None
    problem: str = ""

    @property
    def words(self) -> str:
        """What it says, without its source."""
        if self.message is not None:
            return say(self.envelope, self.message)
        if self.problem:
            return say_unreadable(self.envelope, self.problem)
        return say_unknown(self.envelope)

    @property
    def remark(self) -> str:
        """What there is to say of its arrival."""
        if self.arrival is not Arrival.STALE:
            return ""
        return "stale" if self.envelope.category == "state" else "again"


def read(envelope: Envelope, arrival: Arrival | None = None) -> Reading:
    """Decode the body of a message as far as it can be."""
    try:
        return Reading(envelope, arrival, open_body(envelope))
    except RemoteProtocolError as error:
        why = str(error.__cause__ or error)
        return Reading(envelope, arrival, None, why)
