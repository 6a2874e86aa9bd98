"""Asks a server on this node whether it has started, is ready and is alive, in a thread of its own."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

Settings = Mapping[str, Any]
_LONGEST_S = 5.0  # of one request while the server starts
_MOST_BYTES = 65536


class Prober(threading.Thread):
    """Calls ``say(state, reason)`` when that changes, and ``give_up(reason)`` when the server must be started again."""

    def __init__(
        self,
        probes: Settings,
        place: tuple[str, int],
        say: Callable[[str, str], None],
        give_up: Callable[[str], None],
    ) -> None:
        super().__init__(daemon=True, name="probe")
        self._probes = probes
        self._host, self._port = place
        self._say = say
        self._give_up = give_up
        self._is_over = threading.Event()

    def stop(self) -> None:
        self._is_over.set()

    def run(self) -> None:
        if self._starts():
            self._watch()

    def _starts(self) -> bool:
        start = self._probes["start"]
        deadline = time.monotonic() + start["timeout_s"]
        while not self._is_over.is_set():
            problem = self._ask(start, min(_LONGEST_S, start["timeout_s"]))
            if problem is None or self._is_over.is_set():  # what it asked may be gone, and the next one there
                return problem is None
            if time.monotonic() > deadline:
                self._give_up(f"not started within {start['timeout_s']:g} s: {problem}")
                return False
            self._say("starting", problem)
            self._is_over.wait(start["interval_s"])
        return False

    def _watch(self) -> None:
        counts = {"ready": 0, "live": 0}
        due = dict.fromkeys(counts, 0.0)
        while not self._is_over.is_set():
            for name in counts:
                if time.monotonic() >= due[name] and not self._is_over.is_set():
                    probe = self._probes[name]
                    problem = self._ask(probe, probe["timeout_s"])
                    due[name] = time.monotonic() + probe["interval_s"]
                    counts[name] = 0 if problem is None else counts[name] + 1
                    self._judge(name, problem, counts[name] >= probe["failures"])
            self._is_over.wait(max(0.01, min(due.values()) - time.monotonic()))

    def _judge(self, name: str, problem: str | None, is_final: bool) -> None:
        if self._is_over.is_set():
            return
        if name == "ready" and problem is None:
            self._say("ready", "")
        elif name == "ready" and is_final:
            self._say("unready", f"not ready: {problem}")
        elif name == "live" and is_final:
            self._give_up(f"not alive: {problem}")

    def _ask(self, probe: Settings, timeout_s: float) -> str | None:
        """What is wrong, in words; None: nothing."""
        try:
            if probe["path"] is None:
                socket.create_connection((self._host, self._port), timeout_s).close()
                return None
            return self._answer(probe, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            what = str(getattr(error, "strerror", None) or error or type(error).__name__).lower()
            return f"{self._host}:{self._port}: {what}"

    def _answer(self, probe: Settings, timeout_s: float) -> str | None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            connection.request("GET", probe["path"], headers={"User-Agent": "ugro-probe", "Connection": "close"})
            answer = connection.getresponse()
            text = answer.read(_MOST_BYTES)
        finally:
            connection.close()
        low, high = probe["status"]
        if low <= answer.status <= high:
            return None
        shown = " ".join(text.decode("utf-8", "replace").split())[:200]
        return f"{probe['path']} answers {answer.status}" + (f": {shown}" if shown else "")
