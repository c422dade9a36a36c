"""The simulated engine, in several set-ups, against the rules that every engine has to keep."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import structlog
from msgspec import structs
from trio.testing import MockClock

from hear.engines.simulated.backend import SimulatedEngine
from hear.engines.testing import RULES, EngineFactory, EngineUnderTest, check_engine, check_rule
from hear.interfaces import ApplyResult, Report
from hear.messages import (
    DEFAULT_TENANT,
    BlocksStored,
    Cancel,
    CapabilitiesReported,
    QueueSnapshot,
    Withdraw,
)
from hear.operation import Operation
from tests.engines.builders import BLOCK, SETUPS, make_request, profile
from tests.engines.mutants import MUTANTS


@pytest.mark.parametrize("id", RULES)
@pytest.mark.parametrize("setup", SETUPS)
async def test_the_simulated_engine_keeps_the_rule(
    setup: str, id: str, autojump_clock: MockClock
) -> None:
    with structlog.testing.capture_logs():
        result = await check_rule(id, SETUPS[setup])
    in_order = setup == "fcfs" and "prioritise" in RULES[id].needs
    assert result == ("unsupported" if in_order else "kept")


# -- an engine that can do next to nothing --------------------------------------------------------


class Attached(SimulatedEngine):
    """An engine that is served from outside: it takes no controls, and shows nothing of itself."""

    def capabilities(self) -> CapabilitiesReported:
        return CapabilitiesReported(block_size=self.block_size, model="tiny")

    def queue(self, tenant: str = DEFAULT_TENANT) -> QueueSnapshot:
        return QueueSnapshot()

    def residency(self, tenant: str = DEFAULT_TENANT) -> Iterable[BlocksStored]:
        return ()

    async def run(self, report: Callable[[Report], None]) -> None:
        await super().run(lambda made: report(replace(made, blocks=[], queue=None)))

    def apply(self, operation: Operation) -> ApplyResult:
        if isinstance(operation.control, Cancel | Withdraw):
            return ApplyResult("completed")
        raise AssertionError("a control that was not claimed came through")


@asynccontextmanager
async def attached() -> AsyncIterator[EngineUnderTest]:
    engine = Attached(profile(gpu=32, seqs=1), block_size=BLOCK, name="e0")
    yield EngineUnderTest(
        name="e0",
        backend=engine,
        client=engine,
        make_request=make_request,
        long_output_tokens=300,
        quiet_s=0.1,
        shows=frozenset(),
    )


@pytest.mark.parametrize("id", RULES)
async def test_an_engine_without_controls_can_be_put_through_all_rules(
    id: str, autojump_clock: MockClock
) -> None:
    rule = RULES[id]
    result = await check_rule(id, attached)
    if rule.needs:
        assert result == "unsupported"
    else:
        assert result == ("cannot be checked" if rule.crashes or rule.looks_at else "kept")


class SubmitOnly(SimulatedEngine):
    """An engine that takes a priority along with a request, and never after."""

    def capabilities(self) -> CapabilitiesReported:
        told = super().capabilities()
        controls = tuple(kind for kind in told.controls if kind != "prioritise")
        return structs.replace(told, controls=controls, at_submission=("prioritise",))


@asynccontextmanager
async def submit_only() -> AsyncIterator[EngineUnderTest]:
    async with SETUPS["one tier"]() as engine:
        made = SubmitOnly(profile(gpu=32, seqs=1), block_size=BLOCK, name="e0")
        yield replace(engine, backend=made, client=made, crash=made.crash, check=lambda: None)


@pytest.mark.parametrize("id", RULES)
async def test_an_engine_that_takes_priorities_with_requests_keeps_the_rule(
    id: str, autojump_clock: MockClock
) -> None:
    with structlog.testing.capture_logs():
        result = await check_rule(id, submit_only)
    assert result == ("unsupported" if "prioritise" in RULES[id].needs else "kept")


async def test_all_rules_can_be_checked_in_one_call(autojump_clock: MockClock) -> None:
    results = await check_engine(attached)
    assert list(results) == list(RULES)
    assert set(results.values()) == {"kept", "unsupported", "cannot be checked"}


async def test_what_cannot_crash_is_not_said_to_survive_it(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def sturdy() -> AsyncIterator[EngineUnderTest]:
        async with SETUPS["inclusive"]() as engine:
            yield replace(engine, crash=None)

    assert await check_rule("HEAR-LIFE-8", sturdy) == "cannot be checked"
    assert await check_rule("HEAR-LIFE-7", sturdy) == "kept"


# -- engines that break the rules -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("mutant", "id"), [(name, id) for name, (_, ids) in MUTANTS.items() for id in ids]
)
async def test_a_broken_engine_is_found_out(
    mutant: str, id: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    factory: EngineFactory = SETUPS["inclusive"]
    MUTANTS[mutant][0](monkeypatch)
    with structlog.testing.capture_logs(), pytest.raises(Exception) as caught:  # noqa: PT011
        await check_rule(id, factory)
    if isinstance(caught.value, AssertionError):  # and not that the worker died of it
        assert str(caught.value).startswith(f"{id} ({RULES[id].title}): ")


def test_there_is_a_mutant_for_every_rule() -> None:
    found_out = {id for _, ids in MUTANTS.values() for id in ids}
    assert found_out == set(RULES)


def test_ids_say_what_they_are_about_and_count_from_one() -> None:
    numbers: dict[str, list[int]] = {}
    for id, rule in RULES.items():
        prefix, topic, number = id.split("-")
        assert prefix == "HEAR"
        assert rule.title[0].isupper()
        assert rule.source
        numbers.setdefault(topic, []).append(int(number))
    assert all(found == list(range(1, len(found) + 1)) for found in numbers.values())
