"""Starts the GPU sampler and asks it. It is a process of its own, so that a driver that hangs or crashes does not
affect the node program.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import Any, Callable, Dict, List, Optional

from ugro.node.program import Program

# Named as in the facts that a probe returns.
NO_GPUS: Dict[str, Any] = {"gpus": [], "gpu_source": None, "gpu_driver": None, "gpu_error": None}
Answer = Callable[[Dict[str, Any]], None]


class Sampler:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._waiting: List[Answer] = []
        self._last = NO_GPUS
        self._line = b""
        self._round = 0
        self._is_asked = False
        self._requests: Optional[int] = None
        self._answers = -1
        self._pid = 0

    def read(self, answer: Answer, timeout_s: float) -> None:
        """Calls ``answer`` once: with a new reading, or with the last one and an error."""
        if self._waiting:
            self._waiting.append(answer)
            return
        if self._requests is None:
            self._start()
        self._waiting.append(answer)
        self._round += 1
        number = self._round
        self._program.after(timeout_s, lambda: self._give_up(number))
        self._ask()

    def _ask(self) -> None:
        """A reader that hangs is not asked again: it would have to answer everything when it recovers."""
        if not self._is_asked:
            self._is_asked = True
            assert self._requests is not None
            with contextlib.suppress(OSError):  # its end is noticed on the answer pipe
                os.write(self._requests, b"?\n")

    def _start(self) -> None:
        pipes: List[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            self._pid = os.fork()
        except OSError:
            for fd in pipes:
                os.close(fd)
            raise
        requests_read, self._requests, self._answers, answers_write = pipes
        if self._pid == 0:
            _serve(requests_read, answers_write, self._program.root)
        os.close(requests_read)
        os.close(answers_write)
        self._is_asked = False
        self._program.watch(self._answers, self._receive)

    def _receive(self) -> None:
        part = os.read(self._answers, 1 << 20)
        if not part:
            self._stop()
            self._answer({**self._last, "gpu_error": "the GPU reader crashed"})
            return
        self._line += part
        if self._line.endswith(b"\n"):
            self._is_asked = False
            line, self._line = self._line.rsplit(b"\n", 2)[-2], b""
            reading = json.loads(line)
            self._last = {
                "gpus": reading["gpus"],
                "gpu_source": reading["source"],
                "gpu_driver": reading["driver"],
                "gpu_error": reading["error"],
            }
            self._answer(self._last)

    def _give_up(self, number: int) -> None:
        if self._waiting and number == self._round:
            self._answer({**self._last, "gpu_error": "the GPU driver does not answer"})

    def _answer(self, reading: Dict[str, Any]) -> None:
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer(reading)

    def _stop(self) -> None:
        self._program.unwatch(self._answers)
        os.close(self._answers)
        if self._requests is not None:
            os.close(self._requests)
        self._requests = None
        self._line = b""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _serve(requests: int, answers: int, root: str) -> None:
    from ugro.node.hardware import gpus
    from ugro.node.process import process_tree
    from ugro.node.process.execute import close_all_but

    try:
        process_tree.die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        close_all_but(sorted((requests, answers)))
        gpus.serve(requests, answers, root)
    finally:
        os._exit(0)
