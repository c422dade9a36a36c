"""Generated conversations in the shape of SCBench: one long context each, then short questions.

SCBench has neither arrivals nor think times, and the paper says neither which of its tasks it
replays nor how many sessions or how fast they come. ``fitted`` is a workload fitted to the row
that the paper prints for first come, first served; the other tasks have SCBench's own counts and
mean lengths. Knows shapes and draws; all that is drawn comes from one seed.

Source: Li et al., "SCBench", ICLR 2025; paper, appendix A.2 (Poisson arrivals, think time).
"""

import random

from msgspec import Struct

from hear.app.plugins import nearest
from hear.blocks import HASH_SCHEME, chain_all
from hear.errors import ConfigError
from hear.harnesses.eval.workloads.arrivals import poisson_arrivals
from hear.harnesses.eval.workloads.workload import Session, Turn, Workload

QUESTION_TOKENS = 200


class Shape(Struct, frozen=True, kw_only=True):
    """What a task's sessions look like.

    ``turns`` are those of ``sessions`` sessions together, spread as evenly as whole turns allow.
    ``context_tokens`` is the range of a uniform draw. ``output_tokens`` are the lengths of the
    answers, turn after turn and then over again.
    """

    sessions: int
    turns: int
    context_tokens: tuple[int, int]
    output_tokens: tuple[int, ...]


def _task(sessions: int, turns: int, mean_tokens: int, *output_tokens: int) -> Shape:
    # Only the mean length is published; a quarter to either side is a guess.
    return Shape(
        sessions=sessions,
        turns=turns,
        context_tokens=(mean_tokens * 3 // 4, mean_tokens * 5 // 4),
        output_tokens=output_tokens,
    )


# Sessions, turns and mean input tokens of each task, and the output limit of a turn. The tasks of
# two kinds take turns; the limit of a needle's answer is that of a short answer.
TASKS = {
    "fitted": Shape(
        sessions=40, turns=40 * 11 // 2, context_tokens=(20_000, 45_000), output_tokens=(150,)
    ),
    "retr_kv": _task(100, 500, 125_000, 150),
    "prefix_suffix": _task(100, 500, 112_000, 150),
    "multihop": _task(90, 450, 124_000, 30),
    "repoqa": _task(88, 440, 65_000, 1024),
    "en_qa": _task(69, 351, 198_000, 40),
    "zh_qa": _task(35, 189, 1_500_000, 40),
    "en_choice": _task(58, 299, 188_000, 40),
    "math_find": _task(100, 240, 120_000, 5),
    "many_shot": _task(54, 270, 22_000, 10),
    "en_sum": _task(79, 350, 104_000, 200),
    "sum_niah": _task(70, 560, 105_000, 200, 40),
    "repoqa_kv": _task(88, 704, 68_000, 1024, 150),
}


def generate(
    task: str = "fitted",
    *,
    sessions: int | None = None,
    rate: float = 0.5,
    seed: int = 0,
    think_mean_s: float = 5.0,
    think_sd_s: float = 1.0,
    block_size: int = 512,
    max_tokens: int = 131_072,
) -> Workload:
    """Generate the sessions of a task; ``sessions`` says how many, None as many as it has.

    Sessions start by a Poisson process of ``rate`` a second. The prompt of a turn is the context,
    all earlier questions and answers, and a question of 200 tokens; its think time is normal, not
    below 0, and there is none before the first. No two sessions share a block. Of one seed, more
    sessions begin with the same ones.

    A context that would take its session's last turn above ``max_tokens``, prompt and output
    together, is cut to what fits; give the largest request that the engine takes.

    Raises:
        ConfigError: there is no such task, or a parameter cannot be used.
    """
    shape = TASKS.get(task)
    if shape is None:
        raise ConfigError(f"SCBench task: got {task!r}: {nearest(task, sorted(TASKS))}")
    count = shape.sessions if sessions is None else sessions
    if count < 1:
        raise ConfigError(f"sessions: got {count}, expected at least 1")
    if block_size < 1:
        raise ConfigError(f"block_size: got {block_size}, expected at least 1")
    if not (0 <= think_mean_s < float("inf") and 0 <= think_sd_s < float("inf")):
        raise ConfigError(
            f"think time: got mean {think_mean_s:g} and deviation {think_sd_s:g} s, "
            "expected both at least 0"
        )
    name = "scbench" if task == "fitted" else f"scbench-{task}"
    phase = random.Random(f"{name} {seed}").randrange(shape.sessions)
    made: list[Session] = []
    for index, start_s in enumerate(poisson_arrivals(count, rate, seed)):
        before, after = (i * shape.turns + phase for i in (index, index + 1))
        num_turns = after // shape.sessions - before // shape.sessions
        # Each session draws from a source of its own, so that none depends on how many there are.
        content = f"{name} {seed} {index}"
        draw = random.Random(content)
        outputs = [shape.output_tokens[k % len(shape.output_tokens)] for k in range(num_turns)]
        room = max_tokens - QUESTION_TOKENS * num_turns - sum(outputs)
        if room < 1:
            raise ConfigError(
                f"max_tokens: got {max_tokens}, expected more than {max_tokens - room}, what "
                f"{num_turns} turns of {task} take without their context"
            )
        context_tokens = min(draw.randint(*shape.context_tokens), room)
        thinks = [0.0]
        thinks += [max(0.0, draw.gauss(think_mean_s, think_sd_s)) for _ in outputs[1:]]
        made.append(
            Session(
                id=f"{name}-{index:03d}",
                turns=_turns(content, context_tokens, outputs, thinks, block_size),
                start_s=start_s,
            )
        )
    return Workload(name=name, block_size=block_size, sessions=tuple(made), hash_scheme=HASH_SCHEME)


def _turns(
    content: str, context_tokens: int, outputs: list[int], thinks: list[float], block_size: int
) -> tuple[Turn, ...]:
    """The turns of one session, over one stream of tokens that only ever grows.

    The tokens at a place of the stream never change, so ``content`` and the number of a block say
    all of what the block holds, whichever turn's question or answer fills it.
    """
    total = context_tokens + QUESTION_TOKENS * len(outputs) + sum(outputs)
    stream = chain_all(f"{content} {block}".encode() for block in range(total // block_size))
    turns: list[Turn] = []
    length = context_tokens
    for output_tokens, think_s in zip(outputs, thinks, strict=True):
        prompt_tokens = length + QUESTION_TOKENS
        length = prompt_tokens + output_tokens
        full = prompt_tokens // block_size
        turns.append(
            Turn(
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                prompt_hashes=tuple(stream[:full]),
                output_hashes=tuple(stream[full : length // block_size]),
                think_s=think_s,
            )
        )
    return tuple(turns)
