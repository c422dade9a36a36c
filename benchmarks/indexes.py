"""The residency directory and its peer, both full: filling them, and matching a prompt."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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
    """Fill both indexes with prompts, piece by piece; reports their memory and how fast it went."""
    draw = random.Random(1)
    count = max(sizes.directory_blocks // sizes.prompt_blocks, 2)
    chains = [draw.randbytes(8 * sizes.prompt_blocks) for _ in range(count)]
    num_blocks = count * sizes.prompt_blocks
    length = min(sizes.fill_blocks, sizes.prompt_blocks)
    section = f"filling an index with {num_blocks:,} blocks, in events of {length} blocks"
    directory, tree = ResidencyDirectory(), make_radix_tree()

    def note(who: str, before: int | None, times: list[float]) -> None:
        rates = (length / took for took in times)
        report.add(section, "apply, while it grows", who, "blocks/s", rates)
        after = resident_bytes()
        if before is not None and after is not None:
            report.add(section, "memory", who, "MiB", [(after - before) / 2**20])
            report.add(section, "memory a block", who, "B", [(after - before) / num_blocks])

    with no_gc():
        before = resident_bytes()
        changes = (
            BlocksStored(tier="gpu", parent=parent, prefix_hashes=piece)
            for parent, piece in _pieces(chains, length)
        )
        note("HEAR", before, [seconds(directory.apply, change) for change in changes])
        if tree is None:
            report.notes.append("RadixTree was left out: the extra 'bench' is not installed.")
        else:
            radix_stored(0, None, chains[0])  # so that the memory of the encoder is not counted
            before = resident_bytes()
            events = (radix_stored(1, parent, piece) for parent, piece in _pieces(chains, length))
            note("RadixTree", before, [seconds(tree.apply_event, 0, event) for event in events])
    return Indexes(chains, directory, tree, draw)


def _pieces(chains: list[bytes], length: int) -> Iterator[tuple[int | None, bytes]]:
    for chain in chains:
        parent = None
        for start in range(0, len(chain), 8 * length):
            piece = chain[start : start + 8 * length]
            yield parent, piece
            parent = unpack(piece)[-1]


def matching(indexes: Indexes, sizes: Sizes, report: Report) -> None:
    """The reusable prefix of one prompt, asked in a full index.

    Cold: after all caches were swept, but for the prompt, which has just come in. Warm: again.
    """
    directory, tree, size = indexes.directory, indexes.tree, sizes.prompt_blocks
    section = f"matching a prompt of {size:,} blocks"
    caches = Caches(sizes.sweep_bytes)
    checked = 0
    with no_gc():
        for name, hit in (("whole prompt", size), ("half of it", size // 2), ("nothing", 0)):
            cold: dict[str, list[float]] = {}
            warm: dict[str, list[float]] = {}
            for packed in _prompts(indexes, hit, size, sizes.match_repeats):
                view, prompt = unpack(packed), list(unpack(packed))
                calls: dict[str, Callable[[], object]] = {
                    "HEAR match": partial(directory.match, view)
                }
                if tree is not None:
                    calls["RadixTree find_matches"] = partial(tree.find_matches, prompt)
                if hit == size:
                    calls["HEAR match_by_tier"] = partial(directory.match_by_tier, view)
                for who, call in calls.items():
                    caches.empty()
                    assert max(view) == max(prompt)
                    cold.setdefault(who, []).append(seconds(call) * 1e6)
                    warm.setdefault(who, []).extend(seconds(call) * 1e6 for _ in range(5))
                found = {directory.match(view), hit}
                if tree is not None:
                    found.add(radix_match(tree, prompt))
                if len(found) > 1:
                    raise AssertionError(f"match lengths {found}, expected {hit}")
                checked += 1
            for what, times in ((f"{name} held, cold", cold), (f"{name} held, warm", warm)):
                for who, taken in times.items():
                    report.add(section, what, who, "us", taken)
        if tree is not None:
            one = unpack(indexes.chains[0])
            report.add(
                "what a RadixTree costs besides",
                "making the list that it takes",
                f"{size:,} packed hashes",
                "us",
                [seconds(list, one) * 1e6 for _ in range(sizes.match_repeats)],
            )
            report.add(
                "what a RadixTree costs besides",
                "going to its thread and back",
                "find_matches of nothing",
                "us",
                [seconds(tree.find_matches, []) * 1e6 for _ in range(sizes.match_repeats)],
            )
            report.notes += [
                f"Both gave the same match length for all {checked:,} prompts.",
                "RadixTree matches by each block's own hash, HEAR by chained hashes; both were "
                "given the same numbers. See README.md for what else differs.",
            ]


def _prompts(indexes: Indexes, hit: int, size: int, count: int) -> Iterator[bytes]:
    """Prompts of which the first ``hit`` blocks are held, of one chain after another."""
    shuffled = indexes.draw.sample(indexes.chains, len(indexes.chains))
    for chain in islice(cycle(shuffled), count):
        yield chain[: 8 * hit] + indexes.fresh(size - hit)
