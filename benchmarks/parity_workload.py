"""Random workloads for two schedulers: requests, when they come, and the limits that they meet.

All tokens are known beforehand, also those that a model would have sampled, so that two engines
are given the same. A workload is made from its seed alone.
"""

import random
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. ``tokens`` are prompt and output; it comes before step ``step``."""

    id: str
    step: int
    arrival_s: float
    tokens: tuple[int, ...]
    output_tokens: int
    priority: int

    @property
    def prompt_tokens(self) -> int:
        """How many of its tokens are its prompt."""
        return len(self.tokens) - self.output_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order in which they come, and the engine's limits, by vLLM's names."""

    seed: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    order: Literal["fcfs", "priority"]
    reserve_full_prompt: bool
    arrivals: tuple[Arrival, ...]


def make_workload(seed: int) -> Workload:
    """Contexts that grow by turns, fork and come back, in a pool that holds a few of them.

    Prompts are cut to fit the pool, since an engine would turn the others away. Every third
    workload has turns that all end on a block's edge, where a repeated prompt is a special case.
    """
    draw = random.Random(seed)
    block_size = draw.choice((2, 4, 8, 16))
    num_blocks = draw.randint(6, 60)
    most_tokens = num_blocks * block_size
    grain = block_size if seed % 3 == 0 else 1
    contexts: list[list[int]] = [[]]
    arrivals = []
    step = 0
    for number in range(draw.randint(4, 40)):
        step += draw.choice((0, 0, 0, 1, 2, draw.randint(0, 30)))
        history = contexts[draw.randrange(len(contexts))]
        if draw.random() < 0.2:
            history = history[: draw.randint(0, len(history))]  # a fork
        new = grain * draw.randint(0 if history else 1, 6 * block_size // grain)
        output = draw.choice((1, 1, grain, draw.randint(1, 4 * block_size)))
        prompt = [*history, *(draw.randrange(1, 400) for _ in range(new))]
        prompt = prompt[: max(1, most_tokens - output)]
        output = min(output, most_tokens - len(prompt))
        if output < 1:
            continue
        tokens = [*prompt, *(draw.randrange(1, 400) for _ in range(output))]
        contexts.append(tokens[: len(prompt) + draw.choice((0, output))])
        arrivals.append(
            Arrival(
                id=f"r{number:03d}",
                step=step,
                arrival_s=step + number * 1e-4,
                tokens=tuple(tokens),
                output_tokens=output,
                priority=draw.choice((0, 0, 0, -1, 1, 2)),
            )
        )
    return Workload(
        seed=seed,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=draw.randint(1, 10),
        max_num_batched_tokens=draw.choice((block_size, 3 * block_size, 7 * block_size, 1000)),
        order=draw.choice(("fcfs", "priority")),
        reserve_full_prompt=draw.random() < 0.7,
        arrivals=tuple(arrivals),
    )
