"""A workload to replay: sessions of turns, with all that a recording fixed and nothing else.

Every configuration replays the same workload, so lengths, prefixes, arrivals and think times are
the same under each of them (paper, appendix A.2, fair replay).
"""

import random
from collections.abc import Sequence

from msgspec import Struct

from hear.messages.intent import PauseCause


class Turn(Struct, frozen=True, kw_only=True):
    """One request of a session.

    ``prompt_hashes`` are the chained hashes of the prompt's full blocks, ``output_hashes`` those
    of the blocks that prompt and output fill together, if known. ``at_s`` is the recorded arrival
    in seconds from the start of the workload, None where the turn follows the one before it by
    ``think_s``. ``waits_for`` names sessions (sub-agents) that have to end first. ``pause`` says
    what the context waited for before this turn.
    """

    prompt_tokens: int
    output_tokens: int
    prompt_hashes: Sequence[int]
    output_hashes: Sequence[int] = ()
    at_s: float | None = None
    think_s: float = 0.0
    waits_for: tuple[str, ...] = ()
    pause: PauseCause = "person"


class Session(Struct, frozen=True, kw_only=True):
    """One context from its first request to its last.

    A top-level session starts at ``start_s``. A sub-agent's session has a ``parent`` and starts
    ``start_s`` seconds after the parent's first ``after_turns`` turns have completed.
    """

    id: str
    turns: tuple[Turn, ...]
    start_s: float = 0.0
    role: str | None = None
    parent: str | None = None
    after_turns: int = 0


class Workload(Struct, frozen=True, kw_only=True):
    """Sessions over one block size; ``name`` is the workload's name in the results."""

    name: str
    block_size: int
    sessions: tuple[Session, ...]

    @property
    def num_turns(self) -> int:
        """How many requests there are in all."""
        return sum(len(session.turns) for session in self.sessions)

    def sample(self, percent: float, seed: int) -> "Workload":
        """Keep ``percent`` of the top-level sessions, each whole and with its sub-agents.

        Samples of the same seed are nested: what 50% keeps, 75% keeps too.
        """
        tops = [session.id for session in self.sessions if session.parent is None]
        order = tops[:]
        random.Random(seed).shuffle(order)
        kept = set(order[: round(len(order) * percent / 100)])
        sessions: list[Session] = []
        for session in self.sessions:  # parents stand before their sub-agents
            if session.id in kept or session.parent in kept:
                kept.add(session.id)
                sessions.append(session)
        return Workload(name=self.name, block_size=self.block_size, sessions=tuple(sessions))
