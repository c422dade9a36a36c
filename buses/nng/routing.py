"""Who gets the messages of a stem.

Owns the answers that are remembered, since few stems make up all traffic. It must be told when
what anybody subscribes to has changed.
"""

from hear.buses.nng.index import PatternIndex
from hear.buses.nng.peers import Peer, Subscription
from hear.buses.nng.remembered import remember


class Routes:
    """The peers that hear a stem."""

    def __init__(self) -> None:
        self._of_state: PatternIndex[Peer] = PatternIndex()
        self._of_reliable: PatternIndex[Peer] = PatternIndex()
        self._known: dict[str, tuple[Peer, ...]] = {}

    def of(self, stem: str) -> tuple[Peer, ...]:
        """The peers that get the messages of a stem."""
        route = self._known.get(stem)
        return self._find(stem) if route is None else route

    def add(self, peer: Peer, subscription: Subscription) -> None:
        """A peer subscribes."""
        for pattern in subscription.patterns:
            self._of_state.add(pattern.text, peer)
            self._of_reliable.add(pattern.text, peer)
        self._known.clear()

    def cut(self, peer: Peer, subscription: Subscription) -> None:
        """A subscription gets no reliable messages any more."""
        for pattern in subscription.patterns:
            self._of_reliable.remove(pattern.text, peer)
        self._known.clear()

    def remove(self, peer: Peer, subscription: Subscription) -> None:
        """A peer subscribes no more."""
        for pattern in subscription.patterns:
            self._of_state.remove(pattern.text, peer)
            if not subscription.cut:
                self._of_reliable.remove(pattern.text, peer)
        self._known.clear()

    def _find(self, stem: str) -> tuple[Peer, ...]:
        index = self._of_state if stem.startswith("state.") else self._of_reliable
        route = tuple(peer for peer in index.find(stem) if peer.grants.may_hear(stem))
        return remember(self._known, stem, stem, route)
