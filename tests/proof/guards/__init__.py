"""What mutants take away, by topic: each file here has a tuple ``MUTANTS``."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]  # arguments of pytest


def all_mutants() -> tuple[Mutant, ...]:
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return tuple(mutant for module in modules for mutant in module.MUTANTS)
