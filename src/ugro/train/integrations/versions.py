"""Which versions of a library an integration was written for: it relies on details that change."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from ugro.core.errors import UgroError
from ugro.train.integrations.journal import missing


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
