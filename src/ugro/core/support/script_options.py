"""Says whether a Python script can know an option, by reading its source. Nothing is run."""

from __future__ import annotations

import ast
import sys
from enum import Enum

# Packages that read no command line unless the script says which options there are.
_SILENT = frozenset({"click", "matplotlib", "numpy", "pandas", "sklearn", "torch", "torchvision", "tqdm", "ugro"})
_HANDS_ON = frozenset({"importlib", "runpy", "subprocess", "multiprocessing"})  # to code that is not read here
# Each of them makes a script that may take any option.
_TAKES_ANY = frozenset(
    {"parse_known_args", "parse_known_intermixed_args", "argv", "orig_argv", "REMAINDER", "UNPROCESSED",
     "ignore_unknown_options", "allow_extra_args", "exec", "eval", "__import__"}
)  # fmt: skip


class Knows(Enum):
    YES = "yes"  # its source has the option
    MAYBE = "maybe"
    NO = "no"


def knows(source: str, option: str) -> Knows:
    """``option``: such as ``--lr``, of which the source may also have a longer one: argparse takes a beginning.

    One with a single dash, such as ``-n``, has to be there as it is.
    """
    word = option.removeprefix("--")
    forms = {word, word.replace("-", "_"), word.replace("_", "-")}
    is_short = word == option
    if any((f"{mark}{form}{mark}" if is_short else f"--{form}") in source for form in forms for mark in "'\""):
        return Knows.YES
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Knows.MAYBE
    return Knows.MAYBE if any(_is_doubtful(node, forms) for node in nodes) else Knows.NO


def _is_doubtful(node: ast.AST, forms: set[str]) -> bool:
    match node:
        case ast.Import(names=names):
            return any(_may_parse(alias.name) for alias in names)
        case ast.ImportFrom(module=module, level=level, names=names):
            return level > 0 or _may_parse(module or "") or any(alias.name in _TAKES_ANY for alias in names)
        case ast.Attribute(attr=word) | ast.Name(id=word) | ast.arg(arg=word) | ast.keyword(arg=str(word)):
            return word in _TAKES_ANY or word in forms
        case ast.Constant(value=str(word)):
            return word in forms
    return False


def _may_parse(module: str) -> bool:
    first = module.partition(".")[0]
    return first in _HANDS_ON or (first not in _SILENT and first not in sys.stdlib_module_names)
