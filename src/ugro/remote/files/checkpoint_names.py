"""Which entries of a folder are complete checkpoints, and their order, by name. Node and agent use this module."""

from __future__ import annotations

import os
import re
from typing import Optional

PART = "checkpoints"  # what they are called as a part of the files of a run
_MOST_NAME_BYTES = 255
_SUFFIXES = re.compile(r"(\.[A-Za-z][A-Za-z0-9_]*)+$")
_NUMBER = re.compile(r"(?:^|[^0-9.]|(?:^|[^0-9])\.)([0-9]{1,18})$")


def is_complete(name: str) -> bool:
    if name.startswith(".") or name.endswith((".tmp", ".partial")):
        return False
    return name.isprintable() and "/" not in name and 0 < len(os.fsencode(name)) <= _MOST_NAME_BYTES


def number(name: str) -> Optional[int]:
    """The one at the end of the name, before suffixes such as .pt."""
    found = _NUMBER.search(_SUFFIXES.sub("", name))
    return int(found.group(1)) if found else None
