"""An attached server, and what servers do unasked: a stand-in that can, on real sockets."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
import structlog
import trio

from hear.blocks import unpack
from hear.buses.memory import MemoryBus
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.engine_view import EngineView, EngineViews
from hear.engines.vllm.attach.backend import AttachedEngine, attached
from hear.engines.vllm.attach.worker import serve_attached
from hear.engines.worker.loop import EngineWorker
from hear.errors import ConfigError, EngineError
from hear.interfaces import InferenceRequest, InferenceResult
from hear.messages import (
    DEFAULT_TENANT,
    Envelope,
    Key,
    OperationOutcome,
    Prioritise,
    RequestOutcome,
)
from tests.engines.vllm.fake_server import (
    BLOCK,
    CLEARED,
    SCHEME,
    TOPIC,
    FakeVllm,
    fake_vllm,
    removed,
    stored,
)
from tests.engines.vllm.requests import tokens_of

WITHIN_S = 20.0


def request(
    id: str, tokens: int = 40, output_tokens: int = 2, tenant: str = DEFAULT_TENANT
) -> InferenceRequest:
    return InferenceRequest(
        id=id,
        prompt_tokens=tokens,
        output_tokens=output_tokens,
        prompt_hashes=(),
        context=id,
        tenant=tenant,
        prompt=tokens_of(id, tokens),
    )


@dataclass
class Scene:
    """A stand-in, attached, with a worker on a bus, and a reader of that bus."""

    server: FakeVllm
    engine: AttachedEngine
    bus: MemoryBus
    worker: EngineWorker
    views: EngineViews = field(default_factory=EngineViews)
    heard: list[Envelope] = field(default_factory=list)
    engine_events: trio.Event = field(default_factory=trio.Event)
    policy: Sequencer = field(default_factory=lambda: Sequencer("policy"))

    @property
    def view(self) -> EngineView:
        return self.views["v0"]

    def request_ends(self, id: str) -> list[tuple[str, str]]:
        found = [open_body(e) for e in self.heard if e.key.request == id]
        return [(m.status, m.reason) for m in found if isinstance(m, RequestOutcome)]

    def ends(self, operation: str) -> list[tuple[str, str]]:
        found = [open_body(e) for e in self.heard if e.key.operation == operation]
        return [(m.status, m.reason) for m in found if isinstance(m, OperationOutcome)]

    def prioritise(self, id: str, priority: int) -> str:
        operation = self.policy.next_id()
        key = Key(request=id, engine="v0", operation=operation)
        self.bus.publish(self.policy.wrap(Prioritise(priority=priority), key, trio.current_time()))
        return operation

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(WITHIN_S):
            while not condition():
                with trio.move_on_after(0.05):  # the stand-in tells nobody what it is asked
                    await self.engine_events.wait()

    async def listen(self, *, task_status: trio.TaskStatus[None]) -> None:
        async with self.bus.subscribe(["state.>", "outcome.>"], name="reader") as subscription:
            task_status.started()
            while True:
                for envelope in await subscription.receive():
                    self.heard.append(envelope)
                    message = open_body(envelope)
                    if envelope.category != "state" or message is None:
                        continue
                    if envelope.tenant != DEFAULT_TENANT:
                        continue
                    if self.views.apply(envelope, message):
                        subscription.request_snapshot(envelope)
                self.engine_events.set()
                self.engine_events = trio.Event()


@asynccontextmanager
async def scene(
    *, prepare: Callable[[FakeVllm], None] = lambda server: None, **options: object
) -> AsyncIterator[Scene]:
    async with fake_vllm() as server, MemoryBus() as bus:
        prepare(server)
        given: dict[str, object] = {
            "kv_events": server.kv.events,
            "kv_replay": server.kv.replay,
            "sends": True,
            "poll_s": 0.05,
            "check_s": 0.2,
            "replay_s": 0.5,
        }
        with structlog.testing.capture_logs():
            async with attached(server.url, **(given | options)) as engine:  # type: ignore[arg-type]
                worker = EngineWorker(
                    bus, engine, name="v0", restart_delay_s=0.05, pressure_interval_s=0.0
                )
                made = Scene(server, engine, bus, worker)
                async with trio.open_nursery() as nursery:
                    await nursery.start(made.listen)
                    await nursery.start(worker.run)
                    await made.until(lambda: "v0" in made.views)
                    yield made
                    nursery.cancel_scope.cancel()


def holds(view: EngineView, *blocks: int) -> bool:
    return view.residency.num_blocks() == len(blocks) and all(
        view.residency.holds("gpu", block) for block in blocks
    )


# -- what it is -----------------------------------------------------------------------------------


async def test_an_attached_server_says_what_it_is() -> None:
    async with scene(prepare=lambda s: s.kv.publish(stored([1]))) as s:
        await s.until(lambda: s.view.capabilities is not None and s.view.residency_known)
        told = s.view.capabilities
        assert told is not None
        assert (told.controls, told.at_submission) == ((), ("prioritise",))
        assert (told.model, told.block_size, told.max_model_len) == ("fake", BLOCK, 512)
        assert [(t.name, t.num_blocks) for t in told.tiers] == [("gpu", 32)]
        assert told.endpoint == s.server.url
        assert holds(s.view, 1)


async def test_the_hash_scheme_is_told_once_an_event_shows_it() -> None:
    async with scene() as s:
        await s.until(lambda: s.view.capabilities is not None)
        assert s.view.capabilities is not None
        assert s.view.capabilities.hash_scheme == ""
        await s.engine.generate(request("a"))
        await s.until(lambda: s.view.capabilities.hash_scheme == SCHEME)  # type: ignore[union-attr]


async def test_priorities_are_not_offered_where_the_server_does_not_go_by_them() -> None:
    def first_come(server: FakeVllm) -> None:
        server.priority = False

    async with scene(prepare=first_come) as s:
        assert s.engine.capabilities().at_submission == ()
        operation = s.prioritise("r", -1)
        await s.until(lambda: s.ends(operation) == [("unsupported", "unsupported_control")])


async def test_an_engine_through_which_nothing_is_sent_offers_nothing() -> None:
    async with scene(sends=False) as s:
        assert s.engine.capabilities().at_submission == ()


async def test_a_request_without_a_prompt_is_refused() -> None:
    async with scene() as s:
        with pytest.raises(EngineError, match="request 'r': expected a prompt"):
            await s.engine.generate(replace(request("r"), prompt=()))
        assert not s.request_ends("r")


async def test_without_events_residency_is_unknown() -> None:
    async with scene(kv_events=None, kv_replay=None) as s:
        await s.engine.generate(request("a"))
        await s.until(lambda: ("completed", "") in s.request_ends("a"))
        assert not s.view.residency_known
        assert s.view.residency_partial
        assert s.view.residency.num_blocks() == 0


# -- requests -------------------------------------------------------------------------------------


async def test_a_priority_goes_with_its_request_if_it_comes_before_it() -> None:
    async with scene() as s:
        early = s.prioritise("second", -3)
        await s.until(lambda: s.ends(early) == [("accepted", "")])
        done: dict[str, InferenceResult] = {}

        async def send(id: str, output_tokens: int) -> None:
            done[id] = await s.engine.generate(request(id, output_tokens=output_tokens))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, "busy", 100)
            await s.until(lambda: "busy" in s.view.running)
            for id in ("first", "second"):
                nursery.start_soon(send, id, 2)
                await s.until(lambda id=id: id in s.view.waiting)  # type: ignore[misc]
            late = s.prioritise("first", -9)
            await s.until(lambda: s.ends(late) == [("rejected", "already_submitted")])
            assert s.view.waiting["second"].priority == -3
        assert s.ends(early) == [("accepted", ""), ("completed", "")]
        assert done["second"].first_token_s < done["first"].first_token_s
        assert [body.get("priority") for body in s.server.bodies] == [None, None, -3]


async def test_a_request_that_is_too_long_is_rejected_and_its_priority_fails() -> None:
    async with scene() as s:
        early = s.prioritise("long", -3)
        await s.until(lambda: s.ends(early) == [("accepted", "")])
        result = await s.engine.generate(request("long", tokens=600))
        assert (result.outcome.status, result.outcome.reason) == ("rejected", "too_long")
        await s.until(lambda: len(s.ends(early)) > 1)
        assert s.ends(early)[1] == ("failed", "request_gone")
        assert s.request_ends("long") == [("rejected", "too_long")]


async def test_a_request_that_is_reused_says_so() -> None:
    async with scene() as s:
        await s.engine.generate(request("a"))
        again = await s.engine.generate(request("a"))
        assert again.outcome.reused_tokens == {"gpu": 2 * BLOCK}
        assert (again.outcome.prompt_tokens, again.outcome.output_tokens) == (40, 2)


async def test_a_second_request_of_one_name_is_refused_while_the_first_is_served() -> None:
    async with scene() as s, trio.open_nursery() as nursery:
        nursery.start_soon(s.engine.generate, request("a", output_tokens=200))
        await s.until(lambda: "a" in s.view.running)
        with pytest.raises(EngineError, match="one of this name"):
            await s.engine.generate(request("a"))
        nursery.cancel_scope.cancel()


async def test_while_the_cache_is_known_in_part_requests_ask_for_all_that_they_reuse() -> None:
    def old(server: FakeVllm) -> None:
        server.kv.seq = 50
        server.kv.publish(stored([1]))

    async with scene(prepare=old) as s:
        await s.engine.generate(request("a"))
        s.server.kv.publish(CLEARED)
        await s.until(lambda: s.view.residency_known)
        await s.engine.generate(request("b"))
        asked = [body.get("vllm_xargs") for body in s.server.bodies]
        assert asked == [{"kv_cache_report_mode": "full"}, None]


# -- tenants --------------------------------------------------------------------------------------


async def test_a_tenants_requests_are_salted_and_told_to_it_alone() -> None:
    async with scene() as s:
        await s.engine.generate(request("a", tenant="acme"))
        await s.engine.generate(replace(request("a", tenant="acme"), cache_salt="mine"))
        again = await s.engine.generate(request("a"))
        assert again.outcome.reused_tokens == {}
        salts = [body.get("cache_salt") for body in s.server.bodies]
        assert salts == ["tenant:4:acme:", "tenant:4:acme:mine", None]
        await s.until(lambda: s.view.residency.num_blocks() == 2)
        told = {e.tenant for e in s.heard if e.category == "outcome"}
        assert told == {"acme", DEFAULT_TENANT}
        for tenant, blocks in (("acme", 4), (DEFAULT_TENANT, 2)):
            chains = s.engine.residency(tenant)
            assert sum(len(unpack(chain.prefix_hashes)) for chain in chains) == blocks


async def test_blocks_from_before_are_a_known_tenants_by_their_salt() -> None:
    def before(server: FakeVllm) -> None:
        server.kv.publish(stored([1, 2], extra_keys=[["tenant:4:acme:"], None]), stored([3]))

    async with scene(prepare=before, tenants=("acme",)) as s:
        await s.until(lambda: holds(s.view, 3) and s.view.residency_known)
        assert [list(unpack(c.prefix_hashes)) for c in s.engine.residency("acme")] == [[1, 2]]


async def test_every_tenant_hears_that_residency_is_unknown() -> None:
    async with scene() as s:
        await s.engine.generate(request("a", tenant="acme"))
        s.server.kv.drop = 1
        s.server.kv.publish(stored([1]))
        s.server.kv.buffer.clear()
        s.server.kv.publish(stored([2]))
        await s.until(lambda: s.view.residency_partial)

        def partial_for() -> set[str]:
            return {e.tenant for e in s.heard if e.kind == "residency_partial"}

        await s.until(lambda: partial_for() == {"acme", DEFAULT_TENANT})


async def test_a_block_that_is_held_twice_goes_with_its_last_copy() -> None:
    async with scene() as s:
        s.server.kv.publish(stored([1, 2]), stored([2], parent=1), removed(2), stored([3]))
        await s.until(lambda: holds(s.view, 1, 2, 3))
        s.server.kv.publish(removed(2))
        await s.until(lambda: holds(s.view, 1, 3))


# -- events that go missing -----------------------------------------------------------------------


async def test_a_gap_is_closed_by_asking_again() -> None:
    async with scene() as s:
        s.server.kv.publish(stored([1]))
        await s.until(lambda: holds(s.view, 1))
        s.server.kv.drop = 2
        for block in (2, 3, 4):
            s.server.kv.publish(stored([block], parent=block - 1))
        await s.until(lambda: holds(s.view, 1, 2, 3, 4))
        assert s.view.residency_known
        assert s.engine.follower.unclosed == 0


async def test_a_replay_without_topic_frames_closes_a_gap_too() -> None:
    async with scene() as s:
        s.server.kv.with_topic = False
        s.server.kv.drop = 1
        s.server.kv.publish(stored([1]))
        s.server.kv.publish(stored([2]))
        await s.until(lambda: holds(s.view, 1, 2))
        assert s.view.residency_known


async def test_a_lost_last_event_is_found_though_nothing_follows() -> None:
    async with scene() as s:
        s.server.kv.drop = 1
        s.server.kv.publish(stored([1]))
        await s.until(lambda: holds(s.view, 1))
        assert s.view.residency_known


async def test_after_a_gap_that_cannot_be_closed_readers_know_only_what_has_come_since() -> None:
    async with scene() as s:
        s.server.kv.publish(stored([1, 2]))
        await s.until(lambda: holds(s.view, 1, 2))
        s.server.kv.drop = 1
        s.server.kv.publish(removed(2))
        s.server.kv.buffer.clear()  # it keeps few
        s.server.kv.publish(stored([3]))
        await s.until(lambda: s.view.residency_partial)
        await s.until(lambda: holds(s.view, 3))
        assert not s.view.residency_known
        s.server.kv.publish(removed(1, 3), stored([4]))  # of 1 nobody knew any more
        await s.until(lambda: holds(s.view, 4))
        assert not s.view.residency_known
        s.server.kv.publish(CLEARED, stored([5]))
        await s.until(lambda: s.view.residency_known)
        assert holds(s.view, 5)
        assert s.worker.epoch == 1


async def test_a_replay_that_is_not_answered_is_a_gap_that_is_not_closed() -> None:
    async with scene(check_s=60.0) as s:
        s.server.kv.publish(stored([0]))
        await s.until(lambda: holds(s.view, 0) and s.server.kv.asked > 2)
        s.server.kv.mute = True
        s.server.kv.drop = 1
        s.server.kv.publish(stored([1]))
        s.server.kv.publish(stored([2]))
        await s.until(lambda: s.view.residency_partial)
        assert holds(s.view, 2)


async def test_nonsense_among_the_events_harms_nothing() -> None:
    async with scene() as s:
        s.server.kv.publish(stored([1]))
        await s.until(lambda: holds(s.view, 1))
        s.server.kv.send_raw(b"what")
        s.server.kv.send_raw(TOPIC, b"12345678", b"\xc1")
        s.server.kv.publish(stored([2]))
        await s.until(lambda: holds(s.view, 1, 2))
        assert s.engine.follower.reader.left_out["unreadable"] == 2


# -- a server that goes, and comes back -----------------------------------------------------------


async def test_a_server_that_begins_anew_is_a_new_epoch_with_an_empty_cache() -> None:
    async with scene() as s:
        await s.engine.generate(request("a"))
        await s.until(lambda: s.view.residency.num_blocks() == 2)
        s.server.crash()
        await s.until(lambda: s.view.epoch == 2 and s.view.residency_known)
        assert s.view.residency.num_blocks() == 0
        result = await s.engine.generate(request("b"))
        assert result.outcome.status == "completed"
        await s.until(lambda: s.view.residency.num_blocks() == 2)


async def test_what_was_running_fails_as_the_server_goes_and_what_comes_waits_for_it() -> None:
    async with scene() as s:
        done: dict[str, InferenceResult] = {}

        async def send(id: str, output_tokens: int = 2) -> None:
            done[id] = await s.engine.generate(request(id, output_tokens=output_tokens))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, "running", 300)
            await s.until(lambda: "running" in s.view.running)
            parked = s.prioritise("later", -1)
            await s.until(lambda: s.ends(parked) == [("accepted", "")])
            s.server.away = True
            s.server.crash()
            await s.until(lambda: s.view.epoch == 2)
            assert not s.view.residency_known
            nursery.start_soon(send, "during")
            refused = s.server.refused
            await s.until(lambda: s.server.refused > refused + 2)
            assert "during" not in done
            s.server.away = False
        assert (done["running"].outcome.status, done["running"].outcome.reason) == (
            "failed",
            "engine_restarted",
        )
        assert done["during"].outcome.status == "completed"
        await s.until(lambda: s.request_ends("during") == [("accepted", ""), ("completed", "")])
        assert s.request_ends("running") == [("accepted", ""), ("failed", "engine_restarted")]
        assert s.ends(parked) == [("accepted", ""), ("failed", "engine_restarted")]
        assert s.worker.epoch == 2


# -- what is no server ----------------------------------------------------------------------------


async def _refusal(make: Callable[[], Awaitable[object]]) -> str:
    with trio.fail_after(WITHIN_S), pytest.raises((EngineError, ConfigError)) as caught:
        await make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://h:0x"])
async def test_what_cannot_be_a_servers_address_is_said(url: str) -> None:
    async with MemoryBus() as bus:
        said = await _refusal(lambda: serve_attached(bus, url=url, name="v0"))
    assert said == f"server {url!r}: expected http://HOST:PORT of a vLLM server"


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "5557", "tcp://h", "tcp://h:no", "ipc://"])
async def test_what_cannot_be_an_address_of_events_is_said(endpoint: str) -> None:
    async with MemoryBus() as bus, fake_vllm() as server:
        said = await _refusal(
            lambda: serve_attached(bus, url=server.url, name="v0", kv_events=endpoint)
        )
    assert said.startswith(f"endpoint {endpoint!r} of KV events: expected tcp://HOST:PORT")


async def test_where_nobody_listens_there_is_no_server() -> None:
    async with MemoryBus() as bus, fake_vllm() as server:
        free = "http://127.0.0.1:1"
        said = await _refusal(lambda: serve_attached(bus, url=free, name="v0"))
        assert said.startswith(f"{free}: no answer: ")
        nobody = "tcp://127.0.0.1:1"
        said = await _refusal(
            lambda: serve_attached(bus, url=server.url, name="v0", kv_events=nobody)
        )
        assert said.startswith(f"KV events at {nobody}: nobody listens there: ")


async def test_a_replay_endpoint_that_answers_nothing_is_said() -> None:
    async with fake_vllm() as server:
        server.kv.mute = True

        async def attach() -> None:
            kv = {"kv_events": server.kv.events, "kv_replay": server.kv.replay}
            async with attached(server.url, replay_s=0.3, **kv):  # type: ignore[arg-type]
                pass

        said = await _refusal(attach)
        assert said.startswith(f"KV events at {server.kv.replay}: nothing is replayed there")


@pytest.mark.parametrize(
    ("route", "answer", "said"),
    [
        ("/version", (404, "no"), "no vLLM server, or not ready: /version answers 404"),
        ("/version", (503, ""), "no vLLM server, or not ready: /version answers 503"),
        ("/version", (200, "<html>"), "no vLLM server: /version is no JSON: '<html>'"),
        ("/version", (200, [1]), "no vLLM server: /version says [1]"),
        ("/version", (200, {"v": 1}), "no vLLM server: /version says {'v': 1}"),
        ("/v1/models", (200, {"data": []}), "model or cache are not told as expected"),
        ("/metrics", (200, "nothing 1.0"), "/metrics: nothing of vLLM is there"),
    ],
)
async def test_an_endpoint_that_is_no_vllm_is_said(
    route: str, answer: tuple[int, object], said: str
) -> None:
    async with MemoryBus() as bus, fake_vllm() as server:
        server.answers[route] = answer
        told = await _refusal(lambda: serve_attached(bus, url=server.url, name="v0"))
    assert told.startswith(server.url)
    assert said in told
