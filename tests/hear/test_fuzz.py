"""Nothing that a stranger sends may do more than be refused; and the fuzzer finds what does."""

import itertools
import os
import time
from pathlib import Path
from random import Random

import msgspec
import pytest

from benchmarks import fuzz, fuzz_inputs, fuzz_workers
from benchmarks.fuzz_targets import TARGETS, Target
from benchmarks.fuzz_workers import BATCH, Limits, inputs_of, read_all, reduced, replay, schedule
from hear import codec
from hear.blocks import pack
from hear.delivery import Arrival, GapDetector, Sequencer
from hear.engine_operations import EngineOperations
from hear.engine_view import MAX_REQUESTS, EngineViews, StateRefusedError
from hear.errors import HearError, LocalProtocolError
from hear.harness_view import MAX_GAPS, HarnessView
from hear.interfaces import ApplyResult
from hear.messages import (
    BlockChange,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Cancel,
    Key,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
    RequestDescribed,
    RequestOutcome,
    ResidencyChanged,
    ResidencySnapshot,
    WaitingRequest,
)
from hear.residency import ResidencyDirectory
from hear.subjects import token


def test_twenty_seconds_of_hostile_bytes_do_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    arguments = ["--seconds", "20", "--seed", "7", "--out", str(tmp_path), "--json", str(path)]
    assert fuzz.main(arguments) == 0
    report = msgspec.json.decode(path.read_bytes(), type=fuzz.Report)
    assert report.targets == list(TARGETS)
    assert report.failures == []
    assert report.inputs > 10_000
    assert 0.1 < report.refused / report.inputs < 0.9  # else the inputs are all good, or all noise
    assert report.peak_mib < 500


@pytest.mark.parametrize("name", TARGETS)
def test_the_same_seed_gives_the_same_inputs_and_another_gives_others(name: str) -> None:
    first, again, other = (list(inputs_of(name, seed, 3)) for seed in (1, 1, 2))
    assert first == again
    assert len(first) == BATCH
    assert first != other


def test_every_kind_of_message_gets_through_to_its_reader() -> None:
    heard = set()
    rng = Random(1)
    for _ in range(5_000):
        try:
            envelope = codec.decode(fuzz_inputs.message(rng))
            message = codec.open_body(envelope)
        except HearError:
            continue
        if message is not None:
            heard.add(envelope.kind)
    assert heard == set(codec.KINDS)


def test_batches_are_shared_out_by_weight() -> None:
    order = schedule(list(TARGETS))
    assert {name: order.count(name) for name in TARGETS} == {
        name: target.weight for name, target in TARGETS.items()
    }


# -- the fuzzer finds what is there to find -------------------------------------------------------


def _counts_to_three() -> object:
    numbers = itertools.count(1)

    def read(data: bytes) -> None:
        if b"bad" in data:
            raise KeyError("bad")
        if data == b"slow":
            end = time.process_time() + 0.2
            while time.process_time() < end:
                pass
        if data == b"count" and next(numbers) == 3:
            raise IndexError("three")
        raise LocalProtocolError("refused")

    return read


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(
        TARGETS,
        "planted",
        Target(_counts_to_three, lambda rng: b""),  # type: ignore[arg-type]
    )
    # In this process: another one would not know of the target.
    monkeypatch.setattr(fuzz_workers, "replay", read_all)
    return "planted"


def test_an_input_that_fails_alone_is_reported_alone(planted: str) -> None:
    few, error = reduced(planted, [b"count", b"x", b"a bad one"], Limits())
    assert few == (b"a bad one",)
    assert error is not None
    assert error.startswith("KeyError: 'bad' at test_fuzz.py:")


def test_what_needs_others_before_it_keeps_only_those(planted: str) -> None:
    inputs = [b"noise"] * 20 + [b"count"] + [b"noise"] * 9 + [b"count"] + [b"noise", b"count"]
    few, error = reduced(planted, inputs, Limits(), tries=200)
    assert few == (b"count",) * 3
    assert error is not None
    assert error.startswith("IndexError")


def test_an_input_that_takes_too_long_is_found_again_by_the_processors_time(planted: str) -> None:
    few, error = reduced(planted, [b"x", b"slow"], Limits(input_s=0.1))
    assert few == (b"slow",)
    assert error == "hang: 0.2 s of the processor's time"
    assert reduced(planted, [b"x", b"slow"], Limits(input_s=5.0))[1] is None


def test_what_does_not_fail_again_is_no_finding(planted: str) -> None:
    assert reduced(planted, [b"count", b"noise"], Limits())[1] is None


def test_a_failure_is_saved_and_can_be_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = fuzz_workers.Failure("subjects", 0, 1, "was: X", (b"a", b"\xff"))
    path = fuzz.save(failure, tmp_path / "new")
    assert fuzz.main(["--replay", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "2 inputs" in shown
    assert "was: X" in shown
    assert "no failure" in shown
    path.write_bytes(b"something else")
    assert fuzz.main(["--replay", str(path)]) == 2


def _starts(slot: fuzz_workers.Slot, batches: range) -> None:
    """Take longer to start than an input may; the second time, there is nothing more to do."""
    time.sleep(0.5)
    if batches.start > 0:
        os._exit(0)
    slot.raw[0] = batches.start


def _crash(
    slot: fuzz_workers.Slot, found: object, names: object, seed: int, batches: range, *rest: object
) -> None:
    _starts(slot, batches)
    slot.raw[1] = 5
    os._exit(9)


def _hang(
    slot: fuzz_workers.Slot, found: object, names: object, seed: int, batches: range, *rest: object
) -> None:
    _starts(slot, batches)
    slot.raw[1] = 6
    time.sleep(60)


@pytest.mark.parametrize(("worker", "place", "says"), [(_crash, 5, "died"), (_hang, 6, "hang")])
def test_a_worker_that_dies_or_hangs_is_found_out_from_outside(
    worker: object, place: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz_workers, "run_batches", worker)
    seen: list[tuple[int, str]] = []

    def note(target: str, inputs: list[bytes], limits: Limits) -> tuple[tuple[bytes, ...], str]:
        seen.append((len(inputs) - 1, target))
        return tuple(inputs[-1:]), ""

    monkeypatch.setattr(fuzz_workers, "reduced", note)
    run = fuzz_workers.Fuzzing(
        ["messages"], seed=1, jobs=1, num_batches=2, limits=Limits(input_s=0.2)
    )
    try:
        failures: list[fuzz_workers.Failure] = []
        end = time.monotonic() + 60
        while run.running and time.monotonic() < end:
            failures += run.watch()
            time.sleep(0.02)
        failures += run.watch()
    finally:
        run.stop()
    # Once: the next process goes on behind the batch, and is not blamed for how long it starts.
    [failure] = failures
    assert failure.error.startswith(says)
    assert seen == [(place, "messages")]


def test_slow_inputs_that_are_not_slow_again_do_not_hide_one_that_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([None, None, None, "hang", "hang", "hang", "hang"])
    monkeypatch.setattr(
        fuzz_workers, "reduced", lambda target, inputs, limits: (tuple(inputs), next(answers))
    )
    run = fuzz_workers.Fuzzing(["messages"], seed=1, jobs=1, num_batches=0)
    try:
        found = [list(run._failure(batch, 0, "hang: longer than 1 s")) for batch in range(6)]
    finally:
        run.stop()
    assert [len(each) for each in found] == [0, 0, 0, 1, 1, 0]
    assert (run.unconfirmed, run.repeated) == (3, 1)


def test_a_process_that_needs_too_much_memory_fails() -> None:
    error = replay("bodies", [b"\0" + b"\xc6\x08\0\0\0" + bytes(1 << 27)], Limits(5.0, 1 << 28))
    assert error is not None


def test_a_run_without_an_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--inputs", "0"], ["--seconds", "-1"], ["--inputs", "1", "--jobs", "0"]):
        with pytest.raises(SystemExit):
            fuzz.main(arguments)
    assert "--inputs" in capsys.readouterr().err


# -- what it has found, and what a look at the bounds of time and memory found ---------------------


def test_a_name_without_a_utf8_form_is_refused_and_not_a_unicode_error() -> None:
    for name in ("\ud800", "a\udfffb", "x" * 1_000 + "\ud800"):
        with pytest.raises(LocalProtocolError, match="no UTF-8 form"):
            token(name)


def test_long_names_are_not_kept_by_the_tables_of_subjects() -> None:
    token.__globals__["_token"].cache_clear()
    for number in range(50):
        made = token(f"{number}." + "x" * 5_000)
        assert made == f"{number}%2e" + "x" * 5_000
    assert token.__globals__["_token"].cache_info().currsize == 0


def test_channels_beyond_the_bound_are_forgotten_and_come_back_as_gaps() -> None:
    detector = GapDetector(max_channels=3)
    sources = [Sequencer(name) for name in "abcd"]

    def say(place: int) -> Arrival:
        return detector.observe(sources[place].wrap(QueueChanged(), Key(engine="e"), 0.0))

    assert [say(place) for place in (0, 1, 2)] == [Arrival.NEXT] * 3
    assert say(0) is Arrival.NEXT
    assert say(3) is Arrival.NEXT  # b was silent longest, and is forgotten
    assert say(0) is Arrival.NEXT
    next_of_b = sources[1].wrap(QueueChanged(), Key(engine="e"), 0.0)
    assert not detector.knows(next_of_b)
    assert detector.observe(next_of_b) is Arrival.GAP
    assert detector.knows(next_of_b)


def test_of_too_many_engines_the_one_that_was_silent_longest_is_forgotten() -> None:
    views = EngineViews(max_engines=3)

    def say(engine: str) -> None:
        message = QueueSnapshot()
        views.apply(Sequencer(engine).wrap_snapshot(message, Key(engine=engine), 0.0), message)

    for engine in "abcad":
        say(engine)
    assert list(views) == ["a", "c", "d"]


FIRST = BlocksStored(tier="gpu", prefix_hashes=pack([1]))
GONE = BlocksRemoved(tier="gpu", prefix_hashes=pack([1]))


def chain(num_blocks: int) -> BlocksStored:
    return BlocksStored(tier="gpu", prefix_hashes=pack(range(1, 1 + num_blocks)))


def test_a_chain_whose_beginning_comes_and_goes_all_the_time_makes_residency_unknown() -> None:
    # One message of 300 kB took 15 s before this had a bound.
    flapping: list[BlockChange] = [GONE, FIRST]
    changes = [chain(30_000), *flapping * 2_500]
    views, engine, key = EngineViews(), Sequencer("e0"), Key(engine="e0")
    message = ResidencyChanged(changes=tuple(changes))
    begun = time.process_time()
    with pytest.raises(StateRefusedError, match="30000 were held") as refused:
        views.apply(engine.wrap(message, key, 0.0), message)
    assert refused.value.ask
    assert time.process_time() - begun < 1.5
    assert not views["e0"].residency_known
    assert views["e0"].residency.num_blocks() == 0
    later = ResidencyChanged(changes=(FIRST,))
    assert views.apply(engine.wrap(later, key, 1.5), later)  # asks for a snapshot


def test_a_snapshot_that_is_refused_is_asked_for_once_a_second_and_no_more() -> None:
    views, engine, key = EngineViews(), Sequencer("e0"), Key(engine="e0")
    storm = ResidencySnapshot(chains=(chain(30_000),), part=0, parts=1)
    bad = msgspec.structs.replace(storm, chains=(BlocksStored(tier="gpu", prefix_hashes=b"odd"),))
    asked = []
    for tenth in range(31):
        with pytest.raises(StateRefusedError) as refused:
            views.apply(engine.wrap_snapshot(bad, key, tenth / 10), bad)
        asked.append(refused.value.ask)
    assert [at for at, ask in enumerate(asked) if ask] == [0, 10, 20, 30]
    assert not views.apply(engine.wrap_snapshot(storm, key, 3.1), storm)
    assert views["e0"].residency_known


def test_what_thousands_watch_alike_may_come_and_go() -> None:
    directory, shared = ResidencyDirectory(), list(range(1, 65))
    for number in range(6_500):
        directory.watch(f"r{number}", [*shared, 1_000 + number])
    directory.apply_all([BlocksStored(tier="gpu", prefix_hashes=pack(shared))])
    assert len(directory.take_changed()) == 6_500
    assert directory.count("r17") == 64
    one_by_one: list[BlockChange] = [
        BlocksRemoved(tier="gpu", prefix_hashes=pack([block])) for block in reversed(shared)
    ]
    directory.apply_all(one_by_one)
    assert directory.count("r17") == 0


def test_a_watched_beginning_that_flaps_costs_its_watchers_once_a_message() -> None:
    directory = ResidencyDirectory()
    for number in range(2_000):
        directory.watch(f"r{number}", [1, 1_000 + number])
    flapping: list[BlockChange] = [FIRST, GONE]
    begun = time.process_time()
    directory.apply_all([*flapping * 20_000, FIRST])
    assert time.process_time() - begun < 1.5
    assert directory.count("r0") == 1


def test_as_many_moves_as_a_large_cache_has_blocks_are_no_storm() -> None:
    directory = ResidencyDirectory()
    directory.apply_all([chain(250_000)])
    directory.apply_all([GONE, FIRST])
    assert directory.match(range(1, 250_001)) == 250_000
    directory.apply_all([BlocksCleared(tier="gpu")])
    assert directory.num_blocks() == 0


def test_a_flood_of_controls_for_a_request_that_never_comes_ends_in_no_time() -> None:
    count = 30_000
    operations, policy = EngineOperations(engine="e0", controls=["prioritise"]), Sequencer("p")
    for number in range(count):
        key = Key(request="never", operation=f"op{number}")
        control = Prioritise(priority=1, deadline_s=1_000.0 - number / count)
        operations.receive(policy.wrap(control, key, 0.0), 0.0)
    begun = time.process_time()
    actions = operations.expire(2_000.0)
    assert time.process_time() - begun < 3  # with a list to look through it was 15
    assert [answer.outcome.reason for answer in actions.outcomes] == ["deadline"] * count
    assert operations.open_operations == []


def test_timers_of_what_was_cancelled_do_not_pile_up() -> None:
    operations, policy = EngineOperations(engine="e0", controls=["prioritise"]), Sequencer("p")
    for number in range(5_000):
        control = Prioritise(priority=1, deadline_s=3_000.0)
        key = Key(request="never", operation=f"op{number}")
        operations.receive(policy.wrap(control, key, 0.0), 0.0)
        cancel = Cancel(target=f"op{number}")
        actions = operations.receive(policy.wrap(cancel, Key(operation=f"end{number}"), 0.0), 0.0)
        [ended] = actions.apply
        operations.applied(ended, ApplyResult("completed"))
    assert operations.open_operations == []
    assert len(operations._timers) <= 1_100
    kept = Prioritise(priority=1, deadline_s=50.0)
    for number in range(1_000):  # past a clean-up, what is open still ends in time
        operations.receive(policy.wrap(kept, Key(request="r", operation=f"k{number}"), 0.0), 0.0)
    assert operations.next_expiry() == 50.0
    assert len(operations.expire(50.0).outcomes) == 1_000


def test_what_is_kept_of_one_context_and_of_one_queue_has_a_bound() -> None:
    view, harness = HarnessView(), Sequencer("h")
    done = RequestOutcome(status="completed")
    view.apply(harness.wrap(done, Key(request="r", context="c"), 0.0), done)
    for number in range(MAX_GAPS + 50):
        described = RequestDescribed()
        key = Key(request=f"r{number}", context="c")
        view.apply(harness.wrap(described, key, float(number)), described)
    gaps_s = view.contexts["c"].gaps_s
    assert len(gaps_s) == MAX_GAPS
    assert gaps_s[-1] == MAX_GAPS + 49

    views, engine, key = EngineViews(), Sequencer("e0"), Key(engine="e0")
    for part in range(3):
        waiting = tuple(
            WaitingRequest(request=f"{part}/{number}", since_s=0.0)
            for number in range(MAX_REQUESTS // 2)
        )
        message = QueueChanged(waiting=waiting)
        views.apply(engine.wrap(message, key, 0.0), message)
    assert not views["e0"].queue_known
    assert len(views["e0"].waiting) == 0
