"""Counts what the project costs to carry, and compares it with the budgets in scripts/budgets.toml.

    python scripts/measure.py            prints every count beside its budget
    python scripts/measure.py --check    says what is above its budget, and fails then
    python scripts/measure.py --trace    counts the modules that `ugro token create` and `ugro launch` run through, too

It counts; it does not judge whether a line is worth its place. Only the agent's and the command's processes are traced,
not what runs on nodes.
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES, TESTS = ROOT / "src/ugro", ROOT / "tests"
BUDGETS = Path(__file__).with_name("budgets.toml")
BESIDE_FEATURES = ("kernel", "cli", "client", "web", "node")
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_LIMIT_S = 120
# Loaded by each traced process; notes in which tenths of a second a module of ours was called.
_TRACER = """
import atexit, json, os, sys, threading, time
seen, sources = {}, SOURCES
def note(frame, event, argument):
    if event == "call" and (name := frame.f_code.co_filename).startswith(sources):
        seen.setdefault(name, set()).add(int(time.time() * 10))
def write():
    sys.setprofile(None)
    with open(f"{FOLDER}/{os.getpid()}.json", "w") as file:
        json.dump({name: sorted(at) for name, at in seen.items()}, file)
atexit.register(write)
threading.setprofile(note)
sys.setprofile(note)
"""


def main(words: list[str], file: Path = BUDGETS) -> int:
    counts = {name: count() for name, count in COUNTS.items()}
    if "--trace" in words:
        counts |= traced()
    budgets = tomllib.loads(file.read_text())
    above = [name for name, count in counts.items() if count > budgets[name]["most"]]
    for name in above if "--check" in words else counts:
        sys.stdout.write(f"{name:<28} {counts[name]:>8,}   most {budgets[name]['most']:>8,}   {budgets[name]['why']}\n")
    if "--check" in words and above:
        sys.stdout.write("above its budget: make it less, or say in scripts/budgets.toml why it must be more\n")
    return 1 if above and "--check" in words else 0


# --- lines ----------------------------------------------------------------------------------------------------------


def code_lines(text: str) -> int:
    """Returns the number of lines that are not blank, a comment or a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


@cache
def _texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.py"))}


@cache
def _code() -> dict[str, int]:
    return {name: code_lines(text) for name, text in _texts(SOURCES).items()}


def kernel_and_frames() -> int:
    """Returns the lines of code that stay when every feature is taken away; 0 before there is a kernel."""
    if not (SOURCES / "kernel").is_dir():
        return 0
    return sum(lines for name, lines in _code().items() if name.partition("/")[0] in BESIDE_FEATURES)


# --- habits ---------------------------------------------------------------------------------------------------------


def set_late() -> int:
    """Returns how often a constructor, or what builds the agent, puts a collaborator into another object."""
    found = 0
    for name, text in _texts(SOURCES).items():
        if not name.startswith(("kernel/", "features/")):
            continue
        builds = name.endswith(("kernel/agent/wiring.py", "kernel/agent/agent.py"))
        found += sum(_late(function) for function in _functions(text) if builds or function.name == "__init__")
    return found


def _functions(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _late(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    targets = [one for node in ast.walk(function) if isinstance(node, ast.Assign) for one in node.targets]
    owners = [ast.unparse(one.value) for one in targets if isinstance(one, ast.Attribute)]
    return sum(owner != "self" for owner in owners)


def polling() -> int:
    """Returns the number of the agent's modules with a loop that looks again after some time."""
    texts = (text for name, text in _texts(SOURCES).items() if name.startswith(("kernel/", "features/")))
    return sum(any(_polls(loop) for loop in _loops(text)) for text in texts)


def _loops(text: str) -> list[ast.While]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.While)] if "while " in text else []


def _polls(loop: ast.While) -> bool:
    for call in (node for node in ast.walk(loop) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        if name in ("asyncio.sleep", "asyncio.timeout", "asyncio.wait_for"):
            return True
        if name == "asyncio.wait" and not any(keyword.arg == "timeout" for keyword in call.keywords):
            continue
        waits = name == "wait_for_any" or name.endswith((".wait", "._wait", ".pause", "._pause"))
        if waits and len(call.args) + len(call.keywords) > 1:
            return True
    return False


def against_the_plan() -> int:
    """Returns the number of imports by which the kernel, a frame or another feature knows a feature, or a frame."""
    modules = {_module(name) for name in _texts(SOURCES)}
    found = 0
    for name, text in _texts(SOURCES).items():
        own = _module(name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ugro."):
                whole = {f"{node.module}.{one.name}" for one in node.names}
                named = whole & modules or {str(node.module)}
                found += sum(_is_against(_room(own), _room(other)) for other in named)
    return found


def _module(name: str) -> str:
    return "ugro." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _room(module: str) -> str:
    """Returns ``features.sweeps`` or ``kernel``, for example."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[0] == "features" else 1])


def _is_against(own: str, other: str) -> bool:
    if own == other or own in ("lab", "__init__"):
        return False
    if other.startswith("features."):
        return True
    return own == "kernel" and other in ("cli", "client", "web", "train", "lab")


COUNTS: dict[str, Callable[[], int]] = {
    "lines of code": lambda: sum(_code().values()),
    "kernel, frames and node": kernel_and_frames,
    "files": lambda: len(_code()),
    "lines of tests": lambda: sum(text.count("\n") for text in _texts(TESTS).values()),
    "collaborators set late": set_late,
    "modules that poll": polling,
    "imports against the plan": against_the_plan,
}


# --- what a command runs through ------------------------------------------------------------------------------------


def traced() -> dict[str, int]:
    with tempfile.TemporaryDirectory(prefix="ugro-") as place:
        lab = _Traced(Path(place))
        lab.ugro("lab", "up", "--nodes", "3")
        try:
            token = lab.span("token", "create", "--role", "viewer", "--name", "measured")
            (lab.work / "train.py").write_text("print('done')\n")
            launch = lab.span("launch", "train.py", "--nodes", "3")
        finally:
            lab.ugro("lab", "down")
            lab.ugro("agent", "stop")
        return {"modules of token create": lab.modules(token), "modules of launch": lab.modules(launch)}


class _Traced:
    """An agent and commands of its own, each of which says when its modules were called."""

    def __init__(self, place: Path) -> None:
        self.work, self._said = place / "work", place / "said"
        for folder in (self.work, self._said, place / "load"):
            folder.mkdir()
        tracer = f"SOURCES, FOLDER = {str(SOURCES)!r}, {str(self._said)!r}\n{_TRACER}"
        (place / "load/sitecustomize.py").write_text(tracer)
        own = {"UGRO_HOME": str(place / "home"), "PYTHONPATH": f"{place / 'load'}:{SOURCES.parent}"}
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("UGRO_")} | own

    def ugro(self, *words: str) -> None:
        argv = [str(Path(sys.executable).with_name("ugro")), *words]
        done = subprocess.run(argv, cwd=self.work, env=self._env, capture_output=True, text=True, timeout=_LIMIT_S)
        if done.returncode:
            raise SystemExit(f"ugro {' '.join(words)}: {done.stdout}{done.stderr}")

    def span(self, *words: str) -> tuple[float, float]:
        begun = time.time()
        self.ugro(*words)
        return begun * 10, time.time() * 10

    def modules(self, span: tuple[float, float]) -> int:
        calls = [json.loads(path.read_text()) for path in self._said.glob("*.json")]
        found = ((name, when) for one in calls for name, at in one.items() for when in at)
        return len({name for name, when in found if span[0] <= when <= span[1]})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
