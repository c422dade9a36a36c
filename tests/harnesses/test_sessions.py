"""Sessions of a trace that does not tell them."""

from collections import Counter
from collections.abc import Iterable

from hear.harnesses.eval.workloads.lines import shipped
from hear.harnesses.eval.workloads.mooncake import SHIPPED
from hear.harnesses.eval.workloads.sessions import rebuild
from hear.harnesses.eval.workloads.traces.mooncake import read
from hear.harnesses.eval.workloads.traces.trace import TracedRequest

REQUESTS = read([shipped(SHIPPED)]).requests


def traced(at_s: float, prompt: int, output: int, blocks: Iterable[int]) -> TracedRequest:
    return TracedRequest(
        where="", at_s=at_s, prompt_tokens=prompt, output_tokens=output, blocks=tuple(blocks)
    )


def last_block(request: TracedRequest) -> int:
    assert request.blocks is not None
    return request.blocks[request.prompt_tokens // 512 - 1]


def test_the_rule_in_its_plain_form_gives_the_same_sessions() -> None:
    """The quadratic reading of the rule, word for word, over some requests."""
    rows = REQUESTS[7_500:8_000]
    times = [row.at_s or 0.0 for row in rows]
    ids = [row.blocks or () for row in rows]
    follows: dict[int, int] = {}
    chain: list[int] = []
    for b, row in enumerate(rows):
        fit = [
            (rows[a].prompt_tokens // 512, a)
            for a in range(b)
            if a not in follows.values()
            and times[a] < times[b]
            and rows[a].prompt_tokens // 512 >= 2
            and last_block(rows[a]) in ids[b]
            and row.prompt_tokens - rows[a].prompt_tokens >= max(rows[a].output_tokens / 2, 1)
        ]
        if fit:
            follows[b] = max(fit)[1]
        chain.append(chain[follows[b]] if fit else b)
    numbers: list[int] = []
    ambiguous = 0
    for b in range(len(rows)):
        shared = False
        if b in follows:
            last = last_block(rows[follows[b]])
            holders = {chain[c] for c in range(len(rows)) if last in ids[c]}
            shared = len(holders) > 1
            ambiguous += shared
        continues = b in follows and not shared
        numbers.append(numbers[follows[b]] if continues else max(numbers, default=-1) + 1)
    assert max(Counter(numbers).values()) > 2
    assert ambiguous > 0
    rebuilt = rebuild(rows, 512)
    assert (rebuilt.sessions, rebuilt.ambiguous) == (numbers, ambiguous)
    assert rebuilt.links == len(rows) - max(numbers) - 1


def test_strangers_who_share_a_prompt_of_tools_are_no_session() -> None:
    shared = list(range(46, 58))
    requests = [
        traced(3_000 * number, tokens, 30, [*shared, 1_000 + number])
        for number, tokens in enumerate((6_169, 6_173, 6_246))
    ]
    assert rebuild(requests, 512) == ([0, 1, 2], 0, 1)


def test_a_turn_that_adds_its_answer_within_the_same_block_continues() -> None:
    first = traced(0, 6_169, 30, [*range(46, 58), 900])
    second = traced(3_000, 6_250, 30, [*range(46, 58), 901])
    assert rebuild([first, second], 512).sessions == [0, 0]


def test_of_many_strangers_with_one_beginning_each_keeps_its_own_next_turn() -> None:
    requests = []
    for number in range(20):
        own = [*range(4), 100 + number, 200 + number]
        requests.append(traced(number, 6 * 16, 10, own))
    for number in range(20):
        own = [*range(4), 100 + number, 200 + number, 300 + number]
        requests.append(traced(100 + number, 7 * 16, 10, own))
    rebuilt = rebuild(requests, 16)
    assert rebuilt.sessions == [*range(20), *range(20)]
    assert (rebuilt.links, rebuilt.ambiguous) == (20, 0)


def test_nearly_all_of_the_published_conversations_are_found_again() -> None:
    rebuilt = rebuild(REQUESTS, 512)
    assert (rebuilt.links, rebuilt.ambiguous) == (3_606, 209)
