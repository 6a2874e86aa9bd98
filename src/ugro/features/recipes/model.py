"""A built-in training recipe: what it trains, and the short names that it knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of a recipe's script."""

    name: str
    help: str
    default: Any = None
    also: tuple[str, ...] = ()  # its other names


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    summary: str
    task: str  # causal-lm, text-classification or image-classification
    script: str
    folder: str
    packages: tuple[str, ...] = ()  # of its Python environment
    models: Mapping[str, str] = field(default_factory=dict)  # hub ids, by short name
    datasets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by short name
    flags: tuple[Flag, ...] = ()
    metric: str = ""  # by which its trainings are compared

    def default(self, flag: str) -> Any:
        return next((one.default for one in self.flags if one.name == flag), None)


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """A launch without a script, as an ordinary one: the fields of its job, and what to say about it first."""

    fields: dict[str, Any]
    notes: tuple[str, ...] = ()
    recipe: str = ""
    metric: str | None = None  # that a sweep of it compares, if none is named
