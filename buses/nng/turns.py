"""Whose turn it is: keys take turns, and the peers of a key take turns among each other.

So what one key has others wait for is its share of the hub's time, however many peers it has and
however much they ask for. A key that took several turns' worth in one, since there are things that
cannot be divided, owes the others as many. Owns the order. It must not know what is done in a turn.
"""

from hear.buses.nng.access import Grants
from hear.buses.nng.peers import Peer


class Ring:
    """Peers that wait for their turn."""

    def __init__(self) -> None:
        self._keys: dict[Grants, dict[Peer, None]] = {}  # the next one first, in both
        self._owed: dict[Grants, int] = {}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def add(self, peer: Peer) -> None:
        """A peer waits for its turn, behind the others of its key."""
        self._keys.setdefault(peer.grants, {})[peer] = None

    def discard(self, peer: Peer) -> None:
        """A peer waits no more."""
        peers = self._keys.get(peer.grants)
        if peers is not None:
            peers.pop(peer, None)
            if not peers:
                del self._keys[peer.grants]

    def pop(self) -> Peer:
        """Whose turn it is. It has to be added again to have another, and its key comes last."""
        while self._owes(grants := next(iter(self._keys))):
            self._keys[grants] = self._keys.pop(grants)
        peers = self._keys.pop(grants)
        peer = next(iter(peers))
        del peers[peer]
        if peers:
            self._keys[grants] = peers
        return peer

    def took(self, grants: Grants, turns: int) -> None:
        """A key took so many turns more than the one that it had."""
        self._owed[grants] = self._owed.get(grants, 0) + turns

    def _owes(self, grants: Grants) -> bool:
        """Whether a key lets the next one go first, which pays for one turn."""
        owed = self._owed.pop(grants, 0)
        if not owed or len(self._keys) == 1:  # who is alone takes from nobody
            return False
        if owed > 1:
            self._owed[grants] = owed - 1
        return True
