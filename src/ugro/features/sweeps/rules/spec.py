"""What a sweep does: its space, method, metric and rule for early ends; made by ``reading``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from statistics import NormalDist
from typing import Any, Literal

from ugro.features.sweeps.model import Scale, Settings
from ugro.kernel.support.errors import ConfigError, UsageError

# --- space ------------------------------------------------------------------------------------------------------------
# The space that a sweep searches. Pure.
#
# A sampler sees each parameter as an axis: a choice by number, a whole number, or a number that may be logarithmic.
# Distributions that no sampler knows (normal, beta) are an axis from 0 to 1 and the inverse of their distribution.


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


# --- options ----------------------------------------------------------------------------------------------------------
# What the values of some parameters set: options of the job, instead of a flag of the script. Pure.
#
# ugro: options: mode: equal: {balance: off} measured: {balance: adaptive, args: [--epochs, 3]}


Options = Mapping[str, Mapping[str, Mapping[str, Any]]]  # by parameter, by value: what a job file would say
SCRIPT, ARGS = "script", "args"
_EXAMPLE = "options: {mode: {equal: {balance: off}}}"


def read_options(tree: Any, parameters: Sequence[Parameter]) -> Options:
    """Raises ConfigError. Which options a job has is not known here."""
    known = {one.name: one for one in parameters}
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, values in _items("ugro.options", tree):
        at = f"ugro.options.{name}"
        if name not in known:
            raise ConfigError(f"{at}: there is no parameter of this name", hint=f"there is: {', '.join(known)}")
        found[name] = {value: dict(_items(f"{at}.{value}", given)) for value, given in _items(at, values)}
        wanted = list(_expected(known[name], found[name], at))
        if unused := [value for value in found[name] if value not in wanted]:
            raise ConfigError(f"{at}.{unused[0]}: no value of {name}", hint=f"there is: {', '.join(wanted)}")
    return found


def _expected(one: Parameter, given: Mapping[str, Any], at: str) -> Iterator[str]:
    """One by one: a range may have more values than fit into memory."""
    for word in map(_word, one.grid() or ()):
        if word not in given:
            raise ConfigError(f"{at}: nothing for the value {word!r:.60}", hint="every value needs an entry")
        yield word


def flags_of(options: Options, settings: Settings) -> Settings:
    """The parameters that are flags of the script."""
    return tuple(one for one in settings if one[0] not in options)


def options_of(options: Options, settings: Settings) -> dict[str, Any]:
    """What a trial's values set. Of the same option, the last parameter's counts; words of ``args`` add up."""
    found: dict[str, Any] = {}
    for name, text in settings:
        given = options.get(name, {}).get(_word(json.loads(text)), {})
        args = [*found.get(ARGS, ()), *given.get(ARGS, ())]
        found |= {**given, ARGS: args} if args else given
    return found


def scripts_of(options: Options) -> list[str]:
    """The scripts that some trial runs instead of the sweep's own."""
    found = [given[SCRIPT] for values in options.values() for given in values.values() if SCRIPT in given]
    return list(dict.fromkeys(found))


def _items(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ConfigError(f"{key}: expected a map of keys to values, got {value!r:.60}", hint=_EXAMPLE)
    return ((_word(name), inner) for name, inner in value.items())


def _word(value: Any) -> str:
    """As keys of a map are written: a number and its text are the same."""
    return value if isinstance(value, str) else json.dumps(value)


# --- ranges -----------------------------------------------------------------------------------------------------------
# Ranges on the command line: ``1e-5,2e-5`` some values, ``2..8`` whole numbers, ``log:1e-5..1e-2``. Pure.
#
# They become parameters in the format of the file, so that there is one reader of both.


_NUMBER = r"[-+]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:[eE][-+]?\d{1,9})?"
_SPAN = re.compile(rf"(log:)?({_NUMBER})\.\.({_NUMBER})(?::({_NUMBER}))?")
_WHOLE = re.compile(r"[-+]?\d{1,400}")
_HINT = 'such as --lr "1e-5,2e-5", --layers 2..8, --dropout 0.0..0.5:0.1 or --lr log:1e-5..1e-2'


def split_arguments(words: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The words that stay as they are, and the parameters that some of them give."""
    rest: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    at = 0
    while at < len(words):
        name, equals, text = words[at].partition("=")
        if not equals and at + 1 < len(words):
            text = words[at + 1]
        parameter = _parameter(name, text) if name.startswith("--") else None
        if parameter is None:
            rest.append(words[at])
            at += 1
            continue
        if name[2:] in found:
            raise UsageError(f"{name} is given twice", hint=_HINT)
        found[name[2:]] = parameter
        at += 1 if equals else 2
    return rest, found


def _parameter(name: str, text: str) -> dict[str, Any] | None:
    """None if the text is no range."""
    if span := _SPAN.fullmatch(text):
        return _span(name, bool(span[1]), span[2], span[3], span[4])
    if text.startswith("log:"):
        raise UsageError(f"{name}: {text!r} is not a range", hint=_HINT)
    if "," not in text or text.startswith(("{", "[")):
        return None
    values = [one.strip() for one in text.split(",")]
    if "" in values:
        raise UsageError(f"{name}: {text!r} has an empty value", hint=_HINT)
    return {"values": [value_of(one) for one in values]}


def _span(name: str, is_log: bool, low: str, high: str, step: str | None) -> dict[str, Any]:
    least, most = value_of(low), value_of(high)
    if least >= most:
        raise UsageError(f"{name}: {low} is not less than {high}", hint=_HINT)
    if is_log and least <= 0:
        raise UsageError(f"{name}: a logarithmic range begins above 0, not at {low}", hint=_HINT)
    if is_log and step:
        raise UsageError(f"{name}: a logarithmic range has no step", hint=_HINT)
    if is_log:
        return {"distribution": "log_uniform_values", "min": float(least), "max": float(most)}
    if step:
        return {"distribution": "q_uniform", "min": least, "max": most, "q": _positive(name, step)}
    is_whole = isinstance(least, int) and isinstance(most, int)
    return {"distribution": "int_uniform" if is_whole else "uniform", "min": least, "max": most}


def _positive(name: str, text: str) -> float:
    if (step := float(text)) <= 0:
        raise UsageError(f"{name}: a step is above 0, not {text}", hint=_HINT)
    return step


def value_of(text: str) -> Any:
    """A number if it looks like one; else the text, as the script would get it without a sweep."""
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if re.fullmatch(_NUMBER, text) else text


# --- spec -------------------------------------------------------------------------------------------------------------


Goal = Literal["minimize", "maximize"]


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    goal: Goal = "minimize"
    target: float | None = None
    is_mean: bool = False  # a trial counts by the mean of its values, and not by the best of them

    @property
    def sign(self) -> int:
        """Times this, smaller is better."""
        return -1 if self.goal == "maximize" else 1


@dataclass(frozen=True, slots=True)
class Pruning:
    """When trials end early. Bands of ``hyperband`` count values, as W&B does; the other rules count steps."""

    kind: str
    bands: tuple[int, ...] = ()
    eta: float = 3.0
    is_strict: bool = False
    startup: int = 5  # trials that ``median`` lets run before it compares, steps of ``wilcoxon``
    brackets: int = 1  # of ``asha``: trials of each begin at another band, and are compared among themselves
    p: float = 0.1  # of ``wilcoxon``: how likely it may be that chance alone makes a trial look so bad


@dataclass(frozen=True, slots=True)
class SweepSpec:
    parameters: tuple[Parameter, ...]
    method: str = "grid"
    metric: Metric | None = None
    pruning: Pruning | None = None
    name: str | None = None
    program: str | None = None
    command: tuple[str, ...] = ()  # with W&B's macros; empty: the script with flags
    run_cap: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # of its jobs
    limits: Mapping[str, Any] = field(default_factory=dict)  # of its budget
    options: Options = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what is read and not used

    @property
    def varying(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.parameters if not one.is_constant and len(one.grid() or (1, 2)) > 1)

    @property
    def goal(self) -> Goal:
        return self.metric.goal if self.metric else "minimize"


# --- scales -----------------------------------------------------------------------------------------------------------
# How the values of a sweep's parameters are placed on an axis. Pure.


def scales(spec: SweepSpec) -> tuple[Scale, ...]:
    """Of the parameters that vary, in their order."""
    varying = set(spec.varying)
    return tuple(_scale(one) for one in spec.parameters if one.name in varying)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scale(one: Parameter) -> Scale:
    kind = one.distribution.removeprefix("q_")
    if one.axis.kind is Kind.CHOICE:
        # Numbers in their order, all else as it was written.
        values = sorted(one.values) if all(is_number(value) for value in one.values) else one.values
        return Scale(one.name, Kind.CHOICE, values=tuple(dict.fromkeys(dumps(value) for value in values)))
    if one.axis.kind is Kind.WHOLE:
        return Scale(one.name, Kind.WHOLE, low=one.low, high=one.high)
    if kind in ("normal", "log_normal"):  # without ends
        return Scale(one.name, Kind.NUMBER, is_log=kind == "log_normal")
    if kind == "beta":
        return Scale(one.name, Kind.NUMBER, low=0.0, high=1.0)
    return Scale(one.name, Kind.NUMBER, one.axis.is_log, one.low, one.high)


# --- words ------------------------------------------------------------------------------------------------------------
# What a sweep searches, in words. Pure.


_MOST_NAMED = 8


def words_of(one: Parameter) -> str:
    """Such as ``whole numbers from 2 to 8``."""
    kind = one.distribution.removeprefix("q_")
    if one.is_constant:
        return f"always {one.values[0]}"
    if one.axis.kind is Kind.CHOICE:
        named = ", ".join(str(value) for value in one.values[:_MOST_NAMED])
        more = len(one.values) - _MOST_NAMED
        return f"{named}{f' and {more} more' if more > 0 else ''}{', by their probabilities' if one.weights else ''}"
    steps = f", in steps of {one.q:g}" if one.q is not None else ""
    if kind in ("normal", "log_normal", "beta"):
        return f"{kind.replace('_', '-')} with {one.shape[0]:g} and {one.shape[1]:g}{steps}"
    what = "whole numbers from" if one.axis.kind is Kind.WHOLE else "from"
    curve = ", logarithmic" if "log_uniform" in kind else ""
    return f"{what} {one.low:g} to {one.high:g}{curve}{steps}"
