"""The waiting queue against a model that sorts anew each time."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from hear.engines.simulated.request import SimRequest
from hear.engines.simulated.waiting import WaitingQueue
from hear.messages import DEFAULT_TENANT
from tests.engines.builders import sim_request


@dataclass
class Row:
    """What the model knows of a request."""

    request: SimRequest
    priority: int = 0
    bound_s: float | None = None
    bound_required: bool = False
    protected: bool = False
    held_until: float | None = None
    hold_required: bool = False


@dataclass
class Model:
    """Looks at all requests for each answer."""

    rows: dict[str, Row] = field(default_factory=dict)

    def promote(self, now: float) -> None:
        for row in self.rows.values():
            if row.held_until is not None and row.held_until <= now:
                row.held_until = None
            due = row.bound_s is not None and row.request.arrival_s + row.bound_s <= now
            if due and not row.protected:
                row.protected = True
                if row.bound_required or not row.hold_required:
                    row.held_until = None

    def order(self) -> list[str]:
        def place(row: Row) -> tuple[bool, bool, int, float, int]:
            priority = 0 if row.protected else row.priority
            held = row.held_until is not None
            return held, not row.protected, priority, row.request.arrival_s, row.request.seq

        return [row.request.id for row in sorted(self.rows.values(), key=place)]

    def next(self) -> str | None:
        order = [id for id in self.order() if self.rows[id].held_until is None]
        return order[0] if order else None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "take", "prioritise", "bound", "unbound", "hold", "admit", "wait"]),
        st.integers(0, 5),
        st.sampled_from([-2, 0, 1, 3]),
        st.booleans(),
    ),
    max_size=50,
)


@given(STEPS)
def test_who_is_next_is_whom_a_sorted_list_would_put_first(
    steps: list[tuple[str, int, int, bool]],
) -> None:
    queue, model = WaitingQueue(), Model()
    now = 0.0
    for seq, (what, number, value, required) in enumerate(steps):
        ids = sorted(model.rows)
        row = model.rows[ids[number % len(ids)]] if ids else None
        if what == "add":
            request = sim_request(f"r{seq}", seq, arrival_s=now)
            model.rows[request.id] = Row(request)
            queue.add(request)
        elif what == "wait":
            now += abs(value)
        elif row is None:
            continue
        elif what == "take":
            queue.remove(row.request)
            del model.rows[row.request.id]
        elif what == "prioritise":
            row.priority = row.request.priority = value
            queue.add(row.request)
        elif what == "bound":
            row.bound_s, row.bound_required, row.protected = float(abs(value)), required, False
            queue.bound(row.request, float(abs(value)), required=required)
        elif what == "unbound":
            row.bound_s, row.bound_required, row.protected = None, False, False
            queue.bound(row.request, None)
        elif what == "hold":
            row.held_until, row.hold_required = now + abs(value), required
            queue.hold(row.request, now + abs(value), required=required)
        else:
            row.held_until = None
            queue.admit(row.request)
        release = queue.next_release()
        held = [row for row in model.rows.values() if row.held_until is not None]
        assert not held or (release is not None and release <= min(_ends(row) for row in held))
        queue.promote(now)
        model.promote(now)
        head = queue.peek()
        assert (head.id if head else None) == model.next()
        assert [r.id for r in queue.in_order()] == model.order()
        assert len(queue) == len(model.rows)
        assert queue.totals(DEFAULT_TENANT) == (len(queue), sum(r.prompt_tokens for r in queue))


def _ends(row: Row) -> float:
    """When the hold of a request ends in the model."""
    assert row.held_until is not None
    yields = row.bound_s is not None and (row.bound_required or not row.hold_required)
    if yields and not row.protected:
        assert row.bound_s is not None
        return min(row.held_until, row.request.arrival_s + row.bound_s)
    return row.held_until


def test_without_controls_it_is_first_come_first_served() -> None:
    queue = WaitingQueue()
    requests = [sim_request(f"r{n}", n, arrival_s=n // 2) for n in range(6)]
    for request in reversed(requests):
        queue.add(request)
    taken = []
    while (head := queue.peek()) is not None:
        queue.remove(head)
        taken.append(head.id)
    assert taken == [f"r{n}" for n in range(6)]


def test_the_protected_go_in_waiting_order_whatever_their_priority() -> None:
    queue = WaitingQueue()
    for number, priority in enumerate((5, -7, 0)):
        request = sim_request(f"r{number}", number, arrival_s=float(number), priority=priority)
        queue.add(request)
        queue.bound(request, 10.0)
    hot = sim_request("hot", 9, arrival_s=3.0, priority=-1000)
    queue.add(hot)
    assert [r.id for r in queue.promote(11.0)] == ["r0", "r1"]
    assert [r.id for r in queue.in_order()] == ["r0", "r1", "hot", "r2"]


def test_a_newer_bound_counts_from_arrival_and_replaces_the_older() -> None:
    queue = WaitingQueue()
    request = sim_request("r", 0, arrival_s=100.0)
    queue.add(request)
    queue.bound(request, 5.0)
    queue.bound(request, 50.0)
    assert queue.promote(110.0) == []
    assert queue.promote(150.0) == [request]


def test_a_request_that_left_is_not_promoted_later() -> None:
    queue = WaitingQueue()
    request = sim_request("r", 0)
    queue.add(request)
    queue.bound(request, 5.0)
    queue.hold(request, 3.0)
    queue.remove(request)
    assert queue.promote(10.0) == []
    assert queue.peek() is None


def test_changing_ones_mind_does_not_grow_the_memory() -> None:
    queue = WaitingQueue()
    requests = [sim_request(f"r{n}", n) for n in range(3)]
    for request in requests:
        queue.add(request)
    for turn in range(5_000):
        request = requests[turn % 3]
        request.priority = turn
        queue.bound(request, 1e6 + turn)
        queue.hold(request, 1e6 + turn)
        queue.admit(request)
    for entries in (queue._heap, queue._bounds, queue._holds):
        assert len(entries) <= 2 * 3 + 1024
    assert [r.id for r in queue.in_order()] == ["r2", "r0", "r1"]
    assert queue.peek() is requests[2]


def test_what_outlasts_its_request_is_not_applied_to_another_with_its_id() -> None:
    queue, old, new = WaitingQueue(), sim_request("r", 0), sim_request("r", 1, arrival_s=15.0)
    queue.add(old)
    queue.bound(old, 10.0, required=True)
    queue.hold(old, 9.0)
    queue.remove(old)
    queue.add(new)
    queue.hold(new, 30.0)
    assert queue.promote(20.0) == []
    assert (new.protected, new.held_until, queue.peek()) == (False, 30.0, None)
