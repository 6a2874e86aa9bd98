"""Who uses this machine: its display, terminals, GPUs, keyboard, mouse and joystick. Serves `presence.*`.

What is typed is never read. Interrupts of built-in keyboards and touchpads are counted by the kernel, for everybody to
see. Of other devices, where this user may open them, it is only asked whether something has happened.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from ugro.features.power.node.signs import Record, Sign, Source, Watch, listed, read
from ugro.node import durable, worker
from ugro.node.hardware.gpu_facts import Gpu
from ugro.node.hardware.gpus import Answer
from ugro.node.machine import user_name
from ugro.node.program import Call, method

# --- display ----------------------------------------------------------------------------------------------------------
# Whether a display of this machine is in use, as its desktop tells logind: not idle and not locked.
#
# A desktop that never says when it is idle says nothing about its user, and is not counted.


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


# --- terminals --------------------------------------------------------------------------------------------------------
# Who types on a terminal of this machine: a console, a window, or a login over the network.
#
# The kernel notes when a terminal was last read from (in steps of 8 s). Output alone is no sign: a program that was
# left running writes, and nobody is there. Terminals of UGRO's own commands and jobs are nobody's.


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


# --- gpu users --------------------------------------------------------------------------------------------------------
# Who computes or plays on this machine's GPUs besides UGRO's jobs.
#
# A process counts when it was seen twice: one of ours that is about to end has lost its mark already. Of a process that
# this machine's /proc does not have, as from inside a container, nothing is known.
#
# Processes in containers count, too, with one exception: the daemon that starts a container for a job (`docker run`)
# leaves no mark of the job on it. So they are taken for a job's as long as one of UGRO's own processes is such a
# client.


# A desktop has some memory of a GPU as long as it runs, whether somebody is there or not.
DESKTOP = frozenset(
    {
        *("Xorg", "X", "Xwayland", "gnome-shell", "gdm-x-session", "kwin_x11", "kwin_wayland", "plasmashell"),
        *("sddm-greeter", "xfwm4", "sway", "Hyprland", "weston", "mutter", "cinnamon", "muffin", "compiz"),
        *("gnome-remote-de", "xdg-desktop-por", "nvidia-persiste", "nvidia-persistenced"),
    }
)

_CONTAINER = re.compile(r"[/-](docker|containerd|crio|libpod|kubepods|lxc|buildkit)[-./:]")  # in a control group's path
_CLIENTS = frozenset({"docker", "docker-compose", "podman", "nerdctl", "ctr"})


class GpuUsers:
    name = "GPU processes"

    def __init__(self, sample: Callable[[], Answer], proc: str = "/proc") -> None:
        self._sample = sample
        self._proc = proc
        self._before: Set[int] = set()
        self._has_gpus = False
        self._error: Optional[str] = None
        self._unseen: List[str] = []

    def can_look(self) -> bool:
        return self._has_gpus and self._error is None

    def blind(self) -> List[str]:
        if self._error is not None:
            return ["GPUs cannot be read: %s" % self._error]
        return self._unseen if self._has_gpus else ["no GPUs found"]

    def look(self) -> Optional[Sign]:
        answer = self._sample()
        self._error, self._has_gpus = answer["error"], bool(answer["gpus"])
        theirs, self._unseen = foreign(answer["gpus"], self._is_there, self._is_jobs_container())
        before, self._before = self._before, {pid for pid, _ in theirs}
        lasting = [text for pid, text in theirs if pid in before]
        return Sign(0.0, lasting[0]) if lasting else None

    def _is_there(self, pid: int) -> bool:
        """Where others' processes are hidden (hidepid), one that is not seen is somebody else's."""
        is_hidden = not os.path.exists(os.path.join(self._proc, "1"))
        return is_hidden or os.path.exists(os.path.join(self._proc, str(pid)))

    def _is_jobs_container(self) -> Callable[[int], bool]:
        has_client: List[bool] = []  # looked for once, and only if there is a container at all

        def check(pid: int) -> bool:
            if not _CONTAINER.search(read(os.path.join(self._proc, str(pid), "cgroup"))):
                return False
            if not has_client:
                has_client.append(self._runs_client())
            return has_client[0]

        return check

    def _runs_client(self) -> bool:
        pids = [name for name in listed(self._proc) if name.isdigit()]
        clients = [pid for pid in pids if read(os.path.join(self._proc, pid, "comm")).strip() in _CLIENTS]
        return any(is_ours(int(pid), self._proc) for pid in clients)


def foreign(
    gpus: List[Gpu], is_there: Callable[[int], bool], is_jobs: Callable[[int], bool]
) -> Tuple[List[Tuple[int, str]], List[str]]:
    """The processes that are none of UGRO's, in words; and what cannot be said of others."""
    theirs: List[Tuple[int, str]] = []
    unseen: List[str] = []
    for gpu in gpus:
        for process in gpu["processes"]:
            if process["is_ours"] or process["name"] in DESKTOP:
                continue
            if is_jobs(process["pid"]):
                unseen.append("a container on GPU %d is taken for a job's" % gpu["index"])
            elif is_there(process["pid"]):
                text = "%s (pid %d) uses GPU %d" % (process["name"], process["pid"], gpu["index"])
                theirs.append((process["pid"], text))
            else:
                unseen.append("a process on GPU %d is in another container" % gpu["index"])
    return theirs, unseen


# --- input devices ----------------------------------------------------------------------------------------------------


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


# --- api --------------------------------------------------------------------------------------------------------------
# `presence.watch`: whether somebody uses this machine, sent when it changes and, while it goes on, now and then.
#
# It looks in a process of its own: a driver, a desktop or a name service may hang. Each line of its output is one JSON
# document: ``{"idle_s", "sign", "sources", "blind"}``.


_LOOK_S = 2.0
_PULSE_S = 5.0
_LEAST_S = 0.1
_PARTS = 4  # looks in a quiet time, at least
# A folder to look at instead of /dev, and at nothing else: for tests beside which somebody works.
_TERMINALS = "UGRO_PRESENCE_DEV"


@method("presence.watch", is_standing=True)
def watch(call: Call, *, when: str, quiet_s: float) -> None:
    when, quiet_s = str(when), float(quiet_s)
    if when not in SOURCES or not 0 < quiet_s < float("inf"):
        raise ValueError("when %.20r, quiet for %r s" % (when, quiet_s))
    root, node_key = call.program.root, call.program.node_key
    worker.send(call, lambda out: _watch(out, when, quiet_s, _record(root, node_key, when)))


def _watch(out: int, when: str, quiet_s: float, record: Record) -> Dict[str, Any]:
    """Until it is killed."""
    seen = Watch(SOURCES[when](), record, min(_PULSE_S, quiet_s / _PARTS))
    pause_s = max(_LEAST_S, min(_LOOK_S, quiet_s / _PARTS))
    while True:
        document = seen.look()
        if document is not None:
            durable.write_all(out, json.dumps(document).encode() + b"\n")
        time.sleep(pause_s)


def _record(root: str, node_key: str, when: str) -> Record:
    folder = os.path.join(os.path.realpath(root), ".ugro", "presence")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return Record(os.path.join(folder, "%s.%s.json" % (node_key, when)))


def _people() -> List[Source]:
    folder = os.environ.get(_TERMINALS)
    return [Terminals(folder)] if folder else [Terminals(), InputDevices(), Displays()]


def _gpus() -> List[Source]:
    from ugro.node.hardware.gpu_claims import ClaimTable
    from ugro.node.hardware.gpus import sampling

    return [GpuUsers(sampling(ClaimTable()))]


SOURCES: Dict[str, Callable[[], List[Source]]] = {"active": _people, "gpu_busy": _gpus}
