"""The HTML report of a sweep: complete, escaped, and without anything from elsewhere."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

from ugro.features.sweeps.model import Budget, Importance, SweepReport, SweepState, Trial, TrialState
from ugro.features.sweeps.rules.page import Explained, page
from ugro.web.report import Assets
from ugro.web.report_assets import assets

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
NONE = Explained(problem="no Optuna")
PLAIN = Assets("body {}", "draw();")


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: dict[str, str] = {}
        self._id = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._id = dict(attrs).get("id") or ""

    def handle_data(self, data: str) -> None:
        if self._id:
            self.texts[self._id] = self.texts.get(self._id, "") + data


def test_a_report_has_its_charts_a_table_and_its_rows_as_csv() -> None:
    text = page(REPORT, Explained([Importance("lr", 0.9), Importance("opt", 0.1)]), PLAIN)
    found = Page(text)
    assert (found.tags.count("script"), found.tags.count("b"), found.tags.count("link")) == (2, 0, 0)
    assert not re.search(r'(?:src|href)="(?!data:text/csv)', text)
    shown = json.loads(found.texts["sweep-document"])
    assert [trial[0] for trial in shown["trials"]] == [1, 2, 3, 4]
    assert shown["importance"][0] == {"parameter": "lr", "share": 0.9}
    assert shown["has_jobs"] is False, "a file has no pages to link to"
    rows = base64.b64decode(text.partition("base64,")[2].partition('"')[0]).decode().splitlines()
    assert rows[0].startswith("trial,job,state,lr,opt,val/loss best")
    assert len(rows) == 5
    assert "Best: trial 4 (job 4), val/loss 0.25" in text


def test_why_there_are_no_importances_is_said() -> None:
    shown = json.loads(Page(page(REPORT, NONE, PLAIN)).texts["sweep-document"])
    assert (shown["importance"], shown["importance_problem"]) == ([], "no Optuna")


def test_a_sweep_without_a_metric_has_its_table() -> None:
    text = page(replace(REPORT, trials=TRIALS[:1], metric=None, best=None, parameters=("lr",)), NONE, PLAIN)
    assert Page(text).tags.count("tr") == 2


def test_the_dashboards_own_files_are_in_it() -> None:
    found = assets()
    assert "--series-1" in found.style
    assert ".axis-strip" in found.style
    assert "class Parallel" in found.script
    assert "/static/" not in re.sub(r'const SHEET = "[^"]*"', "", found.script), "nothing is loaded"
