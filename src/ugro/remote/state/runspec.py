"""What a run is to do on this node: its ranks as they will be started, and its limits. Parsed and checked here only."""

from __future__ import annotations

import os
import signal
from typing import Any, Dict, List, Optional

from ugro.remote import trees
from ugro.remote.hardware.gpu_locks import Device

GRACE_S = 15.0
MAX_GRACE_S = 3600.0
LOG_CAP_BYTES = 1 << 30
LEAST_LOG_CAP_BYTES = 64 * 1024
MOST_RANKS = 256  # how each ended must fit beside the last lines of a log (rundir.EXIT_BYTES)

_FIELDS = {
    "ranks", "env", "cwd", "code", "grace_s", "lease_s", "log_cap_bytes", "stop_signal", "outputs", "workdir",
    "checkpoint_dir", "shared", "gpus", "user",
}  # fmt: skip
_RANK_FIELDS = {"rank", "argv", "env"}
# They end nothing: who gets one of them as its last warning would only be killed later.
_HARMLESS = {"STOP", "TSTP", "TTIN", "TTOU", "CONT", "CHLD", "CLD", "WINCH", "URG"}


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
        self.env = environment(fields.get("env"))
        self.cwd: Optional[bytes] = folder(fields.get("cwd"))
        # The tree that is its folder when it starts; by its hash.
        self.code: Optional[bytes] = None if fields.get("code") is None else trees.parse_id(fields["code"])
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
        self.gpus = devices(fields.get("gpus"))
        self.user = str(fields.get("user") or "unknown")[:100]  # who submitted it, for others who want its GPUs
        self.log_cap_bytes = _whole(fields.get("log_cap_bytes", LOG_CAP_BYTES), "log_cap_bytes", LEAST_LOG_CAP_BYTES)


def grace(value: Any) -> float:
    grace_s = float(value)
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise ValueError("grace_s is not between 0 and %g" % MAX_GRACE_S)
    return grace_s


def devices(gpus: Any) -> List[Device]:
    """As ``[index, UUID]``; the UUID is empty where it is not known."""
    return [Device(_whole(index, "a GPU's index", least=0), str(uuid)) for index, uuid in gpus or ()]


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


def _expect_only(fields: Any, known: Any, what: str) -> None:
    if not isinstance(fields, dict):
        raise ValueError("%s must be an object" % what)
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ValueError("%s has no %s" % (what, ", ".join(unknown)))
