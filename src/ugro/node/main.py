"""Where the node program starts, and where it finds its methods."""

from __future__ import annotations

import functools
import os
import sys

from ugro.node import wire
from ugro.node.hardware.probe import Prober, has_gpu_hint, machine
from ugro.node.machine import node_key
from ugro.node.program import METHODS, Call, Program, method

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from typing import Any, Dict, Optional

    from ugro.node.program import Method


def main(root: str, nonce: str, silence_s: float, node: str) -> None:
    # Output of imported modules or child processes must not get between the frames.
    link_in, link_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    program = Program(link_in, link_out, root, silence_s, node_key(node))
    program.find = _find
    _prober(program)
    os.write(link_out, ("UGRO1 %s ready\n" % nonce).encode())
    program.send(wire.message(wire.RESULT, 0, machine(root)))
    program.run()
    sys.exit(0)


@method("echo")
def echo(call: Call, /, **params: Any) -> None:
    """The smallest call: measures the cost of the link itself."""
    call.finish(params)


@method("probe", is_standing=True)
def probe(call: Call, *, gpu_timeout_s: float) -> None:
    """Measures load, memory, disks and GPUs."""
    _prober(call.program).probe(call, float(gpu_timeout_s))


class _Prober:
    """Nodes without any hint of a GPU do not start a sampler."""

    def __init__(self, program: Program) -> None:
        self._sample = Prober(program.root).sample
        self._limits: Optional[Dict[str, str]] = None
        self._sampler: Optional[Any] = None
        if has_gpu_hint():
            from ugro.node.hardware.sampler import Sampler

            self._sampler = Sampler(program)
            program.read_gpus = self._sampler.read

    def probe(self, call: Call, gpu_timeout_s: float) -> None:
        if self._limits is None:
            from ugro.node.process.cgroup import offered

            self._limits = offered()
        facts = {**self._sample(), "limits": self._limits}
        if self._sampler is None:
            call.finish(facts)
            return
        self._sampler.read(lambda reading: call.finish({**facts, **reading}), gpu_timeout_s)


_prober = functools.lru_cache(maxsize=None)(_Prober)


def _find(name: str) -> Optional[Method]:
    """Loads the module that has it when it is first asked for: a link opens faster than all of them load."""
    if name not in METHODS and name in _modules():
        __import__(_modules()[name])
    return METHODS.get(name)


def _modules() -> Dict[str, str]:
    """By method, as the agent has sent it (``kernel.links.transport``)."""
    found: Dict[str, str] = __import__("ugro.node.served", fromlist=["MODULES"]).MODULES
    return found
