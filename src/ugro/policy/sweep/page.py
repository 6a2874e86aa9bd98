"""A sweep as one HTML file that needs no server and loads nothing: its charts, as in the dashboard, and a table.

Pure: a report in, a text out. Every text that comes from a job or a file is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from ugro.core.sweep import Importance, SweepReport, Trial, TrialState
from ugro.policy.sweep.charts import document
from ugro.policy.sweep.html import Assets, csv_button, table, whole


@dataclass(frozen=True, slots=True)
class Explained:
    """The importances of a sweep's parameters, or why there are none."""

    importances: Sequence[Importance] = ()
    problem: str = ""


def page(found: SweepReport, explained: Explained, assets: Assets) -> str:
    facts = "".join(f"<p>{escape(line)}</p>" for line in _facts(found))
    main = (
        f'{facts}<div class="stack"><noscript><p>The charts need JavaScript; the table below does not.</p></noscript>'
        f'<div class="stack sweep-charts" id="sweep-charts"></div>{_trials(found)}</div>'
    )
    shown = document(found, has_jobs=False)
    shown |= {"importance": [asdict(one) for one in explained.importances], "importance_problem": explained.problem}
    return whole(f"Sweep {found.name}", main, ("sweep-document", shown), assets)


def _facts(found: SweepReport) -> Iterator[str]:
    yield f"{found.method}, {len(found.trials)} trials, {found.state}{f': {found.reason}' if found.reason else ''}"
    if (best := found.best_trial) is not None:
        values = ", ".join(f"{name} = {shown_value(best.values.get(name))}" for name in found.parameters)
        yield f"Best: trial {best.number} (job {best.job}), {found.metric} {shown_value(best.best)}, with {values}"


def _trials(found: SweepReport) -> str:
    return (
        '<section class="panel" aria-labelledby="trials-title"><header><h2 id="trials-title">Trials</h2>'
        '<span class="muted small" id="selected-trials" role="status"></span>'
        f'<span class="push">{csv_button(found.name, rows(found))}</span></header>'
        f"{table('Table of trials', rows(found), 'data-trial')}</section>"
    )


def rows(found: SweepReport) -> Iterator[list[str]]:
    metric = [f"{found.metric} best", f"{found.metric} last", "step"] if found.metric else []
    yield ["trial", "job", "state", *found.parameters, *metric, "seconds", "reason"]
    for trial in found.trials:
        measured = [shown_value(trial.best), shown_value(trial.last), shown_value(trial.step)] if found.metric else []
        values = [shown_value(trial.values.get(name)) for name in found.parameters]
        about = [str(trial.number), shown_value(trial.job), str(trial.state)]
        yield [*about, *values, *measured, shown_value(trial.took_s), _reason(trial)]


def _reason(trial: Trial) -> str:
    return trial.reason if trial.state is not TrialState.RUNNING else ""


def shown_value(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
