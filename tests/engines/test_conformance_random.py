"""Random storms over the simulated engine: see ``hear.engines.testing.storm``."""

from collections import Counter
from typing import Any

import pytest
import structlog
import trio
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hear.blocks import pack
from hear.engines.testing import EngineFactory
from hear.engines.testing.storm import Crashed, Requested, Sent, Storm, weather
from hear.messages import (
    DEFAULT_TENANT,
    Admit,
    BoundWait,
    Cancel,
    Configure,
    Control,
    Hold,
    Place,
    Prepare,
    Prioritise,
    Release,
    Retain,
    Route,
    Withdraw,
)
from tests.engines.builders import hashes_of, profile, under_test

TIMES = st.integers(0, 80).map(lambda tick: tick / 20)  # within 4 s, many at the same moment
FORCES: dict[str, st.SearchStrategy[Any]] = {
    "force": st.sampled_from(["preference", "preference", "requirement"]),
    "deadline_s": st.sampled_from([None, None, 0.05, 1.0]),
}
CONTEXTS = st.integers(0, 3)
PREFIXES = st.one_of(
    st.just(b""), st.builds(lambda c, n: pack(hashes_of(f"c{c}", n)), CONTEXTS, st.integers(1, 6))
)
TIERS = st.sampled_from(["gpu", "cpu", "disk"])
FALLBACKS = st.sampled_from([(), ("gpu",), ("preference",)])

ABOUT_REQUESTS: list[st.SearchStrategy[Control]] = [
    st.builds(Prioritise, priority=st.integers(-3, 3), **FORCES),
    st.builds(BoundWait, max_wait_s=st.sampled_from([0.0, 0.2, 2.0]), **FORCES),
    st.builds(Hold, hold_s=st.sampled_from([0.0, 0.3, 3.0]), **FORCES),
    st.builds(Admit, **FORCES),
    st.builds(Route, targets=st.sampled_from([("e0",), ("e1",)]), **FORCES),
    st.builds(Configure, modes=st.sampled_from([("dense",), ("sparse",)]), **FORCES),
]
ABOUT_CONTEXTS: list[st.SearchStrategy[Control]] = [
    st.builds(
        Retain,
        lease_s=st.sampled_from([0.0, 0.5, 5.0]),
        score=st.sampled_from([0.01, 0.5, 1.0]),
        prefix_hashes=PREFIXES,
        fallback=FALLBACKS,
        **FORCES,
    ),
    st.builds(Release, **FORCES),
    st.builds(
        Prepare,
        tier=TIERS,
        prefix_hashes=PREFIXES,
        compute=st.booleans(),
        fallback=FALLBACKS,
        **FORCES,
    ),
    st.builds(Place, tier=TIERS, prefix_hashes=PREFIXES, fallback=FALLBACKS, **FORCES),
]
SENT = st.one_of(
    st.builds(
        Sent,
        at_s=TIMES,
        sender=st.integers(0, 2),
        control=st.one_of(ABOUT_REQUESTS),
        request=st.integers(0, 5),
    ),
    st.builds(
        Sent,
        at_s=TIMES,
        sender=st.integers(0, 2),
        control=st.one_of(ABOUT_CONTEXTS),
        context=CONTEXTS,
        version=st.sampled_from([None, None, 1, 2]),
    ),
    st.builds(
        Sent,
        at_s=TIMES,
        sender=st.integers(0, 2),
        control=st.sampled_from([Cancel(target=""), Cancel(target=""), Withdraw()]),
        target=st.integers(0, 20),
    ),
)
REQUESTED = st.builds(
    Requested,
    at_s=TIMES,
    context=CONTEXTS,
    num_blocks=st.integers(1, 6),
    output_tokens=st.sampled_from([1, 2, 20, 40]),
    version=st.sampled_from([None, 1, 2, 3]),
    leaves_s=st.sampled_from([float("inf")] * 4 + [0.0, 0.05, 0.5]),
    tenant=st.integers(0, 1),
)
FATES = st.lists(
    st.sampled_from([(0.0,)] * 4 + [(), (0.0, 0.0), (0.1, 0.7), (0.4,), (2.0,), (0.0, 3.0)]),
    max_size=60,
).map(tuple)
STORMS = st.builds(
    Storm,
    events=st.tuples(
        st.lists(REQUESTED, min_size=3, max_size=12),
        st.lists(SENT, min_size=3, max_size=30),
        st.lists(st.builds(Crashed, at_s=TIMES), max_size=2),
    ).map(lambda lists: (*lists[0], *lists[1], *lists[2])),
    fates=FATES,
    tenants=st.sampled_from([(DEFAULT_TENANT,), (DEFAULT_TENANT, "acme")]),
)

ENGINES: dict[str, EngineFactory] = {
    "inclusive": under_test(profile(gpu=12, cpu=10, seqs=2)),
    "exclusive": under_test(profile(gpu=12, cpu=10, seqs=3, tier="exclusive", budget=40)),
    "one tier": under_test(profile(gpu=10, seqs=3, reserve=False)),
    "fcfs": under_test(profile(gpu=14, cpu=30, seqs=2, order="fcfs", budget=24)),
}


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=settings().max_examples // 2)
@given(storm=STORMS)
def test_every_operation_and_request_ends_once_in_a_storm(engine: str, storm: Storm) -> None:
    async def main() -> Counter[str]:
        aftermath = await weather(ENGINES[engine], storm)
        return aftermath.operations + aftermath.requests

    clock = trio.testing.MockClock(autojump_threshold=0)
    with structlog.testing.capture_logs():
        for ending in trio.run(main, clock=clock):
            event(ending)
