"""Naming policies: what a text stands for, and what is said of one that stands for nothing."""

from collections.abc import Iterable

import pytest

from hear.engine_view import EngineViews
from hear.errors import ConfigError, PluginError
from hear.harness_view import HarnessView
from hear.interfaces import Ask
from hear.policies.guard import Guard
from hear.policies.runtime.spec import parse


class Bare:
    """A policy of one's own."""

    name: str = "bare"
    observes: tuple[str, ...] = ("intent.>",)

    def __init__(self, number: float = 0.0) -> None:
        self.number = number

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        return []


class Nameless(Bare):
    name = ""


class OneText(Bare):
    observes = "intent.>"  # type: ignore[assignment]


class NoPattern(Bare):
    observes: tuple[str, ...] = ("intent..x",)


class NotTexts(Bare):
    observes: tuple[str, ...] = (1,)  # type: ignore[assignment]


class Undecided(Bare):
    decide = None  # type: ignore[assignment]


class Refuses(Bare):
    def __init__(self) -> None:
        raise RuntimeError("not today")


def names(text: str) -> list[str]:
    return [policy.name for policy in parse(text).make()]


def test_fcfs_is_no_policy() -> None:
    assert parse("fcfs").make() == []


def test_names_are_joined_by_plus_and_take_numbers() -> None:
    assert names("cache-aware") == ["cache-aware"]
    assert names("cache-aware+guard:60+session-aware") == [
        "cache-aware",
        "guard:60",
        "session-aware",
    ]


def test_each_run_has_policies_of_its_own() -> None:
    spec = parse("guard:2.5")
    [one], [other] = spec.make(), spec.make()
    assert isinstance(one, Guard)
    assert one is not other


def test_a_policy_of_ones_own_is_named_by_its_module_and_class() -> None:
    [policy] = parse(f"{__name__}:Bare").make()
    assert isinstance(policy, Bare)
    [policy] = parse(f"{__name__}:Bare:7").make()
    assert isinstance(policy, Bare)
    assert policy.number == 7


def test_a_module_needs_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with open(f"{tmp_path}/my_policy.py", "w") as file:
        file.write(f"from {__name__} import Bare as Mine\n")
    assert names("my_policy:Mine+guard:40") == ["bare", "guard:40"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cache-awre", "no policy named 'cache-awre': did you mean 'cache-aware'?"),
        ("gard:40", "no policy named 'gard': did you mean 'guard'?"),
        ("guard:abc", "policy 'guard:abc': 'abc', expected a number"),
        ("guard:", "policy 'guard:': '', expected a number"),
        ("guard:-1", "policy 'guard:-1': guard: W is -1.0 s, expected a positive number"),
        ("guard:nan", "policy 'guard:nan': guard: W is nan s"),
        ("guard:1:2", "policy 'guard:1:2' cannot be made: "),
        ("cache-aware:5", "policy 'cache-aware:5': cache-aware: hot share 5.0"),
        ("", "policy '': an empty name"),
        ("guard++guard:2", "an empty name"),
        (":40", "an empty name"),
        ("guard+guard:40", "names the same policy twice"),
        ("guard+fcfs", "fcfs is no policy, so it stands alone"),
        ("fcfs:3", "fcfs is no policy, so it stands alone"),
        ("no.such:Thing", "no.such:Thing cannot be loaded: "),
        ("nosuch:Thing", "nosuch:Thing cannot be loaded: "),
        (f"{__name__}:Missing", f"{__name__}:Missing cannot be loaded: "),
        (f"{__name__}:Refuses", f"policy '{__name__}:Refuses' cannot be made: not today"),
        (f"{__name__}:names", f"policy '{__name__}:names' cannot be made: "),
        (f"{__name__}:Nameless", "name is '', expected a text"),
        (f"{__name__}:OneText", "observes is 'intent.>', expected subject patterns"),
        (f"{__name__}:NotTexts", "observes holds 1, expected subject patterns"),
        (f"{__name__}:NoPattern", "observes: subject pattern 'intent..x'"),
        (f"{__name__}:Undecided", "it has no method decide"),
    ],
)
def test_a_text_that_names_no_policy_is_told_why(text: str, says: str) -> None:
    with pytest.raises((ConfigError, PluginError)) as caught:
        parse(text)
    assert says in str(caught.value)
