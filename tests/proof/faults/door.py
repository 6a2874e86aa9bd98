"""A crowd connects to the dashboard's port and says nothing, while the agent has few descriptors to spare."""

from __future__ import annotations

import os
import re
import resource
from contextlib import suppress
from pathlib import Path

from tests.proof.faults import Hit, Kind, Step, Target
from tests.rig.agent import holder
from tests.rig.crowd import Crowd, may_have

_MOST = 1200
_SPARE = 250  # fewer than the crowd takes, and more than commands do
_LONGEST_S = 12.0  # longer than strangers may stay
_ADDRESS = re.compile(r'"dashboard at (http://[^"]+)"')


def crowd(target: Target, step: Step) -> Hit | None:
    pid, url = holder(target.home), _address(target.home)
    if pid is None or url is None:
        return None
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with suppress(OSError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")) + _SPARE, most))
    people = Crowd(url)
    people.join(int(_MOST * (1 + step.pick) / 2))

    def undo() -> None:
        people.leave()
        with suppress(ProcessLookupError):  # another fault may have ended it
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))

    return Hit(f"{len(people.sockets)} connections to {url}, {_SPARE} descriptors to spare", undo)


def _address(home: Path) -> str | None:
    """Of the newest agent: it logs it. Asking for it would start one."""
    with suppress(OSError):
        found = _ADDRESS.findall((home / "agent.log").read_text(errors="replace"))
        return found[-1] if found else None
    return None


KINDS = {
    "crowd": Kind(
        2,
        crowd,
        longest_s=_LONGEST_S,
        impossible=lambda: None if may_have(_MOST) else f"this process may not have {_MOST} connections",
    )
}
