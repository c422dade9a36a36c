"""A hub and peers that speak to it frame by frame, without anything between: for pure tests."""

from collections.abc import Sequence

from hear.buses.nng.access import Grant, Handshake, Keyring, new_nonce
from hear.buses.nng.frames import (
    LINK_VERSION,
    Challenge,
    Denied,
    Frame,
    Hello,
    Item,
    Piece,
    Run,
    SnapshotFor,
    Subscribe,
    Subscribed,
    Welcome,
    Wire,
    decode,
    encode,
    join,
    split,
)
from hear.buses.nng.hub import Hub
from hear.buses.nng.seal import Seals, is_sealed
from hear.codec import encode as encode_envelope
from hear.delivery import Sequencer
from hear.messages import Envelope, Key, OperationOutcome, QueueChanged, QueueSnapshot

SECRETS = {name: f"{number:02x}" * 32 for number, name in enumerate(("acme", "umbra", "ops"), 1)}


def tenants() -> Keyring:
    """Two tenants that may do all in their own subjects, and one who may do everything."""
    return Keyring(
        (
            *(
                Grant(
                    name=name,
                    secret=SECRETS[name],
                    publish=(f"*.{name}.>",),
                    subscribe=(f"*.{name}.>",),
                    sources=(name, f"{name}-*"),
                )
                for name in ("acme", "umbra")
            ),
            Grant(
                name="ops", secret=SECRETS["ops"], publish=(">",), subscribe=(">",), sources=("*",)
            ),
        )
    )


def envelope(
    tenant: str = "default", source: str = "e", *, engine: str = "e", state: bool = False
) -> Envelope:
    """A message, numbered 1."""
    message = QueueChanged() if state else OperationOutcome(status="completed")
    return Sequencer(source, tenant=tenant).wrap(message, Key(engine=engine), 0.0)


def snapshot(tenant: str = "default", source: str = "e", *, engine: str = "e") -> bytes:
    """A snapshot of an empty queue."""
    made = Sequencer(source, tenant=tenant).wrap_snapshot(QueueSnapshot(), Key(engine=engine), 0.0)
    return encode_envelope(made)


def run_of(made: Envelope, stem: str = "") -> Run:
    """A run of one message, on its stem or on another."""
    from hear.subjects import stem_of

    return Run(stem or stem_of(made), made.category != "state", [encode_envelope(made)])


class Peer:
    """Someone who speaks the link by hand."""

    def __init__(self, net: "Net", connection: int) -> None:
        self.connection = connection
        self.frames: list[Wire] = []
        self.items: list[Item] = []
        self.acknowledges = True
        self.seals: Seals | None = None
        self._net = net
        self._number = 0
        self._received = 0
        self._pieces = bytearray()

    def say(self, wire: Wire | bytes) -> None:
        """Send a frame."""
        data = wire if isinstance(wire, bytes) else encode(wire)
        if self.seals is not None and not isinstance(wire, Hello):
            data = self.seals.seal(data)
        self._net.hub.receive(self.connection, data, self._net.now)
        self._net.settle()

    def put(self, *items: Item) -> None:
        """Send items in one frame, and one that is too large for it in pieces."""
        frames: list[list[Item]] = [list(items)]
        if len(items) == 1:
            frames = [[part] for part in split(items[0])]
        for frame_items in frames:
            self._number += 1
            taken_over = self._received if self.acknowledges else 0
            self.say(Frame(self._number, taken_over, 0, frame_items))

    def join(self, name: str, key: str = "", secret: str = "", session: str = "") -> Wire:
        """Join; returns the last answer."""
        hello = Hello(LINK_VERSION, name, session or f"{name}-{self.connection}", 0, key=key)
        self.say(hello)
        answer = self.frames[-1]
        if isinstance(answer, Challenge) and secret:
            nonce = new_nonce()
            handshake = Handshake(nonce, answer.nonce, key, hello.session, name)
            self.seals = Seals(*handshake.seals(bytes.fromhex(secret)))
            self.say(
                Hello(
                    LINK_VERSION,
                    name,
                    hello.session,
                    0,
                    key=key,
                    proof=handshake.prove_client(bytes.fromhex(secret), "", 0),
                    answers=answer.nonce,
                    nonce=nonce,
                )
            )
        return self.frames[-1]

    def subscribe(self, *patterns: str, number: int = 1) -> Subscribed:
        """Subscribe; returns the answer."""
        self.put(Subscribe(number, f"reader-{number}", list(patterns)))
        answer: Subscribed = self.of(Subscribed)[-1]
        return answer

    def hear(self, data: bytes) -> None:
        """Take in what the hub sends."""
        if is_sealed(data):
            assert self.seals is not None
            opened = self.seals.open(data)
            assert opened is not None
            data = opened
        wire = decode(data)
        self.frames.append(wire)
        if isinstance(wire, Frame) and wire.number == self._received + 1:
            self._received = wire.number
            for item in wire.items:
                if isinstance(item, Piece):
                    self._pieces += item.data
                    if len(self._pieces) == item.size_bytes:
                        self.items.append(join(bytes(self._pieces), from_hub=True))
                        self._pieces.clear()
                else:
                    self.items.append(item)
            if self.acknowledges:
                self.acknowledge()

    def acknowledge(self) -> None:
        """Say what has been taken over."""
        data = encode(Frame(0, self._received if self.acknowledges else 0))
        data = data if self.seals is None else self.seals.seal(data)
        self._net.hub.receive(self.connection, data, self._net.now)

    def of(self, type_: type) -> list:  # type: ignore[type-arg]  # of that type
        """The items of one type that have come."""
        return [item for item in self.items if isinstance(item, type_)]

    @property
    def messages(self) -> list[bytes]:
        """All messages that have come, snapshots included."""
        return [
            message
            for item in self.items
            if isinstance(item, Run | SnapshotFor)
            for message in item.messages
        ]

    @property
    def denials(self) -> Sequence[str]:
        """Reasons that it was told."""
        return [item.reason for item in self.of(Denied)]

    @property
    def closed(self) -> bool:
        """Whether the hub has closed the connection."""
        return self.connection in self._net.closed


class Net:
    """The hub, and whoever is connected."""

    def __init__(self, hub: Hub | None = None, keyring: Keyring | None = None) -> None:
        self.now = 0.0
        self.hub = hub or Hub(id="hub", now=-10.0, keyring=keyring)
        self.hub.tick(self.now)
        self.peers: dict[int, Peer] = {}
        self.closed: set[int] = set()

    def connect(self) -> Peer:
        """A new connection."""
        peer = Peer(self, len(self.peers) + 1)
        self.peers[peer.connection] = peer
        return peer

    def joined(self, name: str, key: str = "") -> Peer:
        """A peer that has joined."""
        peer = self.connect()
        answer = peer.join(name, key, SECRETS.get(key, ""))
        assert isinstance(answer, Welcome), answer
        return peer

    def settle(self) -> None:
        """Let everything that is on its way arrive."""
        for _ in range(10_000):
            for connection in self.hub.to_close:
                self.closed.add(connection)
                self.hub.closed(connection, self.now)
            self.hub.to_close.clear()
            self.hub.turn(self.now)
            if not self.carry() and not self.hub.busy and not self.hub.to_close:
                return

    def carry(self) -> bool:
        """Let what the hub has said arrive; returns whether there was anything."""
        output, self.hub.output = self.hub.output, []
        for connection, data in output:
            if connection in self.peers:
                self.peers[connection].hear(data)
        return bool(output)

    def pass_time(self, seconds: float) -> None:
        """Let time pass; all who are there say that they live."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            for peer in self.peers.values():
                if not peer.closed:
                    peer.acknowledge()
            self.hub.tick(self.now)
            self.settle()
