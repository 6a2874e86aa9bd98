"""Where Python environments are on this node, and which of them are whole.

Below ``<root>/.ugro``: ``environments/<name>/`` is an environment that is whole, and never changes. It is built in
``environments/<name>.<machine>.<random>.making/`` and renamed as the last step; what is removed is renamed to
``….removing`` first. ``environments/.locks/<name>`` is held alone by who makes or removes it, shared by runs that use
it. ``tools/`` has installers, ``cache/`` what they have downloaded, ``pythons/`` interpreters.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from typing import Any, Dict, List, Optional

from ugro.remote import durable
from ugro.remote.identity import machine_id
from ugro.remote.state.runspec import is_environment

RECORD = "made.json"
CACHE_LOCK = ".cache"  # among the locks; no environment is called that
_MAKING, _REMOVING = ".making", ".removing"
_LEFT_S = 24 * 3600.0  # what another machine with the same folder left may still be under way


def checked_name(name: Any) -> str:
    if not isinstance(name, str) or not is_environment(name):
        raise ValueError("no name for an environment: %.80r" % (name,))
    return name


class Place:
    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)
        self.home = os.path.join(self.root, ".ugro")
        self.folder = os.path.join(self.home, "environments")
        self.tools = os.path.join(self.home, "tools")
        self.cache = os.path.join(self.home, "cache")
        self.pythons = os.path.join(self.home, "pythons")
        self._locks = os.path.join(self.folder, ".locks")

    def environment(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def prepare(self) -> None:
        for folder in (self._locks, self.tools, self.cache, self.pythons):
            durable.make_folder(folder)

    # --- what is there -------------------------------------------------------------------------------------------

    def names(self) -> List[str]:
        found = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        return sorted(name for name in found if is_environment(name))

    def made(self, name: str) -> Optional[Dict[str, Any]]:
        """Its record with when it was used last; None unless it is whole, here, and its interpreter exists."""
        folder = self.environment(name)
        path = os.path.join(folder, RECORD)
        record = durable.read_json(path)
        if record is None or record.get("folder") != folder or not os.access(str(record.get("python")), os.X_OK):
            return None
        with contextlib.suppress(OSError):
            return {**record, "used_at": shown(os.stat(path).st_mtime)}
        return None

    def used_at(self, name: str) -> float:
        with contextlib.suppress(OSError):
            return os.stat(os.path.join(self.environment(name), RECORD)).st_mtime
        return 0.0

    def note_use(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.utime(os.path.join(self.environment(name), RECORD))

    # --- locks ---------------------------------------------------------------------------------------------------

    def open_lock(self, name: str) -> int:
        """Not taken yet. Lock files stay: one that was deleted could be held by two."""
        durable.make_folder(self._locks)
        return os.open(os.path.join(self._locks, name), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def lock(self, name: str, *, alone: bool, wait_s: float = 0.0) -> Optional[int]:
        """A descriptor that holds it until it is closed; None if another has it."""
        fd = self.open_lock(name)
        if durable.lock_within(fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, wait_s):
            return fd
        os.close(fd)
        return None

    # --- what is not whole ---------------------------------------------------------------------------------------

    def new_folder(self, name: str) -> str:
        """A path to build in, not used before."""
        return "%s.%s.%s%s" % (self.environment(name), machine_id(), os.urandom(6).hex(), _MAKING)

    def set_aside(self, name: str) -> Optional[str]:
        """Takes it out of sight in one step; the caller holds its lock alone. None if there is none."""
        try:
            return self.put_aside(self.environment(name), name)
        except FileNotFoundError:
            return None

    def put_aside(self, path: str, name: str) -> str:
        """Renames it, so that anybody may delete it; the new path."""
        aside = "%s.%s%s" % (self.environment(name), os.urandom(6).hex(), _REMOVING)
        os.rename(path, aside)
        return aside

    def half(self, name: Optional[str] = None) -> List[str]:
        """What was being made, of one environment or of all."""
        found = self._ending_with(_MAKING)
        return [path for path in found if name is None or os.path.basename(path).partition(".")[0] == name]

    def set_asides(self) -> List[str]:
        """What was removed, and is not deleted yet: perhaps somebody is at it."""
        return self._ending_with(_REMOVING)

    def _ending_with(self, end: str) -> List[str]:
        found = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        return [os.path.join(self.folder, one) for one in found if one.endswith(end)]

    def is_abandoned(self, path: str) -> bool:
        """Of a half one, whether nobody works on it any more, if its environment's lock is ours."""
        if ".%s." % machine_id() in os.path.basename(path):
            return True
        with contextlib.suppress(OSError):
            return time.time() - os.stat(path).st_mtime > _LEFT_S
        return False


def delete(path: str) -> None:
    """As far as it can be; what is left is tried again by the next one who cleans up."""
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        for folder, names, _ in os.walk(path):  # those that a package made read-only
            for inner in (folder, *(os.path.join(folder, name) for name in names)):
                with contextlib.suppress(OSError):
                    if not os.path.islink(inner):
                        os.chmod(inner, 0o700)
        shutil.rmtree(path, ignore_errors=True)


def shown(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
