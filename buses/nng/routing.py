"""Who gets the messages of a stem.

Owns the answers that are remembered, since few stems make up all traffic. It must be told when
what anybody subscribes to has changed.
"""

from typing import Final

from hear.buses.nng.peers import Peer, Peers

_MAX_ROUTES: Final = 16_384


class Routes:
    """The peers that hear a stem."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._known: dict[str, tuple[Peer, ...]] = {}

    def of(self, stem: str) -> tuple[Peer, ...]:
        """The peers that get the messages of a stem."""
        route = self._known.get(stem)
        return self._find(stem) if route is None else route

    def changed(self) -> None:
        """Someone subscribes to something else than before."""
        self._known.clear()

    def _find(self, stem: str) -> tuple[Peer, ...]:
        if len(self._known) >= _MAX_ROUTES:
            self._known.clear()
        reliable = not stem.startswith("state.")
        route = self._known[stem] = tuple(
            peer
            for peer in self._peers
            if peer.grants.may_hear(stem)
            and any(
                subscription.covers(stem) and not (reliable and subscription.cut)
                for subscription in peer.subscriptions.values()
            )
        )
        return route
