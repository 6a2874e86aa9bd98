"""Runs one command of the user's, and ends all that it leaves: when it ends, when asked to, and when the agent is gone.

``python -P -m ugro.kernel.support.command_guard PARENT NAME,... WORD...``; ends with the command's exit code. The
command gets the variables of these names, as far as they are set.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from ugro.node.process import process_tree

_GRACE_S = 1.0
ASKED_TO_END = 124


class _Asked(BaseException):
    pass


def main(parent: int, names: list[str], argv: list[str]) -> NoReturn:
    signal.signal(signal.SIGTERM, _asked)
    process_tree.become_subreaper()
    ctypes.CDLL(None).prctl(process_tree.PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    code = ASKED_TO_END
    try:
        if os.getppid() == parent:
            code = _run(argv, {name: os.environ[name] for name in names if name in os.environ})
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is left is ended now, whatever is asked for meanwhile
    except _Asked:
        pass
    finally:
        process_tree.end_descendants(_GRACE_S)
        os._exit(code)


def _run(argv: list[str], env: dict[str, str]) -> int:
    command = os.fork()
    if command == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
            os._exit(127)
    while True:  # what the command leaves becomes a child of ours, and may end first
        pid, status = os.wait()
        if pid == command:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _asked(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Asked


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
