"""The hand-over between the engine's thread and HEAR's."""

import threading
from collections.abc import Callable

import pytest
import trio

from hear.engines.vllm.plugin.bridge import Bridge, Command, EngineEvents, SchedulerLock

EXPECT = Command("expect", None, ("default", "r"))
PATIENCE_S = 10.0


def on_another_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(PATIENCE_S)
    return not thread.is_alive()


# -- the scheduler lock ---------------------------------------------------------------------------


def test_nobody_comes_in_while_the_engine_holds_the_lock() -> None:
    lock, done = SchedulerLock(), list[str]()
    assert not lock.run_if_free(lambda: done.append("a"))
    lock.release()
    assert lock.run_if_free(lambda: done.append("b"))
    assert lock.acquire()
    assert not lock.run_if_free(lambda: done.append("c"))
    assert done == ["b"]


def test_who_takes_the_lock_back_waits_for_who_is_inside() -> None:
    lock, inside, go_on = SchedulerLock(), threading.Event(), threading.Event()
    seen: list[str] = []

    def work() -> None:
        inside.set()
        go_on.wait(PATIENCE_S)
        seen.append("worked")

    lock.release()
    worker = on_another_thread(lambda: seen.append(str(lock.run_if_free(work))))
    assert inside.wait(PATIENCE_S)

    def close() -> None:
        lock.acquire()
        seen.append("closed")

    closer = on_another_thread(close)
    closer.join(0.05)
    assert seen == []
    go_on.set()
    assert ended(worker)
    assert ended(closer)
    assert seen.index("worked") < seen.index("closed")


def test_what_is_done_inside_may_close_what_is_open_without_waiting_for_itself() -> None:
    lock = SchedulerLock()
    lock.release()
    said: list[bool] = []
    worker = on_another_thread(
        lambda: said.append(lock.run_if_free(lambda: said.append(lock.acquire())))
    )
    assert ended(worker)
    assert said == [False, True]
    assert lock.acquire(), "it is open still"


def test_what_fails_inside_leaves_the_lock_as_it_was() -> None:
    lock = SchedulerLock()
    lock.release()

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lock.run_if_free(fail)
    assert lock.run_if_free(lambda: None)


# -- commands and engine events -------------------------------------------------------------------


def test_a_command_is_carried_out_at_once_if_it_can_be_and_else_the_engine_is_woken() -> None:
    bridge, log = Bridge(), list[str]()

    def drain() -> None:
        while bridge.next_command() is not None:
            log.append("carried out")

    bridge.drain = drain
    bridge.wake_engine = lambda: log.append("woken")
    bridge.command(EXPECT)
    assert (log, bridge.has_commands) == (["woken"], True)
    bridge.scheduler_lock.release()
    bridge.command(EXPECT)
    assert log == ["woken", "carried out", "carried out"]
    assert not bridge.has_commands


async def test_news_arrive_in_order_also_those_told_before_anybody_listened() -> None:
    bridge, heard, all_there = Bridge(), list[float | None](), trio.Event()

    def receive(engine_events: EngineEvents) -> None:
        heard.append(engine_events.timer_s)
        if len(heard) == 100:
            all_there.set()

    bridge.tell(EngineEvents(timer_s=0.0))
    bridge.listen(receive)
    assert heard == [0.0]

    def engine() -> None:
        for number in range(1, 100):
            bridge.tell(EngineEvents(timer_s=float(number)))

    thread = on_another_thread(engine)
    with trio.fail_after(PATIENCE_S):
        await all_there.wait()
    assert ended(thread)
    assert heard == [float(number) for number in range(100)]


def test_an_engine_whose_listener_has_ended_goes_on_telling_nobody() -> None:
    bridge = Bridge()

    async def listen_and_leave() -> None:
        bridge.listen(lambda engine_events: None)

    trio.run(listen_and_leave)
    for _ in range(3):
        bridge.tell(EngineEvents())
    assert len(bridge._engine_events) == 0
