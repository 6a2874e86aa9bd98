"""No regular expression of ours takes longer than its text is long: anybody may have written the text.

``re`` holds the interpreter while it matches. An expression that goes back over its text stops the whole agent.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.rig.growth import is_slow
from ugro.features.environments.node import failures
from ugro.kernel.jobs.engine.rules import postmortem as log_signatures
from ugro.kernel.operations import audit_rules
from ugro.kernel.operations.registry import requests
from ugro.kernel.operations.request import _pattern
from ugro.web import api_allowlist

SRC = Path(__file__).parents[2] / "src"
HOW = {"compile": None, "match": "match", "fullmatch": "fullmatch"} | dict.fromkeys(
    ("search", "sub", "subn", "split", "findall", "finditer"), "search"
)

# How many expressions of a file the check names, and why they may stay.
BOUNDED: Mapping[str, tuple[int, str]] = {
    "kernel/config/reference.py": (1, "our own documentation"),
    "kernel/support/secrets.py": (3, "an address ends before the next ://, and a value that has begun ends in a match"),
    "web/report.py": (1, "our own modules"),
    "features/hardware/node/devices.py": (1, "the kernel's /proc/cpuinfo"),
    "node/system.py": (1, "a line of the NVIDIA driver"),
    "node/files/listing.py": (1, "the name of a file: 255 bytes"),
    "features/environments/node/interpreters.py": (1, "the C library's name"),
    "features/environments/node/failures.py": (2, "lines of at most 500 characters (Mask)"),
    "kernel/store/postgres_connection.py": (1, "our own SQL"),
    "train/checkpoint.py": (1, "the name of a file: 255 bytes"),
    "web/pages/cluster.py": (1, "the name of a job: 64 characters"),
    "features/services/node/door_machine.py": (1, "what HAProxy says of its version"),
}
# Those that are put together when they are used.
MADE: Mapping[str, list[tuple[str | re.Pattern[Any], str]]] = {
    "kernel/operations/audit_rules.py": [(one.path, "fullmatch") for one in audit_rules.RULES],
    "kernel/config/edit.py": [(r"    [ ]+#", "match")],
    "kernel/jobs/engine/rules/postmortem.py": [
        (pattern, "search")
        for sign in (*log_signatures._ROOTS, *log_signatures._SYMPTOMS)
        for pattern in (sign.pattern, *(one for two in sign.in_order for one in two))
    ],
    "kernel/operations/request.py": [
        (_pattern(one.operation.path), "fullmatch") for one in requests()
    ],
    "node/globs.py": [],  # characters, one after the other; nothing repeats
    "node/hardware/gpu_claims.py": [],  # the kernel's list of sockets
    "features/environments/node/failures.py": [(pattern, "search") for _, _, pattern in failures._SIGNS],
    "features/environments/node/place.py": [],  # classes of one character
    "train/checkpoint.py": [],  # a number between two fixed texts
    "web/api_allowlist.py": [(pattern, "fullmatch") for pattern in api_allowlist._PATTERNS.values()],
}


def test_every_regular_expression_takes_time_in_proportion_to_its_text() -> None:
    slow = {(place, getattr(one, "pattern", one)) for place, one, how in expressions() if is_slow(re.compile(one), how)}
    counts = Counter(place for place, _ in slow)
    unexplained = [one for one in slow if counts[one[0]] > BOUNDED.get(one[0], (0, ""))[0]]
    assert not unexplained, "rewrite it, bound its text, or say in BOUNDED what bounds it"
    assert counts == {place: count for place, (count, _) in BOUNDED.items()}, "one of these is not needed any more"


def test_fnmatch_is_not_used_for_what_others_wrote() -> None:
    users = {str(path.relative_to(SRC / "ugro")) for path in SRC.rglob("*.py") if "fnmatch" in words(path)}
    assert users == {"train/parallel/tensor.py"}, (
        "it is for a training's plan of its own model; others: node/globs.py"
    )


def words(path: Path) -> set[str]:
    imports = re.findall(r"^\s{0,20}(?:import|from) .+", path.read_text(), re.MULTILINE)
    return {word for line in imports for word in re.findall(r"\w+", line)}


@pytest.mark.parametrize(
    ("pattern", "how", "slow"),
    [
        (r"a*a*b", "match", True),
        (r"(a*)*b", "match", True),
        (r"(ab|a|b)*c", "match", True),
        (r"(\w+\s?)*x", "match", True),
        (r"(a{1,20}){1,20}b", "match", True),
        (r"\d+\.?\d*x", "match", True),
        (r"(.*?)(\d+)(\D*)", "fullmatch", True),
        (r"a+$", "search", True),
        (r"<a>.*?</a>", "search", True),
        (r"(a|b)*c", "match", False),
        (r"\d+(\.\d*)?x", "match", False),
        (r"\s*(.*)", "match", False),
        (r"(ab)*a*c", "match", False),
        (r"^a+$", "search", False),
        (r"a{1,200}b", "search", False),
        (r"#.*", "search", False),
    ],
)
def test_the_check_knows_slow_ones(pattern: str, how: str, *, slow: bool) -> None:
    assert is_slow(re.compile(pattern), how) is slow


def expressions() -> Iterator[tuple[str, re.Pattern[Any] | str, str]]:
    """Every expression in the sources: its file, and how it is used. Names of the file's beginning are known."""
    for path in sorted(SRC.rglob("*.py")):
        text = path.read_text()
        if "re." not in text:
            continue
        place, tree = str(path.relative_to(SRC / "ugro")), ast.parse(text)
        known = constants(tree)
        for call in ast.walk(tree):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and is_re(call.func)):
                continue
            found = compiled(call, known)
            if found is None:
                assert place in MADE, f"{path}:{call.lineno}: state in MADE what this can be"
                continue
            for how in hows(call, text):
                yield place, found, how
        yield from ((place, one, how) for one, how in MADE.get(place, ()))


def is_re(function: ast.Attribute) -> bool:
    return isinstance(function.value, ast.Name) and function.value.id == "re" and function.attr in HOW


def constants(tree: ast.Module) -> dict[str, Any]:
    known: dict[str, Any] = {"re": re}
    for line in tree.body:
        targets = (
            line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
        )
        if len(targets) == 1 and isinstance(targets[0], ast.Name):
            value = evaluated(line.value, known)  # type: ignore[attr-defined]
            if isinstance(value, str | bytes | re.Pattern):
                known[targets[0].id] = value
    return known


def evaluated(expression: ast.expr | None, known: dict[str, Any]) -> Any:
    """Texts, and what is put together from them; None for everything else."""
    if expression is None or any(isinstance(one, ast.Call) and not is_compile(one) for one in ast.walk(expression)):
        return None
    try:
        return eval(compile(ast.Expression(expression), "source", "eval"), {"__builtins__": {}, **known})
    except (NameError, TypeError, AttributeError, KeyError):
        return None


def is_compile(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and is_re(call.func) and call.func.attr in ("compile", "escape")


def compiled(call: ast.Call, known: dict[str, Any]) -> re.Pattern[Any] | None:
    pattern = evaluated(call.args[0], known)
    if pattern is None:
        return None
    words = [*call.args[1:], *(one.value for one in call.keywords)]
    flags = [one for one in words if ast.unparse(one).startswith("re.")]
    return (
        re.compile(pattern, evaluated(flags[0], known) if flags else 0) if isinstance(pattern, str | bytes) else pattern
    )


def hows(call: ast.Call, text: str) -> list[str]:
    """The ways it is used in this file; a search is the slowest."""
    assert isinstance(call.func, ast.Attribute)
    if (how := HOW[call.func.attr]) is not None:
        return [how]
    line = text.splitlines()[call.lineno - 1]
    name = re.match(r"(_?[A-Z]\w*)(?::[^=]*)? = re\.compile", line)
    used = set(re.findall(rf"\b{name[1]}\.(\w+)\(", text)) & set(HOW) if name else set()
    return sorted({HOW[one] or "search" for one in used}) or ["search"]
