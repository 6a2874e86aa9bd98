"""Holds the store in which ranks meet, in a process that outlives each of them: ``python -m ugro.train.elastic.store``.

It listens on MASTER_PORT until it is ended, or until the process that started it is gone.
"""

from __future__ import annotations

import os
import signal
import threading

from ugro.core.errors import UsageError

_LOOK_S = 2.0


def main() -> None:
    import torch

    port = os.environ.get("MASTER_PORT", "")
    if not port.isdigit():
        raise UsageError("MASTER_PORT is not set", hint="the ranks connect to the same port, at MASTER_ADDR")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    parent = os.getppid()
    torch.set_num_threads(1)
    host = torch.distributed.TCPStore("0.0.0.0", int(port), is_master=True, wait_for_workers=False)
    while host is not None and os.getppid() == parent:
        if ended.wait(_LOOK_S):
            break


if __name__ == "__main__":
    main()
