"""`presence.watch`: whether somebody uses this machine, sent when it changes and, while it goes on, now and then.

It looks in a process of its own: a driver, a desktop or a name service may hang. Each line of its output is one JSON
document: ``{"idle_s", "sign", "sources", "blind"}``.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Callable, Dict, List

from ugro.remote import durable, worker
from ugro.remote.presence.display import Displays
from ugro.remote.presence.gpu_users import GpuUsers
from ugro.remote.presence.input_devices import InputDevices
from ugro.remote.presence.signs import Record, Source, Watch
from ugro.remote.presence.terminals import Terminals
from ugro.remote.program import Call

_LOOK_S = 2.0
_PULSE_S = 5.0
_LEAST_S = 0.1
_PARTS = 4  # looks in a quiet time, at least
# A folder to look at instead of /dev, and at nothing else: for tests beside which somebody works.
_TERMINALS = "UGRO_PRESENCE_DEV"


def watch(call: Call, params: Dict[str, Any]) -> None:
    when, quiet_s = str(params["when"]), float(params["quiet_s"])
    if when not in SOURCES or not 0 < quiet_s < float("inf"):
        raise ValueError("when %.20r, quiet for %r s" % (when, quiet_s))
    root, node_key = call.program.root, call.program.node_key
    worker.send(call, lambda out: _watch(out, when, quiet_s, _record(root, node_key, when)))


def _watch(out: int, when: str, quiet_s: float, record: Record) -> Dict[str, Any]:
    """Until it is killed."""
    seen = Watch(SOURCES[when](), record, min(_PULSE_S, quiet_s / _PARTS))
    pause_s = max(_LEAST_S, min(_LOOK_S, quiet_s / _PARTS))
    while True:
        document = seen.look()
        if document is not None:
            durable.write_all(out, json.dumps(document).encode() + b"\n")
        time.sleep(pause_s)


def _record(root: str, node_key: str, when: str) -> Record:
    folder = os.path.join(os.path.realpath(root), ".ugro", "presence")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return Record(os.path.join(folder, "%s.%s.json" % (node_key, when)))


def _people() -> List[Source]:
    folder = os.environ.get(_TERMINALS)
    return [Terminals(folder)] if folder else [Terminals(), InputDevices(), Displays()]


def _gpus() -> List[Source]:
    from ugro.remote.hardware.gpu_claims import ClaimTable
    from ugro.remote.hardware.gpus import sampling

    return [GpuUsers(sampling(ClaimTable()))]


SOURCES: Dict[str, Callable[[], List[Source]]] = {"active": _people, "gpu_busy": _gpus}

METHODS: Dict[str, Callable[[Call, Dict[str, Any]], None]] = {"watch": watch}
