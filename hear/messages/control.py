"""Execution Requirements and Control, from harness to engine (paper, Table 1).

Each control is one operation: the sender makes its id and puts it in the key, delivered twice it
acts once, and exactly one terminal outcome answers it (``hear.operation``).
"""

from typing import Annotated, Literal

from msgspec import Meta

from hear.messages.envelope import Message, Seconds, Time

Force = Literal["preference", "requirement"]
Axis = Literal["order", "wait", "retention", "placement", "admission", "route", "mode", "none"]
"""What a control takes hold of. Controls on the same axis and key are arbitrated."""

Score = Annotated[float, Meta(gt=0.0, le=1.0)]


class Control(Message, frozen=True, kw_only=True):
    """Base of the controls.

    ``force``: a preference is best effort; a requirement is met, met by one of ``fallback``, or
    rejected. ``deadline_s`` is the time on the sender's clock by which a terminal outcome is
    owed (None: the engine's own default). ``reason`` is a few words for the one who asks why.
    ``engine_epoch`` is the incarnation of the engine that it is meant for: a later one fails it, so
    that what may have acted before a restart does not act again after it.
    """

    force: Force = "preference"
    deadline_s: Time | None = None
    fallback: tuple[str, ...] = ()
    reason: str = ""
    engine_epoch: int | None = None


class Prioritise(Control, frozen=True, kw_only=True, tag="prioritise"):
    """Put a waiting request at ``priority``: smaller goes first, 0 is the default.

    Completed when the queue holds it there.
    """

    priority: int


class BoundWait(Control, frozen=True, kw_only=True, tag="bound_wait"):
    """Guard a waiting request: after ``max_wait_s`` of waiting no later one may pass it.

    Completed when the request leaves the queue. A new bound from the same sender replaces it.
    """

    max_wait_s: Seconds


class Retain(Control, frozen=True, kw_only=True, tag="retain"):
    """Lease the blocks of a context for ``lease_s`` seconds, ranked by ``score`` (0, 1].

    The rank fades with the time since the context was last used, at the engine's own rate
    (``CapabilitiesReported.retention_decay_s``). Empty ``prefix_hashes`` means the blocks that
    the engine last served the context with. Completed when the lease ran out or was renewed or
    released; failed ``yielded`` when service needed the room.
    """

    score: Score = 1.0
    lease_s: Seconds
    prefix_hashes: bytes = b""


class Release(Control, frozen=True, kw_only=True, tag="release"):
    """End the leases of a context and let its blocks go first.

    Blocks that another context begins with, too, stay. Completed when no request of the context is
    here, not even a waiting one, and none uses the others.
    """


class Prepare(Control, frozen=True, kw_only=True, tag="prepare"):
    """Bring the blocks of a context to ``tier`` ahead of use.

    Blocks that no tier holds are computed if ``compute`` allows it. Completed when they are there.
    """

    tier: str = "gpu"
    prefix_hashes: bytes = b""
    compute: bool = False


class Place(Control, frozen=True, kw_only=True, tag="place"):
    """Move the blocks of a context to ``tier``, and out of the faster ones."""

    tier: str
    prefix_hashes: bytes = b""


class Hold(Control, frozen=True, kw_only=True, tag="hold"):
    """Keep a waiting request from being scheduled, for ``hold_s`` seconds at most."""

    hold_s: Seconds = 30.0


class Admit(Control, frozen=True, kw_only=True, tag="admit"):
    """End a hold. Completed when the request can be scheduled."""


class Route(Control, frozen=True, kw_only=True, tag="route"):
    """Serve a request on one of ``targets`` (engines), best first."""

    targets: tuple[str, ...]


class Configure(Control, frozen=True, kw_only=True, tag="configure"):
    """Run a request in the first of ``modes`` that the engine has."""

    modes: tuple[str, ...]


class Cancel(Control, frozen=True, kw_only=True, tag="cancel"):
    """End the open operation ``target``: it fails ``cancelled`` and its effect goes."""

    target: str


class Withdraw(Control, frozen=True, kw_only=True, tag="withdraw"):
    """End every effect that controls of this sender still have on the engine.

    A policy says it when it leaves, or whoever watches over the policy says it in its name.
    """


AXES: dict[type[Control], Axis] = {
    Prioritise: "order",
    BoundWait: "wait",
    Retain: "retention",
    Release: "retention",
    Prepare: "placement",
    Place: "placement",
    Hold: "admission",
    Admit: "admission",
    Route: "route",
    Configure: "mode",
    Cancel: "none",
    Withdraw: "none",
}
