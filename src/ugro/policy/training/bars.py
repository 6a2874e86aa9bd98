"""Progress bars at the end of a log, as tqdm draws them: ``Train:  45%|████▌    | 450/1000 [01:02<01:15, 7.2it/s]``."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# All lengths are bounded, and nothing before the percentage is searched for: a log may have any line.
_AMOUNT = r"\d[\d.,]{0,20}[kMGT]?"
_BAR = re.compile(
    rf"\d{{1,3}}%\|[^|]{{0,400}}\|\s{{0,20}}(?P<done>{_AMOUNT})\w{{0,10}}/(?P<total>{_AMOUNT})\w{{0,10}}"
    r"\s{0,20}\[(?P<passed>[\d:]{1,20})<(?P<left>[\d:?]{1,20})"
)
_SCALE = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
# Bars of a part of the work: of one epoch, of an evaluation, of the preparation of data.
_PART = re.compile(r"\d|epoch|eval|val\b|valid|test|load|download|map|token|predict|fetch", re.IGNORECASE)
_LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class Bar:
    what: str  # its name, or ""
    done: float
    total: float
    passed_s: float
    left_s: float | None  # None: not known yet

    @property
    def is_complete(self) -> bool:
        return self.done >= self.total

    @property
    def is_part(self) -> bool:
        return _PART.search(self.what) is not None


def newest_bar(log_tail: str) -> Bar | None:
    """The last state of the bar that has been shown for the longest time, since inner ones start again and again.

    One that is complete counts only if there is no other.
    """
    latest: dict[tuple[str, float], Bar] = {}
    for line in re.split(r"[\r\n]", _ESCAPE.sub("", log_tail)):
        if (bar := _bar(line)) is not None:
            latest[bar.what, bar.total] = bar
    return max(latest.values(), key=lambda bar: (not bar.is_complete, bar.passed_s), default=None)


def _bar(line: str) -> Bar | None:
    found = _BAR.search(line)
    if found is None:
        return None
    done, total, passed_s = _amount(found["done"]), _amount(found["total"]), _seconds(found["passed"])
    if done is None or not total or done > total or passed_s is None:
        return None
    what = line[: found.start()].rpartition("|")[2].strip().removesuffix(":").rstrip()[-_LONGEST_NAME:]
    return Bar(what, done, total, passed_s, _seconds(found["left"]))


def _amount(text: str) -> float | None:
    scale = _SCALE.get(text[-1], 1.0)
    try:
        return float(text.rstrip("kMGT").replace(",", "")) * scale
    except ValueError:
        return None


def _seconds(text: str) -> float | None:
    """``01:15``, ``1:02:03``; ``?`` is not known."""
    parts = text.split(":")
    if not all(part.isdigit() for part in parts):
        return None
    seconds = 0.0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return seconds
