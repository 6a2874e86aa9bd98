"""UGRO's own package, which goes with a job whose script imports it: for which commands, and to which Pythons."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath

from ugro.policy.nodes.imports import CodeTree, uses

MODULE = "ugro"
LEAST_PYTHON = "3.11"
TOO_OLD = f"{MODULE}.train needs Python {LEAST_PYTHON} or newer: name one"
_VERSION = re.compile(r"(\d+)\.(\d+)")
_SAYS_SO = re.compile(r"\b(import|from)\s+ugro\b")


def is_for(version: str) -> bool:
    """Whether a Python of this version can import it."""
    found = _VERSION.match(version)
    return found is not None and (int(found[1]), int(found[2])) >= tuple(map(int, LEAST_PYTHON.split(".")))


def still_missing(names: Collection[str], version: str) -> frozenset[str]:
    """What a Python lacks of the modules that it does not have, when UGRO's own package goes with the job."""
    return frozenset(names) - {MODULE} if is_for(version) else frozenset(names)


def scripts_in(argv: Sequence[str]) -> Iterator[str]:
    """The files that a command may run with Python, as they would be called in the code."""
    yield from (str(PurePosixPath(word)) for word in argv if word.endswith(".py") and not word.startswith(("/", "-")))
    if "-m" in argv[1:-1]:
        module = argv[argv.index("-m", 1) + 1].replace(".", "/")
        yield from (f"{module}.py", f"{module}/__main__.py")


def is_named_in(argv: Sequence[str]) -> bool:
    """``python -c "import ugro"``, or a shell's text that has the same."""
    return any(_SAYS_SO.search(word) for word in argv)


def is_wanted(script: str, tree: CodeTree) -> bool | None:
    """Whether the script imports it and its own code does not have it; None if that cannot be told."""
    for folder in {PurePosixPath(script).parent, PurePosixPath(".")}:
        if any(tree.source(str(folder / name)) is not None for name in (f"{MODULE}.py", f"{MODULE}/__init__.py")):
            return False  # a module of the user's own
    return uses(script, tree, MODULE)
