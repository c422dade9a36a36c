"""``NngBus``: the bus as a process sees it that has joined a hub.

Owns what the interface of a bus promises, and the loop that carries bytes. What is said to the hub
is decided by ``member``, who gets what came by ``readers``, how bytes travel by ``wire``.
"""

import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
import structlog
import trio

from hear.app.clock import new_epoch
from hear.app.nursery import unwrapped
from hear.buses.mailbox import Mailbox, check_stem
from hear.buses.nng.access import load_key
from hear.buses.nng.backlog import Bounds
from hear.buses.nng.frames import (
    FRAME_FILL_BYTES,
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_NAME,
    MAX_STEM,
    MAX_WILL_BYTES,
    MAX_WILL_RUNS,
    Answer,
    CutOff,
    Denied,
    Item,
    Lost,
    Question,
    Run,
    Snapshot,
    SnapshotFor,
    Standing,
    Subscribed,
    Wanted,
)
from hear.buses.nng.member import Member
from hear.buses.nng.questions import parse
from hear.buses.nng.readers import NngSubscription, Readers
from hear.buses.nng.wire import ClientWire
from hear.codec import UNREADABLE, decode, encode
from hear.errors import BusError, LocalProtocolError, RemoteProtocolError
from hear.interfaces import BusStatistics, SnapshotProvider
from hear.messages import Envelope
from hear.subjects import stem_of, subject

_log = structlog.get_logger("hear.bus")

CONNECT_S: Final = 5.0
"""Time that joining may take, and each question to the hub."""

LEAVE_S: Final = 1.0
"""Time that leaving may take."""

DEFAULT_CAPACITY: Final = 4096
_STANDING_S: Final = 1.0
_IDLE_S: Final = 0.1
_TICK_S: Final = 0.005


class NngBus(trio.abc.AsyncResource):
    """A bus between processes, joined by ``connect``."""

    def __init__(self, wire: ClientWire, member: Member) -> None:
        """Join parts that ``connect`` has made; ``run`` does the work."""
        self._wire = wire
        self._member = member
        self._readers = Readers(member)
        self._providers: dict[str, SnapshotProvider] = {}
        self._wills: dict[str, list[Run]] = {}
        self._published = dict.fromkeys(("intent", "control", "state", "outcome"), 0)
        self._numbers = count(1)
        self._questions: dict[int, trio.MemorySendChannel[Answer]] = {}
        self._asking = trio.Lock()
        self._standing_s = 0.0
        self._stood: Standing | None = None
        self._sleeper: trio.lowlevel.Task | None = None
        self._closed = False
        self._silent = False
        self.denied = 0
        """Times that the hub said that the key does not grant something."""

    @property
    def name(self) -> str:
        """The name under which it joined."""
        return self._member.name

    @property
    def idle(self) -> bool:
        """Whether the hub has taken over all that was said."""
        return self._member.idle

    @property
    def dropped(self) -> int:
        """Messages of state that gave way here, since the hub did not take them in time."""
        return self._member.dropped

    @property
    def unreadable(self) -> int:
        """Messages and frames from the bus that could not be read."""
        return self._readers.unreadable + self._member.unreadable

    # -- the interface ----------------------------------------------------------------------------

    def publish(self, envelope: Envelope) -> None:
        """Send a message to all whose patterns match. Never waits for a reader.

        Raises:
            BusError: the bus is closed, or the hub has been away for so long that no more
                messages can be kept for it.
            LocalProtocolError: it cannot be encoded, is too large, or of no known category.
        """
        if self._closed:
            raise BusError(f"message {envelope.id} ({envelope.kind}): the bus is closed")
        category = envelope.category
        if category not in self._published:
            raise LocalProtocolError(
                f"message {envelope.id}: category {category!r}, expected one of "
                f"{', '.join(self._published)}"
            )
        data = encode(envelope)
        if len(data) > MAX_MESSAGE_BYTES:
            raise LocalProtocolError(
                f"message {envelope.id} ({envelope.kind}): {len(data)} bytes, expected at most "
                f"{MAX_MESSAGE_BYTES}"
            )
        scope = stem_of(envelope)
        if len(scope) > MAX_STEM:
            raise LocalProtocolError(
                f"message {envelope.id} ({envelope.kind}): subject {scope[:80]!r}... of "
                f"{len(scope)} letters, expected at most {MAX_STEM}"
            )
        self._member.publish(scope, category != "state", data)
        self._published[category] += 1
        self._wake()

    def subscribe(
        self, patterns: Iterable[str], *, name: str, capacity: int = DEFAULT_CAPACITY
    ) -> NngSubscription:
        """Make a subscription that holds up to ``capacity`` unread messages of each class.

        It is live from entering its context, which waits for the hub, to leaving it.

        Raises:
            LocalProtocolError: a pattern is not one, they are too many or too long, or the capacity
                is less than 1.
            BusError: the bus is closed (also on entering, or if the hub does not answer).
        """
        if self._closed:
            raise BusError(f"subscription {name!r}: the bus is closed")
        wanted = tuple(patterns)
        parse(wanted)
        return NngSubscription(self, next(self._numbers), wanted, name, capacity)

    def provide_snapshots(self, subject: str, provider: SnapshotProvider) -> None:
        """Name who answers for the state of one stream (a subject's stem); the last one counts.

        Raises:
            LocalProtocolError: ``subject`` is not the stem of a subject.
            BusError: the bus is closed.
        """
        if self._closed:
            raise BusError(f"snapshots of {subject!r}: the bus is closed")
        check_stem(subject)
        if subject.partition(".")[0] not in self._published or len(subject) > MAX_STEM:
            raise LocalProtocolError(
                f"snapshots of {subject[:80]!r}: expected <category>.<tenant>.<instance>.<topic>"
            )
        self._providers[subject] = provider
        self._member.provide(subject)
        self._wake()

    def withdraw_snapshots(self, subject: str, provider: SnapshotProvider) -> None:
        """``provider`` answers for a stream no more, if it still does."""
        if not self._closed and self._providers.get(subject) == provider:
            del self._providers[subject]
            self._member.unprovide(subject)
            self._wake()

    def set_will(self, source: str, envelopes: Iterable[Envelope]) -> None:
        """Leave word what the hub is to publish if this process is lost without leaving.

        Replaces what ``source`` left before; nothing at all ends its will.

        Raises:
            LocalProtocolError: it cannot be encoded, or is too large.
        """
        mine = [Run(stem_of(e), e.category != "state", [encode(e)]) for e in envelopes]
        runs = [run for owner, kept in self._wills.items() if owner != source for run in kept]
        runs += mine
        sizes = [len(run.messages[0]) + len(run.stem) for run in runs]
        if sum(sizes) > MAX_WILL_BYTES or len(runs) > MAX_WILL_RUNS:
            raise LocalProtocolError(
                f"a will of {len(runs)} messages and {sum(sizes)} bytes, expected at most "
                f"{MAX_WILL_RUNS} and {MAX_WILL_BYTES}"
            )
        if max(sizes, default=0) > MAX_FRAME_BYTES // 2:
            raise LocalProtocolError(
                f"a message of {max(sizes)} bytes in a will, expected at most "
                f"{MAX_FRAME_BYTES // 2}"
            )
        self._wills[source] = mine
        self._member.set_will(runs)
        self._wake()

    def statistics(self) -> BusStatistics:
        """What this process has published, and how its subscriptions fare."""
        return BusStatistics(
            published=dict(self._published),
            subscriptions=tuple(reader.statistics() for reader in self._readers),
            lagged=self._readers.lagged,
        )

    async def history(self, patterns: Iterable[str]) -> Sequence[Envelope]:
        """The messages that the hub still remembers and that a pattern matches, oldest first.

        Raises:
            LocalProtocolError: a pattern is not one.
            BusError: the bus is closed, or the hub did not answer in time.
        """
        wanted = parse(tuple(patterns))
        heard = []
        for part in await self._ask("history", [pattern.text for pattern in wanted]):
            try:
                envelope = decode(part)
            except RemoteProtocolError:
                self._readers.unreadable += 1
                continue
            if any(pattern.matches(subject(envelope)) for pattern in wanted):
                heard.append(envelope)
        return heard

    async def central_statistics(self) -> BusStatistics:
        """What has passed through the hub, and how each subscription of each process fares.

        Raises:
            BusError: the bus is closed, or the hub did not answer in time, or not in a form that
                can be read.
        """
        answer = b"".join(await self._ask("statistics", []))
        try:
            return msgspec.msgpack.decode(answer, type=BusStatistics)
        except UNREADABLE as error:
            raise BusError(f"the hub's statistics cannot be read: {error}") from error

    async def _ask(self, about: str, patterns: list[str]) -> list[bytes]:
        if self._closed:
            raise BusError(f"question about {about}: the bus is closed")
        async with self._asking:  # the hub answers one question of a process at a time
            return await self._ask_alone(about, patterns)

    async def _ask_alone(self, about: str, patterns: list[str]) -> list[bytes]:
        number = next(self._numbers)
        send, receive = trio.open_memory_channel[Answer](4096)
        self._questions[number] = send
        self._member.ask(Question(number, about, patterns))
        self._wake()
        parts: list[bytes] = []
        answered_by = self._member.stay
        try:
            with trio.move_on_after(CONNECT_S) as scope:
                async for answer in receive:
                    scope.deadline = trio.current_time() + CONNECT_S
                    if answered_by != self._member.stay:
                        answered_by = self._member.stay
                        parts.clear()  # what the hub before this one had begun to tell
                    parts.extend(answer.parts)
                    if answer.last:
                        return parts
        finally:
            del self._questions[number]
            self._member.forget(number)
        raise BusError(f"the hub did not answer a question about {about} within {CONNECT_S:g} s")

    async def aclose(self) -> None:
        """Leave the bus: what was said is handed over first, for a bounded time."""
        member = self._member
        with trio.move_on_after(LEAVE_S, shield=True):
            while member.phase == "joined" and not member.idle:
                await self._step()
            member.leave(trio.current_time())
            while member.phase == "leaving":
                await self._step()
        self.close()
        await trio.lowlevel.checkpoint_if_cancelled()

    def close(self) -> None:
        """Leave without a word: a reader gets what it has not read yet, and then ``BusError``."""
        if self._closed:
            return
        self._closed = True
        self._readers.close()
        self._providers.clear()
        self._wire.close()

    # -- for the subscriptions ----------------------------------------------------------------

    async def join(self, reader: Mailbox) -> None:
        """Enter a reader; waits until the hub has noted it."""
        assert isinstance(reader, NngSubscription)
        if self._closed:
            raise BusError(f"subscription {reader.name!r}: the bus is closed")
        self._readers.enter(reader)
        self._wake()
        try:
            with trio.move_on_after(CONNECT_S):
                await reader.joined.wait()
            if reader.refused or not reader.joined.is_set() or self._closed:
                why = reader.refused or (
                    "the bus is closed" if self._closed else f"no answer in {CONNECT_S:g} s"
                )
                raise BusError(f"subscription {reader.name!r}: {why}")
        except BaseException:
            self.leave(reader)
            raise

    def leave(self, reader: Mailbox) -> None:
        """Forget a reader."""
        assert isinstance(reader, NngSubscription)
        self._readers.leave(reader)
        self._wake()

    def provides(self, scope: str) -> bool:
        """Whether a snapshot may come: the hub knows, and says so if none does."""
        return True

    def snapshots(self, reader: Mailbox, wanted: Iterable[str]) -> list[Envelope]:
        """Have snapshots sent; they come later."""
        assert isinstance(reader, NngSubscription)
        self._readers.fetch(reader, wanted)
        self._wake()
        return []

    # -- the work -----------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Join, and carry messages both ways until the bus is closed.

        Raises:
            BusError: the hub refuses, or does not answer.
        """
        member = self._member
        with trio.move_on_after(CONNECT_S):
            while member.phase == "joining":
                await self._step()
        if not self._joined():
            self.close()
            why = member.refusal or (
                f"nobody answers (waited {CONNECT_S:g} s); hear up or hear run bus starts a bus, "
                "and --bus names another than this"
            )
            if self._wire.impostor is not None:
                why = (
                    f"who answers shows a certificate of {self._wire.impostor[:MAX_NAME]!r}, which "
                    "is not the hub's (server_name in the key file)"
                )
            raise BusError(f"bus cannot be joined as {member.name!r}: {why}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_what_is_said)
            nursery.start_soon(self._keep_time)
            task_status.started()
            while self._joined() and not self._closed:
                await self._wire.readable()
                await self._take_in()
            nursery.cancel_scope.cancel()
        self.close()
        raise BusError(f"the hub has shut {member.name!r} out: {member.refusal}")

    def _joined(self) -> bool:
        return self._member.phase == "joined"

    async def _step(self) -> None:
        """Wait for the hub for a moment, take in what came, and say what is due."""
        now = trio.current_time()
        self._flush(now)
        with trio.move_on_at(min(self._member.next_due(), now + _IDLE_S)):
            await self._wire.readable()
        await self._take_in()
        self._keep_up(trio.current_time())

    async def _take_in(self) -> None:
        """Take in what has come."""
        now = trio.current_time()
        while frames := self._wire.receive():
            if self._silent:
                self._silent = False
                _log.info("hub.back", client=self.name)
            for data in frames:
                for item in self._member.receive(data, now):
                    self._take(item)
            await trio.lowlevel.checkpoint()  # so that what readers answer travels at once
            now = trio.current_time()
            self._flush(now)

    def _keep_up(self, now: float) -> None:
        """Do what is due, whatever comes or does not come."""
        self._flush(now)
        if self._member.lost(now):
            if not self._silent:
                _log.warning("hub.silent", client=self.name)
            self._silent = True
            self._wire.reconnect()
            self._member.reconnected(now)
        self._tell_standing(now)

    async def _keep_time(self) -> None:
        while True:
            now = trio.current_time()
            self._keep_up(now)
            await trio.sleep(min(max(self._member.next_due() - now, _TICK_S), _IDLE_S))

    async def _send_what_is_said(self) -> None:
        while True:
            self._sleeper = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abort)
            self._flush(trio.current_time())

    def _abort(self, raise_cancel: object) -> trio.lowlevel.Abort:
        self._sleeper = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _wake(self) -> None:
        sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            trio.lowlevel.reschedule(sleeper)

    def _flush(self, now: float) -> None:
        for data in self._member.poll(now):
            self._wire.send(data)  # what finds no room is sent again by the link

    def _tell_standing(self, now: float) -> None:
        if now < self._standing_s + _STANDING_S or not self._member.connected:
            return
        self._standing_s = now
        standing = self._readers.standing()
        if standing != self._stood:
            self._stood = standing
            self._member.put(standing)
            self._wake()

    # -- what the hub says --------------------------------------------------------------------

    def _take(self, item: Item) -> None:
        readers = self._readers
        if isinstance(item, Run):
            readers.take_run(item)
        elif isinstance(item, SnapshotFor):
            readers.take_snapshot(item)
        elif isinstance(item, Wanted):
            self._make_snapshot(item)
        elif isinstance(item, Subscribed):
            readers.take_subscribed(item)
        elif isinstance(item, Lost):
            readers.take_lost(item)
        elif isinstance(item, CutOff):
            _log.error("bus.cut_off", client=self.name, reason=item.reason)
            readers.cut_off(item)
        elif isinstance(item, Denied):
            self.denied += 1
            _log.error("bus.denied", client=self.name, reason=item.reason)
        elif isinstance(item, Answer) and (asked := self._questions.get(item.number)) is not None:
            try:
                asked.send_nowait(item)
            except trio.WouldBlock:
                _log.warning("answer.dropped", client=self.name)

    def _make_snapshot(self, item: Wanted) -> None:
        provider = self._providers.get(item.stem)
        parts: list[bytes] = []
        if provider is not None:
            try:
                parts = [encode(envelope) for envelope in provider()]
            except Exception:
                _log.exception("snapshot.failed", client=self.name, stream=item.stem)
                parts = []
        largest = max(map(len, parts), default=0)
        if largest > MAX_MESSAGE_BYTES:
            _log.error(
                "snapshot.too_large",
                client=self.name,
                stream=item.stem,
                size_bytes=largest,
                limit_bytes=MAX_MESSAGE_BYTES,
            )
            parts = []
        chunk: list[bytes] = []
        size_bytes = 0
        for part in parts:
            if chunk and size_bytes + len(part) > FRAME_FILL_BYTES:
                self._member.put(Snapshot(item.stem, item.ticket, chunk, False), size_bytes)
                chunk, size_bytes = [], 0
            chunk.append(part)
            size_bytes += len(part)
        self._member.put(Snapshot(item.stem, item.ticket, chunk, True), size_bytes)


@asynccontextmanager
async def connect(
    url: str, *, name: str, key: Path | None = None, bounds: Bounds | None = None
) -> AsyncIterator[NngBus]:
    """Join the hub at ``url`` as ``name``; leave it at the end.

    Raises:
        ConfigError: the address or the key file cannot be used.
        BusError: the hub does not answer, or refuses this name or key.
    """
    key_file = None if key is None else load_key(key)
    wire = ClientWire(
        url,
        key_file.tls if key_file and url.startswith("tls") else None,
        any_owner=key_file is not None,
    )
    member = Member(
        name,
        session=f"{new_epoch()}-{secrets.token_hex(8)}",
        now=trio.current_time(),
        key=key_file,
        bounds=bounds,
    )
    bus = NngBus(wire, member)
    try:
        with unwrapped():
            async with trio.open_nursery() as nursery:
                try:
                    await nursery.start(bus.run)
                except BusError as error:
                    hint = ""
                    if url.startswith("tls") and "nobody answers" in str(error):
                        hint = (
                            ", or the certificates do not fit: one has expired, or is not of the "
                            "other's authority, or server_name is not the name in the hub's"
                        )
                    raise BusError(f"{url}: {error}{hint}") from error
                try:
                    yield bus
                finally:
                    nursery.cancel_scope.cancel()
    finally:
        await bus.aclose()
