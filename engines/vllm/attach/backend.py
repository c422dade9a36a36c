"""An unmodified vLLM server behind ``hear.interfaces.EngineBackend``, seen and asked from outside.

What it holds comes from its KV events, how it fares from ``/metrics`` (``attached_watch``), and it
takes one control: a priority, along with a request that is sent through here (``attached_client``).
When the server is lost ``run`` raises ``EngineError``; run again, it waits until it is back.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import httpx

from hear.engines.vllm.attach.client import AttachedClient
from hear.engines.vllm.attach.kv_follower import Heard, KvFollower
from hear.engines.vllm.attach.requests import CONNECT_S, Completion
from hear.engines.vllm.attach.watch import Watch
from hear.engines.vllm.holdings import GPU
from hear.engines.vllm.identity import Tenants
from hear.engines.vllm.launch.server import VllmServer
from hear.errors import EngineError
from hear.interfaces import ApplyResult, InferenceRequest, InferenceResult, Report
from hear.messages import (
    DEFAULT_TENANT,
    BlocksStored,
    Cancel,
    CapabilitiesReported,
    CostsReported,
    PressureReported,
    Prioritise,
    QueueSnapshot,
    Tier,
    TierPressure,
    Withdraw,
)
from hear.operation import Operation

_UNTOLD = 4_096


class AttachedEngine:
    """One server. Made by ``attached``."""

    def __init__(
        self,
        watch: Watch,
        http: httpx.AsyncClient,
        tenants: Tenants,
        *,
        prioritises: bool,
        answer_s: float,
    ) -> None:
        self._watch = watch
        self._client = AttachedClient(watch, http, tenants, self._tell, answer_s=answer_s)
        self._at_submission = ("prioritise",) if prioritises else ()
        self._told_scheme: str | None = None
        self._told_pressure: PressureReported | None = None
        self._untold: deque[Report] = deque(maxlen=_UNTOLD)
        self._report: Callable[[Report], None] | None = None
        self._lost = False

    # -- what it says of the server -----------------------------------------------------------

    @property
    def follower(self) -> KvFollower:
        """The account of its KV events."""
        return self._watch.follower

    def capabilities(self) -> CapabilitiesReported:
        """What can be done from outside."""
        facts = self._watch.facts
        return CapabilitiesReported(
            at_submission=self._at_submission,
            modes=("dense",),
            tiers=(Tier(name=GPU, num_blocks=facts.num_blocks),),
            block_size=facts.block_size,
            hash_scheme=self._watch.hash_scheme,
            max_model_len=facts.max_model_len,
            model=facts.model,
            endpoint=self._watch.url,
        )

    def costs(self) -> CostsReported:
        """Over all that the server has served; 0 where it has served nothing yet."""
        page = self._watch.page
        computed = page.prompt_tokens - page.cached_tokens
        return CostsReported(
            basis="calibrated" if page.prefill_s else "estimated",
            prefill_tokens_per_s=computed / page.prefill_s if page.prefill_s else 0.0,
            decode_step_s=page.decode_s / page.decoded if page.decoded else 0.0,
            kv_bytes_per_token=0.0,
        )

    def pressure(self) -> PressureReported:
        """As it was looked at last."""
        page, before = self._watch.page, self._watch.first_page
        size = self._watch.facts.num_blocks
        used = min(round(page.usage * size), size)
        held = self.follower.holdings.count(GPU)
        gpu = TierPressure(
            tier=GPU,
            num_blocks=size,
            used=used,
            cached=max(min(held, size) - used, 0),
            allocatable=size - used,
        )
        return PressureReported(
            tiers=(gpu,),
            num_waiting=round(page.num_waiting),
            num_running=round(page.num_running),
            restored_tokens=max(round(page.restored_tokens - before.restored_tokens), 0),
            preemptions=max(round(page.preemptions - before.preemptions), 0),
        )

    def queue(self, tenant: str = DEFAULT_TENANT) -> QueueSnapshot:
        """The requests of a tenant that were sent through here."""
        return self._client.requests.snapshot(tenant)

    def residency(self, tenant: str = DEFAULT_TENANT) -> Iterable[BlocksStored]:
        """What is known to be resident of a tenant."""
        return self.follower.holdings.chains(tenant)

    def residency_known(self) -> bool:
        """Whether none of its events are missing."""
        return self.follower.known

    # -- controls and requests ----------------------------------------------------------------

    def apply(self, operation: Operation) -> ApplyResult:
        """Take a priority for a request that is about to be sent."""
        control = operation.control
        if isinstance(control, Cancel | Withdraw):
            return ApplyResult("completed")  # what it ends was reverted before
        if not isinstance(control, Prioritise):
            return ApplyResult("unsupported", "unsupported_control")
        return self._client.prioritise(operation, control)

    def expect(self, operation: Operation) -> None:
        """Nothing to do: a request is announced before it is sent."""

    def revert(self, operation: Operation) -> None:
        """Forget the priority of a request that has not been sent yet."""
        self._client.revert(operation)

    async def generate(self, request: InferenceRequest) -> InferenceResult:
        """Send a request and wait for its last token, or for its refusal.

        While the server is known to be away, its requests wait for it.
        """
        return (await self.complete(request)).result

    async def complete(self, request: InferenceRequest) -> Completion:
        """As ``generate``; returns the tokens too.

        Raises:
            EngineError: it has no prompt, or its tenant has one of the same id being served.
        """
        return await self._client.complete(request)

    # -- following the server -----------------------------------------------------------------

    async def run(self, report: Callable[[Report], None]) -> None:
        """Follow the server until cancelled, and report each change.

        Raises:
            EngineError: the server is lost, or has begun anew. Running it again waits for it.
        """
        if self._lost:
            await self._watch.come_back()
            self._lost = False
            self._client.come_back()
            report(Report(residency_anew=True, capabilities=self.capabilities()))
        self._told_scheme = self.follower.scheme
        self._told_pressure = self.pressure()
        self._report = report
        while self._untold:
            report(self._untold.popleft())
        try:
            await self._watch.run(looked=self._looked, heard=self._heard)
        except EngineError:
            self._lost = True
            self._report = None
            self._watch.forget()
            self._client.lose()
            raise
        finally:
            self._report = None

    def _looked(self) -> None:
        if (pressure := self.pressure()) != self._told_pressure:
            self._told_pressure = pressure
            self._tell(Report())  # whoever drives this engine asks for the rest

    def _heard(self, heard: Heard) -> None:
        of_all = Report(residency_anew=heard.anew)
        if self.follower.scheme != self._told_scheme:
            self._told_scheme = self.follower.scheme
            of_all.capabilities = self.capabilities()
        if of_all.residency_anew or of_all.capabilities is not None:
            self._tell(of_all)
        if not heard.anew:
            for tenant, blocks in heard.changes.items():
                self._tell(Report(tenant=tenant, blocks=blocks))

    def _tell(self, report: Report) -> None:
        if self._report is None:
            self._untold.append(report)
        else:
            self._report(report)


@asynccontextmanager
async def attached(
    url: str,
    *,
    kv_events: str | None = None,
    kv_replay: str | None = None,
    topic: str = "",
    priority: bool | None = None,
    sends: bool = False,
    tenants: Iterable[str] = (),
    hash_seed: str | None = None,
    poll_s: float = 1.0,
    check_s: float = 5.0,
    replay_s: float = 2.0,
    answer_s: float = 3_600.0,
) -> AsyncIterator[AttachedEngine]:
    """Attach to the server at ``url``, and see what it holds.

    Args:
        kv_events, kv_replay: where it publishes KV events and replays them (its
            ``--kv-events-config``); without the one residency is unknown, without the other it is
            as soon as an event is lost, and until then if it has published any before.
        topic: which events; empty: all that are published there.
        priority: whether it runs with ``--scheduling-policy priority``. None: as it says, which it
            does in development mode alone.
        sends: whether requests are sent through the engine (``generate``), so that it can give them
            priorities.
        tenants: those whose blocks are told apart before a request of theirs is sent through here.
        hash_seed: its ``PYTHONHASHSEED``, for its hash scheme to be known before its first event.
        poll_s: how often to look at its metrics.
        check_s: how often to ask whether an event was lost.
        replay_s: how long a replay may pause.
        answer_s: how long a request may take.

    Raises:
        ConfigError: an address cannot be one.
        EngineError: no vLLM server is there, or its events are not.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as http:
        server = VllmServer(url, http)
        facts = await server.facts()
        known = Tenants(tenants)
        watch = Watch(
            server,
            facts,
            known,
            kv_events=kv_events,
            kv_replay=kv_replay,
            topic=topic,
            hash_seed=hash_seed,
            poll_s=poll_s,
            check_s=check_s,
            replay_s=replay_s,
        )
        await watch.read_history()
        prioritises = sends and bool(facts.priority if priority is None else priority)
        yield AttachedEngine(watch, http, known, prioritises=prioritises, answer_s=answer_s)
