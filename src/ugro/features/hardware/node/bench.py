"""`bench`: measures something on this node in a fresh Python, whose whole tree ends with the call.

That Python may be another than ours, such as one that has PyTorch; it gets the node program's modules by a descriptor.
It writes a line of JSON for each thing that it found; the agent reads them as the output of a command.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, Dict, List

from ugro.features.hardware.node.meter import skip
from ugro.node import loader
from ugro.node.hardware.gpu_locks import Device, GpuLocks
from ugro.node.process.execute import GRACE_S, MARK, Command, run_guarded
from ugro.node.program import Call, Refused, method

PARTS = ("machine", "devices", "count", "listen", "connect", "allreduce")
# The parameters travel in the environment: others on this machine can read arguments, and there is a secret in them.
PARAMS = "UGRO_BENCH"


@method("bench")
def bench(call: Call, /, *, part: str, python: str = "", **params: Any) -> None:
    if part not in PARTS:
        raise ValueError("no such part: %.40r" % (part,))
    root = call.program.root
    python = os.path.expanduser(str(python or "")) or sys.executable or "python3"
    marker = os.fsencode("bench.%s" % os.urandom(8).hex())
    env = {
        **os.environb,
        PARAMS.encode(): json.dumps({**params, "part": part, "root": root}).encode(),
        MARK.encode(): marker,
    }
    modules = loader.installed().descriptor(os.path.join(root, ".ugro"))
    try:
        words = [python, "-c", loader.FRESH, str(modules), "ugro.features.hardware.node.bench", part]
        # In a folder where nobody can put a module that would be imported instead of another.
        command = Command([os.fsencode(word) for word in words], env, b"/", GRACE_S, keep=modules)
        run_guarded(call, command, marker)
    finally:
        os.close(modules)


# --- gpu use ----------------------------------------------------------------------------------------------------------
# What is measured with GPUs holds their locks, as a run does: no agent starts a job on them meanwhile.


def hold(params: Dict[str, Any]) -> None:
    """Until this process ends: it still has the GPUs while it does. Raises ``Refused`` when a run has one of them."""
    lock = params.get("lock") or {}
    devices = [Device(int(number), str(uuid)) for number, uuid in lock.get("gpus") or ()]
    record = {
        "agent": str(lock.get("agent")),
        "node": str(lock.get("node")),
        "job": "",  # a measurement
        "attempt": 0,
        "user": _account(),
        "mark": "%s=%s" % (MARK, os.environ.get(MARK, "")),
    }
    if not lock.get("is_forced"):
        GpuLocks().take(devices, str(params["root"]), record)
        return
    for device in devices:
        try:
            GpuLocks().take([device], str(params["root"]), record)
        except Refused:
            continue  # somebody has it, and it is to be measured all the same


def _account() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


# --- main -------------------------------------------------------------------------------------------------------------
# The fresh Python that measures: one part, then it ends. What it finds, it says as soon as it is known.


NO_IMPORT = "it cannot be imported"  # the beginning of why something was skipped
MODULES = {
    "machine": "ugro.features.hardware.node.machine",
    "devices": "ugro.features.hardware.node.devices",
    "count": "ugro.features.hardware.node.devices",
    "listen": "ugro.features.hardware.node.network",
    "connect": "ugro.features.hardware.node.network",
    "allreduce": "ugro.features.hardware.node.devices",
}


def main(words: List[str]) -> None:
    params: Dict[str, Any] = json.loads(os.environ.pop(PARAMS))
    part = words[0]
    try:
        hold(params)
        getattr(importlib.import_module(MODULES[part]), part)(params)
    except (OSError, EOFError) as error:
        skip(part, str(error))
    except Refused as refusal:
        skip(part, str(refusal))
    except ImportError as error:
        skip(part, "%s: %s" % (NO_IMPORT, error))
