"""The figures of an experiment as tables: for the command line, for the page, and as CSV. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ugro.core.training import StepRecord
from ugro.policy.ablation.measure import METRICS, Metric
from ugro.policy.ablation.statistics import Band, Estimate, Row, Run, is_measured

NOT_MEASURED = "not measured"
Cells = Sequence[str]


def shown(one: Estimate | None, metric: Metric) -> str:
    """Such as ``312 ± 14 samples/s``."""
    if one is None:
        return NOT_MEASURED
    unit = f" {metric.unit}" if metric.unit else ""
    return f"{spread(one, metric.scale)}{unit}"


def spread(one: Estimate, scale: float = 1.0) -> str:
    if one.half is None:
        return number(one.mean * scale)
    # Two digits of the interval say how many of the mean count.
    half = one.half * scale
    decimals = _decimals(10 * half) if half else _decimals(one.mean * scale)
    return f"{one.mean * scale:.{decimals}f} ± {one.half * scale:.{decimals}f}"


def number(value: float) -> str:
    return f"{value:.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    """Three digits that count, and no more than four decimals."""
    size = abs(value)
    if size == 0:
        return 0
    return next((places for places, least in enumerate((100, 10, 1, 0.1)) if size >= least), 4)


def gain(row: Row) -> str:
    if row.ratio is None:
        return "1" if row.against is None and row.runs else ""
    return f"× {spread(row.ratio)}"


def summary(rows: Sequence[Row]) -> Iterator[list[str]]:
    yield ["model", "variant", "runs", "against", *(metric.title for metric in METRICS), "last shares"]
    for row in rows:
        compared = f"{gain(row)} ({row.against})" if row.ratio is not None else gain(row)
        values = [shown(row.values.get(metric.key), metric) for metric in METRICS]
        yield [row.model, row.variant, f"{row.runs} of {row.wanted}", compared, *values, _shares(row.shares)]


def of_metric(rows: Sequence[Row], metric: Metric) -> Iterator[list[str]]:
    yield ["model", "variant", f"mean{f' in {metric.unit}' if metric.unit else ''}", "95 % interval ±", "runs"]
    for row in rows:
        one = row.values.get(metric.key)
        if one is not None:
            half = "" if one.half is None else f"{one.half * metric.scale:.6g}"
            yield [row.model, row.variant, f"{one.mean * metric.scale:.6g}", half, str(one.count)]


def of_bands(bands: Sequence[Band], x: str) -> Iterator[list[str]]:
    yield ["variant", x, "loss", "low", "high"]
    for band in bands:
        for values in zip(band.xs, band.means, band.lows, band.highs, strict=True):
            yield [band.variant, *(f"{value:.6g}" for value in values)]


def of_runs(runs: Sequence[Run]) -> Iterator[list[str]]:
    """In the units of the values themselves: seconds, shares, joules."""
    keys = [metric.key for metric in METRICS]
    yield ["run", "job", "model", "variant", "seed", "state", *keys, "steps", "shares", "nodes", "reason"]
    for run in runs:
        one = run.figures
        values = [_plain(getattr(one, key)) for key in keys]
        about = [str(run.number), _plain(run.job), run.model, run.variant, str(run.seed), run.state]
        yield [*about, *values, str(one.steps), _shares(one.shares), " ".join(one.nodes), run.reason]


def of_steps(steps: Iterable[tuple[Run, Sequence[StepRecord]]]) -> Iterator[list[str]]:
    """Every step of every run; lists have a value for each rank."""
    lists = ("shares", "own_s", "waiting_s", "communication_s", "data_s")
    yield ["run", "job", "model", "variant", "seed", "step", "epoch", "samples", "loss", "step_s", "time", *lists]
    for run, records in steps:
        about = [str(run.number), _plain(run.job), run.model, run.variant, str(run.seed)]
        for one in records:
            plain = (one.step, one.epoch, one.samples, one.loss, one.step_s, one.time_s)
            ranks = (" ".join(_plain(value) for value in getattr(one, name)) for name in lists)
            yield [*about, *(_plain(value) for value in plain), *ranks]


def problems(runs: Sequence[Run]) -> Iterator[str]:
    """What a reader must know before believing the figures."""
    failed = [run for run in runs if run.state not in ("complete", "running", "pending")]
    for run in failed[:5]:
        why = f": {run.reason}" if run.reason else ""
        yield f"run {run.number} ({run.model}, {run.variant}, seed {run.seed}) is {run.state}{why}"
    if len(failed) > 5:
        yield f"and {len(failed) - 5} more runs"
    silent = [run for run in runs if run.state == "complete" and not is_measured(run)]
    if silent:
        yield f"{len(silent)} complete runs have recorded no steps"


def _shares(shares: Sequence[int]) -> str:
    return " / ".join(str(share) for share in shares)


def _plain(value: float | int | None) -> str:
    if value is None:
        return ""
    return f"{value:.9g}" if isinstance(value, float) and abs(value) < 1e8 else str(value)
