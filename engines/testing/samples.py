"""A control of each kind, for the rules that hold for all of them alike."""

from hear.engines.testing.bench import Bench
from hear.messages import (
    Admit,
    BoundWait,
    Cancel,
    Configure,
    Control,
    Hold,
    Place,
    Prepare,
    Prioritise,
    Release,
    Retain,
    Route,
    Withdraw,
)

REQUEST_KINDS = ("prioritise", "bound_wait", "hold", "admit", "route", "configure")
CONTEXT_KINDS = ("retain", "release", "prepare", "place")


NEVER_WAS = "an operation that never was"


def sample(
    b: Bench, kind: str, deadline_s: float | None = None, target: str = NEVER_WAS
) -> Control:
    """A control of a kind that an engine which has the kind can do. A Cancel aims at ``target``."""
    mode = b.capabilities.modes[0] if b.capabilities.modes else "default"
    made: dict[str, Control] = {
        "prioritise": Prioritise(priority=1, deadline_s=deadline_s),
        "bound_wait": BoundWait(max_wait_s=b.engine.patience_s, deadline_s=deadline_s),
        "hold": Hold(hold_s=b.engine.quiet_s, deadline_s=deadline_s),
        "admit": Admit(deadline_s=deadline_s),
        "route": Route(targets=(b.name,), deadline_s=deadline_s),
        "configure": Configure(modes=(mode,), deadline_s=deadline_s),
        "retain": Retain(lease_s=b.engine.quiet_s, deadline_s=deadline_s),
        "release": Release(deadline_s=deadline_s),
        "prepare": Prepare(deadline_s=deadline_s),
        "place": Place(tier="gpu", deadline_s=deadline_s),
        "cancel": Cancel(target=target, deadline_s=deadline_s),
        "withdraw": Withdraw(deadline_s=deadline_s),
    }
    return made[kind]


def send_sample(b: Bench, kind: str, about: str = "r", *, by: str | None = None) -> str:
    """Send a sample about a request, or about the context ``c``, as a sender of its own."""
    if kind in REQUEST_KINDS:
        return b.send(sample(b, kind), by=by or kind, request=about)
    return b.send(sample(b, kind), by=by or kind, context="c")


ALL_KINDS = (*REQUEST_KINDS, *CONTEXT_KINDS, "cancel", "withdraw")
