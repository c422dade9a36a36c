"""What KV events add up to: copies counted, and every block with its tenant; against a model."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hear.blocks import pack, unpack
from hear.engines.vllm import identity
from hear.engines.vllm.holdings import (
    REMEMBER,
    Cleared,
    Event,
    Holdings,
    Removed,
    Stored,
    salts_among,
)
from hear.engines.vllm.identity import Tenants, salt_of
from hear.messages import DEFAULT_TENANT, BlocksCleared, BlocksRemoved, BlocksStored

TENANTS = (DEFAULT_TENANT, "acme", "umbra")
ACME, UMBRA = (salt_of(tenant, None) or "" for tenant in TENANTS[1:])
GPU, CPU = "gpu", "cpu"


def held(holdings: Holdings, tenant: str = DEFAULT_TENANT) -> dict[tuple[str, int], int | None]:
    found: dict[tuple[str, int], int | None] = {}
    for chain in holdings.chains(tenant):
        parent = chain.parent
        for block in unpack(chain.prefix_hashes):
            assert (chain.tier, block) not in found
            found[chain.tier, block] = parent
            parent = block
    return found


def test_fields_of_a_request_that_say_nothing_are_told() -> None:
    good = {"hear_request": "r", "hear_context": "c", "hear_version": 1, "hear_tenant": "acme"}
    assert (
        identity.unusable(good) == identity.unusable({"other": 4}) == identity.unusable(None) == []
    )
    for bad in ("", -4, ["a"], "t" * 257, "\ud800", None):
        args = dict.fromkeys(good, bad)
        assert set(identity.unusable(args)) == set(good)
        assert identity.tenant_of(args) == DEFAULT_TENANT


def hash_of(tenant: str, index: int) -> int:
    """Of the prompt of a tenant, whose first block is 0."""
    return 100 * (1 + TENANTS.index(tenant)) + index


@given(st.data())
def test_what_is_told_and_what_is_held_are_what_the_engine_has(data: st.DataObject) -> None:
    """An engine stores, copies, gives up and clears; readers who hear the changes agree with it."""
    holdings = Holdings(Tenants(TENANTS))
    engine: Counter[tuple[str, str, int]] = Counter()
    readers: dict[str, set[tuple[str, int]]] = {tenant: set() for tenant in TENANTS}
    for _ in range(data.draw(st.integers(1, 25))):
        tenant = data.draw(st.sampled_from(TENANTS))
        tier = data.draw(st.sampled_from((GPU, CPU)))
        index = data.draw(st.integers(0, 3))
        block = hash_of(tenant, index)
        before = None if index == 0 else hash_of(tenant, index - 1)
        first = engine[tenant, tier, block] == 0
        if tier == CPU:  # what is there was in the first tier before
            possible = engine[tenant, GPU, block] > 0
        else:
            possible = index == 0 or engine[tenant, GPU, before or 0] > 0
        event: Event
        what = data.draw(st.sampled_from(("store", "store", "remove", "clear")))
        if what == "store" and possible and (first or index):
            salt = salt_of(tenant, data.draw(st.sampled_from((None, "mine"))))
            event = Stored(tier, [block], before, [salt] if salt and index == 0 else ())
            engine[tenant, tier, block] += 1
        elif what == "remove" and not first:
            event = Removed(tier, [block])
            engine[tenant, tier, block] -= 1
        else:
            event = Cleared(tier)
            engine = Counter({key: n for key, n in engine.items() if key[1] != tier})
        for owner, changes in holdings.take([event]).items():
            for change in changes:
                if isinstance(change, BlocksStored):
                    readers[owner] |= {(change.tier, b) for b in unpack(change.prefix_hashes)}
                elif isinstance(change, BlocksRemoved):
                    readers[owner] -= {(change.tier, b) for b in unpack(change.prefix_hashes)}
                else:
                    readers[owner] = {at for at in readers[owner] if at[0] != change.tier}
        for owner in TENANTS:
            has = {(t, b) for (of, t, b), copies in engine.items() if of == owner and copies}
            assert set(held(holdings, owner)) == has
            assert readers[owner] == has
        for each in (GPU, CPU):
            assert holdings.count(each) == sum(
                1 for (_, t, _), n in engine.items() if n and t == each
            )


def test_a_chain_is_told_as_it_is_stored() -> None:
    told = Holdings(Tenants()).take([Stored(GPU, [1, 2]), Stored(GPU, [3], 2)])
    assert told[DEFAULT_TENANT] == [
        BlocksStored(tier=GPU, prefix_hashes=pack([1, 2])),
        BlocksStored(tier=GPU, parent=2, prefix_hashes=pack([3])),
    ]


def test_a_block_comes_with_its_first_copy_and_goes_with_its_last() -> None:
    holdings = Holdings(Tenants())
    holdings.take([Stored(GPU, [1, 2])])
    assert holdings.take([Stored(GPU, [2], 1), Removed(GPU, [2])]) == {}
    assert held(holdings) == {(GPU, 1): None, (GPU, 2): 1}
    assert list(holdings.take([Removed(GPU, [2])])) == [DEFAULT_TENANT]
    assert held(holdings) == {(GPU, 1): None}


def test_what_is_told_again_of_reused_blocks_is_no_copy() -> None:
    holdings = Holdings(Tenants())
    holdings.take([Stored(GPU, [1, 2]), Stored(GPU, [1, 2]), Removed(GPU, [2, 1])])
    assert held(holdings) == {}


def test_what_was_never_stored_is_not_given_up() -> None:
    holdings = Holdings(Tenants())
    assert holdings.take([Removed(GPU, [1]), Cleared(GPU)]) == {}


def test_a_slower_tier_that_names_no_parents_has_those_of_the_first() -> None:
    holdings = Holdings(Tenants(["acme"]))
    holdings.take([Stored(GPU, [1, 2], None, [ACME]), Removed(GPU, [1, 2])])
    holdings.take([Stored(CPU, [2])])
    assert held(holdings, "acme") == {(CPU, 2): 1}


def test_origins_of_what_has_gone_are_bounded() -> None:
    holdings = Holdings(Tenants(["acme"]))
    blocks = range(1, REMEMBER + 2)
    holdings.take([Stored(GPU, blocks, None, [ACME]), Removed(GPU, blocks)])
    holdings.take([Stored(CPU, [1]), Stored(CPU, [2])])
    assert held(holdings, "acme") == {(CPU, 2): 1}
    assert not held(holdings)


def test_a_tier_that_is_cleared_is_told_to_those_who_had_something_there() -> None:
    holdings = Holdings(Tenants(["acme", "umbra"]))
    holdings.take(
        [
            Stored(GPU, [1], None, [ACME]),
            Stored(CPU, [2], None, [UMBRA]),
        ]
    )
    assert holdings.take([Cleared(GPU)]) == {"acme": [BlocksCleared(tier=GPU)]}


def test_a_salt_of_nobody_is_one_of_the_default_tenants_clients() -> None:
    tenants = Tenants(["acme"])
    assert tenants.of_salts([]) == DEFAULT_TENANT
    assert tenants.of_salts(["somebody"]) == DEFAULT_TENANT
    assert tenants.of_salts(["acme"]) == DEFAULT_TENANT
    own, more = salt_of("acme", None), salt_of("acme", "mine")
    assert own is not None
    assert more is not None
    assert tenants.of_salts([own]) == tenants.of_salts([more]) == "acme"
    assert tenants.of_salts(["an adapter", own]) == "acme"


def test_no_tenant_has_the_salt_of_another_whatever_it_asks_for() -> None:
    asked = (None, "", "mine", "acme", salt_of("acme", None), salt_of("acme", "mine"))
    names = (DEFAULT_TENANT, "acme", "acme:", "acme\nmine", "4:acme", "umbra")
    salts = {(name, salt_of(name, salt) or "") for name in names for salt in asked}
    assert len({salt for _, salt in salts}) == len(salts)


def test_where_tenants_are_too_many_what_is_salted_for_a_further_one_is_nobodys() -> None:
    tenants = Tenants(f"t{number}" for number in range(identity.MAX_TENANTS + 1))
    first, further = salt_of("t0", None), salt_of(f"t{identity.MAX_TENANTS}", None)
    assert first is not None
    assert further is not None
    assert tenants.of_salts([first]) == "t0"
    assert tenants.of_salts([further]) is None
    holdings = Holdings(tenants)
    assert holdings.take([Stored(GPU, [1], None, [further])]) == {}


def test_an_adapters_name_is_no_salt() -> None:
    assert salts_among([("adapter", "acme"), None], "adapter") == ["acme"]
    assert salts_among([("adapter", ("picture", 0))], "adapter") == []
    assert salts_among([None]) == salts_among([]) == []
