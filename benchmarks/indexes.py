"""The residency directory and its peer, both full: filling them, and matching a prompt."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

from benchmarks.measuring import Caches, Report, Sizes, no_gc, resident_bytes, seconds
from benchmarks.peer import RadixTree, make_radix_tree, radix_match, radix_stored
from hear.blocks import unpack
from hear.messages import BlocksStored
from hear.residency import ResidencyDirectory


@dataclass(slots=True)
class Indexes:
    """The same blocks in HEAR's directory and, if it is there, in a RadixTree."""

    chains: list[bytes]
    directory: ResidencyDirectory
    tree: RadixTree | None
    draw: random.Random

    def fresh(self, num_blocks: int) -> bytes:
        """Hashes that nobody holds, packed."""
        return self.draw.randbytes(8 * num_blocks)


def build(sizes: Sizes, report: Report) -> Indexes:
    """Fill both indexes from chains of a prompt each; reports their memory and how fast it went."""
    draw = random.Random(1)
    count = max(sizes.directory_blocks // sizes.prompt_blocks, 2)
    chains = [draw.randbytes(8 * sizes.prompt_blocks) for _ in range(count)]
    num_blocks = count * sizes.prompt_blocks
    section = f"filling an index with {num_blocks:,} blocks, in chains of {sizes.prompt_blocks:,}"
    directory, tree = ResidencyDirectory(), make_radix_tree()

    def note(who: str, before: int | None, times: list[float]) -> None:
        rates = (sizes.prompt_blocks / took for took in times)
        report.add(section, "apply, while it grows", who, "blocks/s", rates)
        after = resident_bytes()
        if before is not None and after is not None:
            report.add(section, "memory", who, "MiB", [(after - before) / 2**20])
            report.add(section, "memory a block", who, "B", [(after - before) / num_blocks])

    with no_gc():
        before = resident_bytes()
        changes = (BlocksStored(tier="gpu", prefix_hashes=chain) for chain in chains)
        note("HEAR", before, [seconds(directory.apply, change) for change in changes])
        if tree is None:
            report.notes.append("RadixTree was left out: the extra 'bench' is not installed.")
        else:
            radix_stored(0, None, chains[0])  # so that the memory of the encoder is not counted
            before = resident_bytes()
            events = (radix_stored(number, None, chain) for number, chain in enumerate(chains))
            note("RadixTree", before, [seconds(tree.apply_event, 0, event) for event in events])
    return Indexes(chains, directory, tree, draw)


def matching(indexes: Indexes, sizes: Sizes, report: Report) -> None:
    """The reusable prefix of one prompt, asked in a full index.

    Cold: of a prompt that was not asked for before, after all caches were swept. Warm: again.
    """
    directory, tree, draw = indexes.directory, indexes.tree, indexes.draw
    size, half = sizes.prompt_blocks, sizes.prompt_blocks // 2
    section = f"matching a prompt of {size:,} blocks"
    caches = Caches(sizes.sweep_bytes)
    shuffled = draw.sample(indexes.chains, len(indexes.chains))
    checked = 0

    def prompts(hit: int, repeats: int) -> Iterator[bytes]:
        for chain in islice(cycle(shuffled), repeats):
            yield chain[: 8 * hit] + indexes.fresh(size - hit)

    def match(packed: bytes) -> int:
        return directory.match(unpack(packed))

    def by_tier(packed: bytes) -> dict[str, int]:
        return directory.match_by_tier(unpack(packed))

    def check(packed: bytes, hit: int) -> None:
        nonlocal checked
        found = {"HEAR": match(packed)}
        if tree is not None:
            found["RadixTree"] = radix_match(tree, list(unpack(packed)))
        if set(found.values()) != {hit}:
            raise AssertionError(f"match lengths {found}, expected {hit}")
        checked += 1

    def cold(what: str, hit: int) -> None:
        hear, radix = [], []
        for packed in prompts(hit, sizes.cold_repeats):
            caches.empty()
            packed.count(0)  # the prompt itself has just come in, so it is warm
            hear.append(seconds(match, packed) * 1e6)
            if tree is not None:
                caches.empty()
                prompt = list(unpack(packed))
                radix.append(seconds(tree.find_matches, prompt) * 1e6)
            check(packed, hit)
        show(what, hear, radix)

    def warm(what: str, hit: int) -> None:
        hear, radix = [], []
        for packed in prompts(hit, sizes.warm_rounds):
            prompt = list(unpack(packed))
            check(packed, hit)
            match(packed)
            hear += [seconds(match, packed) * 1e6 for _ in range(20)]
            if tree is not None:
                tree.find_matches(prompt)
                radix += [seconds(tree.find_matches, prompt) * 1e6 for _ in range(20)]
        show(what, hear, radix)

    def show(what: str, hear: list[float], radix: list[float]) -> None:
        report.add(section, what, "HEAR match", "us", hear)
        if radix:
            report.add(section, what, "RadixTree find_matches", "us", radix)

    with no_gc():
        for name, hit in (("whole prompt held", size), ("half of it held", half), ("none", 0)):
            cold(f"{name}, cold", hit)
            warm(f"{name}, warm", hit)
        times = []
        for packed in prompts(size, sizes.cold_repeats // 2):
            caches.empty()
            times.append(seconds(by_tier, packed) * 1e6)
        report.add(section, "whole prompt held, cold", "HEAR match_by_tier", "us", times)
        times = [seconds(by_tier, shuffled[-1]) * 1e6 for _ in range(2 * sizes.warm_rounds)][1:]
        report.add(section, "whole prompt held, warm", "HEAR match_by_tier", "us", times)
        if tree is not None:
            what = "making the list that RadixTree takes"
            times = [seconds(list, unpack(shuffled[0])) * 1e6 for _ in range(2 * sizes.warm_rounds)]
            report.add(section, what, "from packed hashes", "us", times)
            report.notes.append(f"Both gave the same match length for all {checked:,} prompts.")
