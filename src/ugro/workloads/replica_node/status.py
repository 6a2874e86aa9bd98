"""The state of a replica for the agent: a line of JSON for each change, on a socket in the run directory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from typing import Any

FOLDER, NAME = "serve", "status"
_MOST = 8  # connections at once
_ALIVE_S = 10.0  # an empty line: a reader that is gone is noticed


class Status:
    def __init__(self, run_dir: str) -> None:
        self.folder = os.path.join(run_dir, FOLDER)
        os.makedirs(self.folder, 0o700, exist_ok=True)
        self._now: dict[str, Any] = {"state": "starting", "reason": "", "host": "", "port": 0, "restarts": 0, "pid": 0}
        self._count = 0
        self._changed = threading.Condition()
        self._open = threading.Semaphore(_MOST)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.folder, NAME))
        folder = os.open(self.folder, os.O_RDONLY)
        try:  # the path may be longer than the address of a socket
            self._listener.bind(f"/proc/self/fd/{folder}/{NAME}")
        finally:
            os.close(folder)
        self._listener.listen(_MOST)
        threading.Thread(target=self._serve, daemon=True, name="status").start()

    def set(self, **values: Any) -> None:
        with self._changed:
            now = {**self._now, **values}
            if now != self._now:
                self._now = now
                self._count += 1
                self._changed.notify_all()

    @property
    def state(self) -> str:
        return str(self._now["state"])

    def _serve(self) -> None:
        while True:
            self._open.acquire()
            connection, _ = self._listener.accept()
            threading.Thread(target=self._tell, args=(connection,), daemon=True).start()

    def _tell(self, connection: socket.socket) -> None:
        seen = -1
        try:
            with connection:
                connection.settimeout(30)
                while True:
                    with self._changed:
                        if self._count == seen:
                            self._changed.wait(_ALIVE_S)
                        line = json.dumps(self._now) if self._count != seen else ""
                        seen = self._count
                    connection.sendall(line.encode() + b"\n")
        except OSError:
            pass
        finally:
            self._open.release()
