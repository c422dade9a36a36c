"""The profile that is nearest to an engine that was recorded."""

import pytest
from msgspec.structs import replace

from hear.app import plugins
from hear.harnesses.eval.replay.nearest import nearest_profile

PROFILES = ["h100-qwen3-8b", "rtx-pro-6000-qwen3-8b"]


@pytest.mark.parametrize("profile", PROFILES)
def test_an_engine_of_a_profile_is_nearest_to_it(profile: str) -> None:
    engine = plugins.load_installed("engines", "simulated")(profile, block_size=16, name="e")
    name, how = nearest_profile(engine.capabilities(), engine.costs(), PROFILES, 512)
    assert name == profile
    assert how.startswith("1.00 times its GPU cache and 1.00 times its prefill speed")
    name, how = nearest_profile(engine.capabilities(), None, PROFILES, 512)
    assert (name, how) == (profile, "1.00 times its GPU cache")


def test_an_engine_that_tells_nothing_of_itself_gets_the_first() -> None:
    engine = plugins.load_installed("engines", "simulated")(PROFILES[1], block_size=16, name="e")
    silent = replace(engine.capabilities(), tiers=(), model="")
    assert nearest_profile(silent, None, PROFILES, 512) == (PROFILES[0], "")
