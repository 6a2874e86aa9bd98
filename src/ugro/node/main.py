"""Where the node program starts, and where it finds its methods."""

from __future__ import annotations

import os
import sys

from ugro.node import wire
from ugro.node.hardware import probe
from ugro.node.machine import node_key
from ugro.node.program import Call, Program

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from typing import Any, Dict, Optional

    from ugro.node.program import Method

# The module that serves a method, by the first part of its name; see ``messages.METHODS``. Loaded when first asked
# for: a link opens faster than these modules load.
MODULES = {
    "exec": "ugro.node.process.execute",
    "check": "ugro.node.check",
    "bench": "ugro.features.hardware.node.bench",
    "runs": "ugro.node.runs.api",
    "files": "ugro.node.files.api",
    "contents": "ugro.node.files.contents",
    "presence": "ugro.features.power.node.presence",
    "folders": "ugro.node.files.folders_api",
    "env": "ugro.features.environments.node.making",
    "net": "ugro.node.net",
}


def main(root: str, nonce: str, silence_s: float, node: str) -> None:
    # Output of imported modules or child processes must not get between the frames.
    link_in, link_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    program = Program(link_in, link_out, root, silence_s, node_key(node))
    program.methods.update(echo=_echo, probe=_Probing(program).probe)
    program.find = _find
    os.write(link_out, ("UGRO1 %s ready\n" % nonce).encode())
    program.send(wire.message(wire.RESULT, 0, probe.machine(root)))
    program.run()
    sys.exit(0)


def _echo(call: Call, params: Dict[str, Any]) -> None:
    """The smallest call: measures the cost of the link itself."""
    call.finish(params)


class _Probing:
    """Nodes without any hint of a GPU do not start a sampler."""

    def __init__(self, program: Program) -> None:
        from ugro.node.hardware.probe import has_gpu_hint

        self._prober = probe.Prober(program.root)
        self._limits: Optional[Dict[str, str]] = None
        self._sampler: Optional[Any] = None
        if has_gpu_hint():
            from ugro.node.hardware.sampler import Sampler

            self._sampler = Sampler(program)
            program.read_gpus = self._sampler.read

    def probe(self, call: Call, params: Dict[str, Any]) -> None:
        if self._limits is None:
            from ugro.node.process.cgroup import offered

            self._limits = offered()
        facts = {**self._prober.sample(), "limits": self._limits}
        if self._sampler is None:
            call.finish(facts)
            return
        self._sampler.read(lambda reading: call.finish({**facts, **reading}), float(params["gpu_timeout_s"]))


def _find(name: str) -> Optional[Method]:
    group, _, rest = name.partition(".")
    if group not in MODULES:
        return None
    methods: Dict[str, Method] = __import__(MODULES[group], fromlist=["METHODS"]).METHODS
    return methods.get(rest or group)
