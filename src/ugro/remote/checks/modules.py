"""Which modules the Python that runs the ranks finds, asked of that Python itself, without importing them."""

from __future__ import annotations

import os
from typing import Any, Iterable, Optional

from ugro.remote.checks import system
from ugro.remote.messages import Modules

MOST_NAMES = 500

# A module counts as missing only if every finder says so: also those of editable installations and of .pth files.
_FIND = r"""
import json, os, sys
from importlib import util

def changed(path):
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0

def is_missing(name):
    try:
        return util.find_spec(name) is None
    except Exception:
        return False

sys.path = [path for path in sys.path if path]  # not the current folder: ranks have their script's
# Before the look: what is installed meanwhile is then seen by the next one.
folders = [(path, changed(path)) for path in sys.path]
missing = [name for name in sys.argv[1:] if is_missing(name)]
sys.stdout.write("\n" + json.dumps({"missing": missing, "folders": folders}))
"""


def modules(names: Iterable[Any], folders: Iterable[Any], python: Optional[str] = None) -> Modules:
    """``python``: that of an environment; None: the one that runs ranks without an environment."""
    known = [(str(path), int(changed)) for path, changed in folders]
    if known and all(_changed(path) == changed for path, changed in known):
        return Modules(is_same=True)
    wanted = [str(name) for name in names][:MOST_NAMES]
    found = system.asked_python(_FIND, *(name for name in wanted if name.isidentifier()), python=python)
    return Modules(tuple(found["missing"]), tuple((path, changed) for path, changed in found["folders"]))


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
