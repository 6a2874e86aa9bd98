"""Who types on a terminal of this machine: a console, a window, or a login over the network.

The kernel notes when a terminal was last read from (in steps of 8 s). Output alone is no sign: a program that was left
running writes, and nobody is there. Terminals of UGRO's own commands and jobs are nobody's.
"""

from __future__ import annotations

import os
import time
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

from ugro.remote.identity import user_name
from ugro.remote.presence.signs import Sign, listed

# Carried by every process of a job, of its set-up, and of ``ugro exec``.
OURS = (b"UGRO_RUN=", b"UGRO_EXEC=")

Device = Tuple[int, int]  # major and minor number


class Terminal(NamedTuple):
    name: str  # pts/3
    device: Device
    read_ns: int  # when it was last read from, by the wall clock
    uid: int


class Terminals:
    name = "terminals"

    def __init__(self, folder: str = "/dev", proc: str = "/proc") -> None:
        self._folder = folder
        self._proc = proc
        self._seen: Optional[Dict[str, int]] = None

    def can_look(self) -> bool:
        return os.path.isdir(os.path.join(self._folder, "pts"))

    def blind(self) -> List[str]:
        return [] if self.can_look() else ["there is no /dev/pts"]

    def look(self) -> Optional[Sign]:
        terminals = list_terminals(self._folder)
        before, self._seen = self._seen, {one.name: one.read_ns for one in terminals}
        if before is None:
            # The first look: nothing to compare with but the time, by the clock that stamps terminals.
            now_ns = time.time_ns()
            read = [one for one in terminals if one.read_ns <= now_ns]
        else:
            now_ns = 0
            read = [one for one in terminals if one.read_ns != before.get(one.name)]
        if not read:
            return None
        theirs = used_by_people([one.device for one in read], self._proc)
        persons = [one for one in read if one.device in theirs]
        if not persons:
            return None
        newest = max(persons, key=lambda one: one.read_ns)
        idle_s = (now_ns - newest.read_ns) / 1e9 if before is None else 0.0
        return Sign(idle_s, "%s types on %s" % (user_name(newest.uid), newest.name))


def list_terminals(folder: str) -> List[Terminal]:
    names = ["pts/" + name for name in listed(os.path.join(folder, "pts")) if name.isdigit()]
    names += [name for name in listed(folder) if name.startswith("tty") and name[3:].isdigit() and name != "tty0"]
    found = []
    for name in names:
        try:
            about = os.stat(os.path.join(folder, name))
        except OSError:  # closed meanwhile
            continue
        device = (os.major(about.st_rdev), os.minor(about.st_rdev))
        found.append(Terminal(name, device, about.st_atime_ns, about.st_uid))
    return found


def used_by_people(devices: List[Device], proc: str = "/proc") -> Set[Device]:
    """Of these terminals, those that some process belongs to, and none of UGRO's."""
    wanted = set(devices)
    people: Set[Device] = set()
    ours: Set[Device] = set()
    for pid in [int(name) for name in listed(proc) if name.isdigit()]:
        device = terminal_of(pid, proc)
        if device in wanted:
            (ours if is_ours(pid, proc) else people).add(device)
    return people - ours


def terminal_of(pid: int, proc: str = "/proc") -> Optional[Device]:
    """The terminal that the process belongs to."""
    try:
        with open(os.path.join(proc, str(pid), "stat"), "rb") as file:
            text = file.read()
    except OSError:
        return None
    try:
        # The name is in brackets and may hold spaces and brackets itself.
        number = int(text[text.rindex(b")") + 2 :].split(b" ", 5)[4])
    except (ValueError, IndexError):
        return None
    # As the kernel writes it: the minor number is in two parts.
    return ((number >> 8) & 0xFFF, (number & 0xFF) | ((number >> 12) & 0xFFF00)) if number > 0 else None


def is_ours(pid: int, proc: str = "/proc") -> bool:
    """By its environment, which of another user's process cannot be read."""
    try:
        with open(os.path.join(proc, str(pid), "environ"), "rb") as file:
            return any(entry.startswith(OURS) for entry in file.read().split(b"\0"))
    except OSError:
        return False
