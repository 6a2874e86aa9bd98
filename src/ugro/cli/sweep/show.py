"""How a sweep looks: a table of its trials, live on a terminal, and as a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ugro.cli.jobs.describe import ago
from ugro.cli.output import Cell, Output, Style
from ugro.client.client import Client
from ugro.core.support import clock
from ugro.core.support.moment import instant_of
from ugro.core.support.quantity import format_duration
from ugro.core.sweep import Importance, SweepReport, SweepState, Trial, TrialState

_STYLES: dict[TrialState, Style] = {
    TrialState.COMPLETE: "good",
    TrialState.FAILED: "bad",
    TrialState.INFEASIBLE: "warn",
    TrialState.PRUNED: "dim",
    TrialState.CANCELLED: "warn",
    TrialState.STOPPED: "warn",
}
_SWEEP_STYLES: dict[SweepState, Style] = {SweepState.DONE: "good", SweepState.FAILED: "bad"}
_BAR = 30
_LIVE_ROWS = 12


def document(found: SweepReport) -> dict[str, Any]:
    """For programs: the values of parameters as they are."""
    own = asdict(found)
    own["trials"] = [trial_document(trial) for trial in found.trials]
    own["workers"] = [{"job": one.job, "state": one.state, "reason": one.reason} for one in found.workers]
    return own


def trial_document(trial: Trial) -> dict[str, Any]:
    own = asdict(trial)
    for name in ("settings", "asked", "ending", "memory"):
        del own[name]
    own["parameters"] = trial.values
    own["history"] = [[point.step, point.value] for point in trial.history]
    return own


def follow(output: Output, client: Client, found: SweepReport) -> int:
    """0 if it ended in good order; 130 if we detached."""
    output.note(f"sweep {found.name}: {_size(found)}, {found.method}")
    try:
        for seen in client.sweeps.watch(found.id):
            found = seen
            output.progress(*_headlines(found), table=output.table_lines(*_live_table(output, found)))
    except KeyboardInterrupt:
        stop = f"stop it: ugro sweep stop {found.name}"
        output.note(f"detached: sweep {found.name} continues; see: ugro sweep status {found.name} · {stop}")
        return 130
    output.end_progress()
    show(output, found)
    return 0 if found.state is SweepState.DONE else 1


def show(output: Output, found: SweepReport) -> None:
    output.table(*_table(found, found.trials))
    for line in _headlines(found):
        output.note(line)


def summary_row(found: SweepReport) -> list[Cell]:
    ended = sum(not trial.is_open for trial in found.trials)
    best = found.best_trial
    trials = f"{ended}/{found.total}" if found.total is not None else str(ended)
    return [
        Cell(found.name, "id"),
        Cell(found.state, _SWEEP_STYLES.get(found.state, "")),
        Cell(trials, is_number=True),
        Cell(found.metric or ""),
        Cell(_number(best.best if best else None), is_number=True),
        Cell(ago(instant_of(found.created_at, None), clock.now())),
    ]


def importance_table(output: Output, found: Sequence[Importance]) -> None:
    rows = [
        [Cell(one.parameter), Cell(f"{one.share:.3f}", is_number=True), Cell("█" * round(_BAR * one.share))]
        for one in found
    ]
    output.table(("PARAMETER", "IMPORTANCE", ""), rows)


def _live_table(output: Output, found: SweepReport) -> tuple[list[str], list[list[Cell]]]:
    """The best trials, and those that run."""
    running = [trial for trial in found.trials if trial.state is TrialState.RUNNING]
    sign = -1 if found.goal == "maximize" else 1
    ended = [trial for trial in found.trials if not trial.is_open]
    ended.sort(key=lambda one: (one.best is None, sign * (one.best or 0.0)))
    room = max(2, min(_LIVE_ROWS, output.room - 4))
    shown = [*ended[: max(1, room - len(running))], *running][:room]
    return _table(found, shown)


def _headlines(found: SweepReport) -> list[str]:
    counts = {state: sum(trial.state is state for trial in found.trials) for state in TrialState}
    words = [f"{count} {state}" for state, count in counts.items() if count]
    left = f", about {format_duration(found.eta_s)} left" if found.eta_s is not None and found.eta_s > 0 else ""
    reason = f": {found.reason}" if found.reason else ""
    first = f"sweep {found.name} is {found.state}{reason}"
    lines = [first, f"{_size(found)}: {', '.join(words) or 'none yet'}{left}"]
    if found.workers:
        said = [f"job {one.job} {one.state}{f': {one.reason}' if one.reason else ''}" for one in found.workers]
        lines.append(f"workers: {', '.join(said)}")
    if (best := found.best_trial) is not None:
        values = ", ".join(f"{name} {_shown(best.values[name])}" for name in found.parameters if name in best.values)
        lines.append(f"best: trial {best.number}, {found.metric} {_number(best.best)} with {values}")
    return lines


def _table(found: SweepReport, trials: Sequence[Trial]) -> tuple[list[str], list[list[Cell]]]:
    metric = [f"{found.metric} best", "last", "STEP"] if found.metric else []
    header = ["TRIAL", "JOB", "STATE", *found.parameters, *metric, "TOOK", "REASON"]
    return header, [_row(found, trial) for trial in trials]


def _row(found: SweepReport, trial: Trial) -> list[Cell]:
    values = trial.values
    measured = [
        Cell(_number(trial.best), "bold" if trial.number == found.best else "", is_number=True),
        Cell(_number(trial.last), is_number=True),
        Cell("" if trial.step is None else str(trial.step), is_number=True),
    ]
    return [
        Cell(str(trial.number), "id", is_number=True),
        Cell("" if trial.job is None else str(trial.job), is_number=True),
        Cell(trial.state, _STYLES.get(trial.state, "")),
        *(Cell(_shown(values.get(name)), is_number=_is_number(values.get(name))) for name in found.parameters),
        *(measured if found.metric else []),
        Cell("" if trial.took_s is None else format_duration(trial.took_s), is_number=True),
        Cell(trial.reason),
    ]


def _size(found: SweepReport) -> str:
    if found.total is not None:
        return f"{found.total} trials"
    # Its script says how many (n_trials) when it runs.
    return "as many trials as its script makes" if found.method == "study" else "trials without a limit"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
