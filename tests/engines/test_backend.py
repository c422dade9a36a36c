"""The simulated engine as its clients and its worker see it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
import trio
import trio.lowlevel
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from hear.delivery import Arrival
from hear.engine_view import EngineView
from hear.engines.simulated.backend import SimulatedEngine, create
from hear.engines.simulated.profile import EngineProfile
from hear.errors import EngineError
from hear.interfaces import InferenceRequest, Report
from hear.messages import Hold, Key, Message, RequestOutcome, ResidencyChanged, Retain
from hear.operation import Operation
from hear.residency import ResidencyDirectory
from tests.engines.builders import BLOCK, hashes_of, own, profile, request
from tests.engines.integrity import check_directory, check_engine


@dataclass
class Listener:
    """Takes in what an engine reports, as a reader of the bus would, and compares."""

    engine: SimulatedEngine
    arrived: list[str] = field(default_factory=list)
    outcomes: dict[str, list[RequestOutcome]] = field(default_factory=dict)
    directory: ResidencyDirectory = field(default_factory=ResidencyDirectory)
    view: EngineView = field(default_factory=lambda: EngineView("engine0"))

    def __call__(self, report: Report) -> None:
        check_engine(self.engine)
        self.arrived += [key.request or "" for key in report.arrived]
        for key, outcome in report.requests:
            self.outcomes.setdefault(key.request or "", []).append(outcome)
        for change in report.blocks:
            self.directory.apply(change)
        messages: list[Message | None] = [
            ResidencyChanged(changes=tuple(report.blocks)) if report.blocks else None,
            report.queue,
        ]
        for message in messages:
            if message is not None:
                self.view.apply(message, Arrival.NEXT, trio.current_time(), seq=1)
        if report.blocks or report.queue:  # other reports come from between two steps
            check_directory(self.directory, self.engine.cache)
        if report.queue is not None:
            queue = self.engine.queue()
            assert set(self.view.waiting) == {w.request for w in queue.waiting}
            assert set(self.view.running) == {r.request for r in queue.running}
            assert report.queue.num_waiting == len(queue.waiting)
            assert report.queue.num_running == len(queue.running)


@asynccontextmanager
async def running(made: EngineProfile) -> AsyncIterator[tuple[SimulatedEngine, Listener]]:
    engine = SimulatedEngine(made, block_size=BLOCK)
    listener = Listener(engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run, listener)
        yield engine, listener
        nursery.cancel_scope.cancel()


# -- serving --------------------------------------------------------------------------------------


async def test_a_request_takes_the_time_of_its_steps(autojump_clock: MockClock) -> None:
    async with running(profile(budget=64)) as (engine, _):
        result = await engine.generate(request("r", num_blocks=5, output_tokens=3))  # 81 tokens
        step_s = engine.roofline.step_s
        prefill_s = step_s(64, 64 * 65 // 2, 64) + step_s(17, sum(range(65, 82)), 81)
        decode_s = step_s(1, 82, 82) + step_s(1, 83, 83)
        assert result.sent_s == result.started_s
        assert result.first_token_s - result.sent_s == pytest.approx(prefill_s)
        assert result.finished_s - result.first_token_s == pytest.approx(decode_s)
        outcome = result.outcome
        assert (outcome.status, outcome.output_tokens) == ("completed", 3)
        assert outcome.prefill_s == pytest.approx(prefill_s)
        assert outcome.decode_s == pytest.approx(decode_s)
        assert outcome.reused_tokens == {}


async def test_outcomes_tell_what_was_reused_of_which_tier(autojump_clock: MockClock) -> None:
    async with running(profile(gpu=8, cpu=32)) as (engine, listener):
        await engine.generate(request("a", context="c", num_blocks=4))
        again = await engine.generate(request("b", context="c", num_blocks=4))
        assert again.outcome.reused_tokens == {"gpu": 4 * BLOCK}
        await trio.sleep(1)
        await engine.generate(request("p", num_blocks=6))
        later = await engine.generate(request("d", context="c", num_blocks=4))
        assert later.outcome.reused_tokens == {"gpu": BLOCK, "cpu": 3 * BLOCK}
        await trio.lowlevel.checkpoint()
        assert [o.status for o in listener.outcomes["d"]] == ["accepted", "completed"]
        assert engine.pressure().restored_tokens == 3 * BLOCK


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (InferenceRequest("r", 0, 1, ()), "malformed"),
        (InferenceRequest("r", 5, 0, ()), "malformed"),
        (InferenceRequest("r", 20, 1, (1, 2)), "malformed"),
        (InferenceRequest("r", 20, 1, (-1,)), "malformed"),
        (InferenceRequest("r", 20, 1, (1,), (2**64,)), "malformed"),
        (InferenceRequest("r", 16 * BLOCK, 1, ()), "too_long"),
    ],
)
async def test_what_cannot_be_served_is_rejected_at_once(
    odd: InferenceRequest, reason: str, autojump_clock: MockClock
) -> None:
    async with running(profile(gpu=16)) as (engine, listener):
        result = await engine.generate(odd)
        assert result.outcome.status == "rejected"
        assert result.outcome.reason.startswith(reason)
        assert result.sent_s == result.finished_s
        assert (await engine.generate(request("next"))).outcome.status == "completed"
        assert listener.outcomes["r"] == [result.outcome]


async def test_the_longest_request_that_fits_is_served(autojump_clock: MockClock) -> None:
    async with running(profile(gpu=16)) as (engine, _):
        result = await engine.generate(InferenceRequest("r", 15 * BLOCK, BLOCK, hashes_of("r", 15)))
        assert result.outcome.status == "completed"


async def test_two_requests_of_one_id_at_a_time_are_an_error(autojump_clock: MockClock) -> None:
    async with running(profile()) as (engine, _), trio.open_nursery() as nursery:
        nursery.start_soon(engine.generate, request("r", output_tokens=9))
        await trio.sleep(0.01)
        with pytest.raises(EngineError, match="'r' is being served already"):
            await engine.generate(request("r"))


async def test_an_id_that_cannot_be_told_on_the_bus_is_an_error(autojump_clock: MockClock) -> None:
    async with running(profile()) as (engine, _):
        for odd in (replace(request("r"), id="\ud800"), replace(request("r"), context="\udfff")):
            with pytest.raises(EngineError, match="surrogates"):
                await engine.generate(odd)


# -- clients that leave, and engines that crash ---------------------------------------------------


@pytest.mark.parametrize("after_s", [0.0, 0.004, 0.03, 0.2])
async def test_a_client_that_leaves_takes_its_request_along(
    after_s: float, autojump_clock: MockClock
) -> None:
    async with running(profile(gpu=8, seqs=1)) as (engine, listener):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.generate, request("other", output_tokens=20))
            await trio.sleep(0.01)
            with trio.move_on_after(after_s) as scope:
                await engine.generate(request("r", num_blocks=3, output_tokens=40))
            assert scope.cancelled_caught
            assert own("r") not in engine._requests
        await trio.sleep(1)
        assert [(o.status, o.reason) for o in listener.outcomes["r"]] == [
            ("accepted", ""),
            ("failed", "client_gone"),
        ]
        assert engine.pressure().tiers[0].allocatable == 8
        assert (await engine.generate(request("r"))).outcome.status == "completed"


async def test_a_crash_fails_all_requests_and_empties_the_engine(autojump_clock: MockClock) -> None:
    engine = SimulatedEngine(profile(gpu=16, cpu=16, seqs=1), block_size=BLOCK)
    failed = []

    async def client(id: str) -> None:
        failed.append((await engine.generate(request(id, output_tokens=99))).outcome)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client, "running")
        nursery.start_soon(client, "waiting")

        @nursery.start_soon
        async def crash() -> None:
            await trio.sleep(0.05)
            engine.crash("out of memory")

        with pytest.raises(EngineError, match="engine0: out of memory"):
            await engine.run(Listener(engine))
    assert [(o.status, o.reason) for o in failed] == [("failed", "engine_restarted")] * 2
    assert list(engine.residency()) == []
    assert not engine.queue().waiting
    assert not engine.queue().running
    assert engine.pressure().num_running == 0


async def test_after_a_crash_the_engine_can_be_run_again(autojump_clock: MockClock) -> None:
    engine = SimulatedEngine(profile(), block_size=BLOCK)
    for _ in range(2):
        engine.crash()
        with pytest.raises(EngineError):
            await engine.run(Listener(engine))
    listener = Listener(engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run, listener)
        assert (await engine.generate(request("r"))).outcome.status == "completed"
        nursery.cancel_scope.cancel()


async def test_what_came_while_nobody_ran_the_engine_is_told_when_somebody_does(
    autojump_clock: MockClock,
) -> None:
    engine = SimulatedEngine(profile(), block_size=BLOCK)
    listener = Listener(engine)
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as clients:
            clients.start_soon(engine.generate, request("early"))
            await trio.sleep(1)
            nursery.start_soon(engine.run, listener)
        await trio.lowlevel.checkpoint()
        assert listener.arrived == ["early"]
        assert [o.status for o in listener.outcomes["early"]] == ["accepted", "completed"]
        nursery.cancel_scope.cancel()


# -- what it says of itself -----------------------------------------------------------------------


async def test_capabilities_and_costs_are_those_of_the_profile(autojump_clock: MockClock) -> None:
    engine = create("h100-qwen3-8b", block_size=512, name="e7")
    said = engine.capabilities()
    assert (said.block_size, said.max_num_seqs, said.modes) == (512, 64, ("dense",))
    assert [tier.name for tier in said.tiers] == ["gpu", "cpu"]
    assert said.tiers[1].num_blocks == 96 * 2**30 // (512 * 147_456)
    assert said.model == "Qwen3-8B"
    costs = engine.costs()
    assert costs.basis == "estimated"
    assert costs.kv_bytes_per_token == 147_456
    assert 20_000 < costs.prefill_tokens_per_s < 60_000
    assert [
        tier.name for tier in SimulatedEngine(profile(), block_size=16).capabilities().tiers
    ] == ["gpu"]


async def test_a_hold_is_told_in_the_queue_and_ends_by_itself(autojump_clock: MockClock) -> None:
    async with running(profile(seqs=1)) as (engine, listener), trio.open_nursery() as nursery:
        nursery.start_soon(engine.generate, request("busy", output_tokens=5))
        await trio.sleep(0.001)
        nursery.start_soon(engine.generate, request("r"))
        await trio.sleep(0.001)
        key = Key(request="r", operation="op")
        hold = Operation(
            id="op",
            control=Hold(hold_s=2.0),
            key=key,
            source="p",
            submitted_s=0.0,
            deadline_s=9.0,
        )
        assert engine.apply(hold).status == "completed"
        await trio.sleep(1.0)
        assert engine.queue().waiting[0].held
        assert listener.view.waiting["r"].held
        await trio.sleep(1.2)
        assert listener.outcomes["r"][-1].queue_s == pytest.approx(2.0, abs=0.01)


REQUESTS = st.lists(
    st.tuples(
        st.floats(0.0, 0.5),  # when it is sent
        st.sampled_from("abcd"),
        st.integers(0, 6),
        st.integers(1, 24),
        st.sampled_from([None, None, 0.05, 0.3]),  # when its client leaves
        st.sampled_from([None, 0.1, 0.9]),  # the score of a lease on its context
    ),
    min_size=1,
    max_size=12,
)


@given(
    arrivals=REQUESTS,
    made=st.builds(
        profile,
        gpu=st.integers(9, 14),
        cpu=st.sampled_from([0, 5, 20]),
        tier=st.sampled_from(["inclusive", "exclusive"]),
        seqs=st.integers(1, 4),
        budget=st.sampled_from([20, 64]),
        order=st.sampled_from(["priority", "fcfs"]),
        transfer_bytes_per_s=st.sampled_from([1e5, 1e6, 1e8]),
    ),
)
def test_what_is_reported_adds_up_after_every_report_and_all_requests_end(
    arrivals: list[tuple[float, str, int, int, float | None, float | None]], made: EngineProfile
) -> None:
    async def client(engine: SimulatedEngine, number: int) -> None:
        at_s, context, num_blocks, output_tokens, leaves_s, score = arrivals[number]
        await trio.sleep(at_s)
        with trio.move_on_after(leaves_s if leaves_s is not None else 1e9):
            sent = request(
                f"r{number}", context=context, num_blocks=num_blocks, output_tokens=output_tokens
            )
            if score is not None:
                engine.apply(
                    Operation(
                        id=f"op{number}",
                        control=Retain(score=score, lease_s=0.4),
                        key=Key(context=context, operation=f"op{number}"),
                        source="p",
                        submitted_s=trio.current_time(),
                        deadline_s=1e9,
                    )
                )
            result = await engine.generate(sent)
            assert result.outcome.status == "completed"
            assert result.outcome.output_tokens == output_tokens
            assert sum(result.outcome.reused_tokens.values()) < sent.prompt_tokens
            assert result.sent_s <= result.started_s < result.first_token_s <= result.finished_s

    async def main() -> None:
        async with running(made) as (engine, listener):
            async with trio.open_nursery() as clients:
                for number in range(len(arrivals)):
                    clients.start_soon(client, engine, number)
            await trio.sleep(100)  # copies arrive, leases end
            for number in range(len(arrivals)):
                said = [o.status for o in listener.outcomes.get(f"r{number}", ())]
                assert said in (["accepted", "completed"], ["accepted", "failed"])
            assert engine.pressure().tiers[0].used == 0
            assert not engine.queue().waiting
            assert not engine.queue().running
            check_engine(engine)

    trio.run(main, clock=MockClock(autojump_threshold=0))
