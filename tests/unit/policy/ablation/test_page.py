"""The report of an experiment: complete, escaped, and without anything from elsewhere."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace

from tests.unit.policy.ablation.test_statistics import run
from ugro.features.experiments.client import _ENTRY, _SHEETS
from ugro.features.experiments.rules.measure import METRICS, rows
from ugro.features.experiments.rules.page import Experiment, bars, page
from ugro.web.report import Assets
from ugro.web.report_assets import assets

RUNS = [
    run("uniform", 1, 10, 1), run("<b>fast</b>", 1, 20, 2), run("uniform", 2, 12, 3), run("<b>fast</b>", 2, 24, 4),
    replace(run("uniform", 1, 5, 5, "bert"), state="failed", reason="no torch & no way"),
]  # fmt: skip
FOUND = Experiment("<script>", "done", "every point was tried: 5", "2026-01-01", ["Nodes: a & b."], RUNS, "a: <1>\n")
PLAIN = Assets("main {}", "draw();")


def csvs(text: str) -> dict[str, list[str]]:
    found = re.findall(r'download="([^"]+)" href="data:text/csv;base64,([^"]+)"', text)
    return {name: base64.b64decode(content).decode().splitlines() for name, content in found}


def test_a_report_has_a_figure_for_each_metric_its_curves_and_all_numbers_as_csv() -> None:
    text = page(FOUND, PLAIN)
    assert not re.search(r'(?:src|href)="(?!data:text/csv)', text)
    assert "<b>fast" not in text
    assert text.count("<script") == 2
    for metric in METRICS:
        assert f">{metric.title}</h2>" in text
    assert text.count('<svg class="bars"') == 2  # of what was measured
    assert text.count("not measured: no device of these runs could be read") == 2
    found = csvs(text)
    assert set(found) == {
        "summary.csv", "samples-per-second.csv", "waiting.csv", "gpt--loss-over-samples.csv",
        "gpt--loss-over-time.csv", "runs.csv",
    }  # fmt: skip
    assert len(found["runs.csv"]) == 6
    assert found["samples-per-second.csv"][1].startswith("gpt,uniform,11,")


def test_a_report_says_what_its_reader_must_know() -> None:
    text = page(FOUND, PLAIN)
    assert "4 of 5 runs are complete; the experiment is done: every point was tried: 5." in text
    assert "Nodes: a &amp; b." in text
    assert "run 5 (bert, uniform, seed 1) is failed: no torch &amp; no way" in text
    assert "With fewer than three seeds, differences say little" in text
    assert "a: &lt;1&gt;" in text


def test_curves_are_embedded_as_the_charts_read_them() -> None:
    text = page(FOUND, PLAIN)
    (document,) = re.findall(r'id="experiment-curves">(.*?)</script>', text)
    curves = json.loads(document)
    assert [(one["x"], one["label"]) for one in curves] == [
        ("samples", "gpt: loss over samples"), ("seconds", "gpt: loss over time"),
    ]  # fmt: skip
    assert [one["name"] for one in curves[0]["series"]] == ["uniform", "<b>fast</b>"]
    assert all(f'id="{one["place"]}"' in text for one in curves)


def test_bars_have_intervals_and_begin_at_zero() -> None:
    drawn = bars(rows(RUNS[:4]), METRICS[0])
    assert drawn.count('class="interval"') == 6  # a line and two caps for each of the two
    assert 'aria-label="Samples per second, after settling: gpt uniform 11 ± 13 samples/s; ' in drawn
    assert 'class="mean is-baseline" x="190"' in drawn
    alone = bars(rows(RUNS[:1]), METRICS[0])
    assert 'class="interval"' not in alone


def test_the_charts_of_a_report_are_those_of_the_dashboard() -> None:
    made = assets(_ENTRY, _SHEETS)
    assert "experiment-curves" in made.script
    assert "customElements.define" in made.script
    assert ".figures" in made.style
