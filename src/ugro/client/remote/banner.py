"""The first line that a relay says: which protocol and version it speaks, for which account, or why it cannot.

A login shell may print something before it; that is skipped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import ugro
from ugro.core.errors import NotAllowed, UgroError, error_from_wire
from ugro.remote import foreign

PROTOCOL = 1
_MARK = b"UGRO-RELAY "
MOST_BEFORE = 64 * 1024  # bytes that are skipped in search of it
_MOST_NAME = 200


@dataclass(frozen=True, slots=True)
class Banner:
    version: str
    user: str  # the account there
    host: str


def banner(user: str, host: str, error: UgroError | None = None) -> bytes:
    about: dict[str, Any] = {"protocol": PROTOCOL, "version": ugro.__version__, "user": user, "host": host}
    if error is not None:
        about["error"] = error.to_wire()
    return _MARK + json.dumps(about).encode() + b"\n"


def find_banner(said: bytes) -> tuple[Banner | None, bytes]:
    """The banner, and what follows it; None while its line is not complete. Raises what the relay reports."""
    at = 0
    while (end := said.find(b"\n", at)) >= 0:
        line = said[at:end]
        # What a shell prints may lack a newline at its end.
        if (start := line.find(_MARK)) >= 0:
            return _parsed(line[start + len(_MARK) :]), said[end + 1 :]
        at = end + 1
    return None, said


def _parsed(line: bytes) -> Banner:
    try:
        about = foreign.parsed(line)
        protocol, version = int(about["protocol"]), str(about["version"])[:_MOST_NAME]
        found = Banner(version, str(about["user"])[:_MOST_NAME], str(about["host"])[:_MOST_NAME])
    except (ValueError, KeyError, TypeError) as error:
        raise NotAllowed("the relay there says what this version does not understand") from error
    if isinstance(about.get("error"), dict):
        raise error_from_wire(about["error"])
    if protocol != PROTOCOL:
        raise _unfit(version)
    expect_fitting(version)
    return found


def expect_fitting(there: str) -> None:
    """Raises NotAllowed unless the first two numbers are the same."""
    if there.split(".")[:2] != ugro.__version__.split(".")[:2]:
        raise _unfit(there)


def _unfit(there: str) -> NotAllowed:
    hint = f"install the same version on both: pip install ugro=={there}"
    return NotAllowed(f"ugro {there} there does not fit ugro {ugro.__version__} here", hint=hint)
