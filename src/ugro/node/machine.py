"""This machine: its identity, whether its users' processes linger, and room on a disk. Imports little."""

from __future__ import annotations

import errno
import os
import pwd

TYPE_CHECKING = False  # see wire.py

if TYPE_CHECKING:
    from typing import Any, Dict, List, Tuple


SPARE_BYTES = 64 << 20  # left free, for what others write meanwhile
NO_SPACE = "no-space"  # the kind of a refusal
# With less, not even a line of a log may fit: blocks are taken whole.
_NOTHING_BYTES = 64 * 1024
_UNITS = ("KiB", "MiB", "GiB", "TiB")


def free_bytes(path: str) -> int:
    usage = os.statvfs(path)
    return usage.f_bavail * usage.f_frsize


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def has_nothing_left(path: str) -> bool:
    """Whether a program that writes there fails now, for want of space or of files."""
    try:
        usage = os.statvfs(path)
    except OSError:
        return False
    return usage.f_bavail * usage.f_frsize < _NOTHING_BYTES or not _has_files(usage)


def shortage(path: str, size: int, what: str, spare: int = SPARE_BYTES) -> str | None:
    """Why ``size`` bytes of ``what`` do not fit, ``spare`` left; None if they do."""
    free = free_bytes(path)
    if size + spare <= free:
        return None
    needs = "%s needs %s, and %s are kept free" % (what, in_words(size), in_words(spare))
    return "the disk of %s is full: %s free; %s" % (_shown(path), in_words(free), needs)


def refusal(error: OSError, path: str, prefix: str = "") -> Tuple[str, str]:
    """The kind and the words of a call that failed by it; ``path`` is on the disk that it wrote to."""
    if not is_full(error):
        return "os", prefix + str(error)
    if error.errno == errno.EDQUOT:  # the disk itself may be almost empty
        return NO_SPACE, "%sthe disk quota is used up in %s" % (prefix, _shown(path))
    return NO_SPACE, "%sthe disk of %s is full%s" % (prefix, _shown(path), _left(path))


def _left(path: str) -> str:
    try:
        usage = os.statvfs(path)
    except OSError:
        return ""
    if not _has_files(usage):
        return ": it has no inodes left for more files"
    return ": %s free" % in_words(usage.f_bavail * usage.f_frsize)


def _has_files(usage: os.statvfs_result) -> bool:
    return usage.f_favail > 0 or usage.f_files == 0  # some file systems do not count files


def _shown(path: str) -> str:
    """UGRO's folder as users know it, without what is inside."""
    return path.partition("/.ugro/")[0]


def in_words(size: float) -> str:
    if size < 1024:
        return "%d B" % size
    for unit in _UNITS:
        size /= 1024
        if size < 999.95 or unit == _UNITS[-1]:
            break
    return "%.1f %s" % (size, unit)


# --- identity ---------------------------------------------------------------------------------------------------------
# Which machine this is, and under which node name the agent reached it.
#
# Several machines may have one folder on a file server, and several node names may lead to one machine. What belongs to
# one node is kept under its key, so that none of them reads another's files and every lock is one machine's own: some
# file servers do not pass locks on to other machines.


_ID_CHARACTERS = 12


def machine_id() -> str:
    """Stays the same when the machine restarts; its host name where it has no id, as in some containers."""
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            found = file.read().strip()[:_ID_CHARACTERS]
    except (OSError, ValueError):
        found = ""
    return found or file_name(os.uname().nodename)


def node_key(node: str) -> str:
    """The name of everything on disk that belongs to this node alone."""
    return "%s@%s" % (file_name(node), machine_id())


def file_name(text: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in text)


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# --- linger -----------------------------------------------------------------------------------------------------------
# Whether what a user leaves running outlives the login; imports little, since every start of a run asks.


_CONFIG_FOLDERS = ("usr/lib", "usr/local/lib", "run", "etc")  # the last one wins


def survival(prefix: str = "/") -> Dict[str, Any]:
    """Whether logind ends what a user left running; ``prefix`` is where the system's files are."""
    user = user_name(os.getuid())
    settings = _logind_settings(prefix)
    is_listed = not settings.get("KillOnlyUsers", "").split() or user in settings["KillOnlyUsers"].split()
    is_excluded = user in settings.get("KillExcludeUsers", "root").split()
    is_on = settings.get("KillUserProcesses", "no").lower() in ("yes", "y", "true", "t", "on", "1")
    return {
        "user": user,
        "has_logind": os.path.isdir(os.path.join(prefix, "run/systemd/system")),
        "kills_processes": is_on and is_listed and not is_excluded,
        "lingers": os.path.exists(os.path.join(prefix, "var/lib/systemd/linger", user)),
    }


def has_user_manager(prefix: str = "/") -> bool:
    """Whether this user's systemd runs, and can be asked for a scope."""
    if not os.path.isdir(os.path.join(prefix, "run/user/%d/systemd" % os.getuid())):
        return False
    import shutil  # brings much with it, and most machines do not come this far

    return shutil.which("systemd-run") is not None


def _logind_settings(prefix: str) -> Dict[str, str]:
    settings: Dict[str, str] = {}
    for path in _logind_files(prefix):
        section = ""
        for line in _lines(path):
            line = line.strip()
            if line.startswith("["):
                section = line
            elif section == "[Login]" and "=" in line and line[0] not in "#;":
                key, _, value = line.partition("=")
                settings[key.strip()] = value.strip()
    return settings


def _logind_files(prefix: str) -> List[str]:
    """In the order in which later ones win: one main file, then the drop-ins by name, wherever they are."""
    folders = [os.path.join(prefix, folder, "systemd") for folder in _CONFIG_FOLDERS]
    mains = [path for path in (os.path.join(folder, "logind.conf") for folder in folders) if os.path.exists(path)]
    drop_ins: Dict[str, str] = {}
    for folder in (os.path.join(folder, "logind.conf.d") for folder in folders):
        if os.path.isdir(folder):
            drop_ins.update((name, os.path.join(folder, name)) for name in os.listdir(folder) if name.endswith(".conf"))
    return mains[-1:] + [drop_ins[name] for name in sorted(drop_ins)]


def _lines(path: str) -> List[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(64 * 1024).splitlines()
    except OSError:
        return []
