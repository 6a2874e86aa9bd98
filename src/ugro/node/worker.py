"""A piece of work in a forked process of its own, so that the node program goes on answering whatever a disk does.

The process gives its answer through one pipe; through another, bytes come in (INPUT) or go out (OUT). Either way
there is never more under way than the window: out, as the agent grants it; in, as the work has taken it, which the
node says in OUT frames of one number each. The process can be killed at any moment, and dies with the node program.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
from typing import Any, Callable, Dict, List, NoReturn, Optional

from ugro.node import machine as disk
from ugro.node import wire
from ugro.node.clock import moment
from ugro.node.process import process_tree
from ugro.node.process.execute import close_all_but
from ugro.node.program import Call, Refused

Answer = Dict[str, Any]
_ANSWER = b'{"answer"'
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ, which Python has a name for since 3.10
_MOST_PIPE = 1 << 20


def do(call: Call, work: Callable[[], Answer], then: Optional[Callable[[Answer], None]] = None) -> None:
    """The call is answered with what ``work`` returns and what time it is, or goes on with it in ``then``."""
    _Worker(call, lambda say: work(), [], then)


def send(call: Call, work: Callable[[int], Answer]) -> None:
    """``work`` writes to the descriptor it is given."""
    _Sender(call, work)


def receive(
    call: Call, work: Callable[[int, Callable[[int], None]], Answer], window: int = wire.WINDOW
) -> None:
    """``work`` reads from the descriptor it is given, and says how many bytes it has dealt with."""
    _Receiver(call, work, window)


class _Worker:
    def __init__(
        self,
        call: Call,
        work: Callable[[int], Answer],
        childs: List[int],
        then: Optional[Callable[[Answer], None]] = None,
    ) -> None:
        """``childs``: descriptors that are the forked process's alone."""
        self._call = call
        self._then = then or (lambda answer: call.finish({"now": moment(), **answer}))
        self._said = b""
        self._is_over = False
        self._heard, say = os.pipe()
        parent = os.getpid()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(self._heard)
            raise
        finally:
            if os.getpid() == parent:
                for fd in [say, *childs]:
                    os.close(fd)
        if self._pid == 0:
            _live(work, say, childs, parent)
        call.program.watch(self._heard, self._hear)
        call.on_cancel = self._cancel

    def _hear(self) -> None:
        part = os.read(self._heard, wire.CHUNK)
        if part:
            self._said += part
            while self._said.startswith(b"+") and b"\n" in self._said:
                taken, _, self._said = self._said.partition(b"\n")
                self._took(int(taken))
            return
        self._call.program.unwatch(self._heard)
        os.close(self._heard)
        os.waitpid(self._pid, 0)
        self._call.on_cancel = None  # its pid may be another's from now on
        self._is_over = True
        self._conclude()

    def _took(self, amount: int) -> None:
        """The work has dealt with so many bytes."""

    def _conclude(self) -> None:
        if self._call.is_done:
            return
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
            self._call.fail(*disk.refusal(error, self._call.program.root))

    def _cancel(self) -> None:
        os.kill(self._pid, signal.SIGKILL)  # reaped when its pipe closes
        self._call.fail("cancelled", "it was cancelled")


class _Sender(_Worker):
    def __init__(self, call: Call, work: Callable[[int], Answer]) -> None:
        self._data, into = os.pipe()
        self._is_open = True
        self._is_watched = False
        self._credit = wire.WINDOW
        try:
            super().__init__(call, lambda say: work(into), [into])
        except OSError:
            os.close(self._data)
            raise
        call.on_credit = self._grant
        self._watch()

    def _watch(self) -> None:
        should = self._is_open and self._credit > 0
        if should and not self._is_watched:
            self._call.program.watch(self._data, self._read)
        elif self._is_watched and not should:
            self._call.program.unwatch(self._data)
        self._is_watched = should

    def _grant(self, amount: int) -> None:
        if self._credit + amount > wire.WINDOW:
            raise wire.ProtocolError("call %d was granted more than it sent" % self._call.number)
        self._credit += amount
        self._watch()

    def _read(self) -> None:
        if not self._is_watched:  # changed by an event of the same round
            return
        payload = os.read(self._data, min(wire.CHUNK, self._credit))
        if not payload:
            self._close()
            self._conclude()
        elif not self._call.is_done:
            self._call.data(wire.OUT, payload)
            self._credit -= len(payload)
            self._watch()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._watch()
            os.close(self._data)

    def _conclude(self) -> None:
        """When the process is gone, and all that it sent is on its way: unless it failed, and nobody wants that."""
        if self._is_over and (self._call.is_done or not self._said.startswith(_ANSWER)):
            self._close()
        if self._is_over and not self._is_open:
            super()._conclude()


class _Receiver(_Worker):
    def __init__(self, call: Call, work: Callable[[int, Callable[[int], None]], Answer], window: int) -> None:
        self._window = window
        out, self._data = os.pipe()
        with contextlib.suppress(OSError):  # less is allowed, or the kernel is old; it works all the same
            fcntl.fcntl(self._data, _SET_PIPE_SIZE, min(window, _MOST_PIPE))
        self._is_open = True
        self._pending = bytearray()
        self._untaken = 0
        self._has_ended = False
        os.set_blocking(self._data, False)
        try:
            super().__init__(call, lambda say: work(out, lambda amount: _say_taken(say, amount)), [out])
        except OSError:
            os.close(self._data)
            raise
        call.on_input = self._input

    def _input(self, payload: bytes) -> None:
        self._untaken += len(payload)
        if self._untaken > self._window or self._has_ended:
            raise wire.ProtocolError("call %d got more than it has room for" % self._call.number)
        self._has_ended = not payload
        self._pending += payload
        self._pour()

    def _took(self, amount: int) -> None:
        self._untaken -= amount
        if not self._call.is_done:
            self._call.data(wire.OUT, wire.AMOUNT.pack(amount))
        # A full pipe is filled again here, when its reader has said that it took something.
        self._pour()

    def _pour(self) -> None:
        while self._is_open and self._pending:
            try:
                del self._pending[: os.write(self._data, self._pending[:_MOST_PIPE])]
            except BlockingIOError:
                return
            except BrokenPipeError:  # it has given up, and says why
                self._close()
        if self._has_ended:
            self._close()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._data)

    def _conclude(self) -> None:
        self._close()
        super()._conclude()


def _say_taken(say: int, amount: int) -> None:
    os.write(say, b"+%d\n" % amount)


def _live(work: Callable[[int], Answer], say: int, childs: List[int], parent: int) -> NoReturn:
    """Runs in the forked process and never returns to the node program's code."""
    try:
        process_tree.die_with_parent()
        if os.getppid() == parent:
            close_all_but(sorted([say, *childs]))
            outcome = json.dumps(_outcome(lambda: work(say)))
            with open(say, "w", encoding="utf-8", errors="replace") as pipe:
                pipe.write(outcome)
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
