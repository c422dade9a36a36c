"""A workload to replay: sessions of turns, with all that a recording fixed and nothing else.

Every configuration replays the same workload, so lengths, prefixes, arrivals and think times are
the same under each of them (paper, appendix A.2, fair replay). A workload that could never end,
or that names what is not there, cannot be made.
"""

import random
from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter

from msgspec import Struct, structs

from hear.errors import ConfigError
from hear.messages.intent import PauseCause


class Turn(Struct, frozen=True, kw_only=True):
    """One request of a session.

    ``prompt_hashes`` are the chained hashes of the prompt's full blocks, ``output_hashes`` those
    of the further blocks that prompt and output fill together, if known. A real engine is sent
    ``prompt_token_ids``; a simulated one knows blocks by their hashes. ``at_s`` is the recorded
    arrival in seconds from the start of the workload, None where the turn follows the one before
    it by ``think_s``. ``waits_for`` names sub-agents of this session that have to end first, from
    whose end ``think_s`` then counts. ``pause`` says what the context waited for before this turn.
    """

    prompt_tokens: int
    output_tokens: int
    prompt_hashes: Sequence[int]
    output_hashes: Sequence[int] = ()
    prompt_token_ids: Sequence[int] = ()
    at_s: float | None = None
    think_s: float = 0.0
    waits_for: tuple[str, ...] = ()
    after: tuple[tuple[str, int], ...] = ()
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


class LeftOut(Struct, frozen=True, kw_only=True):
    """What of a source a workload does not hold, and why.

    ``turns`` and ``prompt_tokens`` count what was left out, ``sessions`` those of which nothing is
    left for that. ``of_prompt_tokens`` is what the source had before.
    """

    why: str
    turns: int
    sessions: int
    prompt_tokens: int
    of_prompt_tokens: int


class Workload(Struct, frozen=True, kw_only=True):
    """Sessions over one block size; ``name`` is the workload's name in the results.

    Parents stand before their sub-agents. ``hash_scheme`` says how block hashes were made; without
    it they are taken to be the engine's. ``left_out`` and ``remarks`` say of the whole source,
    whatever sample of it this is, what is missing and how its sessions are known.

    Raises:
        ConfigError: an id is there twice, a session has no turn, a sub-agent's parent does not
            stand before it, or a turn waits for what is not there, is not a sub-agent of its
            session, or could only start after it.
    """

    name: str
    block_size: int
    sessions: tuple[Session, ...]
    hash_scheme: str = ""
    left_out: tuple[LeftOut, ...] = ()
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        seen: dict[str, Session] = {}
        for session in self.sessions:
            if session.id in seen:
                raise ConfigError(f"{self.name}: session {session.id!r} is there twice")
            if not session.turns:
                raise ConfigError(f"{self.name}: session {session.id!r} has no turn")
            seen[session.id] = session
            if session.parent is None:
                continue
            parent = seen.get(session.parent)
            if parent is None or parent is session:
                raise ConfigError(
                    f"{self.name}: sub-agent {session.id!r} has the parent {session.parent!r}, "
                    "expected a session that stands before it"
                )
            if not 0 <= session.after_turns <= len(parent.turns):
                raise ConfigError(
                    f"{self.name}: sub-agent {session.id!r} starts after {session.after_turns} "
                    f"turns, expected 0 to {len(parent.turns)}, the turns of {parent.id!r}"
                )
        for session in self.sessions:
            for number, turn in enumerate(session.turns, 1):
                for name in turn.waits_for:
                    awaited = seen.get(name)
                    if awaited is None or awaited.parent != session.id:
                        raise ConfigError(
                            f"{self.name}: turn {number} of {session.id!r} waits for {name!r}, "
                            "expected one of its sub-agents"
                        )
                    if awaited.after_turns >= number:
                        raise ConfigError(
                            f"{self.name}: turn {number} of {session.id!r} waits for {name!r}, "
                            f"which starts only after turn {awaited.after_turns}"
                        )
                for name, awaited_number in turn.after:
                    if name not in seen or not 1 <= awaited_number <= len(seen[name].turns):
                        raise ConfigError(
                            f"{self.name}: turn {number} of {session.id!r} comes after turn "
                            f"{awaited_number} of {name!r}, expected a turn of this workload"
                        )
        if any(turn.after for session in self.sessions for turn in session.turns):
            self._check_that_it_ends()

    def _check_that_it_ends(self) -> None:
        order: TopologicalSorter[tuple[str, int]] = TopologicalSorter()
        turns_of = {session.id: len(session.turns) for session in self.sessions}
        for session in self.sessions:
            for number, turn in enumerate(session.turns, 1):
                before = [*turn.after, *((name, turns_of[name]) for name in turn.waits_for)]
                if number > 1:
                    before.append((session.id, number - 1))
                elif session.parent is not None and session.after_turns:
                    before.append((session.parent, session.after_turns))
                order.add((session.id, number), *before)
        try:
            order.prepare()
        except CycleError as error:
            around = " after ".join(f"turn {n} of {name!r}" for name, n in error.args[1][::-1])
            raise ConfigError(
                f"{self.name}: {around}: got turns that wait for each other, expected an order"
            ) from error

    @property
    def num_turns(self) -> int:
        """How many requests there are in all."""
        return sum(len(session.turns) for session in self.sessions)

    def sample(self, percent: float, seed: int) -> "Workload":
        """Keep ``percent`` of the top-level sessions, each whole and with its sub-agents.

        Sessions whose turns wait for each other are kept or left together. Samples of the same seed
        are nested: what 50% keeps, 75% keeps too.

        Raises:
            ConfigError: ``percent`` is not above 0 and at most 100, or keeps no session.
        """
        if not 0 < percent <= 100:
            raise ConfigError(f"load: got {percent:g}%, expected above 0 and at most 100")
        family = self._families()
        order = list(dict.fromkeys(family.values()))
        count = len(order)
        random.Random(seed).shuffle(order)
        kept = set(order[: round(count * percent / 100)])
        if not kept:
            raise ConfigError(
                f"load: {percent:g}% of the {count} sessions of {self.name} is none of them"
            )
        sessions = tuple(session for session in self.sessions if family[session.id] in kept)
        return structs.replace(self, sessions=sessions)

    def _families(self) -> dict[str, str]:
        """Of each session the first of those that it is tied to, by sub-agents or by waiting."""
        first = {session.id: session.id for session in self.sessions}

        def find(name: str) -> str:
            while first[name] != name:
                first[name] = first[first[name]]  # halves the way for those who come after
                name = first[name]
            return name

        place = {session.id: number for number, session in enumerate(self.sessions)}
        for session in self.sessions:
            tied = [name for turn in session.turns for name, _ in turn.after]
            for name in (*tied, *([] if session.parent is None else [session.parent])):
                one, other = sorted((find(session.id), find(name)), key=place.__getitem__)
                first[other] = one
        return {session.id: find(session.id) for session in self.sessions}

    def overlaid(self, layers: "Sequence[Workload]") -> "Workload":
        """Serve the sessions of further workloads at the same time.

        Raises:
            ConfigError: two of them have a session of the same id.
        """
        all_layers = (self, *layers)
        return structs.replace(
            self,
            sessions=tuple(session for layer in all_layers for session in layer.sessions),
            left_out=_together(one for layer in all_layers for one in layer.left_out),
        )


def _together(parts: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    whole: dict[str, LeftOut] = {}
    for part in parts:
        known = whole.get(part.why)
        whole[part.why] = (
            part
            if known is None
            else LeftOut(
                why=part.why,
                turns=known.turns + part.turns,
                sessions=known.sessions + part.sessions,
                prompt_tokens=known.prompt_tokens + part.prompt_tokens,
                of_prompt_tokens=known.of_prompt_tokens + part.of_prompt_tokens,
            )
        )
    return tuple(whole.values())
