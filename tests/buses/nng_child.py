"""What the tests run in processes of their own: a hub, and one who publishes."""

import sys

import trio

from hear.app.clock import SharedClock, new_epoch
from hear.buses.nng.client import connect
from hear.buses.nng.server import serve
from hear.delivery import Sequencer
from hear.messages import Key, OperationOutcome, QueueChanged, WaitingRequest


async def hub(url: str) -> None:
    """Be the hub."""
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda **kwargs: serve(url, **kwargs))
        print("ready", flush=True)


async def publish(url: str, name: str) -> None:
    """Say something ten times a second, and leave a will."""
    sequencer = Sequencer(name, epoch=new_epoch())
    async with connect(url, name=name) as bus:
        will = sequencer.wrap(OperationOutcome(status="failed"), Key(engine=f"{name}-gone"), 0.0)
        bus.set_will("me", [will])
        print("ready", flush=True)
        number = 0
        while True:
            number += 1
            now = trio.current_time()
            done = OperationOutcome(status="completed")
            key = Key(engine=name, operation=str(number))
            bus.publish(sequencer.wrap(done, key, now))
            waiting = WaitingRequest(request=f"r{number}", since_s=now)
            bus.publish(sequencer.wrap(QueueChanged(waiting=(waiting,)), Key(engine=name), now))
            await trio.sleep(0.1)


if __name__ == "__main__":
    what, url, *name = sys.argv[1:]
    if what == "hub":
        trio.run(hub, url, clock=SharedClock())
    else:
        trio.run(publish, url, name[0], clock=SharedClock())
