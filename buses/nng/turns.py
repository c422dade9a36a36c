"""Whose turn it is: keys take turns, and the peers of a key take turns among each other.

So what one key has others wait for is its share of the hub's time, however many peers it has and
however much they ask for. Owns the order. It must not know what is done in a turn.
"""

from hear.buses.nng.access import Grants
from hear.buses.nng.peers import Peer


class Ring:
    """Peers that wait for their turn."""

    def __init__(self) -> None:
        self._keys: dict[Grants, dict[Peer, None]] = {}  # the next one first, in both

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
        grants, peers = next(iter(self._keys.items()))
        del self._keys[grants]
        peer = next(iter(peers))
        del peers[peer]
        if peers:
            self._keys[grants] = peers
        return peer
