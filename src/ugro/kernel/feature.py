"""What a feature adds, as data: frames and the agent read it without loading the feature.

The list of our own is ``ugro.features.NAMES``. A package of somebody else adds one by an entry point of the group
``ugro.features``, which names its ``Feature``. UGRO_WITHOUT leaves features out, by their names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

from ugro.kernel.support.errors import ConfigError

WITHOUT = "UGRO_WITHOUT"
_GROUP = "ugro.features"


@dataclass(frozen=True, slots=True)
class Command:
    target: str  # module:attribute, loaded when the command is called
    summary: str  # the first line of its own help
    heading: str = ""  # of ``ugro --help``; for a command below another one, nothing
    is_here_only: bool = False  # about files and processes of this machine


@dataclass(frozen=True, slots=True)
class Page:
    """Who may open an address of the dashboard; what it shows is the feature's ``pages.py``."""

    role: str = "viewer"
    of: str = ""  # what the address names, which may be private: "sweep", "service"


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the dashboard's menu."""

    address: str
    name: str
    key: str  # after g, on the keyboard


@dataclass(frozen=True, slots=True)
class Feature:
    name: str
    package: str  # where it is: its ``operations.py`` is found there
    needs: tuple[str, ...] = ()  # features without which it is left out
    commands: Mapping[str, Command] = field(default_factory=dict)  # by their words: "sweep", "node bench"
    settings: Mapping[str, str] = field(default_factory=dict)  # sections of cluster.yaml: name → module:class
    pages: Mapping[str, Page] = field(default_factory=dict)  # by route: "GET /sweeps"
    menu: tuple[Entry, ...] = ()
    service: str = ""  # module:class, made with the agent: what it marks with ``answers`` is served
    on_nodes: tuple[str, ...] = ()  # its files and folders that travel with the node program


    @property
    def folder(self) -> str:
        return os.path.dirname(str(import_module(self.package).__file__))


def import_object(target: str) -> Any:
    """Returns what ``module:attribute`` names."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


@cache
def installed() -> tuple[Feature, ...]:
    """Returns the features that there are, each after those that it needs."""
    left_out = {name.strip() for name in os.environ.get(WITHOUT, "").split(",")} - {""}
    found: dict[str, Feature] = {}
    for feature in (*_own(), *_of_others()):
        if feature.name in found:
            packages = f"{found[feature.name].package}, {feature.package}"
            raise ConfigError(f"two features are called {feature.name}: {packages}")
        found[feature.name] = feature
    if unknown := sorted(left_out - found.keys()):
        raise ConfigError(f"{WITHOUT}: there is no feature {unknown[0]}", hint=f"there are: {', '.join(found)}")
    kept: dict[str, Feature] = {}
    waiting = [one for one in found.values() if one.name not in left_out]
    while ready := [one for one in waiting if kept.keys() >= set(one.needs)]:
        kept |= {one.name: one for one in ready}
        waiting = [one for one in waiting if one.name not in kept]
    return tuple(kept.values())


def _own() -> Iterator[Feature]:
    for name in import_module("ugro.features").NAMES:
        yield import_module(f"ugro.features.{name}").FEATURE


def _of_others() -> Iterator[Feature]:
    for target in _entry_points():
        try:
            feature = import_object(target)
        except (ImportError, AttributeError) as error:
            text = f"the feature {target} cannot be loaded: {error}"
            raise ConfigError(text, hint="reinstall or remove it") from error
        yield feature


def _entry_points() -> Iterator[str]:
    """Read by hand: importing ``importlib.metadata`` takes longer than a command."""
    for folder in dict.fromkeys(sys.path):
        with suppress(OSError):  # not a folder, or not ours to read
            for name in sorted(one for one in os.listdir(folder or ".") if one.endswith(".dist-info")):
                with suppress(FileNotFoundError):
                    yield from _targets(os.path.join(folder, name, "entry_points.txt"))


def _targets(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="replace") as file:
        section = file.read().partition(f"[{_GROUP}]")[2].partition("\n[")[0]
    return [line.partition("=")[2].strip() for line in section.splitlines() if "=" in line]
