"""How this node can hold jobs to the cores and the memory that they ask for. Loads little: every link asks."""

from __future__ import annotations

import os

from ugro.remote.process import cgroup
from ugro.remote.process.cgroup import CPU, MEMORY, Home
from ugro.remote.runs.linger import has_user_manager, survival

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from typing import Dict, Iterable, Optional

SYSTEMD, AFFINITY, NONE = "systemd", "affinity", "none"
_MANAGER = "/sys/fs/cgroup/user.slice/user-%d.slice/user@%d.service/cgroup.controllers"


def enforcement(homes: Dict[str, Home], delegated: Iterable[str], can_bind: bool) -> Dict[str, str]:
    """How each limit is enforced. ``delegated``: the controllers that a user's systemd passes on to a scope."""

    def by_groups(controller: str) -> Optional[str]:
        home = homes.get(controller)
        if home is not None and not home.is_scope:
            return "cgroup%d" % home.version
        return SYSTEMD if home is not None or controller in delegated else None

    return {"cpus": by_groups(CPU) or (AFFINITY if can_bind else NONE), "memory": by_groups(MEMORY) or NONE}


def offered() -> Dict[str, str]:
    """By this node, for runs that start now."""
    # Without linger, a scope ends with the last login: then it is not used.
    has_scopes = survival()["lingers"] and has_user_manager()
    delegated = cgroup.read(_MANAGER % (os.getuid(), os.getuid())).split() if has_scopes else []
    return enforcement(cgroup.detect(), delegated, can_bind=hasattr(os, "sched_setaffinity"))
