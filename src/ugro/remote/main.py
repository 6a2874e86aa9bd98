"""Where the node program begins, and the list of what it can be asked."""

from __future__ import annotations

import os
import sys

from ugro.remote import wire
from ugro.remote.hardware import probe
from ugro.remote.identity import node_key
from ugro.remote.program import Call, Program

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from typing import Any, Dict, Optional

    from ugro.remote.program import Method

RUN_METHODS = (
    "start", "start_many", "stop", "remove", "remove_many", "list", "watch", "follow", "renew", "setup",
    "reserve_port", "free_port", "control",
)  # fmt: skip
CHECKPOINT_METHODS = ("prepare", "list", "send", "receive", "forget")
CONTENT_METHODS = ("has", "missing", "put", "receive", "tidy")
OUTPUT_METHODS = ("filled", "list", "send", "hashes", "keep", "forget")


def main(root: str, nonce: str, silence_s: float, node: str) -> None:
    # Whatever an imported module or a child prints must not get between the frames.
    link_in, link_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    program = Program(link_in, link_out, root, silence_s, node_key(node))
    program.methods.update(echo=_echo, probe=_Probing(program).probe, exec=_execute, check=_check)
    program.methods.update(("runs." + name, _runs(name)) for name in RUN_METHODS)
    program.methods.update(("checkpoints." + name, _checkpoints(name)) for name in CHECKPOINT_METHODS)
    program.methods.update(("contents." + name, _contents(name)) for name in CONTENT_METHODS)
    program.methods.update(("outputs." + name, _outputs(name)) for name in OUTPUT_METHODS)
    os.write(link_out, ("UGRO1 %s ready\n" % nonce).encode())
    program.send(wire.message(wire.RESULT, 0, probe.machine(root)))
    program.run()
    sys.exit(0)


def _echo(call: Call, params: Dict[str, Any]) -> None:
    """The smallest call there is: what a link itself costs."""
    call.finish(params)


class _Probing:
    """A node without anything that hints at a GPU pays nothing for GPUs."""

    def __init__(self, program: Program) -> None:
        from ugro.remote.hardware.gpu_hint import has_gpu_hint

        self._prober = probe.Prober(program.root)
        self._sampler: Optional[Any] = None
        if has_gpu_hint():
            from ugro.remote.hardware.sampler import Sampler

            self._sampler = Sampler(program)

    def probe(self, call: Call, params: Dict[str, Any]) -> None:
        facts = self._prober.sample()
        if self._sampler is None:
            call.finish(facts)
            return
        self._sampler.read(lambda reading: call.finish({**facts, **reading}), float(params["gpu_timeout_s"]))


# Imported when first asked for: a link opens faster than these modules load.


def _execute(call: Call, params: Dict[str, Any]) -> None:
    from ugro.remote.process.execute import execute

    execute(call, params)


def _check(call: Call, params: Dict[str, Any]) -> None:
    from ugro.remote.checks.check import check

    check(call, params)


def _runs(name: str) -> Method:
    def method(call: Call, params: Dict[str, Any]) -> None:
        from ugro.remote.runs.api import METHODS

        METHODS[name](call, params)

    return method


def _checkpoints(name: str) -> Method:
    def method(call: Call, params: Dict[str, Any]) -> None:
        from ugro.remote.files.checkpoints import METHODS

        METHODS[name](call, params)

    return method


def _outputs(name: str) -> Method:
    def method(call: Call, params: Dict[str, Any]) -> None:
        from ugro.remote.files.outputs import METHODS

        METHODS[name](call, params)

    return method


def _contents(name: str) -> Method:
    def method(call: Call, params: Dict[str, Any]) -> None:
        from ugro.remote.cas.contents import METHODS

        METHODS[name](call, params)

    return method
