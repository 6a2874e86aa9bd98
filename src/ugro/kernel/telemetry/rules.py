"""The parameters of a training; and one line of a run's metrics.jsonl as points. Invalid lines are skipped.

    {"step": 10, "time": 1700000000.5, "rank": 0, "attempt": 1, "values": {"loss": 0.5}}
    {"step": 10, "time": 1700000000.5, "loss": 0.5, "lr": 1e-4}
    {"kind": "profile", "step": 10, "step_s": 0.1, "own_s": [0.5, 0.25]}   →  profile/step_s, profile/own_s/0 and /1
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.support.secrets import is_secret

# --- the parameters of a training -------------------------------------------------------------------------------------
# They come from its command line, its variables, its seed, and what it wrote itself. ``train.py --lr 1e-3 --epochs=3
# --amp model.depth=12`` has lr, epochs, amp and model.depth.


_MAX_PARAMETERS = 200
_MAX_LENGTH = 200
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_SETTING = re.compile(r"\+{0,2}([A-Za-z_][\w./-]*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_SEED = re.compile(r"(?:^|[._-])seed$", re.IGNORECASE)
YES = "yes"


def parameters(spec: JobSpec) -> dict[str, str]:
    """By name; those that look secret are left out."""
    found = dict(_given(_after_script(spec.argv)))
    found |= {f"env.{name}": value for name, value in spec.env}
    if spec.seed is not None and not any(map(is_seed, found)):
        found["seed"] = str(spec.seed)
    names = [name for name, value in found.items() if not is_secret(name, value)]
    return {name: found[name][:_MAX_LENGTH] for name in names[:_MAX_PARAMETERS]}


def all_parameters(given: Mapping[str, str], written: Mapping[str, str]) -> dict[str, str]:
    """With those that the training wrote beside its metrics; what the job was given takes precedence."""
    more = {name: value[:_MAX_LENGTH] for name, value in written.items() if name not in given}
    return dict(islice({**given, **more}.items(), max(_MAX_PARAMETERS, len(given))))


def is_seed(name: str) -> bool:
    return _SEED.search(name) is not None


def configuration(given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """All parameters but the seed: jobs with the same ones are the same experiment."""
    return tuple(sorted((name, value) for name, value in given.items() if not is_seed(name)))


def number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None


def _after_script(argv: Sequence[str]) -> Sequence[str]:
    """The arguments of the script, without those of the program that runs it, such as python's -m."""
    for place, word in enumerate(argv):
        if word == "-m" and place > 0:
            return argv[place + 2 :]
        if word.endswith((".py", ".sh")):
            return argv[place + 1 :]
    return argv[1:]


def _given(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if setting := _SETTING.fullmatch(word):
            yield setting[1], setting[2]
        elif flag := _FLAG.fullmatch(word):
            value = flag[2]
            if value is None and place < len(words) and _is_value(words[place]):
                value = words[place]
                place += 1
            yield flag[1], YES if value is None else value


def _is_value(word: str) -> bool:
    return not word.startswith("-") or _NUMBER.fullmatch(word) is not None


# --- lines as points --------------------------------------------------------------------------------------------------


LONGEST_LINE = 1 << 20
_LARGEST = 1 << 53
_LONGEST_KEY = 200
_MOST_KEYS = 10_000
_DEEPEST = 4
_ABOUT = frozenset({"step", "time", "rank", "attempt", "kind", "values"})
_PLAIN = ("log", "metrics")  # kinds whose keys are chosen by the user
_FLOATS = {float}
_FINE_KEYS: set[str] = set()  # keys that were checked before
_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class Record(NamedTuple):
    step: int
    time_ms: int
    rank: int
    values: dict[str, float]


def read(line: bytes) -> Record | None:
    try:
        return of(json.loads(line))
    except (ValueError, RecursionError):
        return None


def read_all(lines: Sequence[bytes]) -> list[Record]:
    """The same for many lines, parsed as one document; one by one only if that fails."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        found = []
    each = map(of, found) if len(found) == len(lines) else map(read, lines)
    return [record for record in each if record is not None]


def of(found: Any) -> Record | None:
    if type(found) is not dict:
        return None
    step, moment = found.get("step"), found.get("time", 0)
    if type(step) is not int or not -_LARGEST < step < _LARGEST:
        return None
    values = _values(found)
    if not values:
        return None
    is_timed = type(moment) in (int, float) and 0 <= moment < _LARGEST / 1000  # false for NaN
    rank = found.get("rank")
    return Record(
        step,
        int(moment * 1000) if is_timed else 0,
        rank if type(rank) is int and 0 <= rank < _LARGEST else 0,
        values,
    )


def _values(found: dict[str, Any]) -> dict[str, float]:
    kind, inner = found.get("kind"), found.get("values")
    if type(inner) is not dict:
        inner = {key: value for key, value in found.items() if key not in _ABOUT}
    prefix = f"{kind}/" if type(kind) is str and kind not in _PLAIN else ""
    if not prefix and set(map(type, inner.values())) == _FLOATS and _FINE_KEYS.issuperset(inner):
        return inner  # the usual case
    values = dict(islice(_flat(inner, prefix, 0), _MOST_KEYS))
    if len(_FINE_KEYS) < _MOST_KEYS:
        _FINE_KEYS.update(values)
    return values


def _flat(values: dict[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        kind = type(value)
        if kind is float or (kind is int and -_LARGEST < value < _LARGEST):
            key = prefix + name
            if 0 < len(key) <= _LONGEST_KEY and key.isprintable():
                yield key, float(value)
        elif kind is dict and depth < _DEEPEST:
            yield from _flat(value, f"{prefix}{name}/", depth + 1)
        elif kind is list and depth < _DEEPEST:
            yield from _flat({str(number): one for number, one in enumerate(value)}, f"{prefix}{name}/", depth + 1)
        elif kind is str and value in _WORDS and len(prefix + name) <= _LONGEST_KEY:
            yield prefix + name, _WORDS[value]
