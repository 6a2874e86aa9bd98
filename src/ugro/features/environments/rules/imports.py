"""What a script imports as it begins, read from its source: the modules that a node's Python must have.

An import counts only if the script cannot run without it: at the top level, of a module that neither Python nor the
code itself has. What is optional, conditional or inside a function does not count. Nothing is run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol

from ugro.kernel.access.model import node_of
from ugro.kernel.jobs.engine.rules.postmortem import disk_hint
from ugro.kernel.jobs.model import Cause, Failure, Imports
from ugro.kernel.support.errors import EnvFailed
from ugro.kernel.support.quantities import in_words, names

_MOST_FILES = 300
_CATCH_ALL = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
# A script that changes where Python looks, or that installs packages, may find what we do not see.
_DOUBTFUL_OF_SYS = frozenset({"path", "modules", "meta_path", "path_hooks"})
_DOUBTFUL_MODULES = frozenset({"importlib", "pip", "pkgutil", "runpy", "site", "zipimport"})
_INSTALLS = re.compile(r"\b(pip|conda|uv)\b|PYTHONPATH")


class CodeTree(Protocol):
    """The code that a job runs with, by paths below its folder."""

    def source(self, path: str) -> str | None:
        """The text of a file; None if there is no such file, or it is too large or no text."""

    def is_folder(self, path: str) -> bool: ...

    def module_names(self) -> frozenset[str] | None:
        """Whatever may be imported from some folder of it; None if there are too many."""


@dataclass(frozen=True, slots=True)
class _Import:
    module: str  # empty in ``from . import x``
    level: int = 0  # how many dots before it
    names: tuple[str, ...] = ()  # what is imported from it


def imports_of(script: str, tree: CodeTree) -> Imports:
    found = _Search(tree, PurePosixPath(script).parent)
    found.follow(script, is_script=True)
    foreign = {name for name in found.foreign if name not in sys.stdlib_module_names}
    local = tree.module_names() if foreign else frozenset()
    names = sorted(foreign - (local or frozenset()))
    return Imports(tuple(names), found.is_certain and local is not None)


def uses(script: str, tree: CodeTree, module: str) -> bool | None:
    """Whether the script, or code of its own that it imports, imports this anywhere; None if that cannot be told."""
    found = _Everywhere(tree, PurePosixPath(script).parent)
    found.follow(script)
    if module in found.named:
        return True
    local = tree.module_names()
    if local is None or not found.is_certain or tree.source(script) is None:
        return None
    # What is not where Python looks first may still be found, by a path that only the job has.
    return None if (found.foreign & local) - sys.stdlib_module_names else False


class _Search:
    def __init__(self, tree: CodeTree, folder: PurePosixPath) -> None:
        self.foreign: set[str] = set()
        self.is_certain = True
        self._tree = tree
        self._folder = folder  # where Python looks first
        self._seen: set[str] = set()

    def follow(self, path: str, *, is_script: bool = False) -> None:
        """Reads a file and, after it, those of the code that it imports."""
        todo = [path]
        while todo:
            path = todo.pop()
            if path in self._seen or (source := self._tree.source(path)) is None:
                continue
            if len(self._seen) == _MOST_FILES:
                self.is_certain = False
                return
            self._seen.add(path)
            for one in self._statements(source, is_script and len(self._seen) == 1):
                todo += self._resolved(one, PurePosixPath(path))

    def _statements(self, source: str, is_script: bool) -> Iterator[_Import]:
        try:
            module = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self.is_certain = False  # for another version of Python, perhaps
            return
        self.is_certain &= not _is_doubtful(module)
        yield from self._imported(module, is_script)

    def _imported(self, module: ast.Module, is_script: bool) -> Iterator[_Import]:
        return _imports(module.body, is_script)

    def _resolved(self, one: _Import, importer: PurePosixPath) -> list[str]:
        """The files of the code that it runs; what is from elsewhere is noted."""
        parts = one.module.split(".") if one.module else []
        if one.level:
            if one.level > len(importer.parts):
                return []
            return self._files(importer.parents[one.level - 1], parts, one.names)
        for folder in dict.fromkeys((self._folder, PurePosixPath("."))):
            if self._is_here(folder / parts[0]):
                return self._files(folder, parts, one.names)
        self.foreign.add(parts[0])
        return []

    def _is_here(self, module: PurePosixPath) -> bool:
        return self._tree.source(f"{module}.py") is not None or self._tree.is_folder(str(module))

    def _files(self, folder: PurePosixPath, parts: list[str], names: Iterable[str]) -> list[str]:
        modules = [folder.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
        inside = modules[-1] if modules else folder
        modules += [inside / name for name in names if name != "*"]
        return [file for module in modules for file in (f"{module}.py", f"{module}/__init__.py")]


class _Everywhere(_Search):
    """Follows all imports, also those that are optional or inside a function."""

    def __init__(self, tree: CodeTree, folder: PurePosixPath) -> None:
        super().__init__(tree, folder)
        self.named: set[str] = set()

    def _imported(self, module: ast.Module, is_script: bool) -> Iterator[_Import]:
        found = (node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom))
        for one in _imports(found, is_script):
            self.named |= set() if one.level else {one.module.partition(".")[0]}
            yield one


def _is_doubtful(module: ast.Module) -> bool:
    prose = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    return any(_raises_doubt(node) for node in ast.walk(module) if id(node) not in prose)


def _raises_doubt(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="sys"), attr=attr):
            return attr in _DOUBTFUL_OF_SYS
        case ast.Name(id=name):
            return name == "__import__"
        case ast.Import(names=names):
            return any(alias.name.partition(".")[0] in _DOUBTFUL_MODULES for alias in names)
        case ast.ImportFrom(module=str(module), names=names):
            is_of_sys = module == "sys" and any(alias.name in _DOUBTFUL_OF_SYS for alias in names)
            return is_of_sys or module.partition(".")[0] in _DOUBTFUL_MODULES
        case ast.Constant(value=str(text)):
            return _INSTALLS.search(text) is not None
    return False


def _imports(body: Iterable[ast.stmt], is_script: bool) -> Iterator[_Import]:
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (_Import(alias.name) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            names = tuple(alias.name for alias in statement.names)
            yield _Import(statement.module or "", statement.level, names)
        else:
            yield from _imports(_surely_run(statement, is_script), is_script)


def _surely_run(statement: ast.stmt, is_script: bool) -> list[ast.stmt]:
    """The statements inside it that run whenever it does, and whose errors end the script."""
    if isinstance(statement, ast.ClassDef):
        return statement.body
    if isinstance(statement, ast.If) and is_script and _is_main(statement.test):
        return statement.body
    if isinstance(statement, ast.Try):
        is_guarded = any(map(_catches_imports, statement.handlers))
        return statement.finalbody if is_guarded else [*statement.body, *statement.finalbody]
    return []


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    # A name that is not a known other error may stand for several.
    return any(not isinstance(one, ast.Name) or one.id in _CATCH_ALL or not one.id.endswith("Error") for one in types)


def _is_main(test: ast.expr) -> bool:
    return ast.unparse(test).replace('"', "'") in ("__name__ == '__main__'", "'__main__' == __name__")


# --- sdk --------------------------------------------------------------------------------------------------------------
# UGRO's own package, which goes with a job whose script imports it: for which commands, and to which Pythons.


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


# --- failures ---------------------------------------------------------------------------------------------------------
# What it means for a job that its environment cannot be made: the cause, which decides about a retry, and a hint.


_HINTS = {
    "not-found": "is its name right, and is there a version for this Python?",
    "no-access": "give the index's password in its address: index_url: https://NAME:${PASSWORD}@…",
    "hash": "the index has other files than when it was resolved; resolve it again: --upgrade",
    "python-missing": "name a version that the nodes have: environment.python, or install that one there",
    "no-network": "is the index's address right? For nodes without internet: environment: {offline: true}",
    "server-failed": "it may pass; if it does not, name another index: environment.index_url",
    "unsafe-folder": "see: ugro doctor",
    "killed": "something on the node killed it: has it enough memory?",
}
_EXISTING = "every node of the job needs it at this path, or name packages instead: environment.packages"
# Another try, or another node, may do.
_OF_THE_NODE = frozenset({"no-network", "server-failed", "killed"})


def failure_of(error: EnvFailed, *, is_existing: bool = False) -> Failure:
    """``error.subject``: the node; None: this machine. ``is_existing``: it was only checked."""
    where = f" on {node_of(error.subject)}" if error.subject else ""
    done = "cannot be used" if is_existing else "was not made"
    reason = f"the Python environment {done}{where}: {error.message}"
    if error.cause == "no-space":
        hint = disk_hint(error.subject) if error.subject else "make room on this machine"
        return Failure(Cause.DISK_FULL, reason, node=error.subject, hint=hint, last_lines=error.tail)
    others = "its last lines say why; try it again with: ugro retry" if error.tail else "try it again with: ugro retry"
    hint = error.hint or (_EXISTING if is_existing else _HINTS.get(error.cause, others))
    # The same packages would not be found on another node either. A network may be back in a moment.
    cause = Cause.START_FAILED if error.cause in _OF_THE_NODE else Cause.SETUP_FAILED
    return Failure(cause, reason, node=error.subject, hint=hint, last_lines=error.tail)


def lack_of_packages(missing: Mapping[str, Sequence[str]], is_ours: bool) -> Failure | None:
    """Why ranks would end as they begin. ``missing``: by node, what the script imports and its environment lacks."""
    lacking = {node: modules for node, modules in missing.items() if modules}
    if not lacking:
        return None
    modules = sorted({name for some in lacking.values() for name in some})
    who = names(list(lacking))
    reason = f"not started: the Python environment on {who} lacks {in_words(modules)}, which the script imports"
    what = in_words(modules)
    hint = f"add the package of {what} to environment.packages" if is_ours else f"install the package of {what} into it"
    if MODULE in modules:  # it goes with the job
        hint = f"{TOO_OLD}, as environment.python" if is_ours else TOO_OLD
    return Failure(Cause.IMPORT_ERROR, reason, node=next(iter(lacking)), hint=hint)
