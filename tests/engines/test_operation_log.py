"""The operation log across the lives of workers."""

from pathlib import Path

import pytest

from hear.engine_operations import KeyedOutcome
from hear.engines.worker.operation_log import OperationLog
from hear.errors import ConfigError
from hear.messages import Key, OperationOutcome, OperationStatus


def answer(id: str, status: OperationStatus = "completed", reason: str = "") -> KeyedOutcome:
    outcome = OperationOutcome(status=status, control="prioritise", reason=reason)
    return KeyedOutcome(Key(operation=id, request="r", engine="e0"), outcome)


def test_ends_are_known_to_the_next_in_order(tmp_path: Path) -> None:
    first = OperationLog(tmp_path / "deep" / "e0")
    answers = [answer("a"), answer("b", "rejected", "outranked"), answer("c", "failed", "deadline")]
    for one in answers:
        first.note(one)
    first.note(answer("a", "failed"))  # an operation ends once
    first.close()
    assert OperationLog(first.path).ended() == answers


def test_what_was_begun_or_accepted_and_did_not_end_is_failed_by_the_next_and_once(
    tmp_path: Path,
) -> None:
    first = OperationLog(tmp_path / "e0")
    first.begin(Key(operation="acting", context="c"), "retain")
    first.note(answer("kept", "accepted"))
    first.begin(Key(operation="done", request="r"), "hold")
    first.note(answer("done"))
    first.close()
    second = OperationLog(first.path)
    second.fail_interrupted()
    failed = second.ended()[1:]
    assert [(a.key.operation, a.outcome.control) for a in failed] == [
        ("acting", "retain"),
        ("kept", "prioritise"),
    ]
    assert {(a.outcome.status, a.outcome.reason) for a in failed} == {
        ("failed", "engine_restarted")
    }
    assert failed[0].key.context == "c"
    second.close()
    third = OperationLog(first.path)
    third.fail_interrupted()
    assert [a.key.operation for a in third.ended()] == ["done", "acting", "kept"]


def test_a_kill_in_mid_write_costs_the_last_entry_alone(tmp_path: Path) -> None:
    path = tmp_path / "e0"
    whole = OperationLog(path)
    whole.note(answer("a"))
    size = path.stat().st_size
    whole.note(answer("b"))
    whole.close()
    data = path.read_bytes()
    for cut in range(len(data)):
        left = ["a"] if cut >= size else []
        path.write_bytes(data[:cut])
        after = OperationLog(path)
        assert [a.key.operation for a in after.ended()] == left
        after.note(answer("c"))
        after.close()
        again = OperationLog(path)
        assert [a.key.operation for a in again.ended()] == [*left, "c"]
        again.close()


def test_only_so_many_ends_are_kept_in_memory_and_on_disk(tmp_path: Path) -> None:
    log = OperationLog(tmp_path / "e0", remember=10)
    log.begin(Key(operation="open"), "retain")
    largest = 0
    for number in range(1000):
        log.note(answer(str(number)))
        largest = max(largest, log.path.stat().st_size)
    assert [a.key.operation for a in log.ended()] == [str(n) for n in range(990, 1000)]
    assert largest < 6_000
    log.close()
    after = OperationLog(log.path, remember=10)
    assert [a.key.operation for a in after.ended()] == [str(n) for n in range(990, 1000)]
    after.fail_interrupted()
    assert after.ended()[-1].key.operation == "open"


@pytest.mark.parametrize("content", [b"hello world, this is no operation log", b"\0\0\0\4abcd"])
def test_a_file_of_another_kind_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "e0"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"operation log {path}"):
        OperationLog(path)
    assert path.read_bytes() == content


def test_a_place_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        OperationLog(tmp_path)


def test_one_worker_at_a_time(tmp_path: Path) -> None:
    first = OperationLog(tmp_path / "e0", remember=10)
    with pytest.raises(ConfigError, match="another worker uses it"):
        OperationLog(first.path)
    for number in range(200):  # and so it stays when it is written anew
        first.note(answer(str(number)))
    with pytest.raises(ConfigError, match="another worker uses it"):
        OperationLog(first.path)
    first.close()
    OperationLog(first.path).close()


def test_tenants_may_use_the_same_operations_and_are_remembered_apart(tmp_path: Path) -> None:
    first = OperationLog(tmp_path / "e0", remember=2)
    first.begin(Key(operation="a"), "retain", "acme")
    first.note(answer("a"))
    first.begin(Key(operation="a"), "hold", "umbra")
    for number in range(50):
        first.note(answer(str(number)), "umbra")
    first.close()
    second = OperationLog(first.path, remember=2)
    second.fail_interrupted()
    assert second.ended() == [answer("a")]
    [lost] = second.ended("acme")
    assert (lost.outcome.control, lost.outcome.reason) == ("retain", "engine_restarted")
    assert [a.key.operation for a in second.ended("umbra")] == ["49", "a"]
    assert set(second.tenants) == {"default", "acme", "umbra"}
