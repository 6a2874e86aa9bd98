"""`bench`: measures something on this node in a fresh Python, whose whole tree ends with the call.

That Python may be another than ours, such as one that has PyTorch; it gets the node program's modules by a descriptor.
It writes a line of JSON for each thing that it found; the agent reads them as the output of a command.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Dict

from ugro.remote import loader
from ugro.remote.process.execute import GRACE_S, MARK, Command, run_guarded
from ugro.remote.program import Call

PARTS = ("machine", "devices", "count", "listen", "connect", "allreduce")
# The parameters travel in the environment: others on this machine can read arguments, and there is a secret in them.
PARAMS = "UGRO_BENCH"


def bench(call: Call, params: Dict[str, Any]) -> None:
    if params["part"] not in PARTS:
        raise ValueError("no such part: %.40r" % (params["part"],))
    root = call.program.root
    python = os.path.expanduser(str(params.get("python") or "")) or sys.executable or "python3"
    marker = os.fsencode("bench.%s" % os.urandom(8).hex())
    env = {
        **os.environb,
        PARAMS.encode(): json.dumps({**params, "root": root}).encode(),
        MARK.encode(): marker,
    }
    modules = loader.installed().descriptor(os.path.join(root, ".ugro"))
    try:
        words = [python, "-c", loader.FRESH, str(modules), "ugro.remote.bench.main", str(params["part"])]
        # In a folder where nobody can put a module that would be imported instead of another.
        command = Command([os.fsencode(word) for word in words], env, b"/", GRACE_S, keep=modules)
        run_guarded(call, command, marker)
    finally:
        os.close(modules)


METHODS = {"bench": bench}
