"""All metrics by name, with their labels, and a bound on how many series each may have.

Owns the names. What they count is decided in ``hear.buses.observe.metrics.collecting``. Names,
engines and policies are made up by whoever is on the bus, so beyond a bound new ones are counted as
``other``.
"""

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hear.escaping import printable

OTHER: Final = "other"
MAX_SERIES: Final = 2_000
MAX_LABEL: Final = 200
MAX_REASONS: Final = 32

REASONS: Final = frozenset(
    (
        *("already_running", "already_terminal", "cancelled", "cannot_promise", "client_gone"),
        *("deadline", "deadline_passed", "engine_error", "engine_restarted", "engine_stopped"),
        *("exclusive_tier", "expired", "in_use", "lease_too_long", "malformed", "no_answer"),
        *(
            "no_blocks",
            "no_room",
            "not_resident",
            "not_this_engine",
            "not_yours",
            "outranked",
            "overloaded",
        ),
        *("protected", "released", "renewed", "replaced", "request_gone", "stale_version"),
        *("too_long", "unknown_context", "unknown_engine", "unknown_mode", "unknown_operation"),
        *("unknown_tier", "already_routed", "already_submitted"),
        *("unsupported_control", "withdrawn", "wrong_engine", "yielded"),
    )
)
"""The codes of docs/protocol.md, which always have a series of their own."""

_WAIT_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 20.0, 40.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0),
)
_LIFE_S: Final = (*_WAIT_S, 1_200.0, 3_600.0, 21_600.0, 86_400.0)
_ANSWER_S: Final = (0.0005, 0.001, 0.0025, *_WAIT_S)

_M = TypeVar("_M", Counter, Gauge, Histogram)


class Family(Generic[_M]):
    """One metric, and the series that it has so far."""

    def __init__(self, metric: _M, num_labels: int, max_series: int) -> None:
        self._metric: _M = metric
        self.num_labels = num_labels
        self._max_series = max_series
        self._series: dict[tuple[str, ...], _M] = {}

    def __call__(self, *labels: str) -> _M:
        """The series with these values of its labels, as a page for people may show them."""
        labels = tuple(map(printable, labels))
        series = self._series.get(labels)
        if series is None:
            if (
                len(self._series) >= self._max_series
                or max(map(len, labels), default=0) > MAX_LABEL
            ):
                labels = (OTHER,) * self.num_labels
            series = self._metric.labels(*labels) if labels else self._metric
            self._series[labels] = series
        return series

    def forget(self, first: str) -> None:
        """Remove the series whose first label has this value: it is not known any more."""
        first = printable(first)
        for labels in [labels for labels in self._series if labels[0] == first]:
            del self._series[labels]
            self._metric.remove(*labels)


class Families:
    """Makes every metric and puts it into a registry."""

    def __init__(self, registry: CollectorRegistry, *, max_series: int = MAX_SERIES) -> None:
        def counter(name: str, text: str, *labels: str) -> Family[Counter]:
            made = Counter(name, text, labels, registry=registry)
            return Family(made, len(labels), max_series)

        def gauge(name: str, text: str, *labels: str) -> Family[Gauge]:
            return Family(Gauge(name, text, labels, registry=registry), len(labels), max_series)

        def times(
            name: str, text: str, *labels: str, buckets: Sequence[float] = _WAIT_S
        ) -> Family[Histogram]:
            made = Histogram(name, text, labels, registry=registry, buckets=buckets)
            return Family(made, len(labels), max_series)

        # -- what passes
        self.messages = counter("hear_messages_total", "Messages heard.", "category", "kind")
        self.unreadable = counter(
            "hear_messages_unreadable_total", "Messages whose body cannot be read.", "kind"
        )
        self.gaps = counter(
            "hear_gaps_total", "Times that messages are missing.", "category", "source"
        )
        self.missed = counter(
            "hear_messages_missed_total", "Messages that are missing.", "category", "source"
        )
        self.lagged = counter(
            "hear_metrics_lagged_total", "Times that this reader was cut off for being slow."
        )

        # -- controls and operations
        self.controls = counter(
            "hear_controls_total", "Controls sent, each operation once.", "policy", "control"
        )
        self.repeated = counter(
            "hear_controls_repeated_total", "Controls sent again, unanswered so far.", "policy"
        )
        self.predictions = counter(
            "hear_predictions_total", "Reuse that was said to be expected.", "policy", "basis"
        )
        self.ended = counter(
            "hear_operations_total", "Operations that ended.", "control", "status", "reason"
        )
        self.policy_ended = counter(
            "hear_policy_operations_total", "Operations that ended.", "policy", "status"
        )
        self.open = gauge("hear_operations_open", "Operations without an end.", "control")
        self.forgotten = counter(
            "hear_operations_forgotten_total", "Operations that are followed no longer."
        )
        self.accept_s = times(
            "hear_operation_accept_seconds",
            "From a control to its acceptance.",
            "control",
            buckets=_ANSWER_S,
        )
        self.end_s = times(
            "hear_operation_seconds",
            "From a control to its end.",
            "control",
            "status",
            buckets=_LIFE_S,
        )

        # -- requests
        self.requests = counter(
            "hear_requests_total", "Requests that ended.", "engine", "status", "reason"
        )
        self.queue_s = times("hear_request_queue_seconds", "From arrival to the batch.", "engine")
        self.prefill_s = times(
            "hear_request_prefill_seconds", "From the batch to the first token.", "engine"
        )
        self.decode_s = times(
            "hear_request_decode_seconds", "From the first token to the last.", "engine"
        )
        self.ttft_s = times(
            "hear_request_ttft_seconds", "From arrival to the first token.", "engine"
        )
        self.request_s = times("hear_request_seconds", "From arrival to the last token.", "engine")
        self.prompt_tokens = counter(
            "hear_prompt_tokens_total", "Prompt tokens of completed requests.", "engine"
        )
        self.output_tokens = counter(
            "hear_output_tokens_total", "Tokens generated for completed requests.", "engine"
        )
        self.reused_tokens = counter(
            "hear_reused_tokens_total", "Prompt tokens not computed again.", "engine", "tier"
        )
        self.preemptions = counter(
            "hear_preemptions_total", "Preemptions of requests that ended.", "engine"
        )

        # -- engines
        self.queue = gauge("hear_queue_requests", "Requests by state.", "engine", "state")
        self.queue_tokens = gauge("hear_queue_tokens", "Their tokens.", "engine", "state")
        self.blocks = gauge("hear_kv_blocks", "Blocks of a tier by use.", "engine", "tier", "use")
        self.capacity = gauge(
            "hear_kv_capacity_blocks", "Blocks that a tier can hold.", "engine", "tier"
        )
        self.backlog_s = gauge(
            "hear_load_backlog_seconds", "Transfers between tiers still ahead.", "engine"
        )
        self.epoch = gauge("hear_engine_epoch", "Incarnation of an engine.", "engine")
        self.restarts = counter("hear_engine_restarts_total", "New epochs seen.", "engine")
        self.heard_s = gauge(
            "hear_engine_heard_timestamp_seconds", "When an engine last told its state.", "engine"
        )

        # -- spans
        self.spans = counter("hear_spans_total", "Spans by what became of them.", "fate")

        self._reasons: set[str] = set()

    def reason(self, text: str) -> str:
        """A reason code as a label: those of the protocol, and a few that others make up."""
        if not text or text in REASONS or text in self._reasons:
            return text
        if len(self._reasons) >= MAX_REASONS or len(text) > MAX_LABEL:
            return OTHER
        self._reasons.add(text)
        return text

    def forget_engine(self, engine: str) -> None:
        """An engine is gone: another takes the place of its series."""
        self.forget_state(engine)
        counts: list[Callable[[str], None]] = [
            family.forget
            for family in (
                *(self.requests, self.preemptions, self.restarts),
                *(self.prompt_tokens, self.output_tokens, self.reused_tokens),
            )
        ]
        times = (self.queue_s, self.prefill_s, self.decode_s, self.ttft_s, self.request_s)
        forget = [*counts, *(family.forget for family in times)]
        for each in (*forget, self.epoch.forget, self.heard_s.forget):
            each(engine)

    def forget_state(self, engine: str) -> None:
        """What was known of an engine's queue and cache is over."""
        forget: list[Callable[[str], None]] = [
            family.forget for family in (self.queue, self.queue_tokens, self.blocks)
        ]
        for each in (*forget, self.capacity.forget, self.backlog_s.forget):
            each(engine)
