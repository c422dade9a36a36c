"""What is seen of a vLLM server from outside: its page of metrics, its KV events, and its loss.

Joins what reads pages (``server``), sockets (``kv_sockets``) and events (``kv_follower``). Knows
neither the requests that are sent there nor controls.
"""

from collections.abc import Callable

import structlog
import trio

from hear.app.nursery import unwrapped
from hear.engines.vllm.attach import kv_sockets
from hear.engines.vllm.attach.kv_follower import Heard, KvFollower
from hear.engines.vllm.attach.kv_sockets import KvSockets
from hear.engines.vllm.hashing import scheme_of
from hear.engines.vllm.holdings import CPU, GPU
from hear.engines.vllm.identity import Tenants
from hear.engines.vllm.launch.server import ServerFacts, VllmServer
from hear.errors import EngineError

_log = structlog.get_logger("hear.attach")

_LOOKS = 3
_SUBSCRIBED_S = 0.5
"""By then the publisher knows of its new subscriber; until then it may have lost events."""


class Watch:
    """Watches one server. ``facts``, ``page`` and ``follower`` are as of the last look."""

    def __init__(
        self,
        server: VllmServer,
        facts: ServerFacts,
        tenants: Tenants,
        *,
        kv_events: str | None,
        kv_replay: str | None,
        topic: str,
        hash_seed: str | None,
        poll_s: float,
        check_s: float,
        replay_s: float,
    ) -> None:
        self.url = server.url
        self.publishes = kv_events is not None
        self._server = server
        self._tenants = tenants
        self._kv = kv_events or "", kv_replay, topic
        self._hash_seed = hash_seed
        self._poll_s, self._check_s, self._replay_s = poll_s, check_s, replay_s
        self._doubt = trio.Event()
        self._begin(facts)

    def _begin(self, facts: ServerFacts) -> None:
        self.facts = facts
        self.page = self.first_page = facts.page
        self.forget()

    def forget(self) -> None:
        """Nothing is known any more of what the server holds."""
        facts = self.facts
        self.follower = KvFollower(
            facts.block_size,
            tenants=self._tenants,
            tiers=(GPU, CPU) if facts.slower_tier else (GPU,),
            served=self.page.prompt_tokens > 0,
        )

    @property
    def hash_scheme(self) -> str:
        """As its events show; before there are any, as whoever attached it says."""
        if self.follower.scheme is not None:
            return self.follower.scheme
        if self._hash_seed is None:
            return ""
        return scheme_of(self.facts.hash_algorithm, self._hash_seed) or ""

    async def is_gone(self) -> bool:
        """Look whether the server that was seen last is not there any more."""
        try:
            page = await self._server.page()
        except EngineError:
            return True
        return not self.page.is_before(page)

    def doubt(self) -> None:
        """It is gone, as somebody else has seen."""
        self._doubt.set()

    async def come_back(self) -> None:
        """Wait until a server is there again, however long."""
        said = ""
        while True:
            try:
                facts = await self._server.facts()
                break
            except EngineError as error:
                if str(error) != said:  # it may last for days
                    said = str(error)
                    _log.info("server.away", url=self.url, error=said)
            await trio.sleep(self._poll_s)
        _log.info("server.back", url=self.url)
        self._doubt = trio.Event()
        self._begin(facts)

    async def run(self, *, looked: Callable[[], None], heard: Callable[[Heard], None]) -> None:
        """Watch until cancelled; say so after each look at the page, and what its events told.

        Raises:
            EngineError: the server is lost, or has begun anew.
        """
        with unwrapped():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look, looked)
                if self.publishes:
                    nursery.start_soon(self._follow, heard)

    async def _look(self, looked: Callable[[], None]) -> None:
        failed = 0
        while True:
            with trio.move_on_after(self._poll_s):
                await self._doubt.wait()
                raise EngineError(f"{self.url}: it broke off a request, and is gone")
            before = self.page
            try:
                page = await self._server.page()
            except EngineError:
                failed += 1
                if failed >= _LOOKS:
                    raise
                continue
            failed = 0
            if not before.is_before(page):
                raise EngineError(f"{self.url}: it has begun anew: its counters fell")
            self.page = page
            looked()

    async def _follow(self, heard: Callable[[Heard], None]) -> None:
        async with kv_sockets.connect(*self._kv) as kv:
            check_at = trio.current_time()
            pause_s = min(_SUBSCRIBED_S, self._check_s)
            while True:
                if kv.can_replay and trio.current_time() >= check_at:
                    self.follower.check()
                    check_at = trio.current_time() + pause_s
                    pause_s = self._check_s
                await self._ask(kv, heard)
                left_s = check_at - trio.current_time() if kv.can_replay else self._check_s
                for frames in await kv.receive(max(left_s, 0.0)):
                    heard(self.follower.live(frames))
                    await self._ask(kv, heard)

    async def _ask(self, kv: KvSockets, heard: Callable[[Heard], None]) -> None:
        first = self.follower.wants
        if first is not None:
            answer = await kv.replay(first, self._replay_s)
            if answer is None and kv.can_replay:
                _log.warning("replay.unanswered", url=self.url, first=first)
            heard(self.follower.replayed(answer))

    async def read_history(self) -> None:
        """Hear what the server has published so far, before anybody is told.

        Raises:
            EngineError: nobody listens at its KV events, or nobody answers where they are replayed.
        """
        if not self.publishes:
            return
        async with kv_sockets.connect(*self._kv) as kv:
            if not kv.can_replay:
                return
            answer = await kv.replay(0, self._replay_s)
            if answer is None:
                raise EngineError(
                    f"KV events at {self._kv[1]}: nothing is replayed there within "
                    f"{self._replay_s:g} s, expected the replay endpoint of {self.url}"
                )
            self.follower.replayed(answer)
