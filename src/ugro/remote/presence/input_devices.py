"""Whether a keyboard, a mouse or a joystick of this machine is used.

What is typed is never read. Interrupts of built-in keyboards and touchpads are counted by the kernel, for everybody to
see. Of other devices, where this user may open them, it is only asked whether something has happened.
"""

from __future__ import annotations

import os
import select
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

from ugro.remote.presence.signs import Sign, read

_DEVICES = "bus/input/devices"
_BUILT_IN = "i8042"  # the controller of PS/2 keyboards, mice and touchpads
_REPEATS = 1 << 20  # EV_REP: a keyboard whose keys repeat; buttons for power and volume do not


class InputDevice(NamedTuple):
    name: str
    phys: str
    handlers: Tuple[str, ...]
    events: int  # a bit for each kind of event

    @property
    def is_for_people(self) -> bool:
        """A keyboard, a mouse, a touchpad or a joystick; no power button, no lid, no loudspeaker."""
        if any(handler.startswith(("mouse", "js")) for handler in self.handlers):
            return True
        return "kbd" in self.handlers and bool(self.events & _REPEATS)

    @property
    def node(self) -> Optional[str]:
        return next((handler for handler in self.handlers if handler.startswith("event")), None)


class InputDevices:
    name = "keyboard and mouse"

    def __init__(self, dev: str = "/dev", proc: str = "/proc") -> None:
        self._dev = dev
        self._proc = proc
        self._count: Optional[int] = None
        self._open: Dict[str, int] = {}  # by path, those that are asked
        self._devices: List[InputDevice] = []
        self._counted: List[str] = []  # names of those whose interrupts are counted

    def can_look(self) -> bool:
        return bool(self._counted or self._open)

    def blind(self) -> List[str]:
        unseen = [one for one in self._devices if one.name not in self._counted and self._path(one) not in self._open]
        return ["%s (%s) cannot be read" % (one.name, self._path(one)) for one in unseen]

    def look(self) -> Optional[Sign]:
        found = parse_devices(read(os.path.join(self._proc, _DEVICES)))
        self._devices = [one for one in found if one.is_for_people]
        has_moved = self._has_interrupted()
        used = self._used()
        self._open_others()
        if used:
            return Sign(0.0, "somebody uses %s" % used)
        return Sign(0.0, "somebody uses its keyboard, mouse or touchpad") if has_moved else None

    def _has_interrupted(self) -> bool:
        text = read(os.path.join(self._proc, "interrupts"), 1 << 23)
        self._counted, count = interrupts_of(self._devices, text)
        before, self._count = self._count, count if self._counted else None
        return before is not None and self._count is not None and before != self._count

    def _used(self) -> str:
        """The name of a device that something has happened to since the last look; empty if there is none."""
        names = {self._path(one): one.name for one in self._devices}
        used = ""
        for path, fd in list(self._open.items()):
            if path not in names or _has_events(fd):
                # Closed with all that came, unread; opened again, it begins with nothing.
                os.close(self._open.pop(path))
                used = used or names.get(path, "")
        return used

    def _open_others(self) -> None:
        for one in self._devices:
            path = self._path(one)
            if one.name not in self._counted and path not in self._open and path:
                try:
                    self._open[path] = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                except OSError:
                    continue

    def _path(self, one: InputDevice) -> str:
        return os.path.join(self._dev, "input", one.node) if one.node else ""


def parse_devices(text: str) -> List[InputDevice]:
    """``/proc/bus/input/devices``: blocks of lines such as ``N: Name="AT keyboard"``."""
    found = []
    for block in text.split("\n\n"):
        values: Dict[str, str] = {}
        for line in block.splitlines():
            key, _, value = line.partition(": ")[2].partition("=")
            values["%s %s" % (line[:1], key)] = value.strip()
        if "N Name" in values:
            handlers = tuple(values.get("H Handlers", "").split())
            found.append(
                InputDevice(
                    values["N Name"].strip('"'), values.get("P Phys", ""), handlers, _bits(values.get("B EV", ""))
                )
            )
    return found


def interrupts_of(devices: Iterable[InputDevice], text: str) -> Tuple[List[str], int]:
    """The names of those whose interrupts ``/proc/interrupts`` counts, and the sum of the counts."""
    lines = [line.split() for line in text.splitlines()]
    cores = len(lines[0]) if lines else 0
    names: List[str] = []
    rows: Dict[int, int] = {}
    for one in devices:
        for number, words in enumerate(lines[1:]):
            if _is_line_of(one, words[1 + cores :]):
                names.append(one.name)
                rows[number] = sum(int(word) for word in words[1 : 1 + cores] if word.isdigit())
    return list(dict.fromkeys(names)), sum(rows.values())


def _is_line_of(one: InputDevice, words: List[str]) -> bool:
    """``words``: what follows the counts; the last of them name the devices, with commas between."""
    actions = [word.rstrip(",") for word in words]
    if one.phys.startswith("isa0060/"):
        return _BUILT_IN in actions
    # A touchpad on I2C has its own line, with the first word of its name: ELAN0676:00
    first = one.name.split(" ", 1)[0]
    return ":" in first and first in actions


def _bits(text: str) -> int:
    try:
        return int(text or "0", 16)
    except ValueError:
        return 0


def _has_events(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll(0))
