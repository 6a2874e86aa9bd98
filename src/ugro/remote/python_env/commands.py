"""Runs an installer: hears what it says, tells how far it is, and explains its failure."""

from __future__ import annotations

import collections
import os
import select
import signal
import subprocess
import time
from typing import Callable, Deque, Dict, List, Sequence

from ugro.remote.process import process_tree
from ugro.remote.python_env.failures import MOST_LINES, Failed, explain

_LOOK_S = 0.25
_MOST_UNREAD = 64 * 1024


class Installer:
    """Environment and folder of all commands that make one environment."""

    def __init__(self, env: Dict[str, str], cwd: str, mask: Callable[[str], str]) -> None:
        self.env = env
        self._cwd = cwd
        self._mask = mask
        self.tick: Callable[[int, str], None] = lambda pid, line: None  # called often: its process, its latest line

    def run(self, argv: Sequence[str]) -> List[str]:
        """What it said last; ``Failed`` if it fails."""
        lines: Deque[str] = collections.deque(maxlen=MOST_LINES)
        process = self._start(argv)
        assert process.stdout is not None
        self._follow(process, process.stdout.fileno(), lines)
        code = process.wait()
        process.stdout.close()
        if code != 0:
            name = os.path.basename(argv[0]).partition("-")[0]
            how = "%s ended with code %d" % (name, code) if code > 0 else "%s was ended by signal %d" % (name, -code)
            kind, text = explain(list(lines), how)
            is_killed = code == -signal.SIGKILL and kind == "crashed"  # the kernel does it when memory runs out
            raise Failed("killed" if is_killed else kind, text, tail=list(lines))
        return list(lines)

    def _start(self, argv: Sequence[str]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self._cwd,
            env=self.env,
            preexec_fn=process_tree.die_with_parent,
        )

    def _follow(self, process: "subprocess.Popen[bytes]", fd: int, lines: Deque[str]) -> None:
        """Until it says no more. What it started may hold the pipe after it has ended: then not for long."""
        unread, ended_at = b"", 0.0
        while True:
            ready, _, _ = select.select([fd], [], [], _LOOK_S)
            part = os.read(fd, 65536) if ready else b""
            if ready and not part:
                break
            *whole, unread = (unread + part).replace(b"\r", b"\n").split(b"\n")
            unread = unread[-_MOST_UNREAD:]
            lines.extend(self._mask(line.decode("utf-8", "replace")) for line in whole if line.strip())
            self.tick(process.pid, lines[-1] if lines else "")
            if not ready and process.poll() is not None:
                ended_at = ended_at or time.monotonic()
                if time.monotonic() - ended_at > 2 * _LOOK_S:
                    break
        if unread.strip():
            lines.append(self._mask(unread.decode("utf-8", "replace")))


def written_bytes(pid: int) -> int:
    """By that process, so far; 0 where the kernel does not say."""
    try:
        with open("/proc/%d/io" % pid, "rb") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(b"wchar:")), 0)
    except (OSError, ValueError):
        return 0
