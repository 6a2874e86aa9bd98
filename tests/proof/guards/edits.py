"""Edits of source code that name what they change: a module, a function in it, and the code to replace there.

Code is found by its syntax tree. So an edit survives other formatting, comments and lines around it, and follows a
function to another module when its name here is changed.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class NotFoundOnce(Exception):
    """Raised when the code to replace is not there, or more than once."""


@dataclass(frozen=True)
class Edit:
    """Replaces ``old``, an expression or statements, by ``new`` in a definition of a module.

    Where ``scope`` is empty the whole module is searched. A file that is no Python is named by its path below ``ugro``,
    and is edited as text.
    """

    module: str
    scope: str
    old: str
    new: str

    def path(self, root: Path) -> Path:
        """Returns the file to edit in a tree of the project."""
        if "/" in self.module:
            return root / "src/ugro" / self.module
        parts = self.module.split(".")
        base = (root if parts[0] == "tests" else root / "src").joinpath(*parts)
        return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")

    def applied(self, text: str) -> str:
        """Returns the edited source. Raises NotFoundOnce when the code has changed."""
        if "/" in self.module:
            if (found := text.count(self.old)) != 1:
                raise NotFoundOnce(f"{self.module}: {found} times: {self.old}")
            return text.replace(self.old, self.new)
        tree = ast.parse(text)
        old, new = (ast.parse(textwrap.dedent(code)).body for code in (self.old, self.new))
        replace = _Replace(old, new)
        replace.visit(self._scope(tree))
        if replace.found != 1:
            raise NotFoundOnce(f"{self.module}:{self.scope}: {replace.found} times: {self.old}")
        return ast.unparse(ast.fix_missing_locations(tree))

    def _scope(self, tree: ast.Module) -> ast.AST:
        inner: ast.AST = tree
        for name in filter(None, self.scope.split(".")):
            named = [node for node in _definitions(inner) if node.name == name]
            if len(named) != 1:
                raise NotFoundOnce(f"{self.module}:{self.scope}: {len(named)} definitions of {name}")
            inner = named[0]
        return inner


def _definitions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yields what is defined directly in a node, and not in another definition there."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _DEFINITIONS):
            yield child
        else:
            yield from _definitions(child)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: list[ast.stmt], new: list[ast.stmt]) -> None:
        self.found = 0
        self._old, self._new = [ast.dump(node) for node in old], new
        is_expression = [len(code) == 1 and isinstance(code[0], ast.Expr) for code in (old, new)]
        self._expression = ast.dump(old[0].value) if all(is_expression) else None  # type: ignore[attr-defined]

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if self._expression is not None:
            if isinstance(node, ast.expr) and ast.dump(node) == self._expression:
                self.found += 1
                return self._new[0].value  # type: ignore[attr-defined, no-any-return]
            return super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, field, None), list):
                setattr(node, field, self._replaced(body))
        return super().generic_visit(node)

    def _replaced(self, body: list[ast.stmt]) -> list[ast.stmt]:
        count = len(self._old)
        for begin in range(len(body) - count + 1):
            if [ast.dump(node) for node in body[begin : begin + count]] == self._old:
                self.found += 1
                return [*body[:begin], *self._new, *body[begin + count :]] or [ast.Pass()]
        return body
