"""The CPU tier, of an engine of real vLLM in this process."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hear.errors import EngineError
from tests.engines.vllm.real import NEEDS_VLLM, engine_in_process, scheduler_of

pytestmark = NEEDS_VLLM

BLOCK = 32
PROMPT = 600  # tokens: 18 full blocks and a part of one
FULL_BLOCKS = PROMPT // BLOCK
NUM_FIRST, NUM_SECOND = 40, 58  # blocks: two prompts fit in the one tier, and three in the other


class Engine:
    """An engine with a tier, and what it says of its blocks."""

    def __init__(self, llm: Any) -> None:
        from hear.engines.vllm.plugin.tier import order_of

        self.llm = llm
        self.scheduler = scheduler_of(llm)
        self.order: Any = order_of(self.scheduler)
        self.events: list[Any] = []
        self.scheduler.kv_event_publisher = SimpleNamespace(
            publish=lambda batch: self.events.extend(batch.events), shutdown=lambda: None
        )

    def ask(self, seed: int) -> tuple[list[int], int]:
        """The answer to a prompt, and how many of its tokens were reused."""
        from vllm import SamplingParams

        chance = random.Random(seed)
        prompt = {"prompt_token_ids": [chance.randrange(3, 512) for _ in range(PROMPT)]}
        [output] = self.llm.generate(
            [prompt], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
        )
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    def stored(self, medium: str) -> list[Any]:
        """The events that tell of blocks stored in a medium."""
        return [e for e in self.events if type(e).__name__ == "BlockStored" and e.medium == medium]

    def hashes(self, kind: str, medium: str) -> list[int]:
        """The blocks of all events of a kind in a medium."""
        return [
            block
            for event in self.events
            if type(event).__name__ == kind and event.medium == medium
            for block in event.block_hashes
        ]

    def forget(self) -> None:
        assert self.llm.reset_prefix_cache(reset_connector=True)
        self.order.rank_of = lambda block: None
        self.events.clear()

    @property
    def host(self) -> list[Any]:
        """The tensors of the second tier."""
        return list(connector_worker().worker._second)


def connector_worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().connector_worker


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from hear.engines.vllm.launch.server_command import tier_config

    # 4 layers of keys and values of 2 heads of 64 numbers of 4 bytes, for each token
    block_bytes = 4 * 2 * 2 * 64 * 4 * BLOCK
    with engine_in_process(
        tmp_path_factory.mktemp("model") / "tiny",
        max_model_len=1024,
        num_gpu_blocks_override=NUM_FIRST,
        kv_transfer_config=tier_config(NUM_SECOND * block_bytes),
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    ) as llm:
        yield Engine(llm)


@pytest.fixture
def engine(made: Engine) -> Engine:
    made.forget()
    return made


def test_the_tier_holds_as_many_blocks_as_its_bytes_allow(engine: Engine) -> None:
    assert engine.order.capacity == NUM_SECOND


def test_an_evicted_prompt_comes_back_from_the_tier_with_the_same_answer(engine: Engine) -> None:
    answer, reused = engine.ask(1)
    assert reused == 0
    for other in (2, 3):
        engine.ask(other)
    prompt = engine.hashes("BlockStored", "GPU")[:FULL_BLOCKS]
    assert len(set(prompt) & set(engine.hashes("BlockRemoved", "GPU"))) > FULL_BLOCKS // 2
    assert engine.ask(1) == (answer, FULL_BLOCKS * BLOCK)


def test_what_the_tier_holds_is_what_the_answer_is_made_of(engine: Engine) -> None:
    answer, _ = engine.ask(1)
    for other in (2, 3):
        engine.ask(other)
    for tensor in engine.host:
        tensor.zero_()
    spoilt, reused = engine.ask(1)
    assert reused == FULL_BLOCKS * BLOCK
    assert spoilt != answer


def test_events_name_the_tier_and_the_hashes_of_the_first_one(engine: Engine) -> None:
    engine.ask(1)
    engine.ask(2)  # what a request leaves behind is copied in the steps after it
    prompt = engine.hashes("BlockStored", "GPU")[:FULL_BLOCKS]
    of_prompt = [e for e in engine.stored("CPU") if set(e.block_hashes) & set(prompt)]
    # They come in any order, so each has to name its parent.
    parents = {event.block_hashes[0]: event.parent_block_hash for event in of_prompt}
    assert parents == dict(zip(prompt, [None, *prompt], strict=False))
    assert all(engine.order.holds(block) for block in prompt)
    for event in of_prompt:
        assert event.block_size == BLOCK
        assert len(event.token_ids) == BLOCK * len(event.block_hashes)


def test_of_two_prompts_the_leased_one_survives_in_the_tier(engine: Engine) -> None:
    engine.ask(1)
    leased = {block: n for n, block in enumerate(engine.hashes("BlockStored", "GPU"))}
    engine.order.rank_of = lambda b: (1.0, -leased[b]) if b in leased else None
    engine.order.rerank(leased)
    for other in range(2, 6):
        engine.ask(other)
    removed = engine.hashes("BlockRemoved", "CPU")
    assert removed
    assert not leased.keys() & set(removed)
    assert engine.ask(1)[1] == FULL_BLOCKS * BLOCK
    assert engine.ask(2)[1] == 0


def test_a_prompt_whose_lease_has_ended_is_given_up_first(engine: Engine) -> None:
    engine.ask(1)
    first = set(engine.hashes("BlockStored", "GPU"))
    engine.ask(2)
    second = [b for b in engine.hashes("BlockStored", "GPU") if b not in first]
    engine.order.rank_of = lambda b: (1.0, 0) if b in second else None
    engine.order.rerank(second)
    engine.ask(3)
    engine.order.rank_of = lambda b: None
    engine.order.rerank(second)
    engine.ask(4)
    engine.ask(5)
    removed = engine.hashes("BlockRemoved", "CPU")
    assert set(removed[: len(second)]) == set(second)


def test_a_tier_that_holds_no_block_is_refused(engine: Engine) -> None:
    from dataclasses import replace

    from hear.engines.vllm.plugin.tier import TierSpec

    config = connector_worker().spec.config
    with pytest.raises(EngineError, match="CPU tier: got 5 bytes, expected at least"):
        TierSpec(replace(config, extra_config={"cpu_bytes_to_use": 5}))
