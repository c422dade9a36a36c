"""Which preference gives way: the order is tested elsewhere, and here what is forgotten."""

from hear.messages import Cancel, Control, Key, Retain
from hear.operation import Operation
from hear.yielding import Preferences


def operation(id: str, control: Control) -> Operation:
    return Operation(
        id=id, control=control, key=Key(), source="p", submitted_s=0.0, deadline_s=60.0
    )


def test_what_has_ended_does_not_give_way_and_is_forgotten() -> None:
    preferences = Preferences()
    lasting = operation("lasting", Retain(lease_s=9.0, score=0.9))
    preferences.add(lasting)
    for number in range(50_000):
        ended = operation(f"{number}", Retain(lease_s=9.0, score=0.1))
        preferences.add(ended)
        ended.advance("rejected")
    assert len(preferences._heap) < 3_000
    assert preferences.least(Retain(lease_s=9.0), "p") is lasting
    assert preferences.least(Retain(lease_s=9.0), "p") is None  # each gives way once


def test_what_can_never_give_way_is_not_taken_note_of() -> None:
    preferences = Preferences()
    preferences.add(operation("a", Retain(lease_s=9.0, force="requirement")))
    preferences.add(operation("b", Cancel(target="c")))
    assert preferences.least(Retain(lease_s=9.0, force="requirement"), "p") is None
