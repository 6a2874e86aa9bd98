"""The HTML report of a sweep: complete, escaped, and without anything from elsewhere."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser

from ugro.core.sweep import Budget, Importance, SweepReport, SweepState, Trial, TrialState
from ugro.policy.sweep.page import page

TRIALS = tuple(
    Trial(number, (("lr", str(10.0**-number)), ("opt", '"<b>"')), (), TrialState.COMPLETE, number, best=1 / number)
    for number in range(1, 5)
)
REPORT = SweepReport(
    1,
    "<script>",
    "ann",
    SweepState.DONE,
    "all & done",
    "2026-01-01T00:00:00+00:00",
    "bayes",
    "val/loss",
    "minimize",
    ("lr", "opt"),
    Budget(),
    4,
    TRIALS,
    best=4,
)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)


def tags(text: str) -> list[str]:
    parser = Tags()
    parser.feed(text)
    return parser.seen


def test_a_report_has_charts_a_table_and_its_rows_as_csv() -> None:
    text = page(REPORT, [Importance("lr", 0.9), Importance("opt", 0.1)])
    found = tags(text)
    assert found.count("circle") == 4
    assert found.count("polyline") == 5, "the best so far, and a line for each trial"
    assert (found.count("script"), found.count("b"), found.count("link")) == (0, 0, 0)
    assert not re.search(r'(?:src|href)="(?!data:text/csv)', text)
    rows = base64.b64decode(text.partition("base64,")[2].partition('"')[0]).decode().splitlines()
    assert rows[0].startswith("trial,job,state,lr,opt,val/loss best")
    assert len(rows) == 5
    assert "Best: trial 4 (job 4), val/loss 0.25" in text


def test_a_sweep_with_nothing_to_draw_has_a_table_only() -> None:
    text = page(replace(REPORT, trials=TRIALS[:1], metric=None, best=None, parameters=("lr",)), [])
    assert "svg" not in tags(text)
    assert tags(text).count("tr") == 2


def test_values_of_any_kind_have_a_place() -> None:
    odd = replace(TRIALS[0], number=9, settings=(("lr", "null"), ("opt", "[1, true]")))
    assert tags(page(replace(REPORT, trials=(*TRIALS, odd)), [])).count("polyline") == 6
