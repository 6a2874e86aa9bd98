"""Runs pip and uv on this machine: without a shell, in a session of their own, ended with their caller.

They end also if the agent is killed. What they leave then, ``workshop`` removes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ugro.core.errors import TimedOut

# Becomes the program, which the kernel kills when its parent ends: a fork of the agent itself, which has threads, must
# not run Python in between. The first word is the parent's process id, in case that has ended already.
_BECOME = """
import ctypes, os, signal, sys
parent, *argv = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != int(parent):
    sys.exit(1)
try:
    os.execvp(argv[0], argv)
except OSError as error:
    sys.exit(f"{argv[0]}: {error.strerror}")
"""


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str


async def run(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout_s: float) -> Ended:
    """Raises TimedOut. A program that cannot be started has a code and says why, as one that fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid())),
        *argv,
        env=dict(env),
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    except TimeoutError as error:
        raise TimedOut(f"{Path(argv[0]).name} did not end within {timeout_s:.0f} s") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))
