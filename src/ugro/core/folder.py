"""A folder, or a single file, of the submitter's machine that a job's nodes get beside its code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Folder:
    """As it was when the job was submitted; its nodes get it read-only."""

    name: str
    source: str  # its path on the submitter's machine
    tree: str  # the hash of its content
    file: str = ""  # the name of the file, if it is a single one
    files: int = 0
    bytes: int = 0

    @property
    def variable(self) -> str:
        """By which its processes find it."""
        return variable_of(self.name)


def variable_of(name: str) -> str:
    return f"UGRO_FOLDER_{name.upper()}"
