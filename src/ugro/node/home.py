"""UGRO's folder on this node as a link finds it: safe, and with the node program in it for the next link."""

from __future__ import annotations

import errno
import os
import stat
import time

from ugro.node.machine import user_name

TYPE_CHECKING = False  # see wire.py

if TYPE_CHECKING:
    from typing import Callable, Dict, FrozenSet, Iterator, List, Optional, Tuple


# --- trust ------------------------------------------------------------------------------------------------------------
# Whether others could change what is in UGRO's folder on this node: then nothing is kept there, and nothing is read.
#
# As sshd does with ``StrictModes``: every folder on the way from ``/`` belongs to this user or to root, and nobody else
# can write to it. Two kinds that others can write to are accepted: one with the sticky bit, such as ``/tmp``, where
# they cannot rename what is ours; and one whose group is this user's private group, which has no other member.


NAME = ".ugro"
PROGRAM = "program"
_GROUP_WRITE, _OTHERS_WRITE = stat.S_IWGRP, stat.S_IWOTH
_MOST_LINKS = 40
_ACL = "system.posix_acl_access"
_ALL_USERS = [b"0", b"0", b"4294967295"]  # the map of user ids outside containers


class Unsafe(Exception):
    """A folder or file that others can change; ``fault`` is a stable word."""

    def __init__(self, path: str, fault: str, owner_uid: int, mode: int) -> None:
        super().__init__("%s: %s" % (path, fault))
        self.path = path
        self.fault = fault
        self.owner_uid = owner_uid
        self.mode = stat.S_IMODE(mode)

    def fields(self) -> Dict[str, object]:
        return {
            "path": self.path,
            "fault": self.fault,
            "owner": user_name(self.owner_uid),
            "is_own": self.owner_uid == os.geteuid(),
            "mode": "%04o" % self.mode,
        }


class Account:
    """This user, and whom it has to trust anyway."""

    def __init__(self, uid: int, roots: FrozenSet[int], private_gid: Callable[[], Optional[int]]) -> None:
        self.uid = uid
        self.roots = roots
        self.private_gid = private_gid


def fault_above(found: os.stat_result, account: Account, has_acl: bool) -> Optional[str]:
    """What is wrong with a folder, or a link, on the way to UGRO's folder."""
    if found.st_uid != account.uid and found.st_uid not in account.roots:
        return "owner"
    if stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX:
        return None
    return _writable(found, account, has_acl)


def fault_inside(found: os.stat_result, account: Account, has_acl: bool) -> Optional[str]:
    """What is wrong with UGRO's folder, or something in it."""
    if found.st_uid != account.uid:
        return "owner"
    if stat.S_ISLNK(found.st_mode):
        return "link"
    return _writable(found, account, has_acl)


def _writable(found: os.stat_result, account: Account, has_acl: bool) -> Optional[str]:
    if found.st_mode & _OTHERS_WRITE:
        return "writable"
    if found.st_mode & _GROUP_WRITE:
        if has_acl:  # the group's bits are then what anybody may have whom the list names
            return "acl"
        if found.st_gid != account.private_gid():
            return "writable"
    return None


# --- looking ------------------------------------------------------------------------------------------------------


def prepare(root: str) -> str:
    """UGRO's folder for programs below ``root``, made where it is missing; ``Unsafe`` where others could change it."""
    account = own_account()
    home = os.path.join(_walk(os.path.abspath(root), account), NAME)
    _make(home)
    _expect_inside(home, account)
    if os.lstat(home).st_mode & (_GROUP_WRITE | _OTHERS_WRITE):
        os.chmod(home, 0o700)  # by a version that left this to the umask; only the private group had access
    program = os.path.join(home, PROGRAM)
    _make(program)
    for path in _entries(home):
        _expect_inside(path, account)
    return program


def _walk(path: str, account: Account) -> str:
    """Every folder and link that is passed on the way; those that are missing are made. Returns the real path."""
    here, left, links = "/", _names(path), 0
    _expect_above(here, os.lstat(here), account)
    while left:
        name = left.pop(0)
        if name == "..":
            here = os.path.dirname(here)
            continue
        there = os.path.join(here, name)
        found = _found(there)
        _expect_above(there, found, account)
        if not stat.S_ISLNK(found.st_mode):
            here = there
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, "too many links", there)
        target = os.readlink(there)
        here, left = ("/" if target.startswith("/") else here), _names(target) + left
    return here


def _names(path: str) -> List[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _found(path: str) -> os.stat_result:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        _make(path)
        return os.lstat(path)


def _make(path: str) -> bool:
    """False when it is there already, whatever it is."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return False
    return True


def _entries(home: str) -> Iterator[str]:
    """What is in UGRO's folder, down to the folders that each agent has there. Below are runs, which are the jobs' own,
    and code, which is known by its hash."""
    folders: List[Tuple[str, int]] = [(home, 2)]
    while folders:
        folder, more = folders.pop()
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            yield path
            if more and (name in (PROGRAM, "agents") or folder != home) and os.path.isdir(path):
                folders.append((path, 0 if name == PROGRAM else more - 1))


def _expect_above(path: str, found: os.stat_result, account: Account) -> None:
    fault = fault_above(found, account, _has_acl(path, found))
    if fault is not None:
        raise Unsafe(path, fault, found.st_uid, found.st_mode)
    if not stat.S_ISDIR(found.st_mode) and not stat.S_ISLNK(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", path)


def _expect_inside(path: str, account: Account) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:  # a run that was removed meanwhile
        return
    fault = fault_inside(found, account, _has_acl(path, found))
    if fault is not None:
        raise Unsafe(path, fault, found.st_uid, found.st_mode)


def _has_acl(path: str, found: os.stat_result) -> bool:
    if not found.st_mode & _GROUP_WRITE or stat.S_ISLNK(found.st_mode):
        return False
    try:
        return bool(os.getxattr(path, _ACL, follow_symlinks=False))
    except OSError:
        return False


# --- the account --------------------------------------------------------------------------------------------------


def own_account() -> Account:
    uid = os.geteuid()
    return Account(uid, _roots(), lambda: private_gid(uid))


def _roots() -> FrozenSet[int]:
    """Root. In a container that knows few user ids, what belongs to root outside shows the id for unknown ones."""
    try:
        with open("/proc/self/uid_map", "rb") as file:
            if file.read().split() == _ALL_USERS:
                return frozenset({0})
        with open("/proc/sys/kernel/overflowuid", "rb") as file:
            return frozenset({0, int(file.read())})
    except (OSError, ValueError):
        return frozenset({0})


def private_gid(uid: int) -> Optional[int]:
    """The group that has this user's name and no other member, if there is one."""
    import grp  # most need none of this
    import pwd

    try:
        user = pwd.getpwuid(uid)
        group = grp.getgrgid(user.pw_gid)
    except KeyError:
        return None
    if group.gr_name != user.pw_name or set(group.gr_mem) - {user.pw_name}:
        return None
    return None if _is_primary_of_others(user.pw_gid, user.pw_name) else user.pw_gid


def _is_primary_of_others(gid: int, name: str) -> bool:
    """By the machine's own list: a directory service may take very long to list all its users."""
    try:
        with open("/etc/passwd", encoding="utf-8", errors="replace") as file:
            users = [line.rstrip("\n").split(":") for line in file]
    except OSError:
        return False
    return any(len(user) > 3 and user[3] == str(gid) and user[0] != name for user in users)


# --- home -------------------------------------------------------------------------------------------------------------


_LEFTOVER_S = 600.0
_SUFFIX = ".program"


def settle(root: str, name: str, received: bytes, nonce: str) -> None:
    """``received``: the node program if it was sent, else empty. ``Unsafe`` where others could change the folder."""
    folder = prepare(root)
    if received:
        _keep(os.path.join(folder, name), received, nonce)
        _clean(folder)


def _keep(path: str, content: bytes, nonce: str) -> None:
    """A power cut leaves the old file, the new one, or one whose hash is wrong: that is sent again."""
    fresh = "%s.%s" % (path, nonce)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        os.rename(fresh, path)
    except OSError:
        os.unlink(fresh)
        raise


def _clean(folder: str) -> None:
    # By age, not by whether it is in use: the folder may be shared with other machines.
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        try:
            is_left = "." in name and not name.endswith(_SUFFIX) and time.time() - os.stat(path).st_mtime > _LEFTOVER_S
        except OSError:
            continue
        if is_left:
            _delete(path)


def _delete(path: str) -> None:
    import contextlib  # both bring much with them
    import shutil

    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(path)
