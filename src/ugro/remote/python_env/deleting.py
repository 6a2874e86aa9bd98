"""Deletes folders that were set aside. A large environment on a busy disk takes a minute: nobody waits for it.

What is left when the deleting process is killed, too, is deleted by the next who cleans up or needs the room.
"""

from __future__ import annotations

import os
import select
from typing import List

from ugro.remote.process.execute import close_all_but
from ugro.remote.python_env.place import delete
from ugro.remote.state.rundir import point

POINTS = ("env.aside",)  # where tests kill or stop the process that deletes


def delete_all(paths: List[str], wait_s: float) -> bool:
    """Whether it is over when this returns, which is after ``wait_s`` at the latest; else it goes on."""
    if not paths:
        return True
    heard, say = os.pipe()
    try:
        _begin(paths, say)
        os.close(say)
        ready, _, _ = select.select([heard], [], [], wait_s)  # its end closes the pipe
        return bool(ready)
    finally:
        os.close(heard)


def _begin(paths: List[str], say: int) -> None:
    """In a process that outlives the call, and lets go of the pipe when it is done."""
    pid = os.fork()
    if pid == 0:
        try:
            if os.fork() == 0:
                close_all_but([say])
                point("env.aside")
                for path in paths:
                    delete(path)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
