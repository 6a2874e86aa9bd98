"""What a run is to do on this node: its ranks as they will be started, and its limits. Parsed and checked here only."""

from __future__ import annotations

import os
import re
import signal
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from ugro.node import trees
from ugro.node.hardware.gpu_claims import MOST_SHARES
from ugro.node.hardware.gpu_locks import Device, Sharing

GRACE_S = 15.0
MAX_GRACE_S = 3600.0
LOG_CAP_BYTES = 1 << 30
LEAST_LOG_CAP_BYTES = 64 * 1024
MOST_RANKS = 256  # how each ended must fit beside the last lines of a log (rundir.EXIT_BYTES)

_FIELDS = {
    "ranks", "env", "cwd", "code", "grace_s", "lease_s", "log_cap_bytes", "stop_signal", "outputs", "workdir",
    "checkpoint_dir", "shared", "gpus", "user", "cpus", "memory_bytes", "environment", "path", "sdk",
    "folders", "share", "elastic", "store", "base",
}  # fmt: skip
_ENVIRONMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_FOLDER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_RANK_FIELDS = {"rank", "argv", "env"}
# They end nothing: who gets one of them as its last warning would only be killed later.
_HARMLESS = {"STOP", "TSTP", "TTIN", "TTOU", "CONT", "CHLD", "CLD", "WINCH", "URG"}


class FolderAt(NamedTuple):
    """A folder that came with the job, or the only file in it."""

    tree: bytes
    file: bytes


class RankSpec:
    def __init__(self, fields: Dict[str, Any]) -> None:
        _expect_only(fields, _RANK_FIELDS, "a rank")
        self.number = _whole(fields["rank"], "rank", least=0)
        if not isinstance(fields["argv"], list) or not fields["argv"]:
            raise ValueError("rank %d needs argv, a list of words" % self.number)
        self.argv = [encoded(word) for word in fields["argv"]]
        self.env = environment(fields.get("env"))


class RunSpec:
    def __init__(self, fields: Dict[str, Any]) -> None:
        _expect_only(fields, _FIELDS, "a run")
        self.ranks: List[RankSpec] = [RankSpec(rank) for rank in fields["ranks"]]
        if not 0 < len(self.ranks) <= MOST_RANKS or len({rank.number for rank in self.ranks}) != len(self.ranks):
            raise ValueError("ranks must be 1 to %d, each with a number of its own" % MOST_RANKS)
        self.is_elastic, self.store = elastic(fields)
        self.env = environment(fields.get("env"))
        self.cwd: Optional[bytes] = folder(fields.get("cwd"))
        # The tree that is its folder when it starts; by its hash.
        self.code: Optional[bytes] = None if fields.get("code") is None else trees.parse_id(fields["code"])
        # The tree that is the job's own code: all else in its folder counts as made by it; by its hash.
        self.base = self.code
        if "base" in fields:
            self.base = None if fields["base"] is None else trees.parse_id(fields["base"])
        # The tree that has UGRO's own package, for its ranks to import; by its hash.
        self.sdk: Optional[bytes] = None if fields.get("sdk") is None else trees.parse_id(fields["sdk"])
        # Folders of the submitter that it reads, by name.
        self.folders: Dict[str, FolderAt] = folders(fields.get("folders"))
        self.grace_s = grace(fields.get("grace_s", GRACE_S))
        self.stop_signal = stop_signal(fields.get("stop_signal")) or int(signal.SIGTERM)
        lease_s = fields.get("lease_s")
        self.lease_s: Optional[float] = None if lease_s is None else float(lease_s)
        if self.lease_s is not None and not 0 < self.lease_s < float("inf"):
            raise ValueError("lease_s must be more than 0")
        self.outputs: List[str] = [str(pattern) for pattern in fields.get("outputs") or ()]
        # Whether the files that it makes in its working directory are collected, if that is ours.
        self.collects_workdir = fields.get("workdir") is not False
        # Below its working directory: what is there outlives the run.
        self.checkpoint_dir: Optional[bytes] = inner_folder(fields.get("checkpoint_dir"))
        # Its supervisor may have other runs as well; else it has one of its own.
        self.is_shared = fields.get("shared") is True
        # The Python environment that it needs as long as it lives; by its name.
        self.environment: Optional[str] = fields.get("environment")
        if self.environment is not None and not is_environment(self.environment):
            raise ValueError("no name for an environment: %.80r" % (self.environment,))
        self.path: List[bytes] = search_path(fields.get("path"))
        self.gpus = devices(fields.get("gpus"))
        self.share: Optional[Sharing] = sharing(fields.get("share"))
        # Its limits; None: it asked for none.
        self.cpus = _limit(fields, "cpus")
        self.memory_bytes = _limit(fields, "memory_bytes")
        self.user = str(fields.get("user") or "unknown")[:100]  # who submitted it, for others who want its GPUs
        self.log_cap_bytes = _whole(fields.get("log_cap_bytes", LOG_CAP_BYTES), "log_cap_bytes", LEAST_LOG_CAP_BYTES)


def elastic(fields: Dict[str, Any]) -> Tuple[bool, Optional[RankSpec]]:
    """Whether ranks may be lost one by one, while the run goes on; and a process in whose store they meet."""
    store = fields.get("store")
    return fields.get("elastic") is True, None if store is None else RankSpec(store)


def folders(named: Any) -> Dict[str, FolderAt]:
    found: Dict[str, FolderAt] = {}
    for name, one in dict(named or {}).items():
        file = encoded(one.get("file") or "")
        if not _FOLDER.fullmatch(str(name)) or b"/" in file or file in (b".", b".."):
            raise ValueError("no name for a folder: %.80r" % (name,))
        found[str(name)] = FolderAt(trees.parse_id(one["tree"]), file)
    return found


def grace(value: Any) -> float:
    grace_s = float(value)
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise ValueError("grace_s is not between 0 and %g" % MAX_GRACE_S)
    return grace_s


def is_environment(name: Any) -> bool:
    """Whether a Python environment may be called that."""
    return isinstance(name, str) and _ENVIRONMENT.fullmatch(name) is not None


def devices(gpus: Any) -> List[Device]:
    """As ``[index, UUID]``; the UUID is empty where it is not known."""
    return [Device(_whole(index, "a GPU's index", least=0), str(uuid)) for index, uuid in gpus or ()]


def sharing(given: Any) -> Optional[Sharing]:
    """As ``[group, most]``: whose runs may have its GPUs, too."""
    if given is None:
        return None
    group, most = given
    if not 2 <= _whole(most, "most", least=2) <= MOST_SHARES:
        raise ValueError("2 to %d runs can share a GPU, not %d" % (MOST_SHARES, most))
    return Sharing(str(group)[:100], int(most))


def stop_signal(name: Any) -> Optional[int]:
    """Its number: a signal's name without SIG, such as INT. None for none."""
    if name is None:
        return None
    number = getattr(signal, "SIG%s" % name, None) if str(name).isalnum() else None
    if not isinstance(number, signal.Signals) or name in _HARMLESS:
        raise ValueError("no signal that ends a program: %.40r; write its name without SIG, such as INT" % str(name))
    return int(number)


def encoded(word: Any) -> bytes:
    """UTF-8 whatever the locale here; bytes that are none come as they do in Python's own arguments."""
    text = str(word).encode("utf-8", "surrogateescape")
    if b"\0" in text:
        raise ValueError("a NUL character in %.40r" % str(word))
    return text


def environment(variables: Any) -> Dict[bytes, bytes]:
    env = {encoded(key): encoded(value) for key, value in dict(variables or {}).items()}
    if any(b"=" in key or not key for key in env):
        raise ValueError("a variable's name is empty or has a = in it")
    return env


def search_path(folders: Any) -> List[bytes]:
    """Folders in which programs are looked for before all others."""
    found = [folder(one) for one in folders or ()]
    if any(one is None or b":" in one for one in found):
        raise ValueError("a folder of the search path has a : in it")
    return [one for one in found if one is not None]


def with_path(env: Dict[bytes, bytes], first: List[bytes]) -> Dict[bytes, bytes]:
    """``env`` with these folders at the beginning of PATH."""
    if not first:
        return env
    return {**env, b"PATH": b":".join([*first, env.get(b"PATH") or os.fsencode(os.defpath)])}


def folder(path: Any) -> Optional[bytes]:
    if path is None:
        return None
    whole = os.path.expanduser(encoded(path))
    if not os.path.isabs(whole):
        raise ValueError("cwd must be absolute or begin with ~: %.80r" % str(path))
    return whole


def inner_folder(path: Any) -> Optional[bytes]:
    """Below another, without a slash at its end."""
    if path is None:
        return None
    parts = [part for part in encoded(path).split(b"/") if part not in (b"", b".")]
    if not parts or b".." in parts or encoded(path).startswith(b"/"):
        raise ValueError("not a folder below the working directory: %.80r" % str(path))
    return b"/".join(parts)


def _whole(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError("%s must be a whole number of at least %d" % (name, least))
    return value


def _limit(fields: Dict[str, Any], name: str) -> Optional[int]:
    return None if fields.get(name) is None else _whole(fields[name], name, least=1)


def _expect_only(fields: Any, known: Any, what: str) -> None:
    if not isinstance(fields, dict):
        raise ValueError("%s must be an object" % what)
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ValueError("%s has no %s" % (what, ", ".join(unknown)))
