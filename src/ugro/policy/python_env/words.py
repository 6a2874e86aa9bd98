"""A Python environment in words: what was asked for, and what a node does to make it."""

from __future__ import annotations

from ugro.core.python_env import EnvRequest
from ugro.core.support.secret import without_passwords

_MOST_NAMED = 4
_PHASES = {
    "resolving": "resolving the packages",
    "downloading": "downloading to this machine",
    "sending": "sending",
    "waiting": "waiting for another installation",
    "unpacking": "unpacking the installer",
    "python": "preparing Python",
    "installing": "installing",
    "checking": "checking",
}


def in_words(request: EnvRequest) -> str:
    """'torch==2.13.0, numpy and 3 more, Python 3.11'."""
    if request.existing is not None:
        return f"{request.existing}, which exists already"
    if request.lock is not None:
        packages = f"the packages of {request.lock_name or 'a lock file'}"
    else:
        packages = _first(request.requirements)
    return packages + (f", Python {request.python}" if request.python else "")


def phase_in_words(phase: str) -> str:
    return _PHASES.get(phase, phase)


def _first(requirements: tuple[str, ...]) -> str:
    """Options of a requirements file are no packages; a comment or a hash says nothing here."""
    lines = (line.split(" #")[0].split(" --")[0].strip() for line in requirements)
    named = [without_passwords(line) for line in lines if line and not line.startswith(("-", "#"))]
    shown = ", ".join(named[:_MOST_NAMED]) or "no packages"
    return f"{shown} and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else shown
