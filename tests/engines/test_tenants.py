"""Blocks that carry whose they are, and an engine that keeps tenants apart."""

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from hear.blocks import unpack
from hear.engines.simulated import tenants as tenants_module
from hear.engines.simulated.backend import SimulatedEngine
from hear.engines.simulated.tenants import Tenants, blocks_of, hash_of, owner_of
from hear.interfaces import Report
from hear.messages import DEFAULT_TENANT, BlocksStored
from tests.engines.builders import BLOCK, hashes_of, profile, request
from tests.engines.integrity import check_engine

HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=5)


@given(st.integers(0, 5), st.integers(0, 5), HASHES)
def test_a_block_is_of_one_tenant_and_has_the_hash_that_it_uses(
    one: int, other: int, hashes: list[int]
) -> None:
    blocks = blocks_of(one, hashes)
    assert [hash_of(block) for block in blocks] == hashes
    assert {owner_of(block) for block in blocks} <= {one}
    assert blocks_of(one, blocks) == blocks
    if one != other:
        assert set(blocks).isdisjoint(blocks_of(other, hashes))


def test_the_blocks_of_the_default_tenant_are_its_hashes_themselves() -> None:
    hashes = hashes_of("a", 3)
    assert blocks_of(0, hashes) is hashes
    assert Tenants().number(DEFAULT_TENANT) == 0


def test_tenants_have_numbers_of_their_own_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants_module, "MAX_TENANTS", 3)
    tenants = Tenants()
    assert tenants.known("a") is None
    assert [tenants.number(name) for name in ("a", "b", "a", "c", "b")] == [1, 2, 1, None, 2]
    assert [tenants.name(number) for number in range(3)] == [DEFAULT_TENANT, "a", "b"]


class Stand:
    """A running engine, and what it reports."""

    def __init__(self) -> None:
        self.engine = SimulatedEngine(profile(gpu=16, cpu=16), block_size=BLOCK)
        self.reports: list[Report] = []

    async def serve(self, id: str, tenant: str, context: str, **settings: int) -> dict[str, int]:
        made = request(id, context=context, tenant=tenant, **settings)
        result = await self.engine.generate(made)
        assert result.outcome.status == "completed"
        check_engine(self.engine)
        return {tier: tokens for tier, tokens in result.outcome.reused_tokens.items() if tokens}

    def told(self, tenant: str) -> list[int]:
        """The blocks that a tenant was told to be stored on the GPU, in order."""
        changes = [c for r in self.reports if r.tenant == tenant for c in r.blocks]
        stored = [c for c in changes if isinstance(c, BlocksStored) and c.tier == "gpu"]
        return [block for change in stored for block in unpack(change.prefix_hashes)]


async def test_equal_prompts_of_two_tenants_share_nothing(autojump_clock: MockClock) -> None:
    stand = Stand()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stand.engine.run, stand.reports.append)
        assert await stand.serve("r1", DEFAULT_TENANT, "c", num_blocks=3) == {}
        assert await stand.serve("r1", "acme", "c", num_blocks=3, output_tokens=40) == {}
        assert await stand.serve("r2", "acme", "c", num_blocks=3) == {"gpu": 3 * BLOCK}
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert stand.told(DEFAULT_TENANT) == hashes_of("c", 3)
    told = stand.told("acme")
    assert told[:3] == hashes_of("c", 3)
    assert len(told) == 5, "and what it wrote itself"
    resident = {c.tier: list(unpack(c.prefix_hashes)) for c in stand.engine.residency("acme")}
    assert resident["gpu"] == told
    assert list(stand.engine.residency("nobody")) == []


async def test_totals_of_the_queue_are_of_the_tenant_that_is_told(
    autojump_clock: MockClock,
) -> None:
    stand = Stand()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stand.engine.run, stand.reports.append)
        for number in range(6):  # four run at a time
            tenant = "acme" if number % 2 else DEFAULT_TENANT
            made = request(f"r{number}", tenant=tenant, output_tokens=50)
            nursery.start_soon(stand.engine.generate, made)
            await wait_all_tasks_blocked()  # trio starts them in any order
        await trio.sleep(0.3)
        assert stand.engine.pressure().num_running == 4
        assert stand.engine.pressure().num_waiting == 2
        for tenant in (DEFAULT_TENANT, "acme"):
            last = [r.queue for r in stand.reports if r.tenant == tenant and r.queue][-1]
            assert (last.num_waiting, last.num_running) == (1, 2)
            assert last.waiting_tokens == BLOCK + 1
            queue = stand.engine.queue(tenant)
            assert (len(queue.waiting), len(queue.running)) == (1, 2)
        nursery.cancel_scope.cancel()


async def test_a_tenant_too_many_is_rejected_and_told_why(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants_module, "MAX_TENANTS", 2)
    stand = Stand()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stand.engine.run, stand.reports.append)
        await stand.serve("r", "acme", "c")
        refused = await stand.engine.generate(request("r", tenant="umbra"))
        assert refused.outcome.reason.startswith("too_many_tenants")
        await trio.sleep(0.1)
        said = [r for r in stand.reports if r.tenant == "umbra"]
        assert [key.request for r in said for key, _ in r.requests] == ["r"]
        nursery.cancel_scope.cancel()
