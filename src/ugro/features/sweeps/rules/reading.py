"""Reads a sweep in the format of W&B's sweep files. Pure: values in, a spec or one clear error out.

A file that works there works here. What we cannot do is refused by name; what has no meaning here is named in a note.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ugro.features.sweeps.model import METHODS, PRUNERS, Settings
from ugro.features.sweeps.rules.spec import (
    MOST_WHOLE,
    Kind,
    Metric,
    Parameter,
    Pruning,
    SweepSpec,
    grid_size,
    read_options,
)
from ugro.kernel.support.errors import ConfigError
from ugro.kernel.support.secrets import HIDDEN, without_passwords

# --- macros -----------------------------------------------------------------------------------------------------------
# The command of a trial: W&B's macros, flags, and the variables that every trial has. Pure.


ARGS = ("${args}", "${args_no_boolean_flags}", "${args_no_hyphens}", "${args_json}")
_PLAIN = ("${env}", "${interpreter}", "${program}")
_VARIABLE = re.compile(r"\$\{envvar:([A-Za-z_][A-Za-z0-9_]*)\}")
_MACRO = re.compile(r"\$\{[^{}]*\}")
_ODD = re.compile(r"[^A-Za-z0-9]+")
ALL = "UGRO_PARAMS"  # all of them, as JSON; nested as in the file


def check_command(words: Any) -> tuple[str, ...]:
    """A command's words; raises ConfigError for a macro that is not known."""
    if words is None:
        return ()
    if isinstance(words, str):
        words = [words]
    if not isinstance(words, list) or not words or not all(isinstance(one, str | int | float) for one in words):
        hint = "command: ['${interpreter}', '${program}', '${args}']"
        raise ConfigError("command: expected a list of words", hint=hint)
    for macro in (macro for word in words for macro in _MACRO.findall(str(word))):
        if macro not in (*ARGS, *_PLAIN) and not _VARIABLE.fullmatch(macro):
            known = ", ".join((*_PLAIN, *ARGS, "${envvar:NAME}"))
            raise ConfigError(f"command: {macro} is not supported here", hint=f"there is: {known}")
    return tuple(str(word) for word in words)


def template(command: Sequence[str], program: str | None) -> tuple[bool, list[str]]:
    """Whether UGRO launches the program as a script, and the words: after the script, or of the whole command.

    ``${args}`` and its relatives stay: each trial has its own.
    """
    words = [word for word in command if word != "${env}"] or ["${interpreter}", "${program}", "${args}"]
    if program is None and "${program}" in words:
        raise ConfigError("program: missing", hint="program: train.py, or name the script: ugro sweep train.py -f FILE")
    if words[:2] == ["${interpreter}", "${program}"]:
        return True, words[2:]
    known = {"${interpreter}": "python3", "${program}": program or ""}
    return False, [known.get(word, word) for word in words]


def wanted_variables(words: Sequence[str]) -> tuple[str, ...]:
    """Variables of the user that the command names."""
    return tuple(dict.fromkeys(name for word in words for name in _VARIABLE.findall(word)))


def with_variables(words: Sequence[str], known: Mapping[str, str]) -> list[str]:
    def value(found: re.Match[str]) -> str:
        if found[1] not in known:
            raise ConfigError(f"command: the variable {found[1]} is not set here", hint=f"export {found[1]}=…")
        return known[found[1]]

    return [_VARIABLE.sub(value, word) for word in words]


def expanded(words: Sequence[str], settings: Settings) -> list[str]:
    """With the flags of a trial."""
    return [part for word in words for part in (_flags(word, settings) if word in ARGS else [word])]


def variables(settings: Settings) -> dict[str, str]:
    """What a trial finds in its environment."""
    named = {f"UGRO_PARAM_{_ODD.sub('_', name).strip('_').upper()}": _word(text) for name, text in settings}
    return {**named, ALL: json.dumps(nested(settings))}


def nested(settings: Settings) -> dict[str, Any]:
    """``optimizer.lr`` is lr of optimizer."""
    found: dict[str, Any] = {}
    for name, text in settings:
        inner = found
        *outer, last = name.split(".")
        for part in outer:
            step = inner.setdefault(part, {})
            inner = step if isinstance(step, dict) else inner
        inner[last] = json.loads(text)
    return found


def _flags(macro: str, settings: Settings) -> list[str]:
    if macro == "${args_json}":
        return [json.dumps(nested(settings))]
    hyphens = "" if macro == "${args_no_hyphens}" else "--"
    found = []
    for name, text in settings:
        if macro == "${args_no_boolean_flags}" and text in ("true", "false"):
            found += [f"--{name}"] if text == "true" else []
        else:
            found.append(f"{hyphens}{name}={_word(text)}")
    return found


def _word(text: str) -> str:
    """As W&B writes it: Python's own words for true, false and nothing; a text without quotes."""
    return str(json.loads(text))


# --- masking ----------------------------------------------------------------------------------------------------------
# A sweep's document as others see it: without the values of its user's variables, and without passwords. Pure.


_ENV = "env"


def without_values(document: Mapping[str, Any]) -> dict[str, Any]:
    """The variables keep their names; of all other texts, only passwords in addresses are hidden."""
    found: dict[str, Any] = _without_passwords(dict(document))
    for job in _jobs(found.get("ugro")):
        if _ENV in job:
            job[_ENV] = _hidden(job[_ENV])
    return found


def _jobs(own: Any) -> Iterator[dict[str, Any]]:
    """Where a document has options of jobs: for all trials, and for single values of parameters."""
    if isinstance(own, dict):
        yield own
        for values in _maps(own.get("options")):
            yield from _maps(values)


def _maps(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield from (inner for inner in tree.values() if isinstance(inner, dict))


def _hidden(env: Any) -> Any:
    """A variable without a value is taken from the submitter's environment: there is nothing to hide."""
    if not isinstance(env, dict):
        return HIDDEN
    return {name: None if value is None else HIDDEN for name, value in env.items()}


def _without_passwords(value: Any) -> Any:
    if isinstance(value, str):
        return without_passwords(value)
    if isinstance(value, dict):
        return {key: _without_passwords(inner) for key, inner in value.items()}
    return [_without_passwords(inner) for inner in value] if isinstance(value, list) else value


# --- reading ----------------------------------------------------------------------------------------------------------


_KEYS = (
    "program", "method", "metric", "parameters", "early_terminate", "command", "name", "run_cap", "ugro",
    "project", "entity", "description",
)  # fmt: skip
_UNUSED = ("project", "entity", "description")
_LIMITS = ("max_parallel", "max_failed", "no_improvement", "time", "gpu_hours", "trials_per_gpu")
_DISTRIBUTIONS = (
    "constant", "categorical", "categorical_w_probabilities", "int_uniform", "uniform", "q_uniform",
    "log_uniform", "log_uniform_values", "q_log_uniform", "q_log_uniform_values",
    "inv_log_uniform", "inv_log_uniform_values", "normal", "q_normal", "log_normal", "q_log_normal", "beta", "q_beta",
)  # fmt: skip
_OF_PARAMETER = (
    "values", "value", "probabilities", "distribution", "min", "max", "mu", "sigma", "q", "a", "b", "parameters",
)  # fmt: skip
_OF_PRUNING = ("type", "min_iter", "max_iter", "s", "eta", "strict", "startup", "brackets", "p_threshold")
_OPTIONS = "options"
_OWN_METHODS = ("study",)  # of ``--study``, which no file has
_EXPONENT = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+")  # YAML 1.1 reads 1e-5 as a text
_NO_NUMBERS = ("nan", "inf", "+inf", "-inf", "infinity", "-infinity")
_BANDS = 100
_MOST_DEPTH = 8
_LARGEST = 1e300


def read(tree: Mapping[str, Any]) -> SweepSpec:
    """Raises ConfigError, which names the key."""
    check_keys(tree)
    parameters = tuple(_parameters(_mapping("parameters", tree.get("parameters")), ""))
    if not parameters:
        raise ConfigError("parameters: a sweep needs at least one", hint="parameters: {lr: {values: [0.1, 0.01]}}")
    method = _one_of("method", tree.get("method", "grid"), (*METHODS, *_OWN_METHODS))
    metric = _metric(tree.get("metric"))
    if method == "grid" and grid_size(parameters) is None:
        endless = next(one.name for one in parameters if one.grid() is None)
        hint = "give values, whole numbers or a larger q; or another method: random, bayes"
        raise ConfigError(f"parameters.{endless}: a grid cannot try all values of a range", hint=hint)
    _expect_suitable(method, metric, parameters)
    pruning = _pruning(tree.get("early_terminate"), metric)
    if metric is not None and pruning is not None and pruning.kind == "wilcoxon":
        metric = replace(metric, is_mean=True)
    own = _mapping("ugro", tree.get("ugro", {}))
    return SweepSpec(
        parameters,
        method,
        metric,
        pruning,
        _text("name", tree.get("name")),
        _text("program", tree.get("program")),
        check_command(tree.get("command")),
        _whole("run_cap", tree.get("run_cap"), 1),
        {key: value for key, value in own.items() if key not in (*_LIMITS, _OPTIONS)},
        {key: value for key, value in own.items() if key in _LIMITS},
        read_options(own.get(_OPTIONS, {}), parameters),
        tuple(f"{key} is W&B's, and has no meaning here" for key in _UNUSED if tree.get(key) is not None),
    )


def check_keys(tree: Mapping[str, Any]) -> None:
    """Raises ConfigError for one that no sweep file has."""
    _expect_known("", tree, _KEYS)


def _expect_suitable(method: str, metric: Metric | None, parameters: Iterable[Parameter]) -> None:
    if metric is None and method not in ("grid", "random", "qmc", *_OWN_METHODS):
        raise ConfigError(f"metric: method {method} needs one", hint="metric: {name: val/loss, goal: minimize}")
    if method == "cmaes" and all(one.axis.kind is Kind.CHOICE for one in parameters):
        hint = "give a range, such as min and max; or another method: bayes"
        raise ConfigError("parameters: method cmaes searches numbers, and all of these are choices", hint=hint)


def _metric(tree: Any) -> Metric | None:
    if tree is None:
        return None
    tree = _mapping("metric", tree)
    _expect_known("metric.", tree, ("name", "goal", "target"))
    if (name := _text("metric.name", tree.get("name"))) is None:
        raise ConfigError("metric.name: missing", hint="the name under which the script logs it, such as val/loss")
    goal = _one_of("metric.goal", tree.get("goal", "minimize"), ("minimize", "maximize"))
    target = tree.get("target")
    return Metric(name, goal, None if target is None else _number("metric.target", target))  # type: ignore[arg-type]


def _pruning(tree: Any, metric: Metric | None) -> Pruning | None:
    if tree is None:
        return None
    tree = _mapping("early_terminate", tree)
    at = "early_terminate."
    kind = _one_of(f"{at}type", tree.get("type"), PRUNERS)
    if metric is None:
        raise ConfigError("early_terminate: it needs a metric to compare", hint="metric: {name: val/loss}")
    _expect_known(at, tree, _OF_PRUNING)
    eta = _number(f"{at}eta", tree.get("eta", 3))
    if eta <= 1:
        raise ConfigError(f"{at}eta: expected more than 1, got {eta:g}")
    startup = _whole(f"{at}startup", tree.get("startup", 2 if kind == "wilcoxon" else 5), 1) or 5
    if kind == "median":
        return Pruning(kind, startup=startup)
    if kind == "wilcoxon":
        p = _number(f"{at}p_threshold", tree.get("p_threshold", 0.1))
        if not 0 < p < 1:
            raise ConfigError(f"{at}p_threshold: expected a number between 0 and 1, got {p:g}")
        return Pruning(kind, startup=startup, p=p)
    brackets = _whole(f"{at}brackets", tree.get("brackets", 1), 1) or 1
    if kind == "hyperband" and brackets > 1:
        raise ConfigError(f"{at}brackets: W&B's hyperband has none", hint="type: asha")
    return Pruning(kind, _bands(tree, eta), eta, bool(tree.get("strict", False)), brackets=brackets)


def _bands(tree: Mapping[str, Any], eta: float) -> tuple[int, ...]:
    at = "early_terminate."
    most, least = (_whole(f"{at}{key}", tree.get(key), 1) for key in ("max_iter", "min_iter"))
    if most is not None:
        count = _whole(f"{at}s", tree.get("s"), 1)
        if count is None and tree.get("type") == "hyperband":
            raise ConfigError(f"{at}s: missing beside max_iter", hint="s: 2")
        found = [most / eta**power for power in range(1, (count or _BANDS) + 1)]
        bands = tuple(sorted(int(band) for band in found if band >= 1))
        if not bands:
            raise ConfigError(f"{at}max_iter: {most} is too small for eta {eta:g}", hint="increase it, or decrease eta")
        return bands
    if least is None and tree.get("type") == "hyperband":
        raise ConfigError("early_terminate: min_iter or max_iter is missing", hint="min_iter: 3")
    if least is None:
        return ()  # of asha: found from the first complete trial
    bands, band = (), float(least)
    while len(bands) < _BANDS and band < 1 << 40:
        bands, band = (*bands, int(band)), band * eta
    return bands


def _parameters(tree: Mapping[str, Any], at: str, depth: int = 0) -> Iterable[Parameter]:
    for name, given in tree.items():
        key = f"{at}{name}"
        given = _mapping(f"parameters.{key}", given)
        _expect_known(f"parameters.{key}.", given, _OF_PARAMETER)
        if "parameters" in given:
            if depth >= _MOST_DEPTH:
                raise ConfigError(f"parameters.{key}: nested too deeply")
            inner = _mapping(f"parameters.{key}.parameters", given["parameters"])
            yield from _parameters(inner, f"{key}.", depth + 1)
        else:
            yield _parameter(key, given)


def _parameter(name: str, given: Mapping[str, Any]) -> Parameter:
    kind = _distribution(name, given)
    at = f"parameters.{name}."
    if kind == "constant":
        if "value" not in given:
            raise ConfigError(f"{at}value: missing")
        return Parameter(name, kind, (_value(f"{at}value", given["value"]),))
    if kind.startswith("categorical"):
        return _choice(name, given)
    q = positive(f"{at}q", given.get("q", 1)) if kind.startswith("q_") else None
    if "normal" in kind:
        mean, spread = _number(f"{at}mu", given.get("mu", 0)), positive(f"{at}sigma", given.get("sigma", 1))
        return _finite(Parameter(name, kind, q=q, shape=(mean, spread)))
    if "beta" in kind:
        a, b = (positive(f"{at}{key}", given.get(key)) for key in ("a", "b"))
        return _finite(Parameter(name, kind, q=q, shape=(a, b)))
    return _finite(_span(name, kind, given, q))


def _finite(one: Parameter) -> Parameter:
    """Checked once, at its ends: a point that cannot be computed would be found in the middle of a sweep."""
    try:
        ends = [one.value(one.axis.low), one.value(one.axis.high)]
        if all(map(math.isfinite, ends)):
            return one
    except (OverflowError, ValueError, ZeroDivisionError):
        pass
    raise ConfigError(f"parameters.{one.name}: its values are too large for numbers", hint="choose a smaller range")


def _span(name: str, kind: str, given: Mapping[str, Any], q: float | None) -> Parameter:
    at = f"parameters.{name}."
    low, high = _number(f"{at}min", given.get("min")), _number(f"{at}max", given.get("max"))
    if low >= high:
        raise ConfigError(f"{at}min: {low:g} is not less than max, {high:g}")
    if kind == "int_uniform" and (low != int(low) or high != int(high)):
        raise ConfigError(f"{at}min: int_uniform needs whole numbers", hint="distribution: uniform")
    if kind == "int_uniform" and max(-low, high) > MOST_WHOLE:
        raise ConfigError(f"{at}max: whole numbers go up to {MOST_WHOLE}", hint="distribution: uniform")
    if kind.endswith("_values") and low <= 0:
        raise ConfigError(f"{at}min: a logarithmic range begins above 0, not at {low:g}")
    if kind in ("log_uniform", "q_log_uniform", "inv_log_uniform"):  # given as exponents of e
        low, high = (-high, -low) if kind.startswith("inv_") else (low, high)
        if max(abs(low), abs(high)) > 300:
            hint = "min and max are exponents of e; for values: log_uniform_values"
            raise ConfigError(f"{at}max: e to the power of {high:g} is no number", hint=hint)
        low, high = math.exp(low), math.exp(high)
    return Parameter(name, kind, low=low, high=high, q=q)


def _choice(name: str, given: Mapping[str, Any]) -> Parameter:
    at = f"parameters.{name}."
    values = given.get("values")
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{at}values: expected a list with at least one value", hint="values: [adam, sgd]")
    weights = given.get("probabilities") or ()
    if weights and (not isinstance(weights, list) or len(weights) != len(values)):
        raise ConfigError(f"{at}probabilities: expected one for each value")
    shares = tuple(_number(f"{at}probabilities", one) for one in weights)
    if shares and (min(shares) < 0 or sum(shares) <= 0):
        raise ConfigError(f"{at}probabilities: expected numbers from 0 to 1")
    is_numbers = any(isinstance(one, int | float) and not isinstance(one, bool) for one in values)
    if is_numbers and (odd := next((one for one in values if str(one).lower() in _NO_NUMBERS), None)) is not None:
        raise ConfigError(f"{at}values: expected finite numbers, got {odd!r} among them", hint="leave it out")
    return Parameter(name, "categorical", tuple(_value(f"{at}values", one) for one in values), shares)


def _distribution(name: str, given: Mapping[str, Any]) -> str:
    """As W&B chooses it where none is given."""
    if (kind := given.get("distribution")) is not None:
        return _one_of(f"parameters.{name}.distribution", kind, _DISTRIBUTIONS)
    if "value" in given:
        return "constant"
    if "values" in given:
        return "categorical"
    if "min" in given and "max" in given:
        is_whole = all(isinstance(given[key], int) for key in ("min", "max"))
        return "int_uniform" if is_whole else "uniform"
    if "mu" in given or "sigma" in given:
        return "normal"
    raise ConfigError(f"parameters.{name}: give values, value, or min and max", hint="values: [0.1, 0.01]")


def _value(key: str, value: Any) -> Any:
    """Raises ConfigError for NaN and infinities, also within a list or a map: no training gets anywhere with them."""
    value = _mended(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _value(key, part)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}: expected a finite number, got {value}", hint=f'as a text: "{value}"')
    return value


def _mended(value: Any) -> Any:
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _number(key: str, value: Any) -> float:
    value = _mended(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        raise ConfigError(f"{key}: expected a number" + ("" if value is None else f", got {value!r:.60}"))
    return value


def positive(key: str, value: Any) -> float:
    """Raises ConfigError for all but a finite number above 0."""
    if (number := _number(key, value)) <= 0:
        raise ConfigError(f"{key}: expected a number above 0, got {number:g}")
    return number


def _whole(key: str, value: Any, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key}: expected a whole number of {least} or more, got {value!r:.60}")
    return value


def _text(key: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}: expected a text, got {value!r:.60}")
    return value


def _mapping(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        what = "missing" if value is None else f"expected a map of keys to values, got {value!r:.60}"
        raise ConfigError(f"{key}: {what}")
    return value


def _one_of(key: str, value: Any, known: Iterable[str]) -> str:
    known = tuple(known)
    if isinstance(value, str) and value in known:
        return value
    what = "missing" if value is None else f"{value!r:.60} is not supported"
    raise ConfigError(f"{key}: {what}", hint=f"there is: {', '.join(known)}")


def _expect_known(at: str, tree: Mapping[str, Any], known: Iterable[str]) -> None:
    known = tuple(known)
    for key in tree:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there is: {', '.join(known)}"
            raise ConfigError(f"{at}{key}: not supported here", hint=hint)
