"""Continuous batching by vLLM V1's rules, and its invariants under anything that may come."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hear.engines.kv.leases import LeaseBook
from hear.engines.simulated.kv_cache import CPU, GPU, KvCache
from hear.engines.simulated.profile import Scheduler as Limits
from hear.engines.simulated.request import SimRequest
from hear.engines.simulated.scheduler import Scheduler, StepPlan
from tests.engines.builders import BLOCK, hashes_of, request
from tests.engines.integrity import check_cache, check_scheduler

STEP_S = 1.0


class Machine:
    """A scheduler with its cache, whose steps all take a second. Looks into it at each step."""

    def __init__(
        self,
        *,
        gpu: int = 16,
        cpu: int = 0,
        inclusive: bool = True,
        seqs: int = 4,
        budget: int = 64,
        reserve: bool = True,
        order: Literal["priority", "fcfs"] = "priority",
        copy_s: float = 0.1,
    ) -> None:
        self.limits = Limits(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            reserve_full_prompt=reserve,
            order=order,
        )
        self.cache = KvCache(
            num_gpu_blocks=gpu,
            num_cpu_blocks=cpu,
            inclusive=inclusive,
            block_transfer_s=copy_s,
            leases=LeaseBook(400.0),
            on_lost=lambda block: None,
        )
        self.scheduler = Scheduler(self.limits, self.cache, BLOCK)
        self.now = 0.0
        self.ended: list[SimRequest] = []
        self.num_added = 0

    def add(
        self,
        id: str = "",
        *,
        context: str | None = None,
        num_blocks: int = 1,
        output_tokens: int = 1,
        extra_tokens: int = 1,
        priority: int = 0,
    ) -> SimRequest:
        self.num_added += 1
        made = request(
            id or f"r{self.num_added}",
            context=context,
            num_blocks=num_blocks,
            output_tokens=output_tokens,
            extra_tokens=extra_tokens,
        )
        sim = SimRequest(made, self.now, self.num_added, "dense")
        sim.priority = priority
        self.scheduler.add(sim)
        return sim

    def begin(self) -> StepPlan | None:
        """Plan a step."""
        self.cache.settle(self.now)
        self.scheduler.settle(self.now)
        plan = self.scheduler.schedule(self.now)
        self.check()
        if plan is not None:
            self._check_plan(plan)
        return plan

    def step(self) -> StepPlan | None:
        """Plan a step and let it end; without one, time passes until something arrives."""
        plan = self.begin()
        if plan is None:
            timers = (
                self.cache.next_settle(),
                self.scheduler.next_load(),
                self.scheduler.waiting.next_release(),
            )
            due = [t for t in timers if t is not None]
            # An engine sleeps until something is due, so nobody may be left waiting for nothing.
            assert due or not (len(self.scheduler.waiting) or self.scheduler.num_running)
            self.now = max(min(due, default=self.now), self.now)
            return None
        self.now += STEP_S
        self.ended += self.scheduler.finish_step(plan, self.now)
        self.check()
        return plan

    def run(self, most: int = 3000) -> None:
        """Serve until nobody is left."""
        for _ in range(most):
            if not (len(self.scheduler.waiting) or self.scheduler.num_running):
                return
            self.step()
        raise AssertionError(f"{most} steps, and {self.scheduler.num_running} still run")

    def check(self) -> None:
        scheduler = self.scheduler
        holders = [*scheduler.running, *scheduler.ready, *(r for _, r in scheduler.loading)]
        check_scheduler(scheduler)
        check_cache(self.cache, [r.blocks for r in holders])

    def _check_plan(self, plan: StepPlan) -> None:
        tokens = pairs = kv = 0
        for sim, share in plan.shares:
            assert 0 < share <= sim.num_tokens - sim.computed
            assert sim in self.scheduler.running
            assert len(sim.blocks) == self.scheduler.num_blocks(sim.computed + share)
            tokens += share
            pairs += sum(range(sim.computed + 1, sim.computed + share + 1))
            kv += sim.computed + share
        assert (plan.new_tokens, plan.pairs, plan.kv_tokens) == (tokens, pairs, kv)
        assert tokens <= self.limits.max_num_batched_tokens
        once = Counter(sim.id for sim, _ in plan.shares)
        assert all(count == 1 for count in once.values())


def shares(plan: StepPlan | None) -> dict[str, int]:
    assert plan is not None
    return {sim.id: share for sim, share in plan.shares}


# -- one step -------------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    machine = Machine(budget=20)
    sim = machine.add("a", num_blocks=3, output_tokens=2)  # 49 tokens
    assert [shares(machine.step())["a"] for _ in range(4)] == [20, 20, 9, 1]
    assert sim.first_token_s == 3 * STEP_S
    assert machine.ended == [sim]
    assert sim.computed == 49 + 2 - 1  # of the last token no KV is ever needed


def test_decodes_come_first_and_prefill_gets_what_is_left() -> None:
    machine = Machine(budget=20)
    machine.add("a", num_blocks=1, output_tokens=5)
    machine.step()
    machine.add("b", num_blocks=2)
    assert shares(machine.step()) == {"a": 1, "b": 19}


def test_no_more_run_at_once_than_the_limit() -> None:
    machine = Machine(seqs=2, budget=1000)
    for _ in range(5):
        machine.add(output_tokens=3)
    assert len(shares(machine.step())) == 2
    machine.run()
    assert len(machine.ended) == 5


def test_a_hit_covers_all_but_the_last_token_of_a_prompt() -> None:
    machine = Machine()
    machine.add("a", context="c", num_blocks=3, extra_tokens=0)
    machine.run()
    again = machine.add("b", context="c", num_blocks=3, extra_tokens=0)
    assert shares(machine.step()) == {"b": BLOCK}
    assert again.reused == {GPU: 2 * BLOCK, CPU: 0}
    one_more = machine.add("d", context="c", num_blocks=3, extra_tokens=1)
    assert shares(machine.step()) == {"d": 1}
    assert one_more.reused == {GPU: 3 * BLOCK, CPU: 0}


def test_blocks_are_found_as_soon_as_they_are_scheduled() -> None:
    machine = Machine(budget=1000)
    machine.add("a", context="c", num_blocks=3)
    second = machine.add("b", context="c", num_blocks=3)
    assert shares(machine.step()) == {"a": 3 * BLOCK + 1, "b": 1}
    assert second.reused[GPU] == 3 * BLOCK


def test_what_a_request_has_written_is_reused_by_the_next_turn() -> None:
    machine = Machine()
    first = machine.add("a", num_blocks=1, output_tokens=2 * BLOCK)
    machine.run()
    written = [first.hash_at(index) for index in range(3)]
    assert [machine.cache.on_gpu(block) for block in written] == [True, True, True]
    follow_up = request("b", num_blocks=1)
    follow_up = type(follow_up)("b", 3 * BLOCK + 1, 1, written)
    sim = SimRequest(follow_up, machine.now, 99, "dense")
    machine.scheduler.add(sim)
    assert shares(machine.step()) == {"b": 1}


def test_the_first_that_does_not_fit_ends_the_round() -> None:
    machine = Machine(gpu=6, budget=1000)
    machine.add("a", num_blocks=3, output_tokens=5)
    machine.add("large", num_blocks=4)
    machine.add("small", num_blocks=0)
    assert list(shares(machine.step())) == ["a"]
    machine.run()
    assert [sim.id for sim in machine.ended] == ["a", "large", "small"]


def test_a_prompt_that_does_not_fit_whole_is_admitted_only_without_a_reserve() -> None:
    for reserve in (True, False):
        machine = Machine(gpu=6, budget=20, reserve=reserve)
        machine.add("a", num_blocks=3, output_tokens=8)
        for _ in range(3):
            machine.step()
        machine.add("b", num_blocks=4)
        assert ("b" in shares(machine.step())) is not reserve
        machine.run()


# -- preemption -----------------------------------------------------------------------------------


def test_when_blocks_run_out_the_last_in_order_is_preempted_and_computed_again() -> None:
    machine = Machine(gpu=5, budget=1000)
    first = machine.add("a", num_blocks=1, output_tokens=2 * BLOCK)
    second = machine.add("b", num_blocks=1, output_tokens=2 * BLOCK)
    machine.run()
    assert [sim.id for sim in machine.ended] == ["a", "b"]
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert machine.scheduler.preemptions == 1
    assert first.produced == second.produced == 2 * BLOCK
    assert second.reused == {GPU: 0, CPU: 0}  # what it finds again of its own is no reuse


def test_nobody_new_starts_in_a_step_that_preempted() -> None:
    machine = Machine(gpu=5, seqs=2, budget=1000)
    machine.add("a", num_blocks=1, output_tokens=2 * BLOCK)
    machine.add("b", num_blocks=1, output_tokens=2 * BLOCK)
    machine.step()
    machine.add("c", num_blocks=0, priority=-1)  # there is room for it as soon as b has gone
    while not machine.scheduler.preemptions:
        plan = machine.step()
    assert list(shares(plan)) == ["a"]
    assert list(shares(machine.step())) == ["a", "c"]


def test_a_preempted_request_is_protected_once_its_bound_has_passed_since_it_came() -> None:
    machine = Machine(gpu=5, budget=1000)
    hot = machine.add("hot", num_blocks=1, output_tokens=2 * BLOCK, priority=-9)
    guarded = machine.add("guarded", num_blocks=1, output_tokens=2 * BLOCK)
    machine.scheduler.waiting.bound(guarded, 3.0, required=True)
    while not guarded.preemptions:
        machine.step()
        assert not guarded.protected  # since it started within its bound
    machine.step()
    assert guarded.protected
    hotter = machine.add("hotter", num_blocks=1, priority=-99)
    while hotter.started_s is None:
        plan = machine.step()
    assert list(shares(plan)) == ["guarded", "hotter"]  # and not before it
    assert machine.ended[0] is hot


def test_the_least_urgent_is_preempted_even_if_it_had_its_share_already() -> None:
    machine = Machine(gpu=5, budget=1000)
    idle = machine.add("idle", num_blocks=1, output_tokens=40, priority=5)
    machine.step()
    urgent = machine.add("urgent", num_blocks=1, output_tokens=40, priority=-5)
    while not idle.preemptions:
        plan = machine.step()  # which checks that the plan adds up without what was taken back
    assert urgent.preemptions == 0
    assert shares(plan) == {"urgent": 1}
    assert idle.state == "waiting"
    machine.run()
    assert idle.produced == urgent.produced == 40


def test_what_was_taken_back_before_it_was_computed_is_found_by_nobody() -> None:
    machine = Machine(gpu=4, cpu=8, budget=1000)
    victim = machine.add("victim", num_blocks=1, extra_tokens=14, output_tokens=20, priority=5)
    machine.step()
    other = machine.add("other", num_blocks=2, extra_tokens=0, output_tokens=9, priority=-5)
    machine.step()
    # Now the one fills its second block with its next token, and the other begins its third.
    assert (victim.computed, other.computed) == (31, 32)
    assert shares(machine.step()) == {"other": 1}
    assert victim.preemptions == 1
    assert machine.cache.match([victim.hash_at(0), victim.hash_at(1)], 2) == (1, 0)
    machine.now += 100.0
    machine.cache.settle(machine.now)
    assert not machine.cache.on_cpu(victim.hash_at(1))
    machine.run()
    assert (victim.produced, other.produced) == (20, 9)


def test_after_a_step_in_which_nobody_could_go_on_the_next_is_planned_at_once() -> None:
    machine = Machine(gpu=4, budget=1000)
    idle = machine.add("idle", num_blocks=1, extra_tokens=0, output_tokens=30, priority=5)
    machine.step()
    urgent = machine.add("urgent", num_blocks=1, extra_tokens=1, output_tokens=30, priority=-5)
    machine.step()
    # Both need a third block in the same step. The idle one, first in the batch, gives way for its
    # own, and with that the step is over: it is empty.
    assert (idle.computed, urgent.computed) == (17, 17)
    while not idle.preemptions:
        plan = machine.step()
    assert list(shares(plan)) == ["urgent"]
    assert urgent.preemptions == 0
    machine.run()


def test_the_budget_that_was_taken_back_is_given_to_the_others() -> None:
    machine = Machine(gpu=6, budget=20, reserve=False)
    victim = machine.add("victim", num_blocks=1, extra_tokens=0, output_tokens=9, priority=9)
    machine.step()
    machine.add("last", num_blocks=1, extra_tokens=0, output_tokens=9)
    machine.step()
    machine.add("urgent", num_blocks=3, extra_tokens=0, priority=-9)
    assert shares(machine.step()) == {"victim": 1, "last": 1, "urgent": 18}
    batch = machine.scheduler.running
    batch.append(batch.pop(1))  # as if it had been preempted once
    assert shares(machine.step()) == {"urgent": 19, "last": 1}
    assert victim.preemptions == 1
    machine.run()


def test_those_behind_the_one_that_is_preempted_still_have_their_turn() -> None:
    machine = Machine(gpu=4, budget=1000)
    victim = machine.add("victim", num_blocks=1, extra_tokens=0, output_tokens=30, priority=9)
    machine.step()
    machine.add("one", num_blocks=1, extra_tokens=0, output_tokens=9)
    machine.step()
    machine.add("two", num_blocks=1, extra_tokens=0, output_tokens=9)
    machine.add("three", num_blocks=0, output_tokens=9)
    while not victim.preemptions:
        plan = machine.step()
    running = [sim.id for sim in machine.scheduler.running]
    assert list(shares(plan)) == running
    machine.run()


def test_loads_that_hold_all_there_is_and_cannot_go_on_give_way_to_the_first() -> None:
    machine = Machine(gpu=8, cpu=64, budget=1000, copy_s=0.5)
    for context in "ab":
        machine.add(context=context, num_blocks=2)
        machine.run()
    machine.now = 50.0
    machine.add("p", num_blocks=7)  # pushes both from the GPU
    machine.run()
    first = machine.add("first", context="a", num_blocks=6)
    second = machine.add("second", context="b", num_blocks=5)
    machine.begin()
    assert [sim.state for sim in (first, second)] == ["loading", "loading"]
    machine.run()
    assert [sim.id for sim in machine.ended][-2:] == ["first", "second"]
    assert second.preemptions == 1


def test_of_such_loads_the_least_urgent_gives_way_and_keeps_its_bound() -> None:
    machine = Machine(gpu=8, cpu=64, budget=1000, copy_s=0.5)
    for context in "ab":
        machine.add(context=context, num_blocks=2)
        machine.run()
    machine.now = 50.0
    machine.add("p", num_blocks=7)
    machine.run()
    idle = machine.add("idle", context="a", num_blocks=6, priority=5)
    machine.scheduler.waiting.bound(idle, 0.4, required=True)
    assert machine.step() is None
    assert idle.state == "loading"
    urgent = machine.add("urgent", context="b", num_blocks=5, priority=-5)
    while len(machine.scheduler.ready) < 1:
        assert machine.begin() is None
        machine.now += 0.5
    machine.now += 1.0
    machine.add("small", num_blocks=0, priority=-9)
    plan = machine.step()
    assert (idle.preemptions, urgent.preemptions) == (1, 0)
    # There would be room for the small one too, but the bound of the idle one has passed.
    assert list(shares(plan)) == ["urgent"]
    assert [sim.id for sim in machine.scheduler.waiting.in_order()] == ["idle", "small"]
    machine.run()


@pytest.mark.parametrize("order", ["priority", "fcfs"])
def test_a_protected_request_is_not_preempted_while_another_runs(
    order: Literal["priority", "fcfs"],
) -> None:
    machine = Machine(gpu=5, budget=1000, order=order)
    guarded = machine.add("guarded", num_blocks=1, output_tokens=40, priority=9)
    machine.scheduler.waiting.bound(guarded, 0.0, required=True)
    hot = machine.add("hot", num_blocks=1, output_tokens=40, priority=-9)
    # In the batch it stands behind the other, as one does that was preempted before.
    machine.step()
    machine.scheduler.running.reverse()
    machine.run()
    assert guarded.preemptions == 0
    assert hot.preemptions > 0


@pytest.mark.parametrize("order", ["priority", "fcfs"])
def test_a_preempted_request_goes_before_those_that_came_later(
    order: Literal["priority", "fcfs"],
) -> None:
    machine = Machine(gpu=5, seqs=2, budget=1000, order=order)
    for id in ("a", "b"):
        machine.add(id, num_blocks=1, output_tokens=2 * BLOCK)
    machine.step()
    machine.now += 1
    later = machine.add("c", num_blocks=1)
    while later.started_s is None:
        plan = machine.step()
    assert list(shares(plan)) == ["b", "c"]  # though it would have fitted beside the first before
    machine.run()


# -- the second tier ------------------------------------------------------------------------------


def test_a_prefix_on_the_cpu_is_loaded_while_others_go_ahead() -> None:
    machine = Machine(gpu=8, cpu=16, budget=1000, copy_s=0.5)
    machine.add("a", context="a", num_blocks=4)
    machine.run()
    machine.now = 10.0
    machine.add("b", context="b", num_blocks=7)
    machine.run()
    back = machine.add("back", context="a", num_blocks=4, output_tokens=2)
    machine.add("new", context="new", num_blocks=1, output_tokens=9)
    began = machine.now
    assert list(shares(machine.step())) == ["new"]
    assert back.state == "loading"
    assert back.reused == {GPU: 0, CPU: 4 * BLOCK}
    while "back" not in (now := shares(machine.step())):
        pass
    assert now["back"] == 1
    assert machine.now >= began + 4 * 0.5
    assert machine.scheduler.restored_tokens == 4 * BLOCK
    machine.run()


def test_a_client_that_leaves_during_a_load_leaves_nothing_behind() -> None:
    machine = Machine(gpu=8, cpu=16, budget=1000, copy_s=0.5)
    machine.add("a", context="a", num_blocks=4)
    machine.run()
    machine.now = 10.0
    machine.add("b", context="b", num_blocks=7)
    machine.run()
    back = machine.add("back", context="a", num_blocks=4)
    machine.begin()
    assert back.state == "loading"
    machine.scheduler.leave(back, machine.now)
    machine.check()
    machine.run()
    assert machine.cache.num_allocatable == 8


# -- anything at all ------------------------------------------------------------------------------


@dataclass
class Arrival:
    """A request, some steps after the one before it."""

    after: int
    context: str
    num_blocks: int
    extra_tokens: int
    output_tokens: int
    priority: int = 0
    bound_s: float | None = None
    hold_s: float | None = None
    leaves_after: int | None = None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        after=st.integers(0, 4),
        context=st.sampled_from("ab"),
        num_blocks=st.integers(0, 6),
        extra_tokens=st.integers(0, BLOCK - 1),
        output_tokens=st.integers(1, 20),
        priority=st.integers(-3, 3),
        bound_s=st.sampled_from([None, None, 0.0, 3.0, 20.0]),
        hold_s=st.sampled_from([None, None, None, 2.0, 9.0]),
        leaves_after=st.sampled_from([None, None, None, 1, 5]),
    ).filter(lambda a: a.num_blocks or a.extra_tokens),
    min_size=1,
    max_size=10,
)
MACHINES = st.fixed_dictionaries(
    {
        "gpu": st.integers(9, 12),
        "cpu": st.sampled_from([0, 4, 12]),
        "inclusive": st.booleans(),
        "seqs": st.integers(1, 4),
        "budget": st.integers(4, 60),
        "reserve": st.booleans(),
        "order": st.sampled_from(["priority", "fcfs"]),
        "copy_s": st.sampled_from([0.0, 0.3, 2.0]),
    }
)


@dataclass
class Watch:
    """Sees who is taken from the queue, and whether it was that one's turn."""

    machine: Machine
    taken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        queue = self.machine.scheduler.waiting
        remove: Callable[[SimRequest], None] = queue.remove

        def watched(sim: SimRequest) -> None:
            if self.scheduling:
                line = [r for r in queue if r.held_until is None]
                assert sim is min(line, key=lambda r: r.order), "it was another one's turn"
                late = [r for r in line if self.is_late(r) and r is not sim]
                assert self.is_late(sim) or not late, "a guarded request was passed"
                self.taken.append(sim.id)
            remove(sim)

        queue.remove = watched  # type: ignore[assignment, method-assign]
        self.scheduling = True

    def is_late(self, sim: SimRequest) -> bool:
        bound = sim.max_wait_s
        return bound is not None and sim.arrival_s + bound <= self.machine.now


def drive(machine: Machine, arrivals: Sequence[Arrival], *, controls: bool) -> list[SimRequest]:
    watch = Watch(machine)
    sims: list[SimRequest] = []
    leaving: list[tuple[int, SimRequest]] = []
    steps = 0

    def step() -> None:
        nonlocal steps
        machine.step()
        steps += 1
        for when, sim in leaving:
            if when <= steps and sim.state != "ended":
                watch.scheduling = False
                machine.scheduler.leave(sim, machine.now)
                watch.scheduling = True
                machine.check()

    for arrival in arrivals:
        for _ in range(arrival.after):
            step()
        sim = machine.add(
            context=arrival.context,
            num_blocks=arrival.num_blocks,
            extra_tokens=arrival.extra_tokens,
            output_tokens=arrival.output_tokens,
        )
        sims.append(sim)
        if controls:
            sim.priority = arrival.priority
            machine.scheduler.waiting.add(sim)
            if arrival.bound_s is not None:
                machine.scheduler.waiting.bound(sim, arrival.bound_s, required=True)
            if arrival.hold_s is not None:
                machine.scheduler.waiting.hold(sim, machine.now + arrival.hold_s)
            if arrival.leaves_after is not None:
                leaving.append((steps + arrival.leaves_after, sim))
    while len(machine.scheduler.waiting) or machine.scheduler.num_running:
        step()
        assert steps < 5000, "nobody gets anywhere"
    return sims


@given(MACHINES, ARRIVALS)
def test_all_requests_end_with_the_right_tokens_and_no_bound_is_broken(
    settings: dict[str, int], arrivals: list[Arrival]
) -> None:
    machine = Machine(**settings)  # type: ignore[arg-type]
    sims = drive(machine, arrivals, controls=True)
    for sim, arrival in zip(sims, arrivals, strict=True):
        assert sim.state == "ended"
        if sim in machine.ended:
            assert sim.produced == arrival.output_tokens
            assert sim.computed == sim.prompt_tokens + sim.produced - 1
        else:
            assert arrival.leaves_after is not None
    assert machine.cache.num_allocatable == machine.cache.num_gpu_blocks


@given(MACHINES, ARRIVALS)
def test_without_controls_requests_start_in_the_order_in_which_they_came(
    settings: dict[str, int], arrivals: list[Arrival]
) -> None:
    machine = Machine(**settings)  # type: ignore[arg-type]
    sims = drive(machine, arrivals, controls=False)
    started = [sim.started_s for sim in sims]
    assert None not in started
    assert started == sorted(started, key=lambda s: s or 0.0)


@given(MACHINES, ARRIVALS)
def test_controls_change_no_output(settings: dict[str, int], arrivals: list[Arrival]) -> None:
    outputs = []
    for controls in (False, True):
        machine = Machine(**settings)  # type: ignore[arg-type]
        sims = drive(
            machine,
            [Arrival(**{**vars(a), "leaves_after": None}) for a in arrivals],
            controls=controls,
        )
        outputs.append(
            [(s.produced, [s.hash_at(index) for index in range(s.num_named)]) for s in sims]
        )
    assert outputs[0] == outputs[1]


def test_hashes_of_a_context_are_chained() -> None:
    assert hashes_of("a", 3)[:2] == hashes_of("a", 2)
    assert not set(hashes_of("a", 3)) & set(hashes_of("b", 3))
