"""A hub and processes joined by connections that do everything that connections may do, in virtual
time: frames are lost, said twice and held up, connections break and one end notices or both,
processes freeze, die without a word and come back, and so does the hub.

What is simulated is nng and the clock; hub, members, readers and the bus are the real ones. A
``World`` also keeps what every reader has heard, and ``World.check`` says what must hold of it.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from hear.blocks import pack
from hear.buses.nng.access import KeyFile, Keyring
from hear.buses.nng.backlog import Backlog, Bounds
from hear.buses.nng.client import NngBus
from hear.buses.nng.hub import AWAY_S, Hub
from hear.buses.nng.link import SILENCE_S
from hear.buses.nng.member import Member
from hear.buses.nng.readers import NngSubscription
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.engine_view import EngineViews
from hear.errors import BusError, LaggedError
from hear.messages import (
    DEFAULT_TENANT,
    BlocksStored,
    Envelope,
    Key,
    OperationOutcome,
    PressureReported,
    QueueChanged,
    QueueSnapshot,
    ResidencyChanged,
    ResidencySnapshot,
    WaitingRequest,
)
from hear.subjects import stem

TICK_S = 0.05
LOST_S = SILENCE_S + AWAY_S
NNG_QUEUE = 128
NNG_HOLDS = 3
CALM_S = 40.0


class Connection:
    """Frames on their way between one process and the hub."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.to_hub: deque[bytes] = deque()
        self.to_process: deque[bytes] = deque()
        self.stalled = False
        self.hub_end = True  # whether the hub believes in it
        self.process_end = True  # whether the process does
        self.lose_to_hub = 0
        self.lose_to_process = 0
        self.twice_to_hub = 0
        self.twice_to_process = 0


class Wire:
    """Stands for ``ClientWire``: a queue in front of a connection that comes back by itself."""

    def __init__(self) -> None:
        self.queue: deque[bytes] = deque()
        self.reconnects = False
        self.impostor = None

    def send(self, data: bytes) -> bool:
        if len(self.queue) >= NNG_QUEUE:
            return False
        self.queue.append(data)
        return True

    def reconnect(self) -> None:
        self.queue.clear()
        self.reconnects = True

    def close(self) -> None:
        pass


@dataclass(eq=False)
class Listener:
    """A reader, as a policy is one: gaps are noticed, snapshots asked for."""

    subscription: NngSubscription
    views: EngineViews = field(default_factory=EngineViews)
    heard: list[Envelope] = field(default_factory=list)
    first: dict[tuple[str, int, str], list[int]] = field(default_factory=dict)
    must_hear: dict[tuple[str, int], int] = field(default_factory=dict)
    """The first outcome of each source and epoch that it may not miss."""
    ended: BusError | None = None
    reads: bool = True
    residency_parts: int = 0

    @property
    def live(self) -> bool:
        return self.subscription.joined.is_set() and self.ended is None

    def read(self) -> None:
        subscription = self.subscription
        while batch := subscription._take():
            subscription._received += len(batch)  # as ``receive`` does
            self.heard += batch
            for envelope in batch:
                self._hear(envelope)
        if subscription._error is not None and self.ended is None:
            self.ended = subscription._error

    def _hear(self, envelope: Envelope) -> None:
        if envelope.category == "state":
            message = open_body(envelope)
            assert message is not None
            if self.views.apply(envelope, message):
                self.subscription.request_snapshot(envelope)
        elif envelope.kind == "operation_outcome" and envelope.seq > 0:
            seqs = self.first.setdefault(
                (envelope.source, envelope.epoch, envelope.key.engine or ""), []
            )
            if envelope.seq not in seqs:
                seqs.append(envelope.seq)


class Process:
    """One process: it publishes the queue of an engine and outcomes, and has readers."""

    def __init__(self, world: "World", name: str, epoch: int, key: KeyFile | None) -> None:
        self.name = name
        self.epoch = epoch
        self.wire = Wire()
        self.member = Member(
            name,
            session=f"{name}-{epoch}",
            now=world.now,
            key=key,
            bounds=world.member_bounds,
        )
        self.bus = NngBus(self.wire, self.member)  # type: ignore[arg-type]  # it has no socket
        self.connection: Connection | None = None
        self.frozen_until_s = 0.0
        self.long_away = False
        self.waiting: list[str] = []
        self.blocks: list[int] = []
        self.outcomes = 0
        self.refused = 0
        self.listeners: list[Listener] = []
        self._numbers = count(1)
        self._sequencer = Sequencer(name, epoch)
        self._world = world
        self._key = Key(engine=name)
        self.provides = True
        for kind, provider in (
            ("queue_snapshot", self._snapshot),
            ("residency_snapshot", self._residency),
        ):
            scope = stem("state", DEFAULT_TENANT, self._key, kind)
            self.bus.provide_snapshots(scope, provider)
        gone = Sequencer(name, epoch).wrap(
            OperationOutcome(status="failed"), Key(engine=f"{name}-gone"), 0.0
        )
        self.bus.set_will(self.name, [gone])

    def _snapshot(self) -> Iterator[Envelope]:
        message = QueueSnapshot(waiting=tuple(map(_waiting, self.waiting)))
        yield self._sequencer.wrap_snapshot(message, self._key, self._world.now)

    def _residency(self) -> Iterator[Envelope]:
        parts = self._world.snapshot_parts
        for part in range(parts):
            chains = tuple(_stored(block) for block in self.blocks[part::parts])
            message = ResidencySnapshot(part=part, parts=parts, chains=chains)
            yield self._sequencer.wrap_snapshot(message, self._key, self._world.now)

    def enqueue(self) -> None:
        """A request waits from here on."""
        request = f"r{len(self.waiting)}"
        self.waiting.append(request)
        self._say(QueueChanged(waiting=(_waiting(request),)), Key(engine=self.name))

    def store(self) -> None:
        """A block is resident from here on."""
        block = len(self.blocks) + 1
        self.blocks.append(block)
        self._say(ResidencyChanged(changes=(_stored(block),)), Key(engine=self.name))

    def pressure(self) -> None:
        """Something of no consequence, that fills queues."""
        self._say(PressureReported(), Key(engine=self.name))

    def outcome(self) -> None:
        """Say something that nobody may miss."""
        if self.member._backlog._is_full(1, 1_000):
            self.refused += 1  # whoever publishes tries again later
            return
        number = self.outcomes + 1
        self._say(
            OperationOutcome(status="completed"), Key(engine=self.name, operation=str(number))
        )
        self.outcomes = number

    def _say(self, message: object, key: Key) -> None:
        envelope = self._sequencer.wrap(message, key, self._world.now)  # type: ignore[arg-type]
        self.bus.publish(envelope)

    def listen(self, patterns: list[str], capacity: int = 4096) -> Listener:
        """Subscribe."""
        reader = self.bus.subscribe(
            patterns, name=f"reader-{next(self._numbers)}", capacity=capacity
        )
        reader._entered = True
        self.bus._readers.enter(reader)
        listener = Listener(reader)
        self.listeners.append(listener)
        return listener

    def unlisten(self, listener: Listener) -> None:
        """Leave a subscription."""
        self.bus._readers.leave(listener.subscription)
        self.listeners.remove(listener)

    def frozen(self, now: float) -> bool:
        return now < self.frozen_until_s


def _waiting(request: str) -> WaitingRequest:
    return WaitingRequest(request=request, since_s=0.0)


def _stored(block: int) -> BlocksStored:
    return BlocksStored(tier="gpu", prefix_hashes=pack([block]))


class World:
    """The hub, all processes, and what is between them."""

    def __init__(
        self,
        *,
        hub_bounds: Bounds | None = None,
        member_bounds: Bounds | None = None,
        keyring: Keyring | None = None,
        keys: dict[str, KeyFile] | None = None,
        snapshot_parts: int = 3,
    ) -> None:
        self.now = 1000.0
        self.hub_bounds = hub_bounds
        self.member_bounds = member_bounds
        self.snapshot_parts = snapshot_parts
        self.hub: Hub | None = None
        self.hubs = 0
        self.processes: dict[str, Process] = {}
        self.killed: list[Process] = []
        self.departed: list[Process] = []
        self.ghosts: list[Connection] = []  # of which only the hub still believes something
        self._keyring = keyring
        self._keys = keys or {}
        self._numbers = count(1)
        self._epochs = count(1)
        self.events: list[tuple[float, str, dict[str, object]]] = []
        self.start_hub()

    # -- what may happen ----------------------------------------------------------------------

    def start_hub(self) -> None:
        assert self.hub is None
        self.hubs += 1
        self.hub = Hub(
            id=f"hub{self.hubs}",
            now=self.now,
            bounds=self.hub_bounds,
            keyring=self._keyring,
            history_bytes=20_000,
        )

    def kill_hub(self) -> None:
        self.hub = None
        self.ghosts.clear()
        for process in self.processes.values():
            process.connection = None

    def start(self, name: str) -> Process:
        assert name not in self.processes
        process = Process(self, name, next(self._epochs), self._keys.get(name))
        self.processes[name] = process
        return process

    def kill(self, name: str) -> Process:
        """End a process without a word; its machine closes the connection."""
        process = self.processes.pop(name)
        self.killed.append(process)
        self.break_connection(process, hub_notices=True)
        return process

    def leave(self, name: str) -> Process:
        """Have a process leave as ``NngBus.aclose`` does it."""
        process = self.processes[name]
        process.member.leave(self.now)
        for _ in range(20):
            self.tick()
            if process.member.phase == "left":
                break
        del self.processes[name]
        self.departed.append(process)
        self.break_connection(process, hub_notices=True)
        return process

    def break_connection(self, process: Process, *, hub_notices: bool) -> None:
        """A connection breaks, and the process's nng begins another."""
        connection, process.connection = process.connection, None
        if connection is None:
            return
        if hub_notices and self.hub is not None:
            if connection.hub_end:
                self.hub.closed(connection.number, self.now)
        else:
            self.ghosts.append(connection)

    def cut_at_hub(self, process: Process) -> None:
        """The hub's machine gives up a connection, and the process hears nothing of it."""
        connection = process.connection
        if connection is not None and connection.hub_end and self.hub is not None:
            connection.hub_end = False
            self.hub.closed(connection.number, self.now)

    # -- time ---------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.tick()

    def tick(self) -> None:
        """Let one step of time pass, with as many rounds as frames need to come to rest."""
        self.now = round(self.now + TICK_S, 6)
        for _ in range(12):
            moved = False
            for process in list(self.processes.values()):
                moved |= self._out(process)
            moved |= self._hub_round()
            for process in list(self.processes.values()):
                moved |= self._in(process)
            if not moved:
                break

    def _out(self, process: Process) -> bool:
        if process.frozen(self.now):
            return False
        member, wire = process.member, process.wire
        process.bus._tell_standing(self.now)
        process.bus._flush(self.now)
        if member.lost(self.now):
            wire.reconnect()
            member.reconnected(self.now)
        if wire.reconnects:
            wire.reconnects = False
            self.break_connection(process, hub_notices=True)
        connection = process.connection
        if connection is None:
            if self.hub is None:
                return False
            connection = process.connection = Connection(next(self._numbers))
        moved = bool(wire.queue) and not connection.stalled
        while wire.queue and not connection.stalled:
            data = wire.queue.popleft()
            if connection.lose_to_hub > 0:
                connection.lose_to_hub -= 1
                continue
            connection.to_hub.append(data)
            if connection.twice_to_hub > 0:
                connection.twice_to_hub -= 1
                connection.to_hub.append(data)
        return moved

    def _hub_round(self) -> bool:
        hub = self.hub
        if hub is None:
            return False
        moved = False
        by_number = {ghost.number: ghost for ghost in self.ghosts}
        for process in self.processes.values():
            if (connection := process.connection) is not None and connection.hub_end:
                by_number[connection.number] = connection
                while connection.to_hub and not connection.stalled:
                    moved = True
                    hub.receive(connection.number, connection.to_hub.popleft(), self.now)
        hub.tick(self.now)
        to_close, hub.to_close = hub.to_close, []
        for number in to_close:
            hub.closed(number, self.now)
            if number in by_number:
                by_number[number].hub_end = False
                self.ghosts = [g for g in self.ghosts if g.number != number]
                for process in self.processes.values():
                    if process.connection is by_number[number]:
                        process.connection = None
        hub.turn(self.now)
        while hub.busy:
            hub.turn(self.now)
        output, hub.output = hub.output, []
        for number, data in output:
            target = by_number.get(number)
            if target is None or not target.hub_end:
                continue
            if target.lose_to_process > 0:
                target.lose_to_process -= 1
                continue
            if len(target.to_process) >= NNG_HOLDS and target.stalled:
                continue  # nng drops what a connection does not take
            moved = True
            target.to_process.append(data)
            if target.twice_to_process > 0:
                target.twice_to_process -= 1
                target.to_process.append(data)
        self.events += [(self.now, event.name, event.facts) for event in hub.events]
        hub.events.clear()
        return moved

    def _in(self, process: Process) -> bool:
        connection = process.connection
        if process.frozen(self.now):
            if connection is not None and len(connection.to_process) > NNG_QUEUE + NNG_HOLDS:
                for _ in range(len(connection.to_process) - NNG_QUEUE - NNG_HOLDS):
                    connection.to_process.pop()
            return False
        moved = False
        if connection is not None and not connection.stalled:
            while connection.to_process:
                moved = True
                for item in process.member.receive(connection.to_process.popleft(), self.now):
                    process.bus._take(item)
        for listener in process.listeners:
            if listener.reads:
                listener.read()
            if listener.live:
                for other in self.processes.values():
                    listener.must_hear.setdefault((other.name, other.epoch), other.outcomes + 1)
        return moved

    def calm(self) -> None:
        """Let everything be as it should be, for long enough."""
        if self.hub is None:
            self.start_hub()
        for process in self.processes.values():
            process.frozen_until_s = 0.0
            connection = process.connection
            if connection is not None:
                connection.stalled = False
                connection.lose_to_hub = connection.lose_to_process = 0
            for listener in process.listeners:
                listener.reads = True
        self.run(CALM_S)

    # -- what must hold -----------------------------------------------------------------------

    def check(self) -> None:
        """What must hold after a calm."""
        for process in self.processes.values():
            assert process.member.phase == "joined", (process.name, process.member.refusal)
            assert process.member.connected
            assert process.member.idle, process.name
            assert process.member.num_unsettled == 0, process.name
            for listener in process.listeners:
                self.check_reliable(process, listener)
                self.check_state(process, listener)
        self.check_bounds()

    def check_reliable(self, process: Process, listener: Listener) -> None:
        who = f"{process.name}/{listener.subscription.name}"
        for (source, epoch, engine), seqs in listener.first.items():
            # What was said before it subscribed may be said again by a hub that was started anew.
            owed_from = listener.must_hear.get((source, epoch))
            owed = [seq for seq in seqs if owed_from is not None and seq >= owed_from]
            expected = list(range(owed_from or 0, (owed_from or 0) + len(owed)))
            assert owed == expected, f"{who}: {source}-{epoch} {engine}: holes or order: {seqs}"
        if listener.ended is not None:
            assert isinstance(listener.ended, LaggedError), listener.ended
            return
        assert listener.live, f"{who} never joined"
        if listener.subscription.only_state:
            return
        for other in self.processes.values():
            first = listener.must_hear.get((other.name, other.epoch))
            if first is None:
                continue
            seqs = listener.first.get((other.name, other.epoch, other.name), [])
            missing = set(range(first, other.outcomes + 1)) - set(seqs)
            assert not missing, f"{who} silently missed {sorted(missing)} of {other.name}"

    def check_state(self, process: Process, listener: Listener) -> None:
        if listener.ended is not None or listener.subscription.patterns == ("outcome.>",):
            return
        for other in self.processes.values():
            if not other.waiting and not other.blocks:
                continue  # it has said nothing yet
            view = listener.views.get(other.name)
            who = f"{process.name}/{listener.subscription.name} of {other.name}-{other.epoch}"
            assert view is not None, f"{who}: never heard of"
            assert view.epoch == other.epoch, f"{who}: {view.epoch}"
            assert view.queue_known or not other.waiting, f"{who}: queue unknown"
            assert list(view.waiting) == other.waiting, f"{who}: queue differs"
            assert view.residency_known or not other.blocks, f"{who}: residency unknown"
            assert view.residency.num_blocks("gpu") == len(other.blocks), f"{who}: blocks differ"

    def check_bounds(self) -> None:
        """What must hold at any time."""
        hub = self.hub
        if hub is not None:
            assert hub._history._size_bytes <= 20_000
            assert len(hub._snapshots) <= 2 * len(hub._snapshots.provided) + 2 * len(hub._peers)
            for peer in hub._peers:
                _check_backlog(peer.backlog, peer.backlog.bounds)
                assert len(peer.tickets) <= 4
                assert len(peer.denials) <= 64
        for process in self.processes.values():
            _check_backlog(process.member._backlog, process.member._backlog.bounds, again=3)
            bounds = process.member._backlog.bounds
            assert process.member.num_unsettled <= 2 * bounds.reliable_messages + 4_096

    def wills(self, listener: Listener, process: Process) -> int:
        """How often a listener heard that a process is gone."""
        gone = f"{process.name}-gone"
        return sum(e.key.engine == gone and e.epoch == process.epoch for e in listener.heard)


def _check_backlog(backlog: Backlog, bounds: Bounds, again: int = 1) -> None:
    assert backlog._state_messages <= bounds.state_messages
    assert backlog._state_bytes <= bounds.state_bytes
    assert backlog._reliable_messages <= again * bounds.reliable_messages + 4_096 * (again > 1)
    assert backlog._state_messages == sum(e.num_messages for e in backlog._state)
    assert backlog._reliable_messages == sum(e.num_messages for e in backlog._other)
    assert backlog.owed_items == sum(not e.num_messages for e in backlog._other)
    assert backlog.owed_bytes == sum(e.size_bytes for e in backlog._other if not e.num_messages)
