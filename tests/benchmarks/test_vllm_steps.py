"""The benchmark of steps: it decodes with and without HEAR, and HEAR is there when it should be."""

from tests.engines.vllm.real import NEEDS_VLLM

pytestmark = NEEDS_VLLM

STEPS = 16


async def test_all_requests_decode_side_by_side_and_hear_hears_of_them() -> None:
    from benchmarks.vllm_steps import stock, with_hear

    for made in (await stock(3, STEPS), await with_hear(3, STEPS)):
        assert len(made.engine_us) == len(made.hear_us) >= STEPS - 4
        assert all(us > 0 for us in made.engine_us)
        assert not made.scheduler.requests
    backend = made.scheduler.hear_host.backend
    assert backend.queue().running == ()
    assert backend.pressure().num_running == 0
    held = sum(len(chain.prefix_hashes) for chain in backend.residency())
    assert held > 0
