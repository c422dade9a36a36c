"""What one replay of one configuration gives: the row of the table, and all that is drawn."""

from msgspec import Struct, field

from hear.harnesses.eval.workloads.workload import LeftOut


class TurnRecord(Struct, frozen=True, kw_only=True):
    """One request as its client saw it. Times in seconds from the start of the replay.

    ``engine`` is the one that it went to.

    It waited in the queue from ``sent_s`` to ``started_s``, was in service (prefill and decode)
    until ``finished_s``, and its first token came at ``first_token_s``. ``reused_tokens`` is by
    tier. A rejected request has no times after ``sent_s`` and carries the ``reason``.
    """

    request: str
    session: str
    turn: int
    engine: str = ""
    sent_s: float
    started_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    reused_tokens: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    status: str = "completed"
    reason: str = ""


class Sample(Struct, frozen=True, kw_only=True):
    """The engines together at one moment, as their last pressure reports on the bus told.

    ``gpu_used`` is the share of GPU blocks in use by running requests, ``gpu_cached`` the share
    that holds reusable blocks nobody uses now; ``restored_tokens`` counts from the start.
    """

    time_s: float
    waiting: int
    running: int
    gpu_used: float
    gpu_cached: float
    restored_tokens: int


class ProtocolCost(Struct, frozen=True, kw_only=True):
    """What the protocol itself cost in one run (paper, Table 7).

    ``messages`` counts by category, ``decisions`` by policy, ``decide_s`` is wall time in policy
    code by policy, and ``run_s`` is the wall time of the whole run, virtual clock and all.
    """

    messages: dict[str, int] = field(default_factory=dict)
    decisions: dict[str, int] = field(default_factory=dict)
    controls: dict[str, int] = field(default_factory=dict)
    decide_s: dict[str, float] = field(default_factory=dict)
    run_s: float = 0.0


class Row(Struct, frozen=True, kw_only=True):
    """One line of the table and one object of ``--json``; nothing in it depends on wall time.

    ``engines`` engines of the profile ``engine`` served it.

    ``ttft_*`` are over all served turns, ``session_s`` is the mean over sessions of the total
    response-waiting time and ``session_p50_s`` the median, ``batch_s`` the time from the first
    arrival to the last token, ``reuse_pct`` the reused share of the prompt tokens of follow-up
    turns, ``reuse_all_pct`` that of all prompts. ``operations`` counts controls by their terminal
    outcome. ``sessions`` is how many the workload has at this load; ``left_out`` and ``remarks``
    are about its source (``Workload``). ``turns_by_engine`` says who served how many turns, and
    ``notes`` who took part in name only.
    """

    workload: str
    engine: str
    load: float
    policy: str
    seed: int
    turns: int
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_max_s: float
    session_s: float
    session_p50_s: float
    batch_s: float
    turns_per_min: float
    reuse_pct: float
    reuse_all_pct: float
    rejected: int
    guard_violations: int
    operations: dict[str, int]
    operations_open: int
    policy_failures: tuple[str, ...] = ()
    engines: int = 1
    sessions: int = 0
    left_out: tuple[LeftOut, ...] = ()
    remarks: tuple[str, ...] = ()
    turns_by_engine: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class RunResult(Struct, frozen=True, kw_only=True):
    """All that one run leaves behind. ``problems`` are broken promises that the run found."""

    row: Row
    turns: tuple[TurnRecord, ...]
    samples: tuple[Sample, ...]
    cost: ProtocolCost
    problems: tuple[str, ...] = ()
