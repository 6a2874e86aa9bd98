"""Who computes or plays on this machine's GPUs besides UGRO's jobs.

A process counts when it was seen twice: one of ours that is about to end has lost its mark already. Of a process that
this machine's /proc does not have, as from inside a container, nothing is known.

Processes in containers count, too, with one exception: the daemon that starts a container for a job
(`docker run`) leaves no mark of the job on it. So they are taken for a job's as long as one of UGRO's own processes is
such a client.
"""

from __future__ import annotations

import os
import re
from typing import Callable, List, Optional, Set, Tuple

from ugro.remote.hardware.gpu_facts import Gpu
from ugro.remote.hardware.gpus import Answer
from ugro.remote.presence.signs import Sign, listed, read
from ugro.remote.presence.terminals import is_ours

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
