"""UGRO's own package for the ranks of a run: a file beside its working directory that their Python imports from.

It comes through the content store, as code does, and goes with the run. A rank finds it by PYTHONPATH: after the places
that the user names there, and before whatever is installed on the node.
"""

from __future__ import annotations

import os
import shutil
from typing import Dict

from ugro.remote.cas import contents
from ugro.remote.cas.packs import LOCK_S
from ugro.remote.state.rundir import RunDir

FILE = "ugro.zip"
_FOLDER = "sdk"
_VARIABLE = b"PYTHONPATH"


def put(run: RunDir, tree: bytes, path: str, wait_s: float = LOCK_S) -> None:
    """``path``: the run's folder, or the one that will become it."""
    drop(path)
    contents.check_out(run, tree, _folder(path), wait_s)


def drop(path: str) -> None:
    if os.path.isdir(_folder(path)):
        shutil.rmtree(_folder(path), ignore_errors=True)


def findable(env: Dict[bytes, bytes], run: RunDir) -> Dict[bytes, bytes]:
    """``env`` with which Python finds the run's package."""
    place = os.fsencode("%s/%s" % (_folder(run.path), FILE))
    if b":" in place:  # it would be two places, and neither would be this one
        return env
    own = env.get(_VARIABLE)
    return {**env, _VARIABLE: own + b":" + place if own else place}


def _folder(path: str) -> str:
    return "%s/%s" % (path, _FOLDER)
