"""The pool: where it sends requests, with routes and without, and that each route ends once."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from hear.buses.memory import MemoryBus
from hear.codec import open_body
from hear.delivery import Sequencer
from hear.errors import BusError, ConfigError, EngineError, UnservedError
from hear.harnesses.pool.dispatcher import ROUTE_WAIT_S, ROUTED_S, SETTLE_S, Dispatcher
from hear.interfaces import InferenceRequest, InferenceResult
from hear.messages import (
    DEFAULT_TENANT,
    Cancel,
    CapabilitiesReported,
    Control,
    Key,
    OperationOutcome,
    Prioritise,
    RequestOutcome,
    Route,
    Withdraw,
)
from hear.operation import TERMINAL


class Engine:
    """Takes a second for each request, and keeps what it was sent and when."""

    def __init__(self) -> None:
        self.sent: dict[str, float] = {}
        self.failure: EngineError | None = None

    async def generate(self, request: InferenceRequest) -> InferenceResult:
        now = self.sent[request.id] = trio.current_time()
        if self.failure is not None:
            raise self.failure
        await trio.sleep(1)
        return InferenceResult(RequestOutcome(status="completed"), now, now, now + 1, now + 1)


def request(id: str = "r", version: int | None = None) -> InferenceRequest:
    return InferenceRequest(
        id=id,
        prompt_tokens=10,
        output_tokens=1,
        prompt_hashes=(),
        context="c" if version is not None else None,
        context_version=version,
    )


class Pool:
    """A running pool of engines, the policies that speak to it, and all that it answers."""

    def __init__(self, **options: Any) -> None:
        self.bus = MemoryBus()
        self.engines = {name: Engine() for name in ("a", "b", "c")}
        self.dispatcher = Dispatcher(self.bus, self.engines, **options)
        self.answers: list[tuple[str, OperationOutcome]] = []
        self.targets: tuple[str, ...] = ()
        self._sources: dict[str, Sequencer] = {}
        self._tenant = DEFAULT_TENANT

    def send(self, control: Control, *, source: str = "policy", **key: Any) -> str:
        """Publish a control; returns its operation."""
        sequencer = self._sources.setdefault(source, Sequencer(source, tenant=self._tenant))
        operation = key.pop("operation", None) or sequencer.next_id()
        whole = Key(**{"engine": "pool", **key}, operation=operation)
        self.bus.publish(sequencer.wrap(control, whole, trio.current_time()))
        return str(operation)

    def speak_for(self, tenant: str) -> None:
        """Send what follows as a tenant."""
        self._tenant = tenant
        self._sources.clear()

    def route(self, *targets: str, request: str = "r", source: str = "policy", **key: Any) -> str:
        fields = {
            name: key.pop(name) for name in ("force", "fallback", "deadline_s") if name in key
        }
        return self.send(Route(targets=targets, **fields), source=source, request=request, **key)

    def outcomes(self, operation: str) -> list[tuple[str, str, str]]:
        """Status, reason and detail of each answer to an operation."""
        return [(o.status, o.reason, o.detail) for id, o in self.answers if id == operation]

    def end(self, operation: str) -> tuple[str, str, str]:
        """The one terminal answer to an operation."""
        [end] = [answer for answer in self.outcomes(operation) if answer[0] in TERMINAL]
        return end

    async def where(self, id: str = "r", version: int | None = None) -> str:
        """Serve a request; returns the engine that it went to."""
        told: list[str] = []
        await self.dispatcher.generate(request(id, version), on_routed=told.append)
        [at] = [name for name, engine in self.engines.items() if id in engine.sent]
        assert told == [at]
        return at

    async def listen(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with self.bus.subscribe(["outcome.>", "state.>"], name="test") as outcomes:
            task_status.started()
            with suppress(BusError):
                while True:
                    for envelope in await outcomes.receive():
                        outcome = open_body(envelope)
                        if isinstance(outcome, CapabilitiesReported):
                            self.targets = outcome.targets
                            continue
                        assert isinstance(outcome, OperationOutcome)
                        assert (envelope.source, envelope.key.engine) == ("pool", "pool")
                        self.answers.append((envelope.key.operation or "", outcome))


@asynccontextmanager
async def pool(**options: Any) -> AsyncIterator[Pool]:
    made = Pool(**options)
    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            await nursery.start(made.listen)
            await nursery.start(made.dispatcher.run)
            yield made
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()


ACCEPTED = ("accepted", "", "")


# -- without routes -----------------------------------------------------------------------------


async def test_without_a_bus_requests_go_to_the_engines_in_turn_and_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engines = {name: Engine() for name in "ab"}
    dispatcher = Dispatcher(None, engines)
    for id in ("1", "2", "3"):
        before = trio.current_time()
        result = await dispatcher.generate(request(id))
        assert result.sent_s == before
        assert trio.current_time() == before + 1
    assert [list(engine.sent) for engine in engines.values()] == [["1", "3"], ["2"]]
    with pytest.raises(BusError, match="pool: there is no bus"):
        await dispatcher.run()


async def test_where_no_policy_speaks_a_request_waits_its_time_and_goes_in_turn(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p:
        begun = trio.current_time()
        assert [await p.where(id) for id in ("1", "2", "3", "4")] == ["a", "b", "c", "a"]
        assert p.engines["a"].sent["1"] == pytest.approx(begun + ROUTE_WAIT_S)


async def test_when_the_bus_closes_requests_are_still_served_and_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p:
        assert await p.where("1") == "a"
        p.bus.close()
        await trio.testing.wait_all_tasks_blocked()
        before = trio.current_time()
        assert await p.where("2") == "b"
        assert p.engines["b"].sent["2"] == before


async def test_a_request_that_is_being_served_is_not_taken_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p, trio.open_nursery() as nursery:
        nursery.start_soon(p.where)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(EngineError, match="'r' is being served already"):
            await p.dispatcher.generate(request())


@pytest.mark.parametrize("engines", [{}, {"pool": Engine()}])
def test_a_pool_needs_engines_of_other_names(engines: dict[str, Engine]) -> None:
    with pytest.raises(ConfigError, match=r"pool 'pool' of .*: expected one engine or more"):
        Dispatcher(None, engines)


async def test_an_engine_that_fails_a_request_fails_it_for_the_client_and_no_other_gets_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p:
        p.engines["a"].failure = EngineError("broken")
        with pytest.raises(EngineError, match="broken"):
            await p.dispatcher.generate(request("1"))
        assert not p.engines["b"].sent
        assert await p.where("2") == "b"
        assert p.dispatcher.num_open == 0


# -- routes -------------------------------------------------------------------------------------


async def test_a_route_that_comes_while_the_request_is_held_is_carried_out(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p, trio.open_nursery() as nursery:
        begun = trio.current_time()
        nursery.start_soon(p.where)
        await trio.sleep(0.002)
        operation = p.route("b", "a")
        await trio.sleep(0.0005)
        assert p.outcomes(operation) == [ACCEPTED]  # it is not there yet
        await trio.sleep(0.001)
        assert p.outcomes(operation) == [ACCEPTED, ("completed", "", "b")]
        assert p.engines["b"].sent["r"] == pytest.approx(begun + 0.002 + SETTLE_S)


async def test_a_route_that_comes_before_its_request_is_kept_for_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p:
        operation = p.route("c")
        await trio.sleep(10)
        assert p.outcomes(operation) == [ACCEPTED]
        assert await p.where() == "c"
        assert p.end(operation) == ("completed", "", "c")


async def test_a_route_whose_request_does_not_come_fails_at_its_deadline(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p:
        operation = p.route("c", deadline_s=trio.current_time() + 5)
        await trio.sleep(6)
        assert p.end(operation)[:2] == ("failed", "deadline")
        assert await p.where() == "a"


async def test_a_route_after_the_request_has_gone_to_an_engine_is_rejected(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p, trio.open_nursery() as nursery:
        nursery.start_soon(p.where)
        await trio.sleep(0.5)
        first = p.route("c")
        await trio.testing.wait_all_tasks_blocked()
        assert p.outcomes(first) == [("rejected", "already_routed", "a")]
        await trio.sleep(1)
        after = p.route("c", source="other")
        await trio.testing.wait_all_tasks_blocked()
        assert p.end(after)[:2] == ("failed", "request_gone")


async def test_where_somebody_routes_a_request_waits_longer_for_its_route(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(p.where, "first")
            await trio.sleep(0.02)
            late = p.route("c", request="first")
        assert p.outcomes(late) == [("rejected", "already_routed", "a")]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(p.where, "second")
            await trio.sleep(0.02)
            in_time = p.route("c", request="second")
        assert p.end(in_time)[0] == "completed"
        assert "second" in p.engines["c"].sent
        await trio.sleep(ROUTED_S)
        begun = trio.current_time()
        await p.where("third")
        sent_s = next(each.sent["third"] for each in p.engines.values() if "third" in each.sent)
        assert sent_s == pytest.approx(begun + ROUTE_WAIT_S)


async def test_a_route_that_is_delivered_twice_acts_once_and_is_answered_the_same(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p:
        for _ in range(2):
            operation = p.route("b", operation="twice")
        assert await p.where() == "b"
        p.route("b", operation="twice")
        await trio.testing.wait_all_tasks_blocked()
        completed = ("completed", "", "b")
        assert p.outcomes(operation) == [ACCEPTED, ACCEPTED, completed, completed]


async def test_a_preference_for_an_unknown_engine_goes_to_its_next_target(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p:
        operation = p.route("nowhere", "c", "b")
        assert await p.where() == "c"
        assert p.end(operation) == ("completed", "", "c")


async def test_a_fallback_is_taken_where_no_target_is_there_and_is_named(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p:
        operation = p.route("nowhere", force="requirement", fallback=("not here", "b"))
        assert await p.where() == "b"
        [*_, (_, outcome)] = [answer for answer in p.answers if answer[0] == operation]
        assert (outcome.status, outcome.fallback) == ("completed", "b")


@pytest.mark.parametrize("force", ["preference", "requirement"])
async def test_a_route_to_none_that_is_there_is_rejected_and_the_request_is_served(
    autojump_clock: trio.testing.MockClock, force: str
) -> None:
    async with pool() as p, trio.open_nursery() as nursery:
        nursery.start_soon(p.where)
        await trio.testing.wait_all_tasks_blocked()
        operation = p.route("nowhere", "d", force=force)
        await trio.testing.wait_all_tasks_blocked()
        assert p.end(operation) == ("rejected", "unknown_engine", "expected a, b, c")
        await trio.sleep(0.01)
        assert "r" in p.engines["a"].sent


async def test_a_route_to_an_engine_that_leaves_meanwhile_fails_and_the_request_is_served(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p, trio.open_nursery() as nursery:
        nursery.start_soon(p.where)
        await trio.testing.wait_all_tasks_blocked()
        operation = p.route("c")
        await trio.testing.wait_all_tasks_blocked()
        del p.engines["c"]
        await trio.sleep(0.01)
        assert p.end(operation)[:2] == ("failed", "unknown_engine")
        assert "r" in p.engines["a"].sent


async def test_a_request_that_an_engine_cannot_have_served_goes_to_the_next_target(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p, trio.open_nursery() as nursery:
        p.engines["c"].failure = UnservedError("nobody listens there")
        told: list[str] = []
        generate = partial(p.dispatcher.generate, request(), on_routed=told.append)
        nursery.start_soon(generate)
        await trio.testing.wait_all_tasks_blocked()
        p.route("c", "b")
        await trio.sleep(1.5)
        assert told == ["c", "b"]
        assert "r" in p.engines["b"].sent
        assert p.dispatcher.unserved == {"c": 1}


async def test_an_engine_that_is_out_is_no_target_and_not_asked_for_a_while(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool(out_s=30.0) as p:
        p.engines["b"].failure = UnservedError("nobody listens there")
        for number in range(6):
            await p.dispatcher.generate(request(f"r{number}"))
        assert len(p.engines["b"].sent) == 1
        assert len(p.engines["a"].sent) + len(p.engines["c"].sent) == 6
        assert list(p.targets) == ["a", "c"]
        p.engines["b"].failure = None
        await trio.sleep(31)
        assert list(p.targets) == ["a", "b", "c"]
        for number in range(6, 9):
            await p.dispatcher.generate(request(f"r{number}"))
        assert len(p.engines["b"].sent) == 2


async def test_if_none_serves_a_request_each_was_asked_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p:
        for engine in p.engines.values():
            engine.failure = UnservedError("nobody listens there")
        with pytest.raises(UnservedError):
            await p.dispatcher.generate(request())
        assert [list(engine.sent) for engine in p.engines.values()] == [["r"]] * 3
        p.engines["c"].failure = None  # they are all out, and asked all the same
        for number in range(3):
            with suppress(UnservedError):
                await p.dispatcher.generate(request(f"again{number}"))
        assert any(name.startswith("again") for name in p.engines["c"].sent)


async def test_what_an_engine_refuses_as_such_is_not_sent_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p:
        p.engines["a"].failure = EngineError("malformed")
        with pytest.raises(EngineError, match="malformed"):
            await p.dispatcher.generate(request())
        assert [list(engine.sent) for engine in p.engines.values()] == [["r"], [], []]
        assert p.targets == ("a", "b", "c")


async def test_a_pool_whose_last_engine_has_left_says_so(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p:
        p.engines.clear()
        with pytest.raises(EngineError, match="pool has no engine left"):
            await p.dispatcher.generate(request())


async def test_a_stale_route_does_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with pool() as p:
        assert await p.where("c/2", version=2) == "a"
        stale = p.route("c", request="c/3", context="c", context_version=1)
        fresh = p.route("c", request="c/3", context="c", context_version=3)
        assert await p.where("c/3", version=3) == "c"
        assert p.end(stale)[:2] == ("rejected", "stale_version")
        assert p.end(fresh) == ("completed", "", "c")


async def test_routes_of_siblings_on_one_context_are_all_followed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p, trio.open_nursery() as nursery:
        routes = {}
        for version in range(2, 10):
            id, engine = f"c/{version}", "abc"[version % 3]
            nursery.start_soon(partial(p.where, id, version=version))
            routes[id] = engine, p.route(engine, request=id, context="c", context_version=version)
        await trio.sleep(1)
        for id, (engine, operation) in routes.items():
            assert p.end(operation) == ("completed", "", engine)
            assert id in p.engines[engine].sent


async def test_a_cancelled_route_has_no_effect(autojump_clock: trio.testing.MockClock) -> None:
    async with pool() as p, trio.open_nursery() as nursery:
        nursery.start_soon(p.where)
        await trio.testing.wait_all_tasks_blocked()
        route = p.route("c")
        cancel = p.send(Cancel(target=route))
        await trio.testing.wait_all_tasks_blocked()
        assert p.end(route) == ("failed", "cancelled", cancel)
        assert p.end(cancel) == ("completed", "", "")
        await trio.sleep(0.01)
        assert "r" in p.engines["a"].sent


async def test_a_policy_that_leaves_takes_its_routes_along(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p:
        route = p.route("c")
        withdraw = p.send(Withdraw())
        assert await p.where() == "a"
        assert p.end(route) == ("failed", "withdrawn", withdraw)
        assert p.end(withdraw) == ("completed", "", "")


async def test_a_request_that_is_cancelled_while_it_is_held_ends_its_route(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(p.where)
            await trio.testing.wait_all_tasks_blocked()
            operation = p.route("c")
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert p.end(operation)[:2] == ("failed", "request_gone")
        assert not any(engine.sent for engine in p.engines.values())
        assert await p.where() == "a"  # and its name is free again


@pytest.mark.parametrize("first", ["strong", "weak"])
async def test_of_two_policies_that_disagree_the_one_of_higher_rank_prevails_whoever_is_first(
    autojump_clock: trio.testing.MockClock, first: str
) -> None:
    async with pool(ranks={"strong": 2, "weak": 1}) as p, trio.open_nursery() as nursery:
        nursery.start_soon(p.where)
        await trio.testing.wait_all_tasks_blocked()
        operations = {}
        for source in (first, {"strong": "weak", "weak": "strong"}[first]):
            operations[source] = p.route({"strong": "b", "weak": "c"}[source], source=source)
            await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(0.01)
        assert "r" in p.engines["b"].sent
        assert p.end(operations["strong"]) == ("completed", "", "b")
        assert p.end(operations["weak"])[1:] == ("outranked", "strong")


async def test_a_requirement_prevails_over_a_preference_of_higher_rank(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool(ranks={"strong": 2, "weak": 1}) as p:
        prefers = p.route("b", source="strong")
        requires = p.route("c", source="weak", force="requirement")
        assert await p.where() == "c"
        assert p.end(requires) == ("completed", "", "c")
        assert p.end(prefers)[1:] == ("outranked", "weak")


async def test_what_a_pool_does_not_offer_is_unsupported(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool() as p:
        operation = p.send(Prioritise(priority=-1), request="r")
        await trio.testing.wait_all_tasks_blocked()
        assert p.end(operation)[:2] == ("unsupported", "unsupported_control")


async def test_what_is_open_when_a_pool_stops_fails() -> None:
    p = Pool()
    async with trio.open_nursery() as listening:
        await listening.start(p.listen)
        async with trio.open_nursery() as nursery:
            await nursery.start(p.dispatcher.run)
            operation = p.route("b")
            await trio.testing.wait_all_tasks_blocked()
            assert p.dispatcher.num_open == 1
            nursery.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        listening.cancel_scope.cancel()
    assert p.dispatcher.num_open == 0
    assert p.end(operation)[:2] == ("failed", "engine_stopped")


async def test_a_pool_says_which_engines_it_has_also_when_they_change() -> None:
    async with pool() as p, p.bus.subscribe(["state.>"], name="reader") as states:
        [first] = await states.receive()
        capabilities = CapabilitiesReported(controls=("route",), targets=("a", "b", "c"))
        assert open_body(first) == capabilities
        del p.engines["b"]
        p.dispatcher.announce()
        [second] = await states.receive()
        assert open_body(second) == CapabilitiesReported(controls=("route",), targets=("a", "c"))


# -- whatever comes, in whatever order ------------------------------------------------------------

ACTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("route"),
            st.sampled_from(["p", "q"]),
            st.sampled_from(["1", "2", "3"]),
            st.lists(st.sampled_from(["a", "b", "nowhere"]), max_size=2),
            st.sampled_from(["preference", "requirement"]),
        ),
        st.tuples(st.just("request"), st.sampled_from(["1", "2", "3"])),
        st.tuples(st.just("again"), st.integers(0, 10)),
        st.tuples(st.just("cancel"), st.sampled_from(["p", "q"]), st.integers(0, 10)),
        st.tuples(st.just("withdraw"), st.sampled_from(["p", "q"])),
        st.tuples(st.just("sleep"), st.sampled_from([0.0, 0.0005, 0.002, 0.01, 2.0])),
    ),
    max_size=25,
)


@given(acts=ACTS)
def test_each_operation_ends_exactly_once_and_each_request_is_served_once(
    acts: list[tuple[Any, ...]],
) -> None:
    async def main() -> None:
        async with pool(ranks={"p": 2, "q": 1}) as p:
            sent: list[Callable[[], str]] = []
            operations: list[str] = []
            asked: set[str] = set()
            async with trio.open_nursery() as nursery:
                for act in acts:
                    match act:
                        case ("route", source, request, targets, force):
                            id = f"op{len(operations)}"
                            operations.append(id)

                            def send(
                                id: str = id,
                                source: str = source,
                                request: str = request,
                                targets: list[str] = targets,
                                force: str = force,
                            ) -> str:
                                return p.route(
                                    *targets,
                                    request=request,
                                    source=source,
                                    force=force,
                                    operation=id,
                                )

                            sent.append(send)
                            send()
                        case ("again", number) if sent:
                            sent[number % len(sent)]()
                        case ("request", request) if request not in asked:
                            asked.add(request)
                            nursery.start_soon(p.where, request)
                        case ("cancel", source, number) if operations:
                            target = operations[number % len(operations)]
                            operations.append(p.send(Cancel(target=target), source=source))
                        case ("withdraw", source):
                            operations.append(p.send(Withdraw(), source=source))
                        case ("sleep", seconds):
                            await trio.sleep(seconds)
                        case _:
                            pass
            await trio.sleep(100)  # past every deadline
            assert p.dispatcher.num_open == 0
            for id in operations:
                assert len({end for end in p.outcomes(id) if end[0] in TERMINAL}) == 1
            served = [id for engine in p.engines.values() for id in engine.sent]
            assert sorted(served) == sorted(asked)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


# -- tenants ------------------------------------------------------------------------------------


async def test_a_pool_hears_the_routes_of_its_own_tenant_alone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pool(tenant="acme") as p:
        foreign = p.route("b", request="theirs")
        p.speak_for("acme")
        own = p.route("c", request="mine")
        where: dict[str, str] = {}
        for id in ("mine", "theirs"):
            made = replace(request(id), tenant="acme")
            await p.dispatcher.generate(made, on_routed=partial(where.__setitem__, id))
        assert where == {"mine": "c", "theirs": "a"}
        await trio.testing.wait_all_tasks_blocked()
        assert p.end(own) == ("completed", "", "c")
        assert p.outcomes(foreign) == []


async def test_a_request_of_another_tenant_is_not_sent_on() -> None:
    async with pool(tenant="acme") as p:
        with pytest.raises(EngineError, match="of tenant 'default', and this pool of 'acme'"):
            await p.where()
