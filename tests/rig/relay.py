"""A link that is cut at a chosen byte: ``relay.py LIMITS COMMAND…``; of this project it imports nothing.

The first line of the file LIMITS is the number of bytes after which it cuts; without one it never does.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys


def main(limits: str, argv: list[str]) -> int:
    limit = _next(limits)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        while limit > 0 and (piece := _read(min(65536, limit))):
            limit -= len(piece)
            try:
                while piece:
                    piece = piece[process.stdin.write(piece) :]
            except BrokenPipeError:
                break
        if limit <= 0:
            process.kill()
        process.stdin.close()
        return process.wait()


def _read(most: int) -> bytes:
    """Standard input is what the command writes to, which it does not want to wait for."""
    while True:
        select.select([0], [], [])
        with contextlib.suppress(BlockingIOError):
            return os.read(0, most)


def _next(path: str) -> int:
    if not os.path.exists(path):
        return 1 << 60
    with open(path) as file:
        limits = file.read().split()
    with open(path, "w") as file:
        file.write("\n".join(limits[1:]))
    return int(limits[0]) if limits else 1 << 60


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
