"""The data of the compare page: runs and their groups for the curves, and differences by section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ugro.core.errors import UsageError
from ugro.core.experiment import Experiment
from ugro.core.metrics import main_loss
from ugro.core.support.quantity import is_number
from ugro.policy.experiments.columns import metric_order
from ugro.policy.experiments.comparison import METRIC, Row
from ugro.policy.experiments.table import BY_CONFIGURATION, BY_NAME, groups_of
from ugro.web.views.experiment_table import MOST_COMPARED

MOST_SIDE_BY_SIDE = 20
_MOST_KEYS = 60
_MOST_VALUES = 8
_CODE = frozenset({"code", "git", "git branch"})
_OUTCOME = (
    "state", "took", "exit code", "attempts", "cached from", "result files", "last step",
    "loss is not finite", "throughput", "device use", "imbalance", "checkpoint of step",
)  # fmt: skip
_ENVIRONMENT = ("python", "machine", "CUDA of torch", "GPU driver", "package ", "nodes")


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    rows: tuple[Row, ...]
    same: int  # how many facts are equal for all runs and therefore not among the rows


@dataclass(frozen=True, slots=True)
class Varied:
    """The values of a parameter over many runs."""

    name: str
    values: tuple[str, ...]  # the most frequent
    count: int  # of different values


def chosen(words: Sequence[str]) -> list[int]:
    """The job numbers of ``jobs=1,2&jobs=3``, each once."""
    found: dict[int, None] = {}
    for word in ",".join(words).replace(" ", "").split(","):
        if not word:
            continue
        if not is_number(word):
            raise UsageError(f"{word!r:.60} is not a job number", hint="example: /compare?jobs=12,13")
        found[int(word)] = None
    if len(found) > MOST_COMPARED:
        raise UsageError(f"{len(found):,} jobs are too many for one page", hint=f"at most {MOST_COMPARED:,}")
    return list(found)


def runs_document(runs: Sequence[Experiment]) -> dict[str, Any]:
    """For static/curves.js: the metrics, the name of each curve, and its groups."""
    names = [BY_CONFIGURATION, BY_NAME]
    groups = {name: groups_of(runs, name) for name in names}
    keys = sorted({key for one in runs for key in one.figures}, key=metric_order)[:_MOST_KEYS]
    return {
        "names": keys,
        "loss": main_loss(keys),
        "runs": [
            {"id": one.id, "name": f"{one.id} {one.name}", "groups": {name: groups[name][one.id] for name in names}}
            for one in runs
        ],
    }


def sections(rows: Sequence[Row], *, is_all: bool) -> list[Section]:
    titles = ("Configuration", "Code", "Environment", "Outcome")
    found: dict[str, list[Row]] = {title: [] for title in titles}
    for row in rows:
        found[_title(row.key)].append(row)
    return [
        Section(
            title,
            tuple(row for row in of_it if is_all or not row.is_same),
            0 if is_all else sum(row.is_same for row in of_it),
        )
        for title, of_it in found.items()
        if of_it
    ]


def varied(runs: Sequence[Experiment]) -> list[Varied]:
    """Parameters that differ between the runs, those with the fewest different values first."""
    counts: dict[str, dict[str, int]] = {}
    for name in dict.fromkeys(name for one in runs for name in one.parameters):
        for one in runs:
            value = one.parameters.get(name, "not given")
            counts.setdefault(name, {})[value] = counts.get(name, {}).get(value, 0) + 1
    found = []
    for name, values in counts.items():
        if len(values) > 1:
            frequent = sorted(values, key=lambda value: -values[value])[:_MOST_VALUES]
            found.append(Varied(name, tuple(f"{value} ({values[value]}×)" for value in frequent), len(values)))
    return sorted(found, key=lambda one: one.count)


def _title(key: str) -> str:
    if key in _CODE:
        return "Code"
    if key.startswith((*_OUTCOME, METRIC)):
        return "Outcome"
    return "Environment" if key.startswith(_ENVIRONMENT) else "Configuration"
