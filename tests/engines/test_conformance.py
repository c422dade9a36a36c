"""The simulated engine, in several set-ups, against the rules that every engine has to keep."""

import pytest
import trio

from hear.engines.testing import RULES, check_rule
from tests.engines.builders import SETUPS


@pytest.mark.parametrize("id", RULES)
@pytest.mark.parametrize("setup", SETUPS)
async def test_simulated_engine_keeps_the_rule(
    setup: str, id: str, autojump_clock: trio.testing.MockClock
) -> None:
    verdict = await check_rule(id, SETUPS[setup])
    assert verdict == "kept" or (setup == "fcfs" and "prioritise" in RULES[id].needs)
