"""The benchmark runs, at a size at which its figures mean nothing, so that it can't rot."""

from pathlib import Path

import msgspec
import pytest

from benchmarks import events, hot_paths, indexes
from benchmarks.measuring import Figure, Report, Sizes, table_of

TINY = Sizes(
    prompt_blocks=128,
    directory_blocks=512,
    fill_blocks=50,
    match_repeats=2,
    sweep_bytes=1024,
    waiting=6,
    apply_blocks=128,
    apply_repeats=2,
    decide_prompt_blocks=256,
    decide_contexts=2,
    decide_events=8,
    decide_repeats=4,
    codec_repeats=2,
    codec_sample_s=1e-5,
    engine_requests=4,
    engine_repeats=1,
)


def test_every_figure_has_a_unit_and_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    hot_paths.main(["--json", str(path)], TINY)
    written = msgspec.json.decode(path.read_bytes())
    shown = capsys.readouterr().out
    sections = {figure["section"] for figure in written["figures"]}
    assert len(sections) >= 9
    for figure in written["figures"]:
        assert figure["unit"]
        assert figure["samples"]
        assert figure["median"] >= 0
        assert figure["section"] in shown


def test_without_the_peer_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "make_radix_tree", lambda: None)
    report = Report()
    full = indexes.build(TINY, report)
    indexes.matching(full, TINY, report)
    events.applying(full, TINY, report)
    assert report.figures
    assert not any("RadixTree" in figure.who for figure in report.figures)
    assert report.notes == ["RadixTree was left out: the extra 'bench' is not installed."]


def test_what_is_stored_for_a_figure_is_removed_again() -> None:
    full = indexes.build(TINY, Report())
    before = full.directory.num_blocks()
    events.applying(full, TINY, Report())
    assert full.directory.num_blocks() == before
    assert [full.directory.match(memoryview(c).cast("Q")) for c in full.chains] == [128] * 4


def test_cost_is_in_times_of_the_first_row_for_times_and_for_rates() -> None:
    rows = [
        Figure("s", "a time", "one", "us", (1.0, 2.0, 3.0)),
        Figure("s", "a rate", "one", "blocks/s", (10.0,)),
        Figure("s", "a time", "other", "us", (8.0,)),
        Figure("s", "a rate", "other", "blocks/s", (20.0,)),
    ]
    table = table_of(rows)
    assert list(table.columns[6].cells) == ["1.00x", "4.00x", "1.00x", "0.50x"]
    assert list(table.columns[3].cells) == ["1.50 - 2.50", "-", "-", "-"]
