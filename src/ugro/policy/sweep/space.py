"""The space that a sweep searches. Pure.

A sampler sees each parameter as an axis: a choice by number, a whole number, or a number that may be logarithmic.
Distributions that no sampler knows (normal, beta) are an axis from 0 to 1 and the inverse of their distribution.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from statistics import NormalDist
from typing import Any

from ugro.core.sweep import Settings

_EDGE = 1e-9  # normal and log-normal reach infinity at 0 and 1
_HALVINGS = 60
_TERMS = 200
_MOST_STEPS = 1_000_000  # of one parameter, in a grid
MOST_WHOLE = 1 << 53  # beyond, a float misses some whole numbers


class Kind(StrEnum):
    CHOICE = "choice"
    WHOLE = "int"
    NUMBER = "float"


@dataclass(frozen=True, slots=True)
class Axis:
    kind: Kind
    low: float = 0.0
    high: float = 1.0
    is_log: bool = False

    @property
    def count(self) -> int | None:
        """How many points it has; None: too many to count."""
        return None if self.kind is Kind.NUMBER else int(self.high) - int(self.low) + 1


@dataclass(frozen=True, slots=True)
class Parameter:
    """With a distribution of W&B's; ``low`` and ``high`` are values, never exponents."""

    name: str
    distribution: str
    values: tuple[Any, ...] = ()
    weights: tuple[float, ...] = ()
    low: float = 0.0
    high: float = 1.0
    q: float | None = None
    shape: tuple[float, float] = (0.0, 1.0)  # mu and sigma, or a and b

    @property
    def is_constant(self) -> bool:
        return self.distribution == "constant"

    @property
    def axis(self) -> Axis:
        kind = self.distribution.removeprefix("q_").removeprefix("inv_")
        if kind in ("constant", "categorical"):
            return Axis(Kind.CHOICE, 0, len(self.values) - 1)
        if kind == "int_uniform":
            return Axis(Kind.WHOLE, self.low, self.high)
        if kind in ("normal", "log_normal", "beta"):
            return Axis(Kind.NUMBER, _EDGE, 1 - _EDGE)
        return Axis(Kind.NUMBER, self.low, self.high, is_log=kind.startswith("log_uniform"))

    def value(self, at: float) -> Any:
        """The value at a place of the axis."""
        axis = self.axis
        if axis.kind is Kind.CHOICE:
            return self.values[int(at)]
        if axis.kind is Kind.WHOLE:
            return int(at)
        return self._rounded(self._inverse(at))

    def _inverse(self, at: float) -> float:
        kind = self.distribution.removeprefix("q_")
        if kind == "normal":
            return NormalDist(*self.shape).inv_cdf(at)
        if kind == "log_normal":
            return math.exp(NormalDist(*self.shape).inv_cdf(at))
        if kind == "beta":
            return _beta_inverse(*self.shape, at)
        return at

    def _rounded(self, value: float) -> float | int:
        if self.q is None:
            return value
        steps = round(value / self.q)
        return steps * int(self.q) if self.q == int(self.q) else float(f"{steps * self.q:.12g}")

    def grid(self) -> Sequence[Any] | None:
        """All its values, which need not be in memory; None if a grid cannot have them."""
        if self.axis.kind is Kind.CHOICE:
            return self.values
        if self.axis.kind is Kind.WHOLE:
            return range(int(self.low), int(self.high) + 1)
        if self.distribution == "q_uniform" and self.q and (self.high - self.low) / self.q < _MOST_STEPS:
            count = math.floor((self.high - self.low) / self.q + _EDGE)
            return tuple(dict.fromkeys(self._rounded(self.low + step * self.q) for step in range(count + 1)))
        return None


Space = Sequence[Parameter]
Place = Mapping[str, float]  # of each parameter that varies


def settings(space: Space, place: Place) -> Settings:
    return tuple((one.name, dumps(one.value(place.get(one.name, 0)))) for one in space)


def random_place(space: Space, chance: Random) -> dict[str, float]:
    return {one.name: _random(one, chance) for one in space if not one.is_constant}


def grid_size(space: Space) -> int | None:
    """The number of different points; None: without end."""
    grids = [one.grid() for one in space]
    return None if None in grids else math.prod(len(grid) for grid in grids if grid is not None)


def grid_settings(space: Space, number: int) -> Settings:
    """The point of that number; the last parameter varies fastest."""
    found: list[tuple[str, str]] = []
    for one in reversed(space):
        grid = one.grid()
        assert grid is not None, f"{one.name} has no grid"
        number, place = divmod(number, len(grid))
        found.append((one.name, dumps(grid[place])))
    return tuple(reversed(found))


def place_of(space: Space, given: Settings) -> dict[str, float] | None:
    """Where a point of the grid is, as a sampler sees it."""
    values = dict(given)
    place: dict[str, float] = {}
    for one in space:
        if one.is_constant:
            continue
        if one.axis.kind is Kind.CHOICE:
            place[one.name] = [dumps(value) for value in one.values].index(values[one.name])
        else:
            place[one.name] = min(max(float(json.loads(values[one.name])), one.low), one.high)
    return place


def dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _random(one: Parameter, chance: Random) -> float:
    axis = one.axis
    if axis.kind is Kind.CHOICE:
        weights = one.weights or (1.0,) * len(one.values)
        return float(chance.choices(range(len(one.values)), weights)[0])
    if axis.kind is Kind.WHOLE:
        return float(chance.randint(int(axis.low), int(axis.high)))
    if axis.is_log:
        return min(max(math.exp(chance.uniform(math.log(axis.low), math.log(axis.high))), axis.low), axis.high)
    return chance.uniform(axis.low, axis.high)


def _beta_inverse(a: float, b: float, at: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _beta(a, b, middle) < at else (low, middle)
    return (low + high) / 2


def _beta(a: float, b: float, x: float) -> float:
    """The share of a beta distribution below x: the continued fraction of Lentz, where it converges fast."""
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(b, a, 1 - x)
    if x <= 0:
        return 0.0
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    result, c, d = 1.0, 1.0, 0.0
    for term in range(_TERMS):
        m = term // 2
        if term == 0:
            part = 1.0
        elif term % 2 == 0:
            part = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            part = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + part * d)
        c = 1 + part / c
        result *= c * d
        if abs(1 - c * d) < _EDGE:
            break
    return front * (result - 1)
