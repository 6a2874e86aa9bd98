"""`check`: what ``ugro doctor`` and a launch look at on a node, one thing per call.

Each of these may hang: on a dead file server, a driver, a firewall that drops packets. So each runs in a forked
process. The node program watches its pipe, keeps answering other calls, and kills it when its time is over or the
call is cancelled.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import asdict
from typing import Any, Callable, Dict, NoReturn

from ugro.remote import wire
from ugro.remote.checks import connectivity, interface, modules, ports, system
from ugro.remote.process import process_tree
from ugro.remote.process.execute import close_all_but
from ugro.remote.program import Call

# Gets the call's parameters and a function that sends a message before the answer; returns the answer, one of the
# values in ``messages``.
Work = Callable[[Dict[str, Any], Callable[[Any], None]], Any]

WORK: Dict[str, Work] = {
    "root": lambda params, say: system.root(str(params["root"])),
    "packages": lambda params, say: system.packages(),
    "environment": lambda params, say: system.environment(),
    "modules": lambda params, say: modules.modules(
        params["names"], params.get("folders") or [], params.get("python")
    ),
    "survival": lambda params, say: system.survival(),
    "ports": lambda params, say: ports.ports([int(port) for port in params["ports"]]),
    "listen": connectivity.listen,
    "connect": lambda params, say: connectivity.connect(params),
    "interface": lambda params, say: interface.interface(),
}


def check(call: Call, params: Dict[str, Any]) -> None:
    work = WORK[str(params["what"])]
    _Check(call, work, {**params, "root": call.program.root})


class _Check:
    """The node program's side: forwards what the process writes, and ends it."""

    def __init__(self, call: Call, work: Work, params: Dict[str, Any]) -> None:
        self._call = call
        self._unread = b""
        self._end_of_pipe = ("crashed", "the check ended without an answer")
        self._timeout_s = float(params["timeout_s"])
        parent = os.getpid()
        self._pipe, write = os.pipe()
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _run(work, params, write, parent)
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(write)
        call.program.watch(self._pipe, self._receive)
        call.program.after(self._timeout_s, self._give_up)
        call.on_cancel = self._cancel

    def _receive(self) -> None:
        part = os.read(self._pipe, wire.CHUNK)
        if part:
            *lines, self._unread = (self._unread + part).split(b"\n")
            for line in lines:
                self._pass_on(json.loads(line))
            return
        self._call.program.unwatch(self._pipe)
        os.close(self._pipe)
        with contextlib.suppress(ChildProcessError):  # reaped together with a command's
            os.waitpid(self._pid, 0)
        self._call.fail(*self._end_of_pipe)

    def _pass_on(self, said: Dict[str, Any]) -> None:
        if "answer" in said:
            self._call.finish(said["answer"])
        elif "error" in said:
            self._call.fail("os", said["error"])
        else:
            self._call.data(wire.OUT, json.dumps(said).encode())

    def _give_up(self) -> None:
        if not self._call.is_done:
            # Not waited for here: a process that hangs in the kernel dies later, and is reaped when its pipe closes.
            self._kill()
            self._call.fail("timed-out", "it did not end within %g s" % self._timeout_s)

    def _cancel(self) -> None:
        # Answered when the process is gone: what it held, such as a port, may be needed next.
        self._end_of_pipe = ("cancelled", "it was cancelled")
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def _run(work: Work, params: Dict[str, Any], pipe: int, parent: int) -> NoReturn:
    """Runs in the forked process; never returns to the node program's code."""

    def say(message: Dict[str, Any]) -> None:
        os.write(pipe, json.dumps(message).encode() + b"\n")

    try:
        process_tree.die_with_parent()
        if os.getppid() == parent:
            close_all_but([pipe])
            answer = work(params, lambda message: say(asdict(message)))
            say({"answer": asdict(answer) if answer is not None else {}})
    except OSError as error:
        say({"error": str(error)})
    finally:
        os._exit(0)


METHODS = {"check": check}
