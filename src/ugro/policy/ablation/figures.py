"""Bars with 95 % intervals as SVG. Pure: rows in, a text out; every text in it is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from ugro.policy.ablation.measure import Metric
from ugro.policy.ablation.statistics import Estimate, Row
from ugro.policy.ablation.tables import number, shown, spread

_WIDTH = 620
_LABELS = 190  # room for the names
_VALUES = 100  # room for the numbers
_LINE = 22
_HEAD = 24  # the line of a model's name
_CAP = 4  # of an interval's ends


def bars(rows: Sequence[Row], metric: Metric) -> str:
    """Grouped by model, all on one scale that begins at 0."""
    known = [(row, one) for row in rows if (one := row.values.get(metric.key)) is not None]
    most = max((max(one.high, one.mean) for _, one in known), default=0.0) or 1.0
    models = list(dict.fromkeys(row.model for row, _ in known))
    height = len(models) * _HEAD + len(known) * _LINE + _LINE
    parts = list(_drawn(known, models, metric, most))
    sentence = escape(_sentence(known, metric))
    return (
        f'<svg class="bars" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{sentence}">'
        f"{''.join(parts)}{_axis(height, metric, most)}</svg>"
    )


def _drawn(
    known: Sequence[tuple[Row, Estimate]], models: Sequence[str], metric: Metric, most: float
) -> Iterator[str]:
    y = 0
    for model in models:
        yield f'<text x="0" y="{y + 16}" font-weight="600">{escape(model)}</text>'
        y += _HEAD
        for row, one in known:
            if row.model == model:
                yield _bar(row, one, metric, most, y)
                y += _LINE


def _bar(row: Row, one: Estimate, metric: Metric, most: float, y: int) -> str:
    length, middle = _place(one.mean, most) - _LABELS, y + _LINE // 2
    kind = "mean is-baseline" if row.against is None else "mean"
    name = row.variant if len(row.variant) <= 32 else f"{row.variant[:31]}…"
    text = (
        f'<text x="{_LABELS - 8}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>'
        f'<rect class="{kind}" x="{_LABELS}" y="{y + 4}" width="{max(0.0, length):.1f}" height="{_LINE - 8}"/>'
    )
    if one.half is not None:
        low, high = _place(max(0.0, one.low), most), _place(one.high, most)
        text += _line(low, middle, high, middle)
        text += "".join(_line(x, middle - _CAP, x, middle + _CAP) for x in (low, high))
    label = escape(spread(one, metric.scale))  # the axis has the unit
    return text + f'<text class="faint" x="{_WIDTH}" y="{middle + 4}" text-anchor="end">{label}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="interval" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _axis(height: int, metric: Metric, most: float) -> str:
    y = height - _LINE + 4
    end = f"{number(most * metric.scale)}{f' {metric.unit}' if metric.unit else ''}"
    return (
        f'<line class="axis" x1="{_LABELS}" y1="{y}" x2="{_WIDTH - _VALUES}" y2="{y}"/>'
        f'<text class="faint" x="{_LABELS}" y="{y + 14}">0</text>'
        f'<text class="faint" x="{_WIDTH - _VALUES}" y="{y + 14}" text-anchor="end">{escape(end)}</text>'
    )


def _place(value: float, most: float) -> float:
    return _LABELS + value / most * (_WIDTH - _VALUES - _LABELS)


def _sentence(known: Sequence[tuple[Row, Estimate]], metric: Metric) -> str:
    """For screen readers."""
    said = [f"{row.model} {row.variant} {shown(one, metric)}" for row, one in known]
    return f"{metric.title}, {metric.meaning}: {'; '.join(said) or 'nothing measured'}."
