"""Tables of what strangers name: bounded in entries, in bytes and by silence."""

from hypothesis import given
from hypothesis import strategies as st

from hear.kept import Kept


def test_what_was_heard_of_longest_ago_goes_first() -> None:
    kept: Kept[int] = Kept(max_entries=2)
    assert kept.keep("a", 1, 0.0) == []
    assert kept.keep("b", 2, 1.0) == []
    kept.hear_of("a", 2.0)
    kept.hear_of("never kept", 2.0)
    assert kept.keep("c", 3, 3.0) == [2]
    assert dict(kept) == {"a": 1, "c": 3}


def test_bytes_are_a_bound_of_their_own() -> None:
    kept: Kept[str] = Kept(max_entries=100, max_bytes=100)
    for name in "abc":
        assert kept.keep(name, name, 0.0, size_bytes=29) == []
    assert kept.keep("d", "d", 0.0, size_bytes=29) == ["a"]
    assert kept.keep("d", "D", 0.0, size_bytes=9) == []  # in the place of what it was
    assert (list(kept), kept.size_bytes) == (["b", "c", "d"], 70)


def test_what_is_larger_than_the_table_goes_itself_and_takes_all_with_it() -> None:
    kept: Kept[str] = Kept(max_entries=100, max_bytes=100)
    kept.keep("a", "a", 0.0)
    assert kept.keep("b", "b", 0.0, size_bytes=100) == ["a", "b"]
    assert (len(kept), kept.size_bytes) == (0, 0)


def test_long_ids_count() -> None:
    kept: Kept[None] = Kept(max_entries=100, max_bytes=1_000)
    for number in range(10):
        kept.keep(f"{number}" * 400, None, 0.0)
    assert len(kept) == 2


def test_silence_is_judged_of_each_by_its_value() -> None:
    kept: Kept[float] = Kept(max_entries=100)
    kept.keep("short", 10.0, 0.0)
    kept.keep("long", 100.0, 0.0)
    kept.keep("fresh", 10.0, 15.0)
    assert kept.forget_silent(20.0, lambda patience_s: patience_s) == [10.0]
    assert list(kept) == ["long", "fresh"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["keep", "drop", "hear", "forget"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_the_bytes_are_those_of_what_is_kept(acts: list[tuple[str, int]]) -> None:
    kept: Kept[int] = Kept(max_entries=5, max_bytes=60)
    for now, (act, number) in enumerate(acts):
        name = f"n{number}"
        match act:
            case "keep":
                kept.keep(name, 3 * number, now, size_bytes=3 * number)
            case "drop":
                kept.drop(name)
            case "hear":
                kept.hear_of(name, now)
            case _:
                kept.forget_silent(now, lambda _: 6.0)
        assert kept.size_bytes == sum(value + 2 for value in kept.values()) <= 60
        assert len(kept) <= 5
    assert kept.get("nobody", 7) == 7
    assert "n1" not in kept or kept["n1"] == 3
