"""An environment that somebody else made, such as conda's: checked, never changed."""

from __future__ import annotations

import os
from typing import Any, Dict

from ugro.remote.python_env import interpreters
from ugro.remote.python_env.failures import Failed


def check(path: str, timeout_s: float) -> Dict[str, Any]:
    """``path``: its folder or its interpreter; ``~`` is this account's."""
    python = _interpreter(path)
    about = interpreters.describe(python, timeout_s, alone=False)
    found = {name: about[name] for name in ("version", "packages", "torch_cuda", "nccl")}
    return {"name": about["prefix"], "python": python, **found, "made_at": "", "used_at": "", "size": 0}


def _interpreter(path: str) -> str:
    if not path or "\0" in path:
        raise ValueError("a path is needed")
    whole = os.path.expanduser(path)
    if not os.path.isabs(whole):
        raise Failed("not-found", "%s: write an absolute path, or one that begins with ~" % path)
    if not os.path.exists(whole):
        raise Failed("not-found", "%s does not exist on this node" % whole)
    if not os.path.isdir(whole):
        return whole
    for name in ("python", "python3"):
        python = os.path.join(whole, "bin", name)
        if os.access(python, os.X_OK):
            return python
    raise Failed("python-missing", "%s is not an environment: it has no bin/python that can be run" % whole)
