"""What takes its time, done in a forked process while the node program goes on answering."""

from __future__ import annotations

import json
import os
import signal
from typing import Any, Callable, Dict, NoReturn, Optional, Tuple

from ugro.remote import tree, wire
from ugro.remote.execute import close_all_but
from ugro.remote.program import Call, Refused
from ugro.remote.rundir import moment

Answer = Dict[str, Any]


def do(call: Call, work: Callable[[], Answer], then: Optional[Callable[[Answer], None]] = None) -> None:
    """The call is answered with what ``work`` returns, or goes on with it in ``then``."""
    _Work(call, work, then or (lambda answer: call.finish({"now": moment(), **answer})))


class _Work:
    """The node program's side: waits for the answer, without waiting."""

    def __init__(self, call: Call, work: Callable[[], Answer], then: Callable[[Answer], None]) -> None:
        self._call = call
        self._then = then
        self._said = b""
        self._pipe, self._pid = _fork(work)
        call.program.watch(self._pipe, self._receive)
        call.on_cancel = self._cancel

    def _receive(self) -> None:
        part = os.read(self._pipe, wire.CHUNK)
        self._said += part
        if part:
            return
        self._call.program.unwatch(self._pipe)
        os.close(self._pipe)
        os.waitpid(self._pid, 0)
        self._call.on_cancel = None  # its pid may be another's from now on
        if not self._call.is_done:
            self._conclude()

    def _conclude(self) -> None:
        if not self._said:
            self._call.fail("crashed", "it ended without an answer")
            return
        said = json.loads(self._said)
        if "kind" in said:
            self._call.fail(said["kind"], said["message"])
            return
        try:
            self._then(said["answer"])
        except Refused as refusal:
            self._call.fail(refusal.kind, str(refusal))
        except OSError as error:
            self._call.fail("os", str(error))

    def _cancel(self) -> None:
        os.kill(self._pid, signal.SIGKILL)  # reaped when its pipe closes
        self._call.fail("cancelled", "it was cancelled")


def _fork(work: Callable[[], Answer]) -> Tuple[int, int]:
    pipe, say = os.pipe()
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os.close(pipe)
        os.close(say)
        raise
    if pid == 0:
        _live(work, say, parent)
    os.close(say)
    return pipe, pid


def _live(work: Callable[[], Answer], say: int, parent: int) -> NoReturn:
    """Runs in the forked process and never returns to the node program's code."""
    try:
        tree.die_with_parent()
        if os.getppid() == parent:
            close_all_but([say])
            with open(say, "w", encoding="utf-8", errors="replace") as pipe:
                pipe.write(json.dumps(_outcome(work)))
    finally:
        os._exit(0)


def _outcome(work: Callable[[], Answer]) -> Dict[str, Any]:
    try:
        return {"answer": work()}
    except Refused as refusal:
        return {"kind": refusal.kind, "message": str(refusal)}
    except OSError as error:
        return {"kind": "os", "message": str(error)}
    except (KeyError, TypeError, ValueError) as error:
        return {"kind": "usage", "message": "bad parameters: %.200s" % error}
