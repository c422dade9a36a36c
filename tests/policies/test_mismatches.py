"""Descriptions that do not fit the engines that they are for."""

from hear.blocks import pack
from hear.compatibility import in_words
from hear.messages import CapabilitiesReported, Key, RequestDescribed
from hear.policies.cache_aware import CacheAware
from hear.policies.runtime.mismatches import Mismatches
from tests.policies.stage import ENGINE, Stage


class Watching(CacheAware):
    """Cache-aware, with what its runner would warn of."""

    def __init__(self) -> None:
        super().__init__()
        self.mismatches = Mismatches()
        self.told: list[str] = []

    def decide(self, h, s):  # type: ignore[no-untyped-def]
        for found in self.mismatches.found(h, s):
            self.told.append(in_words(found.differing, found.described_by, found.engine))
        return super().decide(h, s)


def test_one_warning_names_both_sides_whichever_is_heard_first() -> None:
    policy = Watching()
    stage = Stage(policy)
    capabilities = CapabilitiesReported(model="m", block_size=16, hash_scheme="vllm-sha256-64")
    for number in range(5):
        described = RequestDescribed(
            prompt_tokens=100,
            block_size=16,
            prefix_hashes=pack([number]),
            hash_scheme="hear-blake2b-64",
        )
        stage.intent(described, Key(request=f"r{number}", engine=ENGINE))
        stage.decide()
        if number == 2:
            stage.engine(capabilities)
            stage.decide()
    assert policy.told == ["hash scheme: harness uses hear-blake2b-64, e0 vllm-sha256-64"]
    stage.intent(RequestDescribed(prompt_tokens=9, model="n"), Key(request="r", engine=ENGINE))
    stage.decide()
    assert policy.told[1:] == ["model: harness uses n, e0 m"]
