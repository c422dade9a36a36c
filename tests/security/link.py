"""One member and a hub with keys, and somebody on the way who sees, keeps and changes every frame:
what the tests of attacks share."""

from collections.abc import Callable
from itertools import count

from hear.buses.nng.access import KeyFile, Keyring
from hear.buses.nng.frames import Hello, Item, Run, Wire, decode
from hear.buses.nng.hub import Hub
from hear.buses.nng.member import Member
from hear.buses.nng.seal import is_sealed
from hear.codec import encode
from hear.delivery import Sequencer
from hear.messages import Key, OperationOutcome
from hear.subjects import stem_of
from tests.buses.nng_peers import SECRETS, tenants

Tamper = Callable[[bytes], list[bytes]]
"""What arrives instead of a frame."""


def untouched(data: bytes) -> list[bytes]:
    """What an honest network does."""
    return [data]


def key_of(name: str, secret: str = "") -> KeyFile:
    """A key file, with its own secret or another."""
    return KeyFile(name=name, secret=secret or SECRETS[name])


class Way:
    """The way between a member with acme's key and a hub. Connections have numbers from 1."""

    def __init__(
        self,
        *,
        key: KeyFile | None = None,
        keyring: Keyring | None = None,
        certificate: str | None = None,
    ) -> None:
        self.now = 0.0
        self.hub = Hub(id="hub", now=-10.0, keyring=keyring or tenants())
        self.hub.tick(self.now)
        self.member = Member("me", session="me-1", now=self.now, key=key or key_of("acme"))
        self.connection = 1
        self.certificate = certificate
        self.to_hub: Tamper = untouched
        self.to_member: Tamper = untouched
        self.sent: list[bytes] = []
        """All that the member has sent."""
        self.answered: list[bytes] = []
        """All that the hub has sent."""
        self.items: list[Item] = []
        self.closed: list[int] = []
        self._outcomes = Sequencer("acme", tenant="acme")
        self._numbers = count(1)
        self.hub.opened(self.connection, self.now, certificate)

    # -- the network --------------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything that is on its way arrive."""
        for _ in range(1_000):
            out = self.member.poll(self.now)
            for data in out:
                self.sent.append(data)
                for arrives in self.to_hub(data):
                    self.hub.receive(self.connection, arrives, self.now)
            if not self.carry_to_member() and not out:
                return
        raise AssertionError("they never come to rest")

    def carry_to_member(self) -> bool:
        """Let the hub work, and what it says arrive."""
        self.hub.tick(self.now)
        self.hub.turn(self.now)
        while self.hub.busy:
            self.hub.turn(self.now)
        output, self.hub.output = self.hub.output, []
        for connection, data in output:
            self.answered.append(data)
            if connection == self.connection:
                for arrives in self.to_member(data):
                    self.items += self.member.receive(arrives, self.now)
        for connection in self.hub.to_close:
            self.closed.append(connection)
            self.hub.closed(connection, self.now)
        self.hub.to_close.clear()
        return bool(output)

    def run(self, seconds: float) -> None:
        """Let time pass, as ``NngBus`` does: a member that hears nothing connects anew."""
        until = self.now + seconds
        while self.now < until:
            self.now = round(self.now + 0.05, 6)
            if self.member.lost(self.now) or self.connection in self.closed:
                self.break_connection()
            self.settle()

    def break_connection(self) -> None:
        """The connection breaks, both ends notice, and another is there."""
        self.hub.closed(self.connection, self.now)
        self.connection += 1
        self.hub.opened(self.connection, self.now, self.certificate)
        self.member.reconnected(self.now)

    # -- honest traffic -----------------------------------------------------------------------

    def joined(self) -> "Way":
        """Join, subscribe, and leave a will."""
        self.settle()
        assert self.member.phase == "joined"
        self.member.subscribe(1, "r", ["outcome.acme.>"])
        self.member.set_will([self._run("gone")])
        self.settle()
        return self

    def publish(self) -> int:
        """Say one message, which the member hears itself; returns its number."""
        number = next(self._numbers)
        run = self._run(str(number))
        self.member.publish(run.stem, run.reliable, run.messages[0])
        return number

    def _run(self, operation: str) -> Run:
        done = OperationOutcome(status="completed")
        made = self._outcomes.wrap(done, Key(engine="e", operation=operation), 0.0)
        return Run(stem_of(made), True, [encode(made)])

    @property
    def passed(self) -> int:
        """How many messages have passed the hub."""
        return sum(self.hub.statistics().published.values())

    @property
    def heard(self) -> list[bytes]:
        """The messages that the member has heard."""
        return [m for item in self.items if isinstance(item, Run) for m in item.messages]

    def hold_to_hub(self) -> list[bytes]:
        """Keep what is on its way to the hub, in the list that is returned."""
        held: list[bytes] = []

        def hold(data: bytes) -> list[bytes]:
            held.append(data)
            return []

        self.to_hub = hold
        return held

    def goes_on(self) -> None:
        """Check that what is said comes back, once."""
        passed, heard = self.passed, len(self.heard)
        for _ in range(3):
            self.publish()
        self.run(1.0)
        assert self.passed == passed + 3
        assert len(self.heard) == heard + 3
        assert len(set(self.heard)) == len(self.heard), "nothing comes twice"
        assert self.member.idle

    # -- what was recorded --------------------------------------------------------------------

    @property
    def sealed(self) -> list[bytes]:
        """The sealed frames that the member has sent."""
        return [data for data in self.sent if is_sealed(data)]

    def said(self, kind: type[Wire]) -> list[bytes]:
        """The unsealed frames of a kind that either end has sent."""
        frames = [data for data in self.sent + self.answered if not is_sealed(data)]
        return [data for data in frames if isinstance(decode(data), kind)]

    @property
    def proof(self) -> Hello:
        """The hello that the member has proved its key with, the last one."""
        hello = [decode(data) for data in self.said(Hello)][-1]
        assert isinstance(hello, Hello)
        assert hello.proof
        return hello

    @property
    def events(self) -> list[str]:
        """Names of all that the hub has logged."""
        return [event.name for event in self.hub.events]
