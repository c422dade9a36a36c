"""Controls on vLLM's waiting queue: what becomes of a bound on waiting when its request runs."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

with warnings.catch_warnings():  # those of vLLM, torch and what they use are not ours
    warnings.simplefilter("ignore")
    from hear.engines.vllm.plugin.queue_controls import QueueControls
    from hear.engines.vllm.plugin.waiting_queue import WaitingQueue

from hear.engines.vllm.plugin.standing import PROTECTED, Standing
from hear.messages import BoundWait, Key
from hear.operation import Operation


class Queue:
    """A queue with its controls, and requests as vLLM's scheduler treats them."""

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self.standings: dict[str, Standing] = {}
        self.ended: list[tuple[str, str]] = []
        self.controls = QueueControls(
            [self.queue],
            find=lambda operation: self.standings.get(operation.key.request or ""),
            moved=lambda standing: None,
            end=lambda ref, status, reason, detail: self.ended.append((ref[1], status)),
        )

    def arrive(self, name: str, at: float, priority: int = 0) -> Any:
        made = SimpleNamespace(request_id=name, priority=priority, arrival_time=at)
        request: Any = _Hashable(made)
        self.standings[name] = Standing(request, Key(request=name), "default", at)
        self.queue.add_request(request)
        return request

    def start(self) -> str:
        name: str = self.queue.pop_request().request_id
        self.standings[name].state = "running"
        self.controls.started(self.standings[name])
        return name

    def preempt(self, name: str) -> None:
        self.standings[name].state = "waiting"
        self.controls.preempted(self.standings[name])
        self.queue.prepend_request(self.standings[name].request)

    def bound(self, name: str, now: float, max_wait_s: float = 5.0) -> str:
        control = BoundWait(max_wait_s=max_wait_s, force="requirement")
        key = Key(request=name, operation=f"bound-{name}")
        operation = Operation(
            id=f"bound-{name}",
            control=control,
            key=key,
            source="guard",
            submitted_s=now,
            deadline_s=1e9,
        )
        return self.controls.bound_wait(operation, now).status


class _Hashable:
    """vLLM's requests are told apart by identity."""

    def __init__(self, made: SimpleNamespace) -> None:
        self.__dict__ = made.__dict__


def test_a_bound_on_a_request_that_runs_counts_once_it_is_preempted() -> None:
    queue = Queue()
    queue.arrive("r", at=0.0)
    assert queue.start() == "r"
    assert queue.bound("r", now=1.0) == "completed"
    queue.controls.tick(6.0)  # its time passes while it runs
    queue.arrive("hot", at=2.0, priority=-9)
    queue.preempt("r")
    queue.controls.tick(7.0)
    assert queue.standings["r"].request.priority == PROTECTED
    assert queue.start() == "r"


def test_a_bound_that_was_kept_holds_again_after_preemption() -> None:
    queue = Queue()
    queue.arrive("r", at=0.0)
    assert queue.bound("r", now=0.0) == "accepted"
    assert queue.start() == "r"
    assert queue.ended == [("bound-r", "completed")]
    queue.controls.tick(6.0)
    queue.arrive("hot", at=2.0, priority=-9)
    queue.preempt("r")
    queue.controls.tick(7.0)
    assert queue.start() == "r"


def test_without_a_bound_the_hot_one_goes_first() -> None:
    queue = Queue()
    queue.arrive("r", at=0.0)
    assert queue.start() == "r"
    queue.arrive("hot", at=2.0, priority=-9)
    queue.preempt("r")
    queue.controls.tick(7.0)
    assert queue.start() == "hot"
