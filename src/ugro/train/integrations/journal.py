"""Metrics of a rank whose steps are run by another library: only ``log``, without process group and balance."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol

from ugro.kernel.support.errors import UgroError
from ugro.kernel.telemetry.model import is_loss
from ugro.train.reporting import Metrics, Notices, kept, plain
from ugro.train.surroundings import Surroundings, run_name
from ugro.train.trial import OTHER_LIBRARY, leave

_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


class Log(Protocol):
    """A ``Run``, or a ``Journal``."""

    def log(self, *, step: int | None = None, **values: Any) -> None: ...


class Missing(UgroError, ImportError):
    """The library of a callback is not installed; also an ImportError, for scripts that can do without it."""


class Journal:
    """Writes the same as ``run.log``, to ``metrics.jsonl`` in ``$UGRO_OUTPUT``."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        around = Surroundings.of(env)
        self.is_main = around.rank == 0
        self._is_trial = around.trial is not None
        name = "metrics.jsonl" if self.is_main else f"metrics.rank_{around.rank}.jsonl"
        self._told: set[str] = set()  # losses that were not finite
        self._notices = Notices(around.run_folder, run_name(around), around.rank)
        self._metrics = Metrics(around.output / name, {"attempt": around.attempt, "rank": around.rank})

    def log(self, *, step: int | None = None, **values: Any) -> None:
        self.refuse_trial()
        found = {name: kept(value) for name, value in values.items()}
        for name, value in found.items():
            if isinstance(value, float | str) and plain(value) in _NOT_FINITE and is_loss(name):
                self._say(name, str(plain(value)), step)
        self._metrics.put({"kind": "log", "step": step, "epoch": None, "values": found})

    def _say(self, name: str, value: str, step: int | None) -> None:
        """At the first time; the last values are on the job's page."""
        if name not in self._told:
            self._told.add(name)
            self._notices.say(name, f"{name} was {value} in step {step}")

    def announce(self, *, step: int, total_steps: int) -> None:
        """Records how many steps there will be."""
        self.refuse_trial()
        self._metrics.put({"kind": "progress", "step": step, "total_steps": total_steps})

    def close(self) -> None:
        """Writes everything to the file; more records may follow."""
        self._metrics.close()

    def refuse_trial(self) -> None:
        """Ends a trial at once: this library would train to the end."""
        if self._is_trial:
            self._metrics.put({"kind": "trial", "problem": OTHER_LIBRARY})
            self._metrics.close()
            leave()


def missing(library: str, error: ImportError) -> Missing:
    found = Missing(f"this callback needs {library}, which is not installed", hint=f"pip install {library}")
    found.add_note(f"hint: {found.hint}")
    found.__cause__ = error
    return found


# --- versions ---------------------------------------------------------------------------------------------------------
# Which versions of a library an integration was written for: it relies on details that change.


@dataclass(frozen=True, slots=True)
class Supported:
    library: str
    first: tuple[int, ...]
    below: tuple[int, ...]

    def check(self) -> None:
        try:
            found = metadata.version(self.library)
        except metadata.PackageNotFoundError as error:
            raise missing(self.library, error) from error
        first, below = _text(self.first), _text(self.below)
        if not self.first <= numbers(found) < self.below:
            raise UgroError(
                f"{self.library} {found} is not supported: it must be {first} or newer, and below {below}",
                hint=f'pip install "{self.library}>={first},<{below}"',
            )


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: (2, 6, 1) of 2.6.1.post0."""
    found: list[int] = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
