"""One example of each kind with every field set, the same for ever: what golden/ holds as bytes."""

from hear.blocks import pack
from hear.codec import encode_body, kind_of
from hear.messages import (
    Admit,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    BoundWait,
    Cancel,
    CapabilitiesReported,
    Configure,
    ContextClosed,
    ContextForked,
    ContextOpened,
    ContextPaused,
    ContextResumed,
    ContextVersioned,
    CostsReported,
    Envelope,
    Force,
    Hold,
    Key,
    Message,
    OperationOutcome,
    Place,
    Prepare,
    PressureReported,
    Prioritise,
    QueueChanged,
    QueueSnapshot,
    Release,
    RequestDescribed,
    RequestOutcome,
    RequestReadinessChanged,
    ResidencyChanged,
    ResidencySnapshot,
    Retain,
    ReuseExpected,
    Route,
    RunningRequest,
    Step,
    Tier,
    TierPressure,
    WaitingRequest,
    Withdraw,
    WorkflowDescribed,
)

_HASHES = pack([1, 2**64 - 1])
_WAITING = WaitingRequest(
    request="r1",
    context="c1",
    since_s=12.5,
    priority=-40,
    protected=True,
    held=True,
    prompt_tokens=20_480,
)
_RUNNING = RunningRequest(request="r0", context="c0", prompt_tokens=512, output_tokens=7)
_STORED = BlocksStored(tier="gpu", parent=2**63, prefix_hashes=_HASHES)
_REQUIREMENT: Force = "requirement"

MESSAGES: tuple[Message, ...] = (
    RequestDescribed(
        role="coder",
        stage="plan",
        depends_on=("r0",),
        ready=False,
        turn=3,
        prompt_tokens=20_480,
        block_size=16,
        prefix_hashes=_HASHES,
        max_output_tokens=1_024,
        expected_output_tokens=200,
    ),
    RequestReadinessChanged(ready=True),
    ContextOpened(role="coder"),
    ContextVersioned(tokens=21_504, prefix_hashes=_HASHES, block_size=16),
    ContextForked(parent="c0", parent_version=2),
    ContextPaused(cause="tool", tool="search", expected_pause_s=4.5),
    ContextResumed(),
    ContextClosed(),
    ReuseExpected(basis="predicted", probability=0.25, horizon_s=400.0, predictor="session-aware"),
    WorkflowDescribed(
        roles=("planner", "coder"),
        steps=(Step(name="code", role="coder", after=("plan",), join="any"),),
    ),
    Prioritise(
        force=_REQUIREMENT, deadline_s=90.0, fallback=("preference",), reason="hot", priority=-40
    ),
    BoundWait(
        force=_REQUIREMENT,
        deadline_s=90.0,
        fallback=("preference",),
        reason="guard",
        max_wait_s=40.0,
    ),
    Retain(
        force=_REQUIREMENT,
        deadline_s=90.0,
        fallback=("preference",),
        reason="returns",
        score=0.75,
        lease_s=400.0,
        prefix_hashes=_HASHES,
    ),
    Release(force=_REQUIREMENT, deadline_s=90.0, fallback=("preference",), reason="closed"),
    Prepare(
        force=_REQUIREMENT,
        deadline_s=90.0,
        fallback=("disk",),
        reason="soon",
        tier="cpu",
        prefix_hashes=_HASHES,
        compute=True,
    ),
    Place(
        force=_REQUIREMENT,
        deadline_s=90.0,
        fallback=("disk",),
        reason="paused",
        tier="cpu",
        prefix_hashes=_HASHES,
    ),
    Hold(force=_REQUIREMENT, deadline_s=90.0, fallback=("x",), reason="gate", hold_s=5.0),
    Admit(force=_REQUIREMENT, deadline_s=90.0, fallback=("x",), reason="gate"),
    Route(
        force=_REQUIREMENT,
        deadline_s=90.0,
        fallback=("e3",),
        reason="held there",
        targets=("e1", "e2"),
    ),
    Configure(
        force=_REQUIREMENT,
        deadline_s=90.0,
        fallback=("dense",),
        reason="role",
        modes=("snapkv", "quest"),
    ),
    Cancel(
        force=_REQUIREMENT, deadline_s=90.0, fallback=("x",), reason="moot", target="policy-1-7"
    ),
    Withdraw(force=_REQUIREMENT, deadline_s=90.0, fallback=("x",), reason="leaves"),
    ResidencyChanged(
        changes=(
            _STORED,
            BlocksRemoved(tier="cpu", prefix_hashes=_HASHES),
            BlocksCleared(tier="disk"),
        )
    ),
    ResidencySnapshot(chains=(_STORED,), part=1, parts=3),
    QueueChanged(
        waiting=(_WAITING,),
        started=("r0",),
        ended=("r9",),
        num_waiting=1,
        num_running=2,
        waiting_tokens=20_480,
        running_tokens=4_096,
    ),
    QueueSnapshot(waiting=(_WAITING,), running=(_RUNNING,)),
    PressureReported(
        tiers=(TierPressure(tier="gpu", num_blocks=690, used=600, cached=80, allocatable=90),),
        num_waiting=1,
        num_running=2,
        restored_tokens=1_024,
        preemptions=3,
        load_backlog_s=0.5,
    ),
    CapabilitiesReported(
        controls=("prioritise", "retain"),
        modes=("dense",),
        tiers=(Tier(name="gpu", num_blocks=690),),
        block_size=16,
        hash_scheme="hear-blake2b-64",
        max_num_seqs=64,
        max_num_batched_tokens=8_192,
        max_model_len=40_960,
        max_lease_s=3_600.0,
        retention_decay_s=400.0,
        model="Qwen3-8B",
        targets=("engine0", "engine1"),
    ),
    CostsReported(
        basis="calibrated",
        prefill_tokens_per_s=42_000.0,
        decode_step_s=0.0125,
        kv_bytes_per_token=147_456.0,
        load_bytes_per_s=25e9,
    ),
    RequestOutcome(
        status="completed",
        reason="",
        mode="dense",
        prompt_tokens=20_480,
        output_tokens=150,
        reused_tokens={"gpu": 16_384, "cpu": 2_048},
        queue_s=1.5,
        prefill_s=0.25,
        decode_s=3.0,
        preemptions=1,
    ),
    OperationOutcome(
        status="failed",
        control="retain",
        reason="yielded",
        detail="service needed the room",
        fallback="preference",
    ),
)


def golden_envelope(message: Message) -> Envelope:
    """The envelope that the example travels in."""
    kind = kind_of(message)
    return Envelope(
        id="source-2-77",
        source="source",
        epoch=2,
        seq=5,
        time_s=123.5,
        tenant="acme",
        category=kind.category,
        kind=kind.name,
        key=Key(
            request="r1",
            context="c1",
            context_version=4,
            engine="e0",
            operation="source-2-76",
            workflow="w1",
        ),
        body=encode_body(message),
    )


EXAMPLES: dict[str, tuple[Message, Envelope]] = {
    kind_of(message).name: (message, golden_envelope(message)) for message in MESSAGES
}
