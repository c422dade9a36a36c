"""The shipped checks for policies: ours pass, and each broken promise is found and named."""

import time
from collections.abc import Iterable
from typing import ClassVar

import pytest

from hear.engine_view import EngineViews
from hear.harness_view import HarnessView
from hear.interfaces import Ask
from hear.messages import (
    BoundWait,
    Key,
    Prioritise,
    QueueChanged,
    RequestDescribed,
    Retain,
    ReuseExpected,
)
from hear.policies.cache_aware import CacheAware
from hear.policies.guard import Guard
from hear.policies.routing import CacheAwareRouting, LeastLoaded, RoundRobin
from hear.policies.session_aware import SessionAware
from hear.policies.testing import CHECKS, Check, PolicyFactory, check_memory, check_policy


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "factory", [CacheAware, CacheAwareRouting, Guard, LeastLoaded, RoundRobin, SessionAware]
)
async def test_our_policies_keep_all_promises(factory: PolicyFactory, check: Check) -> None:
    await check(factory, 0)


class Quiet:
    """A policy that keeps all promises, for want of doing anything."""

    name = "quiet"
    observes: tuple[str, ...] = ("intent.default.>", "state.default.>")

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        return []


class Described(Quiet):
    """Asks something about each request that is described."""

    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        for key, message in h.changes:
            if isinstance(message, RequestDescribed) and key.request and key.engine:
                yield from self.ask(key, s)

    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        return []


async def test_a_policy_that_does_nothing_passes() -> None:
    await check_policy(Quiet)


class Nameless(Quiet):
    name = ""


class NoPatterns(Quiet):
    observes: tuple[str, ...] = ("state..residency",)


class Cyclic(Quiet):
    """Not a new one each time, and so not a factory."""

    only: ClassVar["Cyclic | None"] = None

    def __new__(cls) -> "Cyclic":
        if cls.only is None:
            cls.only = super().__new__(cls)
        return cls.only


class TakesForGranted(Quiet):
    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        s["engine0"]
        return []


class AsksTooEarly(Quiet):
    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        return [Ask(Prioritise(priority=1), Key(request="r", engine="engine0"))]


class NoEngine(Described):
    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        yield Ask(Prioritise(priority=1), Key(request=key.request))


class AnotherEngine(Described):
    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        yield Ask(Prioritise(priority=1), Key(request=key.request, engine="engine7"))


class NoRequest(Described):
    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        yield Ask(BoundWait(max_wait_s=1), Key(engine=key.engine))


class NoContext(Described):
    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        yield Ask(Retain(lease_s=1), Key(request=key.request, engine=key.engine))


class Certain(Described):
    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        yield Ask(ReuseExpected(basis="known"), key)


class PlaysEngine(Described):
    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        yield Ask(QueueChanged(), key)  # type: ignore[arg-type]


class Unreadable(Described):
    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        yield Ask(Prioritise(priority="first"), key)  # type: ignore[arg-type]


class Unsendable(Described):
    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        yield Ask(Prioritise(priority=object()), key)  # type: ignore[arg-type]


class Nonsense(Described):
    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        yield "prioritise it"  # type: ignore[misc]


class TrustsResidency(Quiet):
    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        assert all(view.residency_known for view in s.values() if not view.targets)
        return []


class TrustsEpoch(Quiet):
    def decide(self, h: HarnessView, s: EngineViews) -> Iterable[Ask]:
        assert all(view.epoch == 1 for view in s.values())
        return []


class TrustsOrder(Described):
    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        assert key.engine is not None
        assert key.request not in s[key.engine].waiting
        return []


class Sleeps(Described):
    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        time.sleep(1000)
        return []


class Hoards(Described):
    def __init__(self) -> None:
        self.seen: set[str | None] = set()

    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        self.seen.add(key.request)
        return []


class WatchesOn(Described):
    """What it leaves behind is not in the policy, but in the directory that it watches."""

    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        assert key.request is not None
        for view in s.values():
            view.residency.watch(key.request, [1])
        return []


class Remembers(Hoards):
    """The last thousand requests, and no more."""

    def __init__(self) -> None:
        self.last: list[str | None] = []

    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        if self.last[-1:] != [key.request]:  # it is described twice: for its pool and its engine
            self.last = [*self.last[-999:], key.request]
        return []


class Whimsical(Described):
    made = 0

    def __init__(self) -> None:
        Whimsical.made += 1
        self.whim = Whimsical.made

    def ask(self, key: Key, s: EngineViews) -> Iterable[Ask]:
        yield Ask(Prioritise(priority=self.whim), key)


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (Nameless, "name is ''"),
        (NoPatterns, "observes: subject pattern"),
        (Cyclic, "makes a new one each time"),
        (TakesForGranted, "empty views: decide raised KeyError"),
        (AsksTooEarly, "empty views: asks nothing"),
        (NoEngine, "asks: asked for Prioritise without an engine in the key"),
        (AnotherEngine, "names an engine that is there: engine7"),
        (NoRequest, "bound_wait names its request"),
        (NoContext, "retain names its context"),
        (Certain, "said of reuse that it is known, expected predicted"),
        (PlaysEngine, "asked for QueueChanged, expected a control or a prediction"),
        (Unreadable, "not a readable prioritise"),
        (Unsendable, "body cannot be encoded"),
        (Nonsense, "asked for 'prioritise it', expected an Ask"),
        (TrustsResidency, "after a gap: decide raised AssertionError"),
        (TrustsEpoch, "after a restart: decide raised AssertionError"),
        (TrustsOrder, "decide raised AssertionError"),
        (Hoards, "holds nothing that grows"),
        (WatchesOn, "holds nothing that grows"),
        (Remembers, "holds nothing that grows"),
        (Whimsical, "asks the same when it hears the same"),
    ],
)
async def test_a_broken_promise_is_named(factory: PolicyFactory, says: str) -> None:
    with pytest.raises(AssertionError, match="broken promise of the policy") as caught:
        await check_policy(factory)
    assert says in str(caught.value)


async def test_a_decision_that_does_not_return_is_a_broken_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hear.policies.fake_cluster.TIMEOUT_S", 0.1)
    with pytest.raises(AssertionError, match="decide does not return"):
        await check_policy(Sleeps)


async def test_who_remembers_with_a_bound_can_say_how_much() -> None:
    await check_memory(Remembers, 500)
