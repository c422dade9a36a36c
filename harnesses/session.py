"""A harness's place on the bus: it says what it knows of its workflow, and hears outcomes.

One ``HarnessSession`` speaks for one workflow. It numbers its messages, makes its keys and does
nothing else: requests go to the engine on their own path.
"""

import trio

from hear.app.clock import new_epoch
from hear.delivery import Sequencer
from hear.interfaces import Bus
from hear.messages import DEFAULT_TENANT, Envelope, Key, Message


class HarnessSession:
    """Publishes the intent of one workflow."""

    def __init__(
        self,
        bus: Bus,
        *,
        workflow: str,
        source: str,
        tenant: str = DEFAULT_TENANT,
        epoch: int | None = None,
    ) -> None:
        """Speak as ``source``, by default in an epoch of its own.

        An ``epoch`` that is given has to be larger than that of any session of the same source
        before: readers take what comes in the same one for messages that they have had.
        """
        self._bus = bus
        self.workflow = workflow
        self._sequencer = Sequencer(source, new_epoch() if epoch is None else epoch, tenant)

    def say(
        self,
        message: Message,
        *,
        request: str | None = None,
        context: str | None = None,
        context_version: int | None = None,
        engine: str | None = None,
    ) -> Envelope:
        """Publish one intent message; returns what was published."""
        key = Key(
            request=request,
            context=context,
            context_version=context_version,
            engine=engine,
            workflow=self.workflow,
        )
        envelope = self._sequencer.wrap(message, key, trio.current_time())
        self._bus.publish(envelope)
        return envelope
