"""One decision of Cache-Aware, beside a look at every waiting request."""

import random
from collections.abc import Iterable, Sequence
from statistics import median

from benchmarks.events import Burst, Change
from benchmarks.measuring import BLOCK_SIZE, ENGINE, Report, Sizes, no_gc, seconds
from hear.blocks import unpack
from hear.codec import decode, encode, open_body
from hear.delivery import Sequencer
from hear.engine_view import EngineViews
from hear.harness_view import HarnessView
from hear.interfaces import Ask
from hear.messages import (
    BlockChange,
    BlocksRemoved,
    BlocksStored,
    Key,
    Prioritise,
    QueueSnapshot,
    RequestDescribed,
    ResidencyChanged,
    ResidencySnapshot,
    WaitingRequest,
)
from hear.policies.cache_aware import CacheAware
from hear.residency import ResidencyDirectory


class Rescan:
    """What Cache-Aware would be if it looked at every waiting request at each decision.

    It counts by bisection, in a directory that nobody watches, or block by block in a plain set,
    as the rule is written down in the paper.
    """

    def __init__(self, prompts: dict[str, Sequence[int]], *, bisect: bool) -> None:
        self._prompts = prompts
        self._directory = ResidencyDirectory() if bisect else None
        self._held: set[int] = set()
        self.priorities = dict.fromkeys(prompts, 0)

    def hear(self, frames: Iterable[bytes]) -> None:
        """Take over residency messages."""
        for frame in frames:
            message = open_body(decode(frame))
            assert isinstance(message, ResidencyChanged)
            for change in message.changes:
                self.apply(change)

    def apply(self, change: BlockChange) -> None:
        """Take over one change."""
        if self._directory is not None:
            self._directory.apply(change)
        elif isinstance(change, BlocksStored):
            self._held.update(unpack(change.prefix_hashes))
        elif isinstance(change, BlocksRemoved):
            self._held.difference_update(unpack(change.prefix_hashes))

    def decide(self) -> list[tuple[str, int]]:
        """The priorities that have changed."""
        asks = []
        count = self._count if self._directory is None else self._directory.match
        for name, prompt in self._prompts.items():
            reusable = count(prompt)
            priority = -reusable if reusable >= len(prompt) / 2 else 0
            if priority != self.priorities[name]:
                self.priorities[name] = priority
                asks.append((name, priority))
        return asks

    def _count(self, prompt: Sequence[int]) -> int:
        held = self._held
        count = 0
        for block in prompt:
            if block not in held:
                break
            count += 1
        return count


class Reader:
    """Cache-Aware with its views, fed with envelopes as they come off a bus."""

    def __init__(self, names: Iterable[str]) -> None:
        self.h, self.s = HarnessView(), EngineViews()
        self.policy = CacheAware()
        self.priorities = dict.fromkeys(names, 0)

    def hear(self, frames: Iterable[bytes]) -> None:
        """Take over messages."""
        for frame in frames:
            envelope = decode(frame)
            message = open_body(envelope)
            assert message is not None
            if envelope.category == "state":
                self.s.apply(envelope, message)
            else:
                self.h.apply(envelope, message)

    def decide(self) -> list[Ask]:
        """What the policy asks for now."""
        asks = list(self.policy.decide(self.h, self.s))
        self.h.clear_changes()
        self.s.clear_changes()
        return asks

    def note(self, asks: Iterable[Ask]) -> None:
        """Keep what was asked for, to compare it."""
        for message, key in asks:
            assert isinstance(message, Prioritise)
            assert key.request is not None
            self.priorities[key.request] = message.priority


def deciding(sizes: Sizes, report: Report) -> None:
    """One decision of Cache-Aware after a burst of events, beside a look at all that wait."""
    draw = random.Random(2)
    half = sizes.decide_prompt_blocks // 2
    heads = [draw.randbytes(8 * half) for _ in range(sizes.decide_contexts)]
    tails = [draw.randbytes(8 * half) for _ in range(sizes.waiting)]
    prompts = {f"r{n}": heads[n % len(heads)] + tail for n, tail in enumerate(tails)}
    reader = Reader(prompts)
    views = {name: unpack(prompt) for name, prompt in prompts.items()}
    rescans = {
        "look at all again, by bisection": Rescan(views, bisect=True),
        "look at all again, block by block": Rescan(views, bisect=False),
    }
    engine, harness = Sequencer(ENGINE), Sequencer("harness")
    key = Key(engine=ENGINE)
    chains = tuple(BlocksStored(tier="gpu", prefix_hashes=head) for head in heads)
    waiting = tuple(
        WaitingRequest(request=name, since_s=0.0, prompt_tokens=BLOCK_SIZE * 2 * half)
        for name in prompts
    )
    reader.hear(
        encode(engine.wrap_snapshot(message, key, 0.0))
        for message in (ResidencySnapshot(chains=chains), QueueSnapshot(waiting=waiting))
    )
    for name, prompt in prompts.items():
        described = RequestDescribed(
            prompt_tokens=BLOCK_SIZE * 2 * half, block_size=BLOCK_SIZE, prefix_hashes=prompt
        )
        about = Key(request=name, engine=ENGINE, workflow="w")
        reader.hear([encode(harness.wrap(described, about, 0.0))])
    for rescan in rescans.values():
        for chain in chains:
            rescan.apply(chain)
        rescan.decide()
    reader.note(reader.decide())

    decide: dict[str, list[float]] = {}
    whole: dict[str, list[float]] = {}
    num_asks: list[int] = []

    def take(who: str, heard: float, decided: float) -> None:
        decide.setdefault(who, []).append(decided * 1e3)
        whole.setdefault(who, []).append((heard + decided) * 1e3)

    with no_gc():
        for repeat in range(sizes.decide_repeats):
            if repeat % 2 == 0:
                burst = Burst()
                for number in range(sizes.decide_events):
                    if number % 2:  # every other event is of no one's prompt
                        burst.add(unpack(heads[0])[-1], draw.randbytes(8 * 64))
                    else:
                        n = draw.randrange(len(tails))
                        burst.add(unpack(heads[n % len(heads)])[-1], tails[n][: 8 * 64])
            changes: Sequence[Change] = burst.removed if repeat % 2 else burst.stored
            frames = [
                encode(engine.wrap(ResidencyChanged(changes=(change,)), key, 1.0))
                for change in changes
            ]
            asks: list[Ask] = []
            heard = seconds(reader.hear, frames)
            take("Cache-Aware", heard, seconds(lambda taken: taken.extend(reader.decide()), asks))
            reader.note(asks)
            num_asks.append(len(asks))
            for who, rescan in rescans.items():
                heard = seconds(rescan.hear, frames)
                take(who, heard, seconds(rescan.decide))
            if not all(rescan.priorities == reader.priorities for rescan in rescans.values()):
                raise AssertionError("Cache-Aware and a look at all requests do not agree")
    section = (
        f"one decision with {sizes.waiting:,} waiting requests of {2 * half:,} blocks after "
        f"{sizes.decide_events} events of 64 blocks ({median(num_asks):.0f} priorities change)"
    )
    for what, rows in (("decide", decide), ("decode and apply the events, decide", whole)):
        for who, taken in rows.items():
            report.add(section, what, who, "ms", taken)
