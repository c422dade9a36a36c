"""What contexts begin with in common."""

from hypothesis import given
from hypothesis import strategies as st

from hear.engines.kv.shared_prefixes import SharedPrefixes


def test_a_context_alone_shares_nothing() -> None:
    prefixes = SharedPrefixes[str]()
    prefixes.put("a", [1, 2, 3])
    assert prefixes.shared("a", [1, 2, 3]) == 0
    assert prefixes.shared("b", [1, 2, 9]) == 2
    prefixes.drop("a")
    prefixes.drop("a")
    assert prefixes.shared("b", [1, 2, 9]) == 0
    assert len(prefixes) == 0


def prefix(path: tuple[int, ...]) -> list[int]:
    """Chained blocks: each stands for itself and all before it."""
    return [hash(path[: end + 1]) for end in range(len(path))]


PATHS = st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), min_size=1, max_size=8)


@given(PATHS, st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=12))
def test_it_is_the_longest_common_prefix_with_any_other(
    paths: list[tuple[int, ...]], steps: list[tuple[int, bool]]
) -> None:
    prefixes, model = SharedPrefixes[int](), dict[int, list[int]]()
    for context, path in enumerate(paths):
        prefixes.put(context, prefix(path))
        model[context] = prefix(path)
    for context, dropped in steps:
        blocks = prefix(paths[(context + 1) % len(paths)])
        if dropped:
            prefixes.drop(context)
            model.pop(context, None)
        else:
            prefixes.put(context, blocks)
            model[context] = blocks
    for context, path in enumerate(paths):
        own = prefix(path)
        common = [
            sum(a == b for a, b in zip(own, other, strict=False))
            for name, other in model.items()
            if name != context
        ]
        assert prefixes.shared(context, own) == max(common, default=0)
