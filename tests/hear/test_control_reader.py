"""How fast controls are taken off a bus, where something else needs the processor as well."""

from itertools import accumulate, count

import pytest
import trio
from trio.testing import MockClock

from hear.app.control_reader import SLICE, ControlReader
from hear.buses.memory import MemoryBus
from hear.delivery import Sequencer
from hear.messages import Envelope, Key, Prioritise


class Engine:
    """Notes when controls come."""

    name = "e0"

    def __init__(self) -> None:
        self.came_s: list[float] = []

    def take_in(self, envelope: Envelope, now: float) -> None:
        self.came_s.append(now)

    def expire(self, now: float) -> None:
        pass

    def next_expiry(self) -> float | None:
        return None


@pytest.mark.parametrize(("share", "rests_s"), [(1.0, []), (0.125, [1.0])])
async def test_a_reader_rests_as_its_share_says(
    share: float, rests_s: list[float], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice takes 0.125 s of processor time here, and two of them are what may be had at once."""
    spent = count()
    monkeypatch.setattr("hear.app.control_reader.time.thread_time", lambda: next(spent) * 0.125)
    monkeypatch.setattr("hear.app.control_reader.BURST_S", 0.25)
    engine, sender = Engine(), Sequencer("p")
    async with (
        MemoryBus() as bus,
        trio.open_nursery() as nursery,
        ControlReader(bus, engine, share=share) as reader,
    ):
        nursery.start_soon(reader.run)
        for number in range(3 * SLICE + 1):
            key = Key(engine="e0", request=f"r{number}", operation=sender.next_id())
            bus.publish(sender.wrap(Prioritise(priority=1), key, trio.current_time()))
        start_s = trio.current_time()
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert len(engine.came_s) == 3 * SLICE + 1
    slices = sorted(set(engine.came_s))
    assert slices == pytest.approx(list(accumulate([start_s, *rests_s])))
