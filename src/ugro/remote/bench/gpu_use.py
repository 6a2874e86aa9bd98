"""What is measured with GPUs holds their locks, as a run does: no agent starts a job on them meanwhile."""

from __future__ import annotations

import os
from typing import Any, Dict

from ugro.remote.hardware.gpu_locks import Device, GpuLocks
from ugro.remote.process.execute import MARK
from ugro.remote.program import Refused


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
