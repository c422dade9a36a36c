"""docs/metrics.md lists every metric as it is, and its examples say what the code does."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from hear.buses.observe.metrics.bus_statistics import BusStatisticsCollector
from hear.buses.observe.metrics.exporting import MAX_QUEUED
from hear.buses.observe.metrics.families import MAX_LABEL, MAX_REASONS, MAX_SERIES, Families, Family
from hear.buses.observe.metrics.operations import FORGET_AFTER_S
from hear.buses.observe.metrics.spans import ids_of
from hear.interfaces import BusStatistics, SubscriptionStatistics

TEXT = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
HEADER = "| metric | type | labels | meaning |"


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    found = {}
    for table in TEXT.split(HEADER)[1:]:
        for line in table.lstrip("\n").splitlines()[1:]:
            if not line.startswith("|"):
                break
            name, type_, labels, _ = (cell.strip() for cell in line.strip("|").split("|"))
            found[name.strip("`")] = type_, frozenset(filter(None, labels.split(", ")))
    return found


def registered() -> dict[str, tuple[str, frozenset[str]]]:
    registry = CollectorRegistry()
    for family in vars(Families(registry)).values():
        if isinstance(family, Family):
            family(*["x"] * family.num_labels)
    statistics = BusStatisticsCollector()
    row = SubscriptionStatistics("x", queued=0, received=0, dropped=0)
    statistics.statistics = BusStatistics({"x": 0}, (row,))
    registry.register(statistics)
    return {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            frozenset(family.samples[0].labels) - {"le"},
        )
        for family in registry.collect()
    }


def test_every_metric_stands_in_the_tables_as_it_is() -> None:
    assert documented() == registered()
    assert len(registered()) > 30


def test_names_follow_the_conventions_of_prometheus() -> None:
    for name, (type_, labels) in registered().items():
        assert re.fullmatch(r"hear_[a-z_]+", name)
        assert name.endswith("_total") == (type_ == "counter")
        if type_ == "histogram":
            assert name.endswith("_seconds")
        assert not labels & {"le", "quantile", "job", "instance"}


def test_the_bounds_are_those_that_it_tells() -> None:
    for number in (MAX_SERIES, MAX_LABEL, MAX_QUEUED, MAX_REASONS):
        assert f"{number:,}" in TEXT
    assert f"{FORGET_AFTER_S / 3600:g} hours" in TEXT


def test_the_example_of_joining_a_trace_gives_the_ids_of_the_request() -> None:
    [code] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, str] = {}
    exec(code, names)
    trace_id, span_id = ids_of("request", "default", "r1")
    assert names["trace_id"] == f"{trace_id:032x}"
    assert names["span_id"] == f"{span_id:016x}"


def test_the_metrics_in_the_questions_exist() -> None:
    [questions] = re.findall(r"```promql\n(.*?)```", TEXT, re.DOTALL)
    asked = {name.removesuffix("_bucket") for name in re.findall(r"hear_\w+", questions)}
    assert asked
    assert asked <= set(registered())
