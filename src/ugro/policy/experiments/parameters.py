"""The parameters of a training: from its command line, its variables, its seed, and what it wrote itself. Pure.

``train.py --lr 1e-3 --epochs=3 --amp model.depth=12`` has lr, epochs, amp and model.depth.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from ugro.core.job import JobSpec
from ugro.core.support.secret import is_secret

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
