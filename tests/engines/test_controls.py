"""What each control does to the simulated engine, and what it says when it cannot."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import trio
import trio.lowlevel
from trio.testing import MockClock

from hear.blocks import chain_all, pack
from hear.engines.simulated.backend import SimulatedEngine
from hear.engines.simulated.profile import EngineProfile
from hear.interfaces import ApplyResult, InferenceRequest, InferenceResult, Report
from hear.messages import (
    Admit,
    BoundWait,
    Configure,
    Control,
    Hold,
    Key,
    OperationOutcome,
    Place,
    Prepare,
    Prioritise,
    Release,
    Retain,
    Route,
)
from hear.operation import Operation
from tests.engines.builders import BLOCK, hashes_of, own, profile, request
from tests.engines.integrity import check_engine


@dataclass
class Running:
    """An engine that runs without a worker: controls go straight to it."""

    engine: SimulatedEngine
    nursery: trio.Nursery
    ended: dict[str, OperationOutcome] = field(default_factory=dict)
    results: dict[str, InferenceResult] = field(default_factory=dict)
    count: int = 0

    def report(self, report: Report) -> None:
        check_engine(self.engine)
        for operation, outcome in report.operations:
            assert operation not in self.ended
            self.ended[operation] = outcome

    def operation(self, control: Control, about: str) -> Operation:
        self.count += 1
        return Operation(
            id=f"op{self.count}",
            control=control,
            key=Key(request=about, context=about, operation=f"op{self.count}"),
            source="policy",
            submitted_s=trio.current_time(),
            deadline_s=1e9,
        )

    def apply(self, control: Control, about: str = "r") -> ApplyResult:
        result = self.engine.apply(self.operation(control, about))
        check_engine(self.engine)
        return result

    async def start(self, id: str, **settings: Any) -> None:
        """Send a request, and go on when the engine has it."""
        self.nursery.start_soon(lambda: self.serve(id, **settings))
        while own(id) not in self.engine._requests:
            await trio.lowlevel.checkpoint()

    async def serve(self, id: str, **settings: Any) -> None:
        self.results[id] = await self.engine.generate(request(id, context=id, **settings))

    async def wait_for(self, operation: str) -> OperationOutcome:
        with trio.fail_after(100):
            while operation not in self.ended:  # noqa: ASYNC110 - reports are plain calls
                await trio.sleep(0.01)
        return self.ended[operation]


@asynccontextmanager
async def running(made: EngineProfile) -> AsyncIterator[Running]:
    engine = SimulatedEngine(made, block_size=BLOCK)
    async with trio.open_nursery() as nursery:
        run = Running(engine, nursery)
        nursery.start_soon(engine.run, run.report)
        yield run
        nursery.cancel_scope.cancel()


TWO_TIERS = profile(gpu=12, cpu=24, seqs=1)
ABOUT_WAITING: tuple[Control, ...] = (
    Prioritise(priority=-1),
    BoundWait(max_wait_s=1.0),
    Hold(hold_s=1.0),
)


async def test_the_bound_of_a_request_that_ran_already_counts_once_it_is_preempted(
    autojump_clock: MockClock,
) -> None:
    async with running(profile(gpu=6, seqs=2)) as run:
        await run.start("first", num_blocks=1, output_tokens=3 * BLOCK)
        await run.start("r", num_blocks=1, output_tokens=3 * BLOCK)
        await trio.sleep(0.1)
        guarded = run.engine._requests[own("r")]
        assert guarded.state == "running"
        result = run.apply(BoundWait(max_wait_s=0.0, force="requirement"))
        assert (result.status, result.reason) == ("completed", "")
        with trio.fail_after(100):
            while not guarded.preemptions:  # noqa: ASYNC110 - nobody tells of it
                await trio.sleep(0.001)
            await run.start("hot", num_blocks=1)
            run.apply(Prioritise(priority=-9), "hot")
            while not guarded.protected:  # noqa: ASYNC110
                await trio.sleep(0.001)
        waiting = [row.request for row in run.engine.queue().waiting]
        assert waiting == ["r", "hot"]


@pytest.mark.parametrize(
    "control",
    [c for c in ABOUT_WAITING if not isinstance(c, BoundWait)],
    ids=lambda c: type(c).__name__,
)
async def test_what_is_about_waiting_is_rejected_for_one_that_runs(
    control: Control, autojump_clock: MockClock
) -> None:
    async with running(TWO_TIERS) as run:
        await run.start("r", output_tokens=50)
        await trio.sleep(0.1)
        result = run.apply(control)
        assert (result.status, result.reason) == ("rejected", "already_running")


@pytest.mark.parametrize("control", [*ABOUT_WAITING, Admit()], ids=lambda c: type(c).__name__)
async def test_what_is_about_no_request_fails(control: Control, autojump_clock: MockClock) -> None:
    async with running(TWO_TIERS) as run:
        result = run.apply(control, "nobody")
        assert (result.status, result.reason) == ("failed", "request_gone")


async def test_a_guard_that_was_reverted_is_not_reported_when_its_request_starts(
    autojump_clock: MockClock,
) -> None:
    async with running(TWO_TIERS) as run:
        await run.start("busy", output_tokens=10)
        await trio.sleep(0.01)
        await run.start("r")
        await trio.lowlevel.checkpoint()
        guard = run.operation(BoundWait(max_wait_s=0.0), "r")
        assert run.engine.apply(guard).status == "accepted"
        run.engine.revert(guard)
        await trio.sleep(10)
        assert "r" in run.results
        assert not run.ended


async def test_a_hold_on_one_that_has_waited_out_its_bound_is_outranked(
    autojump_clock: MockClock,
) -> None:
    async with running(TWO_TIERS) as run:
        await run.start("busy", output_tokens=100)
        await trio.sleep(0.01)
        await run.start("r")
        await trio.lowlevel.checkpoint()
        run.apply(BoundWait(max_wait_s=0.0, force="requirement"))
        await trio.sleep(0.1)
        for force in ("preference", "requirement"):
            result = run.apply(Hold(force=force))
            assert (result.status, result.reason) == ("rejected", "outranked")


async def test_a_required_hold_prevails_over_a_preferred_bound_even_when_that_has_passed(
    autojump_clock: MockClock,
) -> None:
    async with running(TWO_TIERS) as run:
        await run.start("busy", output_tokens=10)
        await trio.sleep(0.01)
        await run.start("r")
        await trio.lowlevel.checkpoint()
        run.apply(BoundWait(max_wait_s=0.0))
        await trio.sleep(0.03)
        assert run.apply(Hold(force="preference")).reason == "outranked"
        held_from = trio.current_time()
        assert run.apply(Hold(hold_s=5.0, force="requirement")).status == "completed"
        await trio.sleep(20)
        assert run.results["r"].started_s == pytest.approx(held_from + 5.0, abs=0.1)


async def test_a_bound_ends_a_hold_on_an_engine_that_has_nothing_else_to_do(
    autojump_clock: MockClock,
) -> None:
    async with running(TWO_TIERS) as run:
        await run.start("busy", output_tokens=5)
        await trio.sleep(0.01)
        await run.start("r")
        await trio.lowlevel.checkpoint()
        run.apply(Hold(hold_s=1000.0))
        run.apply(BoundWait(max_wait_s=3.0, force="requirement"))
        await trio.sleep(20)
        result = run.results["r"]
        assert result.started_s - result.sent_s == pytest.approx(3.0, abs=0.1)


# -- retention ------------------------------------------------------------------------------------


async def test_retain_and_release_know_only_contexts_that_were_served(
    autojump_clock: MockClock,
) -> None:
    async with running(TWO_TIERS) as run:
        for control in (Retain(lease_s=1.0), Release(), Prepare(), Place(tier="cpu")):
            assert run.apply(control, "nobody").reason == "unknown_context"


async def test_a_lease_can_name_its_blocks_itself(autojump_clock: MockClock) -> None:
    async with running(profile(gpu=12, seqs=1)) as run:
        await run.serve("a", num_blocks=4)
        named = pack(hashes_of("a", 2))
        assert run.apply(Retain(lease_s=100.0, prefix_hashes=named), "other").status == "accepted"
        for number in range(4):
            await run.serve(f"p{number}", num_blocks=8)
        assert run.engine.cache.match(hashes_of("a", 4), 4) == (2, 0)


@pytest.mark.parametrize("hashes", [b"odd", pack([7, 7])], ids=["length", "twice"])
@pytest.mark.parametrize("kind", ["retain", "prepare", "place"])
async def test_block_hashes_that_make_no_sense_are_malformed(
    kind: str, hashes: bytes, autojump_clock: MockClock
) -> None:
    controls = {
        "retain": Retain(lease_s=1.0, prefix_hashes=hashes),
        "prepare": Prepare(prefix_hashes=hashes),
        "place": Place(tier="cpu", prefix_hashes=hashes),
    }
    async with running(TWO_TIERS) as run:
        result = run.apply(controls[kind])
        assert (result.status, result.reason) == ("rejected", "malformed")


async def test_a_lease_follows_its_context_from_turn_to_turn(autojump_clock: MockClock) -> None:
    async with running(profile(gpu=12, seqs=1)) as run:
        await run.serve("a", num_blocks=2)
        run.apply(Retain(lease_s=1000.0), "a")
        await run.engine.generate(request("a2", context="a", num_blocks=5))
        for number in range(4):
            await run.serve(f"p{number}", num_blocks=6)
        assert run.engine.cache.match(hashes_of("a", 5), 5) == (5, 0)


async def test_a_client_that_leaves_does_not_take_the_lease_of_its_context_along(
    autojump_clock: MockClock,
) -> None:
    async with running(profile(gpu=12, seqs=1)) as run:
        await run.serve("a", num_blocks=4)
        run.apply(Retain(lease_s=1000.0), "a")
        with trio.move_on_after(0.02):
            await run.engine.generate(request("a2", context="a", num_blocks=1, output_tokens=99))
        for number in range(4):
            await run.serve(f"p{number}", num_blocks=6)
        assert run.engine.cache.match(hashes_of("a", 4), 4) == (4, 0)


async def test_what_was_released_goes_first_and_its_end_before_its_start(
    autojump_clock: MockClock,
) -> None:
    async with running(profile(gpu=12, seqs=1)) as run:
        await run.serve("older", num_blocks=3)
        await run.serve("newer", num_blocks=4)
        assert run.apply(Release(), "newer").status == "completed"
        await run.serve("p", num_blocks=7)
        assert run.engine.cache.match(hashes_of("newer", 4), 4) == (1, 0)
        assert run.engine.cache.match(hashes_of("older", 3), 3) == (3, 0)


def shared_request(id: str, num_shared: int, num_blocks: int) -> InferenceRequest:
    """A prompt that begins as every other of these, and goes on by itself."""
    hashes = chain_all(
        f"{'shared' if index < num_shared else id}/{index}".encode() for index in range(num_blocks)
    )
    plain = request(id, context=id, num_blocks=num_blocks)
    return replace(plain, prompt_hashes=hashes)


async def test_a_release_leaves_what_another_context_begins_with(
    autojump_clock: MockClock,
) -> None:
    async with running(profile(gpu=12, seqs=1)) as run:
        one, other = shared_request("one", 3, 5), shared_request("other", 3, 4)
        for made in (one, other):
            await run.engine.generate(made)
        assert run.apply(Release(), "one").status == "completed"
        await run.serve("p", num_blocks=7)
        assert run.engine.cache.match(other.prompt_hashes, 4) == (4, 0)
        assert run.engine.cache.match(one.prompt_hashes, 5) == (3, 0)
        assert run.apply(Release(), "other").status == "completed"
        await run.serve("q", num_blocks=4)
        assert run.engine.cache.match(other.prompt_hashes, 4)[0] < 3


async def test_a_lease_that_ends_leaves_what_another_context_begins_with(
    autojump_clock: MockClock,
) -> None:
    async with running(profile(gpu=12, seqs=1)) as run:
        one, other = shared_request("one", 3, 5), shared_request("other", 3, 4)
        await run.engine.generate(one)
        run.apply(Retain(lease_s=5.0), "one")
        await run.engine.generate(other)
        assert (await run.wait_for("op1")).reason == "expired"
        await run.serve("p", num_blocks=7)
        assert run.engine.cache.match(other.prompt_hashes, 4) == (4, 0)


async def test_what_is_released_while_it_runs_goes_first_once_it_has_ended(
    autojump_clock: MockClock,
) -> None:
    async with running(profile(gpu=12, seqs=2)) as run:
        await run.serve("older", num_blocks=3)
        await run.start("running", num_blocks=4, output_tokens=8)
        await trio.sleep(0.03)
        assert run.apply(Release(), "running").status == "accepted"
        assert (await run.wait_for("op1")).status == "completed"
        assert "running" in run.results
        await run.serve("p", num_blocks=7)
        assert run.engine.cache.match(hashes_of("older", 3), 3) == (3, 0)


async def test_a_release_that_is_taken_back_while_its_context_runs_releases_nothing(
    autojump_clock: MockClock,
) -> None:
    async with running(profile(gpu=12, seqs=2)) as run:
        await run.serve("older", num_blocks=3)
        await run.start("running", num_blocks=4, output_tokens=8)
        await trio.sleep(0.03)
        release = run.operation(Release(), "running")
        assert run.engine.apply(release).status == "accepted"
        run.engine.revert(release)
        await trio.sleep(5)
        assert run.ended == {}
        await run.serve("p", num_blocks=7)
        assert run.engine.cache.match(hashes_of("running", 4), 4) == (4, 0)


async def test_retaining_again_renews_even_if_nobody_ended_the_first_lease(
    autojump_clock: MockClock,
) -> None:
    async with running(TWO_TIERS) as run:
        await run.serve("a", num_blocks=2)
        run.apply(Retain(lease_s=100.0), "a")
        run.apply(Retain(lease_s=100.0, prefix_hashes=pack(hashes_of("a", 1))), "a")
        assert (await run.wait_for("op1")).reason == "renewed"
        assert (await run.wait_for("op2")).reason == "expired"
        check_engine(run.engine)


# -- placement ------------------------------------------------------------------------------------


async def put_on_cpu(run: Running, context: str, num_blocks: int) -> None:
    await run.serve(context, num_blocks=num_blocks)
    result = run.apply(Place(tier="cpu"), context)
    if result.status == "accepted":
        assert (await run.wait_for(f"op{run.count}")).status == "completed"
    cache = run.engine.cache
    assert cache.match(hashes_of(context, num_blocks), num_blocks) == (0, num_blocks)


@pytest.mark.parametrize("tier", ["inclusive", "exclusive"])
async def test_place_and_prepare_bring_blocks_down_and_up_again(
    tier: str, autojump_clock: MockClock
) -> None:
    async with running(profile(gpu=12, cpu=24, seqs=1, tier=tier)) as run:  # type: ignore[arg-type]
        await put_on_cpu(run, "a", 4)
        assert run.apply(Prepare(), "a").status == "accepted"
        assert (await run.wait_for("op2")).status == "completed"
        assert run.engine.cache.match(hashes_of("a", 4), 4) == (4, 0)
        assert run.engine.cache.on_cpu(hashes_of("a", 1)[0]) is (tier == "inclusive")


async def test_blocks_in_use_are_not_taken_from_the_gpu(autojump_clock: MockClock) -> None:
    async with running(TWO_TIERS) as run:
        await run.start("a", num_blocks=2, output_tokens=50)
        await trio.sleep(0.05)
        result = run.apply(Place(tier="cpu"), "a")
        assert (result.status, result.reason) == ("rejected", "in_use")


async def test_a_place_that_is_overtaken_by_a_request_fails_and_does_not_say_completed(
    autojump_clock: MockClock,
) -> None:
    slow = profile(gpu=64, cpu=64, seqs=1, transfer_bytes_per_s=1e4)
    async with running(slow) as run:
        await run.serve("a", num_blocks=2)
        assert run.apply(Place(tier="cpu"), "a").status == "accepted"
        await run.start("a", num_blocks=2, output_tokens=900)
        outcome = await run.wait_for("op1")
        assert (outcome.status, outcome.reason) == ("failed", "in_use")
        assert run.engine.cache.on_gpu(hashes_of("a", 1)[0])


async def test_a_move_down_that_is_overtaken_by_a_new_computation_fails(
    autojump_clock: MockClock,
) -> None:
    slow = profile(gpu=12, cpu=24, seqs=1, tier="exclusive", transfer_bytes_per_s=1e4)
    async with running(slow) as run:
        await run.serve("a", num_blocks=2)
        assert run.apply(Place(tier="cpu"), "a").status == "accepted"
        await run.engine.generate(request("b", context="a", num_blocks=2))
        outcome = await run.wait_for("op1")
        assert (outcome.status, outcome.reason) == ("failed", "not_resident")


async def test_preparing_what_is_nowhere_needs_leave_to_compute(autojump_clock: MockClock) -> None:
    async with running(TWO_TIERS) as run:
        named = pack(hashes_of("new", 3))
        result = run.apply(Prepare(prefix_hashes=named), "new")
        assert (result.status, result.reason) == ("rejected", "not_resident")
        assert run.apply(Prepare(prefix_hashes=named, compute=True), "new").status == "accepted"
        assert (await run.wait_for("op2")).status == "completed"
        assert run.engine.cache.match(hashes_of("new", 3), 3) == (3, 0)


async def test_preparing_for_the_cpu_is_completed_when_the_copies_are_there(
    autojump_clock: MockClock,
) -> None:
    slow = profile(gpu=12, cpu=24, seqs=1, transfer_bytes_per_s=1e4)
    async with running(slow) as run:
        begun_s = trio.current_time()
        new = Prepare(tier="cpu", prefix_hashes=pack(hashes_of("new", 3)), compute=True)
        run.apply(new, "new")
        assert (await run.wait_for("op1")).status == "completed"
        assert all(run.engine.cache.on_cpu(b) for b in hashes_of("new", 3))
        assert trio.current_time() - begun_s >= 3 * run.engine.roofline.block_transfer_s


async def test_blocks_that_go_before_a_load_begins_are_not_computed_without_leave(
    autojump_clock: MockClock,
) -> None:
    async with running(profile(gpu=12, cpu=8, seqs=1)) as run:
        await put_on_cpu(run, "a", 4)
        await run.start("busy", num_blocks=0, output_tokens=60)
        await trio.sleep(0.05)
        assert run.apply(Prepare(), "a").status == "accepted"  # it has to wait
        await run.start("p", num_blocks=8)
        outcome = await run.wait_for("op2")
        assert (outcome.status, outcome.reason) == ("failed", "not_resident")
        assert not run.engine.cache.on_gpu(hashes_of("a", 1)[0])


async def test_a_prefill_of_prepare_lets_all_requests_go_first(autojump_clock: MockClock) -> None:
    async with running(TWO_TIERS) as run:
        await run.start("busy", output_tokens=20)
        await trio.sleep(0.01)
        named = pack(hashes_of("new", 3))
        run.apply(Prepare(prefix_hashes=named, compute=True), "new")
        await run.start("later", output_tokens=20)
        await run.wait_for("op1")
        assert "later" in run.results


async def test_a_prepare_that_is_reverted_leaves_the_queue_and_says_nothing(
    autojump_clock: MockClock,
) -> None:
    async with running(TWO_TIERS) as run:
        await run.start("busy", output_tokens=20)
        await trio.sleep(0.01)
        operation = run.operation(
            Prepare(prefix_hashes=pack(hashes_of("new", 3)), compute=True), "new"
        )
        run.engine.apply(operation)
        run.engine.revert(operation)
        await trio.sleep(10)
        assert not run.ended
        assert run.engine.pressure().num_waiting == 0
        assert run.engine.cache.match(hashes_of("new", 3), 3) == (0, 0)


@pytest.mark.parametrize(
    ("control", "reason"),
    [
        (Place(tier="disk"), "unknown_tier"),
        (Prepare(tier="cpu"), "exclusive_tier"),
        (Place(tier="cpu", prefix_hashes=pack(hashes_of("new", 2))), "not_resident"),
        (Prepare(prefix_hashes=pack(hashes_of("new", 99)), compute=True), "no_room"),
        (
            Prepare(tier="cpu", prefix_hashes=pack(hashes_of("new", 2)), compute=True),
            "exclusive_tier",
        ),
    ],
    ids=["tier", "copy", "nowhere", "room", "computed copy"],
)
async def test_what_cannot_be_moved_is_told_why(
    control: Control, reason: str, autojump_clock: MockClock
) -> None:
    async with running(profile(gpu=12, cpu=24, seqs=1, tier="exclusive")) as run:
        await run.serve("a", num_blocks=2)
        result = run.apply(control, "a")
        assert (result.status, result.reason) == ("rejected", reason)


# -- route and mode -------------------------------------------------------------------------------


async def test_route_and_configure_say_which_fallback_was_used(autojump_clock: MockClock) -> None:
    async with running(TWO_TIERS) as run:
        assert run.apply(Route(targets=("x",), fallback=("engine0",))).fallback == "engine0"
        assert run.apply(Route(targets=("engine0",), fallback=("x",))).fallback is None
        assert run.apply(Configure(modes=("x",), fallback=("y", "dense"))).fallback == "dense"
        assert run.apply(Configure(modes=("x", "dense"))).fallback is None
        assert run.apply(Configure(modes=("x",))).status == "rejected"
        assert run.apply(Route(targets=("x",))).status == "rejected"


async def test_an_engine_that_serves_in_order_does_not_claim_to_prioritise(
    autojump_clock: MockClock,
) -> None:
    in_order = SimulatedEngine(profile(order="fcfs"), block_size=BLOCK)
    by_priority = SimulatedEngine(profile(), block_size=BLOCK)
    assert "prioritise" not in in_order.capabilities().controls
    assert "prioritise" in by_priority.capabilities().controls


async def test_what_is_released_while_it_waits_goes_first_once_it_has_ended(
    autojump_clock: MockClock,
) -> None:
    async with running(profile(gpu=12, seqs=1)) as run:
        await run.serve("older", num_blocks=3)
        await run.start("first", num_blocks=2, output_tokens=8)
        await run.start("queued", num_blocks=4, output_tokens=8)
        await trio.sleep(0.01)
        assert run.engine.queue().waiting
        assert run.apply(Release(), "queued").status == "accepted"
        assert (await run.wait_for("op1")).status == "completed"
        assert "queued" in run.results
        await run.serve("p", num_blocks=6)
        assert run.engine.cache.match(hashes_of("older", 3), 3) == (3, 0)


async def test_what_is_released_while_it_is_preempted_goes_first_once_it_has_ended(
    autojump_clock: MockClock,
) -> None:
    async with running(profile(gpu=6, seqs=2)) as run:
        await run.start("first", num_blocks=1, output_tokens=3 * BLOCK)
        await run.start("r", num_blocks=1, output_tokens=3 * BLOCK)
        preempted = run.engine._requests[own("r")]
        with trio.fail_after(100):
            while not preempted.preemptions:  # noqa: ASYNC110 - nobody tells of it
                await trio.sleep(0.001)
        assert preempted.state == "waiting"
        assert run.apply(Release(), "r").status == "accepted"
        assert (await run.wait_for("op1")).status == "completed"
        assert "r" in run.results


async def test_blocks_of_a_request_that_is_gone_in_its_first_step_are_there_when_it_ends(
    autojump_clock: MockClock,
) -> None:
    async with running(profile(gpu=12, seqs=2)) as run:
        with trio.CancelScope() as client:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run.engine.generate, request("gone", num_blocks=4))
                await trio.sleep(1e-6)
                assert run.engine.scheduler.computing == set(hashes_of("gone", 4))
                client.cancel()
        assert run.engine.scheduler.computing
        await trio.sleep(5)
        assert not run.engine.scheduler.computing
        check_engine(run.engine)
        assert run.engine.cache.match(hashes_of("gone", 4), 4) == (4, 0)
