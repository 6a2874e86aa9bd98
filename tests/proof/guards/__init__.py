"""What mutants take away, by topic: each file here has a tuple ``MUTANTS``."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass

from tests.proof.guards.edits import Edit, NotFoundOnce

__all__ = ["Edit", "Mutant", "NotFoundOnce", "all_mutants"]


@dataclass(frozen=True)
class Mutant:
    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]  # arguments of pytest


def all_mutants() -> tuple[Mutant, ...]:
    names = [found.name for found in pkgutil.iter_modules(__path__) if found.name != "edits"]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return tuple(mutant for module in modules for mutant in module.MUTANTS)
