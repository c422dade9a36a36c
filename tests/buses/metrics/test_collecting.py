"""What is scraped, beside a count of what was on the bus."""

from collections import Counter, defaultdict
from functools import partial

import msgspec
import pytest
import trio
from prometheus_client import CollectorRegistry

from hear.app.cluster import Cluster, running
from hear.blocks import pack
from hear.buses.memory import MemoryBus
from hear.buses.observe.metrics.collecting import Collecting
from hear.buses.observe.metrics.families import OTHER, REASONS, Families
from hear.buses.observe.metrics.spans import SpanData
from hear.buses.observe.metrics.tap import follow
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.errors import BusError
from hear.harnesses.session import HarnessSession
from hear.interfaces import InferenceRequest
from hear.messages import (
    BoundWait,
    CapabilitiesReported,
    ContextOpened,
    Control,
    Envelope,
    Key,
    Message,
    OperationOutcome,
    PressureReported,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    RequestOutcome,
    Retain,
    ReuseExpected,
    RunningRequest,
    TierPressure,
    WaitingRequest,
)

BLOCK = 512


class Scrape:
    """What a registry holds now."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.samples.get((name, *sorted(labels.items())))

    def all(self, name: str) -> dict[tuple[str, ...], float]:
        """The samples of a name, by the values of their labels in order of the labels' names."""
        return {
            tuple(value for _, value in labels): number
            for (found, *labels), number in self.samples.items()
            if found == name
        }


class Tap:
    """Messages of one engine and one policy, counted."""

    def __init__(self, **bounds: int) -> None:
        self.registry = CollectorRegistry()
        self.spans: list[SpanData] = []
        self.collecting = Collecting(self.registry, on_span=self.spans.append, **bounds)
        self.engine = Sequencer("e0")
        self.policy = Sequencer("cache-aware")
        self.now = 100.0

    def hear(self, *envelopes: Envelope) -> None:
        for envelope in envelopes:
            self.collecting.hear(envelope, self.now)

    def say(self, message: Message, **key: str) -> Envelope:
        """The engine says something."""
        envelope = self.engine.wrap(message, Key(engine="e0", **key), self.now)  # type: ignore[arg-type]
        self.hear(envelope)
        return envelope

    def ask(self, control: Control, operation: str, **key: str) -> Envelope:
        """The policy asks for something."""
        whole = Key(engine="e0", operation=operation, **key)  # type: ignore[arg-type]
        envelope = self.policy.wrap(control, whole, self.now)
        self.hear(envelope)
        return envelope

    def scrape(self) -> Scrape:
        self.collecting.settle(self.now)
        return Scrape(self.registry)


# -- the whole loop -------------------------------------------------------------------------------


async def _serve(cluster: Cluster) -> None:
    """Forty requests over eight contexts, more than the engine can serve at once."""

    async def session(number: int) -> None:
        name = f"s{number}"
        harness = HarnessSession(cluster.bus, workflow=name, source=f"harness/{name}")
        harness.say(ContextOpened(), context=name)
        for turn in range(1, 6):
            hashes = [number * 1_000_000 + place for place in range(20 * turn)]
            tokens, request = len(hashes) * BLOCK, f"{name}/{turn}"
            harness.say(
                RequestDescribed(
                    turn=turn,
                    prompt_tokens=tokens,
                    block_size=BLOCK,
                    prefix_hashes=pack(hashes),
                ),
                request=request,
                context=name,
                context_version=turn,
                engine=cluster.engine_name,
            )
            await cluster.engine.generate(
                InferenceRequest(
                    id=request,
                    prompt_tokens=tokens,
                    output_tokens=20,
                    prompt_hashes=hashes,
                    context=name,
                    context_version=turn,
                )
            )
            await trio.sleep(2)

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(session, number)


async def _record(
    bus: MemoryBus,
    into: list[Envelope],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    async with bus.subscribe([">"], name="record", capacity=1_000_000) as messages:
        task_status.started()
        while True:
            into.extend(await messages.receive())


async def test_a_served_workload_is_counted_as_it_was_on_the_bus(
    autojump_clock: trio.testing.MockClock,
) -> None:
    registry = CollectorRegistry()
    spans: list[SpanData] = []
    collecting = Collecting(registry, on_span=spans.append)
    heard: list[Envelope] = []
    policy = "cache-aware+guard:40+session-aware"
    with trio.fail_after(10_000):
        async with (
            running(
                engine="simulated", profile="h100-qwen3-8b", block_size=BLOCK, policy=policy
            ) as cluster,
            trio.open_nursery() as nursery,
        ):
            bus = cluster.bus
            assert isinstance(bus, MemoryBus)
            await nursery.start(lambda task_status: _record(bus, heard, task_status=task_status))
            await nursery.start(
                lambda task_status: follow(bus, collecting, task_status=task_status)
            )
            await _serve(cluster)
            await cluster.stop_policies()
            await trio.testing.wait_all_tasks_blocked()
            collecting.settle(trio.current_time())
            scrape = Scrape(registry)
            nursery.cancel_scope.cancel()

    messages = [(envelope, open_body(envelope)) for envelope in heard]
    by_kind = Counter((e.category, e.kind) for e in heard)
    assert scrape.all("hear_messages_total") == by_kind
    assert {"intent", "control", "state", "outcome"} == {category for category, _ in by_kind}
    assert scrape.all("hear_gaps_total") == {}
    assert scrape.all("hear_messages_unreadable_total") == {}

    controls = {
        e.key.operation: e for e, message in reversed(messages) if isinstance(message, Control)
    }
    asked = Counter((e.kind, e.source) for e in controls.values())
    assert scrape.all("hear_controls_total") == asked
    assert {source for _, source in asked} == {"cache-aware", "guard:40", "session-aware"}
    ends: Counter[tuple[str, str, str]] = Counter()
    by_policy: Counter[tuple[str, str]] = Counter()
    lives: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    answers: defaultdict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    over = set()
    for envelope, message in messages:
        if not isinstance(message, OperationOutcome):
            continue
        operation = str(envelope.key.operation)
        asked_for = controls[operation]
        life = envelope.time_s - asked_for.time_s
        if message.status in ("accepted", "completed", "failed"):
            answers[asked_for.kind,].setdefault(operation, life)
        if message.status != "accepted" and operation not in over:
            over.add(operation)
            ends[asked_for.kind, message.reason, message.status] += 1
            by_policy[asked_for.source, message.status] += 1
            lives[asked_for.kind, message.status].append(life)
    assert scrape.all("hear_operations_total") == ends
    assert len(ends) > 4
    assert scrape.all("hear_policy_operations_total") == by_policy
    assert sum(scrape.all("hear_operations_open").values()) == len(controls) - len(over) == 0
    assert scrape.all("hear_operation_seconds_count") == {k: len(v) for k, v in lives.items()}
    assert scrape.all("hear_operation_seconds_sum") == pytest.approx(
        {k: sum(v) for k, v in lives.items()}
    )
    assert scrape.all("hear_operation_accept_seconds_count") == {
        k: len(v) for k, v in answers.items()
    }
    assert scrape("hear_operations_forgotten_total") == 0

    outcomes = [m for _, m in messages if isinstance(m, RequestOutcome) and m.status == "completed"]
    assert len(outcomes) == 40
    assert scrape("hear_requests_total", engine="engine0", status="completed", reason="") == 40
    times: dict[str, list[float]] = {
        "queue_": [m.queue_s for m in outcomes],
        "prefill_": [m.prefill_s for m in outcomes],
        "decode_": [m.decode_s for m in outcomes],
        "ttft_": [m.queue_s + m.prefill_s for m in outcomes],
        "": [m.queue_s + m.prefill_s + m.decode_s for m in outcomes],
    }
    for name, seconds in times.items():
        count = scrape(f"hear_request_{name}seconds_count", engine="engine0")
        total = scrape(f"hear_request_{name}seconds_sum", engine="engine0")
        assert count == 40
        assert total == pytest.approx(sum(seconds))
        assert total is not None
        assert total > 0
        below = scrape(f"hear_request_{name}seconds_bucket", engine="engine0", le="2.5")
        assert below == sum(each <= 2.5 for each in seconds)
    reused: Counter[tuple[str, str]] = Counter()
    for outcome in outcomes:
        for tier, tokens in outcome.reused_tokens.items():
            reused["engine0", tier] += tokens
    assert scrape.all("hear_reused_tokens_total") == reused
    assert sum(reused.values()) > 0
    prompts = sum(outcome.prompt_tokens for outcome in outcomes)
    assert scrape("hear_prompt_tokens_total", engine="engine0") == prompts
    assert scrape("hear_output_tokens_total", engine="engine0") == 40 * 20

    pressure = [m for _, m in messages if isinstance(m, PressureReported)][-1]
    assert {tier.tier: tier.num_blocks for tier in pressure.tiers} == {
        tier: value for (_, tier), value in scrape.all("hear_kv_capacity_blocks").items()
    }
    for each in pressure.tiers:
        for use in ("used", "cached", "allocatable"):
            shown = scrape("hear_kv_blocks", engine="engine0", tier=each.tier, use=use)
            assert shown == getattr(each, use)
    queue = [m for _, m in messages if isinstance(m, QueueChanged)][-1]
    assert scrape("hear_queue_requests", engine="engine0", state="running") == queue.num_running
    assert scrape("hear_queue_requests", engine="engine0", state="waiting") == queue.num_waiting
    assert scrape("hear_engine_epoch", engine="engine0") == 1
    assert scrape.all("hear_engine_restarts_total") == {}

    assert sum(span.name == "request" for span in spans) == 40
    assert sum("hear.policy" in span.attributes for span in spans) == len(over)
    of_requests = {span.trace_id for span in spans if span.name == "request"}
    for span in spans:
        if "hear.policy" in span.attributes and "hear.request" in span.attributes:
            assert span.trace_id in of_requests


# -- numbers --------------------------------------------------------------------------------------


def test_nothing_is_shown_of_what_is_not_known() -> None:
    shown = {name for name, *_ in Scrape(CollectorRegistry()).samples}
    assert shown == set()
    names = {name for name, *_ in Tap().scrape().samples}
    # Of itself this reader knows that nothing has happened; of all else it knows nothing.
    assert names == {"hear_operations_forgotten_total", "hear_metrics_lagged_total"}


def test_what_was_said_before_this_reader_came_is_not_missed_and_what_is_lost_later_is() -> None:
    tap = Tap()
    said = [
        tap.engine.wrap(RequestOutcome(status="accepted"), Key(engine="e0", request=f"r{n}"), 0.0)
        for n in range(20)
    ]
    tap.hear(*said[10:12])
    assert tap.scrape().all("hear_gaps_total") == {}
    tap.hear(*said[15:])
    scrape = tap.scrape()
    assert scrape("hear_gaps_total", category="outcome", source="e0") == 1
    assert scrape("hear_messages_missed_total", category="outcome", source="e0") == 3


def test_what_is_delivered_twice_counts_once() -> None:
    tap = Tap()
    control = tap.ask(Prioritise(priority=1), "op", request="r")
    tap.hear(control)
    end = tap.say(OperationOutcome(status="completed", control="prioritise"), operation="op")
    done = tap.say(RequestOutcome(status="completed", prompt_tokens=7), request="r")
    tap.hear(end, done, control)
    scrape = tap.scrape()
    assert scrape("hear_controls_total", policy="cache-aware", control="prioritise") == 1
    assert scrape("hear_controls_repeated_total", policy="cache-aware") == 2
    assert sum(scrape.all("hear_operations_total").values()) == 1
    assert scrape("hear_prompt_tokens_total", engine="e0") == 7
    assert scrape("hear_messages_total", category="outcome", kind="request_outcome") == 2


def test_times_run_from_the_control_to_its_acceptance_and_to_its_end() -> None:
    tap = Tap()
    tap.ask(BoundWait(max_wait_s=40), "op", request="r")
    tap.now += 0.25
    tap.say(OperationOutcome(status="accepted", control="bound_wait"), operation="op")
    assert tap.scrape()("hear_operations_open", control="bound_wait") == 1
    tap.now += 30
    tap.say(OperationOutcome(status="accepted", control="bound_wait"), operation="op")
    tap.say(OperationOutcome(status="completed", control="bound_wait"), operation="op")
    scrape = tap.scrape()
    assert scrape("hear_operation_accept_seconds_sum", control="bound_wait") == 0.25
    assert scrape("hear_operation_accept_seconds_count", control="bound_wait") == 1
    ended = {"control": "bound_wait", "status": "completed"}
    assert scrape("hear_operation_seconds_sum", **ended) == 30.25
    assert scrape("hear_operations_open", control="bound_wait") == 0
    # A rejection is an end without acceptance.
    tap.ask(Prioritise(priority=1), "other", request="r")
    tap.say(OperationOutcome(status="rejected", reason="outranked"), operation="other")
    scrape = tap.scrape()
    assert scrape("hear_operation_accept_seconds_count", control="prioritise") is None
    ended = {"control": "prioritise", "status": "rejected"}
    assert scrape("hear_operations_total", reason="outranked", **ended) == 1


def test_an_outcome_whose_control_was_not_heard_is_counted_without_a_time() -> None:
    tap = Tap()
    tap.say(OperationOutcome(status="failed", control="hold", reason="deadline"), operation="op")
    scrape = tap.scrape()
    assert scrape("hear_operations_total", control="hold", status="failed", reason="deadline") == 1
    assert scrape.all("hear_operation_seconds_count") == {}
    assert scrape.all("hear_policy_operations_total") == {}
    assert tap.spans == []


def test_a_restart_ends_what_is_open_there_and_all_that_was_known_of_the_engine() -> None:
    tap = Tap()
    tap.say(QueueChanged(num_waiting=3, num_running=2, waiting_tokens=30))
    tap.say(PressureReported(tiers=(TierPressure(tier="gpu", num_blocks=10, used=4),)))
    tap.ask(Retain(lease_s=60), "lease", context="c")
    old = tap.engine.wrap(QueueChanged(num_waiting=9), Key(engine="e0"), tap.now)
    before = tap.scrape()
    assert before("hear_queue_requests", engine="e0", state="waiting") == 3
    assert before("hear_kv_blocks", engine="e0", tier="gpu", use="used") == 4
    tap.engine.restart()
    tap.now += 5
    tap.hear(tap.engine.wrap_snapshot(CapabilitiesReported(), Key(engine="e0"), tap.now))
    scrape = tap.scrape()
    assert scrape("hear_engine_epoch", engine="e0") == 2
    assert scrape("hear_engine_restarts_total", engine="e0") == 1
    assert scrape.all("hear_queue_requests") == {}
    assert scrape.all("hear_kv_blocks") == scrape.all("hear_kv_capacity_blocks") == {}
    ended = {"control": "retain", "status": "failed"}
    assert scrape("hear_operations_total", reason="engine_restarted", **ended) == 1
    assert scrape("hear_operation_seconds_sum", **ended) == 5
    assert scrape("hear_operations_open", control="retain") == 0
    tap.hear(old)  # of an epoch that has ended
    assert tap.scrape().all("hear_queue_requests") == {}
    waiting = (WaitingRequest(request="r", since_s=0.0, prompt_tokens=7),)
    running_ = (RunningRequest(request="q", prompt_tokens=10, output_tokens=3),)
    snapshot = QueueSnapshot(waiting=waiting, running=running_)
    tap.hear(tap.engine.wrap_snapshot(snapshot, Key(engine="e0"), tap.now))
    assert tap.scrape().all("hear_queue_tokens") == {("e0", "waiting"): 7, ("e0", "running"): 13}


def test_predictions_count_by_who_says_so() -> None:
    tap = Tap()
    said = ReuseExpected(basis="predicted", probability=0.5)
    tap.hear(tap.policy.wrap(said, Key(context="c"), 0.0))
    predicted = {"policy": "cache-aware", "basis": "predicted"}
    assert tap.scrape()("hear_predictions_total", **predicted) == 1


# -- what strangers send --------------------------------------------------------------------------


def test_series_are_bounded_however_many_names_are_made_up() -> None:
    tap = Tap(max_series=20)
    for number in range(100):
        made_up = Sequencer(f"stranger{number}")
        key = Key(engine=f"e{number}", request="r", operation=f"op{number}")
        tap.hear(
            made_up.wrap(Prioritise(priority=1), key, 0.0),
            made_up.wrap(OperationOutcome(status="failed", reason=f"why{number}"), key, 0.0),
            made_up.wrap(RequestOutcome(status="completed"), key, 0.0),
        )
    scrape = tap.scrape()
    controls = scrape.all("hear_controls_total")
    assert len(controls) == 21
    assert controls[OTHER, OTHER] == 80
    assert sum(scrape.all("hear_requests_total").values()) == 100
    assert len(scrape.all("hear_requests_total")) == 21


def test_reasons_of_the_protocol_stand_and_few_others_get_a_series() -> None:
    families = Families(CollectorRegistry())
    made_up = [families.reason(f"why{number}") for number in range(100)]
    assert made_up[:32] == [f"why{number}" for number in range(32)]
    assert set(made_up[32:]) == {OTHER}
    assert all(families.reason(reason) == reason for reason in REASONS)
    assert families.reason("") == ""
    assert families.reason("why3") == "why3"


def test_the_known_reasons_are_those_of_the_protocol() -> None:
    from tests.hear.test_protocol_document import tables

    listed = {row[0] for row in tables("reason", "with", "means")}
    assert listed | {"too_long", "client_gone"} == REASONS


def test_infinite_and_backward_times_do_not_spoil_the_sums() -> None:
    tap = Tap()
    tap.say(RequestOutcome(status="completed", queue_s=float("inf"), decode_s=2.0), request="r")
    tap.say(RequestOutcome(status="completed", queue_s=1.0, decode_s=2.0), request="s")
    scrape = tap.scrape()
    assert scrape("hear_messages_unreadable_total", kind="request_outcome") == 1
    assert scrape("hear_request_decode_seconds_sum", engine="e0") == 2.0
    assert scrape("hear_request_queue_seconds_sum", engine="e0") == 1.0
    tap.ask(Prioritise(priority=1), "op", request="r")
    tap.now -= 3  # the engine's clock is behind
    tap.say(OperationOutcome(status="completed"), operation="op")
    ended = {"control": "prioritise", "status": "completed"}
    assert tap.scrape()("hear_operation_seconds_sum", **ended) == 0
    assert tap.spans[-1].end_s >= tap.spans[-1].start_s


def test_what_cannot_be_read_is_counted_and_its_operation_still_followed() -> None:
    tap = Tap()
    good = tap.policy.wrap(Prioritise(priority=1), Key(engine="e0", operation="op"), tap.now)
    tap.hear(msgspec.structs.replace(good, body=msgspec.Raw(b"\xc0")))
    tap.say(OperationOutcome(status="rejected", reason="malformed"), operation="op")
    scrape = tap.scrape()
    assert scrape("hear_messages_unreadable_total", kind="prioritise") == 1
    ended = {"control": "prioritise", "status": "rejected", "reason": "malformed"}
    assert scrape("hear_operations_total", **ended) == 1


def test_unknown_kinds_and_kinds_of_the_wrong_category_are_counted_and_not_opened() -> None:
    tap = Tap()
    known = tap.policy.wrap(Prioritise(priority=1), Key(engine="e0", operation="op"), tap.now)
    tap.hear(
        msgspec.structs.replace(known, kind="later"),
        msgspec.structs.replace(known, category="intent"),
        msgspec.structs.replace(known, key=Key(engine="e0")),  # no operation: nobody acts on it
    )
    scrape = tap.scrape()
    assert scrape("hear_messages_total", category="control", kind="later") == 1
    assert scrape("hear_messages_total", category="intent", kind="prioritise") == 1
    assert scrape("hear_messages_total", category="control", kind="prioritise") == 1
    assert scrape.all("hear_controls_total") == scrape.all("hear_controls_repeated_total") == {}


async def test_a_reader_that_was_cut_off_says_so_and_begins_anew(
    autojump_clock: trio.testing.MockClock,
) -> None:
    bus = MemoryBus()
    tap = Tap()
    tap.ask(Prioritise(priority=1), "op", request="r")
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(follow, bus, tap.collecting, capacity=5))
        key = Key(engine="e0", request="r")
        for _ in range(7):
            bus.publish(tap.engine.wrap(RequestOutcome(status="accepted"), key, 0.0))
        await trio.testing.wait_all_tasks_blocked()
        bus.publish(tap.engine.wrap(RequestOutcome(status="completed"), key, 0.0))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    scrape = tap.scrape()
    assert scrape("hear_metrics_lagged_total") == 1
    assert scrape("hear_operations_forgotten_total") == 1
    assert sum(scrape.all("hear_requests_total").values()) == 1
    bus.close()
    with pytest.raises(BusError):
        await follow(bus, tap.collecting)


def test_the_queue_of_an_engine_is_that_of_all_its_tenants_together() -> None:
    tap = Tap()
    acme = Sequencer("e0", tenant="acme")
    tap.say(QueueChanged(num_waiting=2, num_running=1, waiting_tokens=20, running_tokens=10))
    queue = QueueChanged(num_waiting=3, num_running=4, waiting_tokens=30, running_tokens=40)
    tap.hear(acme.wrap(queue, Key(engine="e0"), tap.now))
    assert tap.scrape()("hear_queue_requests", engine="e0", state="waiting") == 5
    assert tap.scrape()("hear_queue_requests", engine="e0", state="running") == 5
    assert tap.scrape()("hear_queue_tokens", engine="e0", state="waiting") == 50
    assert tap.scrape()("hear_queue_tokens", engine="e0", state="running") == 50
    tap.hear(acme.wrap(QueueChanged(), Key(engine="e0"), tap.now))
    assert tap.scrape()("hear_queue_requests", engine="e0", state="waiting") == 2
    tap.engine.restart()
    tap.say(QueueChanged(num_waiting=1))
    assert tap.scrape()("hear_queue_requests", engine="e0", state="waiting") == 1


def test_operations_of_two_tenants_may_have_the_same_id() -> None:
    tap = Tap()
    tap.ask(Prioritise(priority=1), "o", request="r")
    acme = Sequencer("cache-aware", tenant="acme")
    key = Key(engine="e0", operation="o", request="r")
    tap.hear(acme.wrap(Prioritise(priority=1), key, tap.now))
    assert tap.scrape()("hear_operations_open", control="prioritise") == 2
    tap.say(OperationOutcome(status="completed", control="prioritise"), operation="o")
    assert tap.scrape()("hear_operations_open", control="prioritise") == 1
