"""An unmodified vLLM server behind ``hear.seams.EngineBackend``, seen and asked from outside.

What it holds comes from its KV events, how it fares from ``/metrics``, and it takes one control: a
priority, along with a request that is sent through here. When the server is lost ``run`` raises
``EngineError``; run again, it waits until the server is back. Pages, events, sockets and requests
have modules of their own; this one joins them.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial

import httpx
import structlog
import trio

from hear.engines.vllm import kv_sockets
from hear.engines.vllm.attached_requests import (
    CONNECT_S,
    Completion,
    OwnRequest,
    OwnRequests,
    PromptOf,
    body_of,
    converse,
    result_of,
)
from hear.engines.vllm.hashing import scheme_of
from hear.engines.vllm.kv_events import Heard, KvFollower
from hear.engines.vllm.kv_sockets import KvSockets
from hear.engines.vllm.server import ServerFacts, VllmServer
from hear.errors import EngineError
from hear.messages import (
    DEFAULT_TENANT,
    BlocksStored,
    Cancel,
    CapabilitiesReported,
    CostsReported,
    OperationOutcome,
    PressureReported,
    Prioritise,
    QueueSnapshot,
    RequestOutcome,
    Tier,
    TierPressure,
    Withdraw,
)
from hear.nursery import unwrapped
from hear.operation import Operation
from hear.seams import InferenceRequest, InferenceResult, OperationEnded, Report, Verdict

_log = structlog.get_logger("hear.attach")

_UNTOLD = 4_096
_LOOKS = 3
_SUBSCRIBED_S = 0.5
"""By then the publisher knows of its new subscriber; until then it may have lost events."""


class AttachedEngine:
    """One server. Made by ``attached``."""

    def __init__(
        self,
        server: VllmServer,
        client: httpx.AsyncClient,
        facts: ServerFacts,
        *,
        kv_events: str | None,
        kv_replay: str | None,
        topic: str,
        priority: bool,
        prompt_of: PromptOf | None,
        hash_seed: str | None,
        poll_s: float,
        check_s: float,
        replay_s: float,
        answer_s: float,
    ) -> None:
        self._server = server
        self._client = client
        self._facts = facts
        self._kv_events, self._kv_replay, self._topic = kv_events, kv_replay, topic
        self._prompt_of = prompt_of
        self._hash_seed = hash_seed
        self._poll_s, self._check_s = poll_s, check_s
        self._replay_s, self._answer_s = replay_s, answer_s
        self._at_submission = ("prioritise",) if priority and prompt_of is not None else ()
        self._page = self._first_page = facts.page
        self._follower = self._new_follower()
        self._told_scheme: str | None = None
        self._own = OwnRequests()
        self._kept: dict[str, str] = {}  # operations to be completed when a request is taken
        self._untold: deque[Report] = deque(maxlen=_UNTOLD)
        self._report: Callable[[Report], None] | None = None
        self._lost = False
        self._back = trio.Event()
        self._doubt = trio.Event()

    # -- what it says of the server -----------------------------------------------------------

    @property
    def follower(self) -> KvFollower:
        """The account of its KV events."""
        return self._follower

    def capabilities(self) -> CapabilitiesReported:
        """What can be done from outside."""
        facts = self._facts
        return CapabilitiesReported(
            at_submission=self._at_submission,
            modes=("dense",),
            tiers=(Tier(name="gpu", num_blocks=facts.num_blocks),),
            block_size=facts.block_size,
            hash_scheme=self._hash_scheme(),
            max_model_len=facts.max_model_len,
            model=facts.model,
            endpoint=self._server.url,
        )

    def _hash_scheme(self) -> str:
        """As its events show; before there are any, as whoever attached it says."""
        if self._follower.scheme is not None:
            return self._follower.scheme
        if self._hash_seed is None:
            return ""
        return scheme_of(self._facts.hash_algorithm, self._hash_seed) or ""

    def costs(self) -> CostsReported:
        """Over all that the server has served; 0 where it has served nothing yet."""
        page = self._page
        computed = page.prompt_tokens - page.cached_tokens
        return CostsReported(
            basis="calibrated" if page.prefill_s else "estimated",
            prefill_tokens_per_s=computed / page.prefill_s if page.prefill_s else 0.0,
            decode_step_s=page.decode_s / page.decoded if page.decoded else 0.0,
            kv_bytes_per_token=0.0,
        )

    def pressure(self) -> PressureReported:
        """As it was looked at last."""
        page, size = self._page, self._facts.num_blocks
        used = min(round(page.usage * size), size)
        held = self._follower.residents.count("gpu")
        gpu = TierPressure(
            tier="gpu",
            num_blocks=size,
            used=used,
            cached=max(min(held, size) - used, 0),
            allocatable=size - used,
        )
        before = self._first_page
        return PressureReported(
            tiers=(gpu,),
            num_waiting=round(page.num_waiting),
            num_running=round(page.num_running),
            restored_tokens=max(round(page.restored_tokens - before.restored_tokens), 0),
            preemptions=max(round(page.preemptions - before.preemptions), 0),
        )

    def queue(self, tenant: str = DEFAULT_TENANT) -> QueueSnapshot:
        """The requests that were sent through here."""
        return self._own.snapshot() if tenant == DEFAULT_TENANT else QueueSnapshot()

    def residency(self, tenant: str = DEFAULT_TENANT) -> Iterable[BlocksStored]:
        """What is known to be resident."""
        return self._follower.residents.chains() if tenant == DEFAULT_TENANT else ()

    def residency_known(self) -> bool:
        """Whether none of its events are missing."""
        return self._follower.known

    # -- controls -----------------------------------------------------------------------------

    def apply(self, operation: Operation) -> Verdict:
        """Take a priority for a request that is about to be sent."""
        control, request = operation.control, operation.key.request or ""
        if isinstance(control, Cancel | Withdraw):
            return Verdict("completed")  # what it ends was reverted before
        if not isinstance(control, Prioritise):
            return Verdict("unsupported", "unsupported_control")
        if request not in self._own or self._own[request].sent:
            return Verdict("rejected", "already_submitted")
        self._own[request].priority = control.priority
        self._kept[operation.id] = request
        return Verdict("accepted")

    def expect(self, operation: Operation) -> None:
        """Nothing to do: a request is announced before it is sent."""

    def revert(self, operation: Operation) -> None:
        """Forget the priority of a request that has not been sent yet."""
        request = self._kept.pop(operation.id, None)
        if request is not None and request in self._own and not self._own[request].sent:
            self._own[request].priority = 0

    # -- the data path ------------------------------------------------------------------------

    async def generate(self, request: InferenceRequest) -> InferenceResult:
        """Send a request and wait for its last token, or for its refusal.

        While the server is known to be away, its requests wait for it.
        """
        return (await self.complete(request)).result

    async def complete(self, request: InferenceRequest) -> Completion:
        """As ``generate``; returns the tokens too.

        Raises:
            EngineError: this engine was attached without ``prompt_of``, or a request of the same
                id is being served.
        """
        if self._prompt_of is None:
            raise EngineError(f"request {request.id!r}: no prompts are known here (prompt_of)")
        prompt = self._prompt_of(request)
        with trio.move_on_after(self._answer_s):
            while self._lost:
                await self._back.wait()
        own = self._own.begin(request)
        self._tell(Report(arrived=[own.key]))
        self._tell(Report(queue=self._own.changed(waits=own)))  # with the priority that it got
        outcome = RequestOutcome(status="failed", reason="client_gone")
        try:
            tell_all = self._kv_events is not None and not self._follower.known
            body = body_of(own, self._facts.model, prompt, tell_all=tell_all)
            outcome = await self._serve(own, body)
        finally:
            self._end(own, outcome)
        return Completion(result_of(own, outcome), own.token_ids)

    async def _serve(self, own: OwnRequest, body: object) -> RequestOutcome:
        broken = False
        with own.scope, trio.move_on_after(self._answer_s):
            try:
                return await converse(
                    own,
                    self._client,
                    self._server.url,
                    body,
                    on_sent=partial(self._sent, own),
                    on_first=partial(self._started, own),
                )
            except httpx.HTTPError as error:
                broken = True
                _log.warning("request.broken", request=own.request.id, error=repr(error))
        if broken and not own.lost and await self._is_gone():
            self._doubt.set()
            own.lost = True
        return RequestOutcome(
            status="failed", reason="engine_restarted" if own.lost else "engine_error"
        )

    async def _is_gone(self) -> bool:
        try:
            page = await self._server.page()
        except EngineError:
            return True
        return not self._page.is_before(page)

    def _sent(self, own: OwnRequest) -> None:
        done = [id for id, request in self._kept.items() if request == own.request.id]
        for id in done:
            del self._kept[id]
        outcome = OperationOutcome(status="completed", control="prioritise")
        self._tell(
            Report(
                operations=[OperationEnded(id, outcome) for id in done],
                requests=[(own.key, RequestOutcome(status="accepted"))],
            )
        )

    def _started(self, own: OwnRequest) -> None:
        self._tell(Report(queue=self._own.changed(started=own)))

    def _end(self, own: OwnRequest, outcome: RequestOutcome) -> None:
        self._own.end(own)
        for id in [id for id, request in self._kept.items() if request == own.request.id]:
            del self._kept[id]
        if not own.lost:  # else whoever drives this engine says so as it begins a new epoch
            self._tell(Report(queue=self._own.changed(ended=own), requests=[(own.key, outcome)]))

    def _tell(self, report: Report) -> None:
        if self._report is None:
            self._untold.append(report)
        else:
            self._report(report)

    # -- following the server -----------------------------------------------------------------

    async def run(self, report: Callable[[Report], None]) -> None:
        """Follow the server until cancelled, and report each change.

        Raises:
            EngineError: the server is lost, or has begun anew. Running it again waits for it.
        """
        if self._lost:
            await self._come_back()
            self._lost = False
            self._back.set()
            report(Report(residency_anew=True, capabilities=self.capabilities()))
        self._told_scheme = self._follower.scheme
        self._report = report
        while self._untold:
            report(self._untold.popleft())
        try:
            with unwrapped():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._look)
                    nursery.start_soon(self._follow)
        except EngineError:
            self._lose()
            raise
        finally:
            self._report = None

    def _lose(self) -> None:
        self._lost = True
        self._back = trio.Event()
        self._report = None
        self._follower = self._new_follower()
        self._kept.clear()
        self._own.lose()

    async def _come_back(self) -> None:
        while True:
            try:
                self._facts = await self._server.facts()
                break
            except EngineError as error:
                _log.info("server.away", url=self._server.url, error=str(error))
            await trio.sleep(self._poll_s)
        self._page = self._first_page = self._facts.page
        self._follower = self._new_follower()
        self._doubt = trio.Event()

    def _new_follower(self) -> KvFollower:
        facts = self._facts
        tiers = ("gpu", "cpu") if facts.slower_tier else ("gpu",)
        return KvFollower(facts.block_size, tiers=tiers, served=self._page.prompt_tokens > 0)

    async def _look(self) -> None:
        """Look at the page of metrics, again and again."""
        failed = 0
        while True:
            with trio.move_on_after(self._poll_s):
                await self._doubt.wait()
                raise EngineError(f"{self._server.url}: it broke off a request, and is gone")
            before = self._page
            try:
                page = await self._server.page()
            except EngineError:
                failed += 1
                if failed >= _LOOKS:
                    raise
                continue
            failed = 0
            if not before.is_before(page):
                raise EngineError(f"{self._server.url}: it has begun anew: its counters fell")
            told = self.pressure()
            self._page = page
            if self.pressure() != told:
                self._tell(Report())

    async def _follow(self) -> None:
        """Follow its KV events, if it publishes any."""
        if self._kv_events is None:
            return
        async with kv_sockets.connect(self._kv_events, self._kv_replay, self._topic) as kv:
            check_at = trio.current_time()
            pause_s = min(_SUBSCRIBED_S, self._check_s)
            while True:
                if kv.can_replay and trio.current_time() >= check_at:
                    self._follower.check()
                    check_at = trio.current_time() + pause_s
                    pause_s = self._check_s
                await self._ask(kv)
                left_s = check_at - trio.current_time() if kv.can_replay else self._check_s
                for frames in await kv.receive(max(left_s, 0.0)):
                    self._hear(self._follower.live(frames))
                    await self._ask(kv)

    async def _ask(self, kv: KvSockets) -> None:
        first = self._follower.wants
        if first is not None:
            answer = await kv.replay(first, self._replay_s)
            if answer is None and kv.can_replay:
                _log.warning("replay.unanswered", url=self._server.url, first=first)
            self._hear(self._follower.replayed(answer))

    def _hear(self, heard: Heard) -> None:
        report = Report(blocks=heard.changes, residency_anew=heard.anew)
        if self._follower.scheme != self._told_scheme:
            self._told_scheme = self._follower.scheme
            report.capabilities = self.capabilities()
        if heard.changes or heard.anew or report.capabilities is not None:
            self._tell(report)

    async def read_history(self) -> None:
        """Hear what the server has published so far, before anybody is told.

        Raises:
            EngineError: nobody listens at its KV events, or nobody answers where they are replayed.
        """
        if self._kv_events is None:
            return
        async with kv_sockets.connect(self._kv_events, self._kv_replay, self._topic) as kv:
            if not kv.can_replay:
                return
            answer = await kv.replay(0, self._replay_s)
            if answer is None:
                raise EngineError(
                    f"KV events at {self._kv_replay}: nothing is replayed there within "
                    f"{self._replay_s:g} s, expected the replay endpoint of {self._server.url}"
                )
            self._follower.replayed(answer)


@asynccontextmanager
async def attached(
    url: str,
    *,
    kv_events: str | None = None,
    kv_replay: str | None = None,
    topic: str = "",
    priority: bool | None = None,
    prompt_of: PromptOf | None = None,
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
        prompt_of: the prompts of requests that are sent through the engine.
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
    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:
        server = VllmServer(url, client)
        facts = await server.facts()
        engine = AttachedEngine(
            server,
            client,
            facts,
            kv_events=kv_events,
            kv_replay=kv_replay,
            topic=topic,
            priority=bool(facts.priority if priority is None else priority),
            prompt_of=prompt_of,
            hash_seed=hash_seed,
            poll_s=poll_s,
            check_s=check_s,
            replay_s=replay_s,
            answer_s=answer_s,
        )
        await engine.read_history()
        yield engine
