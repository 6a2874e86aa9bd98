"""Whether a display of this machine is in use, as its desktop tells logind: not idle and not locked.

A desktop that never says when it is idle says nothing about its user, and is not counted.
"""

from __future__ import annotations

import os
import subprocess
import time
from typing import Dict, List, Optional

from ugro.remote.presence.signs import Sign, listed, read

_GRAPHICAL = ("x11", "wayland", "mir")
_ASKED = ("IdleHint", "IdleSinceHintMonotonic", "LockedHint", "Name")
_TIMEOUT_S = 5.0


class Displays:
    name = "display"

    def __init__(self, folder: str = "/run/systemd/sessions", program: str = "loginctl") -> None:
        self._folder = folder
        self._program = program
        self._is_answered = False
        self._silent: List[str] = []

    def can_look(self) -> bool:
        return self._is_answered

    def blind(self) -> List[str]:
        return ["the desktop of %s does not say when it is idle" % user for user in self._silent]

    def look(self) -> Optional[Sign]:
        self._is_answered, self._silent = False, []
        signs = [self._sign(session) for session in graphical(self._folder)]
        return min((sign for sign in signs if sign is not None), default=None)

    def _sign(self, session: str) -> Optional[Sign]:
        said = self._ask(session)
        user = said.get("Name") or "somebody"
        if not said or not is_telling(said):
            self._silent.append(user)
            return None
        self._is_answered = True
        idle_s = idle_by(said, time.clock_gettime(time.CLOCK_MONOTONIC))
        return None if idle_s is None else Sign(idle_s, "%s uses the display" % user)

    def _ask(self, session: str) -> Dict[str, str]:
        argv = [self._program, "show-session", session, *("--property=" + name for name in _ASKED)]
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_TIMEOUT_S
            )
        except (OSError, subprocess.SubprocessError):
            return {}
        return parse(done.stdout[:65536].decode("utf-8", "replace")) if done.returncode == 0 else {}


def graphical(folder: str) -> List[str]:
    """The sessions that are on a display now. logind keeps a file for each, which everybody may read."""
    found = []
    for name in listed(folder):
        said = parse(read(os.path.join(folder, name), 65536))
        if said.get("TYPE") in _GRAPHICAL and said.get("CLASS") == "user" and said.get("ACTIVE") == "1":
            found.append(name)
    return found


def parse(text: str) -> Dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key: value.strip() for key, _, value in pairs}


def is_telling(said: Dict[str, str]) -> bool:
    """Whether the desktop has ever said that it is idle, that it no longer is, or that it is locked."""
    return said.get("LockedHint") == "yes" or _since_us(said) > 0


def idle_by(said: Dict[str, str], now_s: float) -> Optional[float]:
    """For how long nobody has used it; None: it is locked."""
    if said.get("LockedHint") == "yes":
        return None
    return max(0.0, now_s - _since_us(said) / 1e6) if said.get("IdleHint") == "yes" else 0.0


def _since_us(said: Dict[str, str]) -> int:
    text = said.get("IdleSinceHintMonotonic", "")
    return int(text) if text.isdigit() else 0
