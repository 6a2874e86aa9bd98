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
import re
import shutil
import time
from typing import Any, Dict, List, NamedTuple, Optional

from ugro.features.environments.node.failures import Mask
from ugro.node import durable, trees
from ugro.node.machine import machine_id
from ugro.node.program import Refused
from ugro.node.runs import rundir as live_runs
from ugro.node.runs.rundir import RunDir
from ugro.node.runs.runspec import is_environment

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


# --- recipe -----------------------------------------------------------------------------------------------------------
# How an environment is to be made, as the agent says it. Parsed and checked here only.


_MINOR = re.compile(r"3\.[0-9]{1,2}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,250}")
_HASH = re.compile(r"--hash[= ]sha256:[0-9a-f]{64}")
_CONTINUED = re.compile(r"\\[ \t]*\n")
_MOST_TEXT = 1 << 20
_MOST_ADDRESS = 4096


class Blob(NamedTuple):
    name: str
    sha256: str
    size: int


class Recipe:
    def __init__(self, fields: Dict[str, Any]) -> None:
        self.name = checked_name(fields["name"])
        self.python = _expected(_MINOR, dict(fields["platform"])["python"], "a version such as 3.11")
        self.requirements = _requirements(fields["requirements"])
        self.count = len(_lines(self.requirements))
        self.tree = trees.parse_id(fields["tree"])
        self.installer = _blob(fields["installer"])
        self.wheels: List[Blob] = [_blob(one) for one in fields.get("wheels") or ()]
        index_url = fields.get("index_url")
        self.index_url: Optional[str] = None if index_url is None else _address(index_url)
        self.extra_index_urls = [_address(one) for one in fields.get("extra_index_url") or ()]
        self.find_links = [_address(one, r",") for one in fields.get("find_links") or ()]
        self.label = str(fields.get("label") or "")[:100]
        self.mask = Mask([one for one in (self.index_url, *self.extra_index_urls, *self.find_links) if one])

    @property
    def is_offline(self) -> bool:
        return bool(self.wheels)


def _requirements(text: Any) -> str:
    """Pinned lines with hashes; nothing that would make an installer read other files or ask other indexes."""
    if not isinstance(text, str) or len(text) > _MOST_TEXT or "\0" in text:
        raise ValueError("requirements must be a text")
    for line in _lines(text):
        if line.startswith("-") or not _HASH.search(line):
            raise ValueError("a requirement without a hash: %.80r" % line)
    return text


def _lines(text: str) -> List[str]:
    lines = (line.strip() for line in _CONTINUED.sub(" ", text).splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def required_names(text: str) -> List[str]:
    """The packages that every environment made of this has: those without a condition."""
    lines = (line.partition(" --hash")[0] for line in _lines(text))
    found = (re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line) for line in lines if ";" not in line)
    return [normal(match[0]) for match in found if match]


def normal(name: str) -> str:
    """Of a package, as all spellings of it are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _blob(fields: Any) -> Blob:
    name = _expected(_FILE, fields["name"], "the name of a file")
    size = fields["size"]
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ValueError("size must be a whole number")
    return Blob(name, trees.parse_id(fields["content"]).hex(), size)


def _address(text: Any, not_in: str = r"\s") -> str:
    """``not_in``: what stands between two of them in an installer's variable."""
    is_text = isinstance(text, str) and 0 < len(text) <= _MOST_ADDRESS and text.isprintable()
    if not is_text or text.startswith("-") or re.search(not_in, text):
        raise ValueError("no address of an index")  # not shown: it may hold a password
    return str(text)


def _expected(pattern: Any, value: Any, what: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError("%.80r is not %s" % (value, what))
    return value


# --- usage ------------------------------------------------------------------------------------------------------------
# Who uses an environment: runs hold its lock while they live, and their folders say which one they were started with.
#
# Both are looked at. The lock lets no run start with an environment that is being removed, and none be removed that a
# supervisor uses; the folders tell of a run whose supervisor was killed, or lives on another machine with this folder.


_WAIT_S = 3.0  # who looks for unused ones holds each lock for a moment


def hold(root: str, name: str) -> int:
    """For a run, before its first rank starts: the environment stays until the descriptor is closed."""
    place = Place(root)
    fd = place.lock(name, alone=False, wait_s=_WAIT_S)
    if fd is None:
        raise Refused("busy", "the Python environment %.12s is being made or removed" % name)
    if place.made(name) is None:
        os.close(fd)
        raise Refused("no-environment", "the Python environment %.12s is not on this node" % name)
    place.note_use(name)
    return fd


def counts(place: Place) -> Dict[str, int]:
    """By environment, how many runs may still need it."""
    found: Dict[str, int] = {}
    for run in live_runs.those_that_may_live(place.root):
        name = _environment(run)
        if name is not None:
            found[name] = found.get(name, 0) + 1
    return found


def _environment(run: RunDir) -> Any:
    spec = (run.envelope() or {}).get("spec")
    return spec.get("environment") if isinstance(spec, dict) else None
