"""The lock of a GPU: one run at a time has it, whichever agent and node name it was started by.

Each GPU has a file, named by its UUID, in one folder of the account. A run's supervisor, or the process that measures,
holds the lock of each of its GPUs, and the file says who that is. The folder is in the account's home: files in /tmp,
/run/user or /dev/shm may be deleted while they are held, because they are old or because the user logs out. A
supervisor that was killed leaves its record: the GPU is free when no process of that run is left, or when the machine
was restarted since.

Runs of one group may share a GPU. Each holds the lock of a seat, a file of its own, and takes it while it holds the
GPU's own lock for a moment; who wants the whole GPU holds that, and finds no seat taken.

Other accounts of the machine do not see these files. Who takes a GPU or a seat also makes a claim (``gpu_claims``),
which all of them see; it ends when the supervisor and its reaper are gone, which ends what a killed supervisor leaves.
Accounts share no GPU.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional

from ugro.node import durable, foreign
from ugro.node.clock import boot_id
from ugro.node.hardware import gpu_claims
from ugro.node.hardware.gpu_claims import MOST_SHARES, Claims, ClaimTable, Record, SharedClaims, Taken
from ugro.node.machine import file_name, machine_id
from ugro.node.process import terminate
from ugro.node.program import Refused

BUSY = "gpu-busy"
_LOCK_S = 0.5  # those who only look hold a lock for a moment, and those who take a seat the GPU's claim
_PAUSE_S = 0.02
_MOST_BYTES = 16 * 1024
_HOME = "~/.local/state/ugro"
# The home folder is none that we could ever write to; any other error may pass, and must not make us look elsewhere.
_NO_HOME = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Sharing(NamedTuple):
    group: str  # whose runs may have a GPU together
    most: int  # of them on one GPU


class Device(NamedTuple):
    number: int  # the driver's index of it
    uuid: str


class GpuLocks:
    """Those of one run. They end with the process that took them, or with ``release``; claims with ``shared``, too."""

    def __init__(self, shared: Optional[SharedClaims] = None) -> None:
        self._files: List[int] = []
        self._claims = Claims(shared)

    def take(self, devices: List[Device], root: str, record: Record, share: Optional[Sharing] = None) -> None:
        """All or none; ``gpu-busy`` when somebody has one of them. A GPU without a UUID has no lock.

        ``share``: runs of the same group may have them, too.
        """
        known = {device.uuid: device for device in devices if device.uuid}
        if not known:
            return
        own = {"boot_id": boot_id(), "cgroup": terminate.own_cgroup(), "since": time.time(), **record}
        folder = _make_folder(root)
        try:
            self._claims.publish(own)
            for _, device in sorted(known.items()):
                if share is None:
                    self._take(folder, device, own)
                else:
                    self._take_seat(folder, device, {**own, "group": share.group}, share)
            self._claims.hand_over()
        except (OSError, Refused):
            self.release(is_over=True)
            raise
        finally:
            os.close(folder)

    def _take(self, folder: int, device: Device, own: Record) -> None:
        file = _locked(folder, device, own)
        try:
            _expect_no_seats(folder, device, own)
            self._claims.keep(_claimed(device, own))
            _write(file, json.dumps(own).encode())
        except (OSError, Refused):
            os.close(file)
            raise
        self._files.append(file)

    def _take_seat(self, folder: int, device: Device, own: Record, share: Sharing) -> None:
        """The lock of the GPU itself is held meanwhile, so nobody else takes it or a seat of it."""
        held = [_locked(folder, device, own)]
        try:
            _expect_no_seats(folder, device, own)
            claim = _claimed(device, own, _seats_in_use(folder, device.uuid))
            held += [] if claim is None else [claim]
            if any(self._sit_down(folder, device.uuid, number, own) for number in range(share.most)):
                return
            raise Refused(BUSY, "GPU %d is used by %d others of its group" % (device.number, share.most))
        finally:
            for one in held:
                os.close(one)

    def _sit_down(self, folder: int, uuid: str, number: int, own: Record) -> bool:
        """False if somebody has the seat."""
        seat = _open(folder, _seat(uuid, number), os.O_CREAT)
        try:
            # Free, but for those who only look.
            if _is_free(seat) and durable.lock_within(seat, fcntl.LOCK_EX, _LOCK_S):
                self._claims.keep(gpu_claims.seat(uuid, number))
                _write(seat, json.dumps(own).encode())
                self._files.append(seat)
                return True
        except Taken:  # by a process that is just ending
            pass
        except OSError:
            os.close(seat)
            raise
        os.close(seat)
        return False

    def hear(self) -> None:
        """Now and then: there is room for those who want to know who has the GPUs."""
        self._claims.hear()

    def release(self, *, is_over: bool) -> None:
        """``is_over``: no process of the run is left. Otherwise the records stay, and the next taker looks for some."""
        self._claims.release()  # who finds a file's lock free finds the claim free, too
        files, self._files = self._files, []
        for file in files:
            with contextlib.suppress(OSError):
                if is_over:
                    os.ftruncate(file, 0)
            os.close(file)


def _locked(folder: int, device: Device, own: Record) -> int:
    """The file of a GPU that no run has, with its lock."""
    file = _open(folder, device.uuid, os.O_CREAT)
    try:
        is_held = not durable.lock_within(file, fcntl.LOCK_EX, _LOCK_S)
        record = _read(file)
        if not is_held and not _is_named(file, folder, device.uuid):
            raise Refused(BUSY, "GPU %d: its lock was deleted meanwhile" % device.number)
        if is_held or (record and not is_over(record)):
            raise Refused(BUSY, "GPU %d is used by %s" % (device.number, _words(record, own, is_held)))
    except (OSError, Refused):
        os.close(file)
        raise
    return file


def _claimed(device: Device, own: Record, own_seats: Iterable[int] = ()) -> Optional[int]:
    """The GPU's claim, which no other account has. ``own_seats`` are those that runs of this account have."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            return gpu_claims.held(device.uuid, own_seats)
        except Taken as taken:
            if time.monotonic() >= deadline:
                claims = ClaimTable()
                claims.look()
                how = "shared" if taken.is_seat else "used"
                words = _words(claims.who(taken.name), own, is_held=True)
                raise Refused(BUSY, "GPU %d is %s by %s" % (device.number, how, words)) from None
        time.sleep(_PAUSE_S)


class Holders:
    """Who has which GPU, for those who only look."""

    def __init__(self, root: str, claims: ClaimTable) -> None:
        self._root = root
        self._claims = claims
        self._over: Dict[str, Record] = {}  # by UUID, the record of a run that is known to be over

    def of(self, uuid: str) -> Optional[Record]:
        """None when the GPU is free, or has no lock. Of other accounts: as of the last look at their claims."""
        for path in _folders(self._root) if uuid else ():
            with contextlib.suppress(OSError, Refused):
                folder = _open_folder(path)
                try:
                    holder = self._in(folder, uuid) or self._in_seats(folder, uuid)
                finally:
                    os.close(folder)
                if holder is not None:
                    return holder
        return self._claims.holder(uuid) if uuid else None

    def _in_seats(self, folder: int, uuid: str) -> Optional[Record]:
        """One of those that share it: they are of one group."""
        with contextlib.suppress(FileNotFoundError):
            for number in range(MOST_SHARES):
                holder = self._in(folder, _seat(uuid, number))
                if holder is not None:
                    return holder
        return None

    def _in(self, folder: int, uuid: str) -> Optional[Record]:
        file = _open(folder, uuid, 0)
        try:
            record = _read(file)
            if not record:
                return None
            is_held = not durable.lock_within(file, fcntl.LOCK_SH, 0)
        finally:
            os.close(file)
        if not is_held and (self._over.get(uuid) == record or is_over(record)):
            self._over[uuid] = record
            return None
        shown = {key: record.get(key) for key in ("agent", "node", "job", "attempt", "user", "since")}
        return {**shown, "is_leftover": not is_held}


def is_over(record: Record) -> bool:
    """Of a run whose supervisor is gone: whether all its processes are, too."""
    if record.get("boot_id") != boot_id():
        return True
    left = terminate.marked(os.fsencode(str(record.get("mark")))) or terminate.in_cgroup(record.get("cgroup"))
    return not left


def _seat(uuid: str, number: int) -> str:
    return "%s.seat-%d" % (uuid, number)


def _expect_no_seats(folder: int, device: Device, own: Record) -> None:
    """Of others than its own group. Seats are made in their order, and stay."""
    with contextlib.suppress(FileNotFoundError):
        for number in range(MOST_SHARES):
            seat = _open(folder, _seat(device.uuid, number), 0)
            try:
                record = _read(seat)
                is_stranger = not record or "group" not in own or record.get("group") != own["group"]
                if is_stranger and not _is_free(seat):
                    words = _words(record, own, not durable.lock_within(seat, fcntl.LOCK_SH, 0))
                    raise Refused(BUSY, "GPU %d is shared by %s" % (device.number, words))
            finally:
                os.close(seat)


def _seats_in_use(folder: int, uuid: str) -> List[int]:
    """Those whose lock a process of this account has."""
    found: List[int] = []
    with contextlib.suppress(FileNotFoundError):
        for number in range(MOST_SHARES):
            seat = _open(folder, _seat(uuid, number), 0)
            try:
                if not durable.lock_within(seat, fcntl.LOCK_SH, 0):
                    found.append(number)
            finally:
                os.close(seat)
    return found


def _is_free(seat: int) -> bool:
    """Nobody holds it, and what has held it is over."""
    is_held = not durable.lock_within(seat, fcntl.LOCK_SH, 0)
    record = _read(seat)
    return not is_held and (not record or is_over(record))


def _words(record: Record, own: Record, is_held: bool) -> str:
    if not record:
        return "another run that is starting"
    if not record.get("job") and not record.get("since"):  # a claim that nothing is said about
        return "a process of %s" % ("user %s" % record["user"] if record.get("user") else "another account")
    since = time.strftime("%H:%M UTC", time.gmtime(float(record.get("since") or 0)))
    what = "job %s" % record.get("job") if record.get("job") else "a measurement"
    is_same_agent = record.get("agent") == own.get("agent")
    who = "%s on %s" % (what, record.get("node")) if is_same_agent else "%s of another agent" % what
    left = "" if is_held else "processes that are left of "
    return "%s%s (user %s, since %s)" % (left, who, record.get("user"), since)


# --- files --------------------------------------------------------------------------------------------------------


def _folders(root: str) -> Iterator[str]:
    """Where the locks are: in the home folder, or in UGRO's folder where there is no home that we may write to."""
    name = "gpus@" + machine_id()
    home = os.path.expanduser(_HOME)
    if os.path.isabs(home):
        yield os.path.join(home, name)
    yield os.path.join(os.path.realpath(root), ".ugro", name)


def _make_folder(root: str) -> int:
    *homes, last = _folders(root)
    for path in homes:
        try:
            if os.path.isdir(os.path.expanduser("~")):
                durable.make_folder(path)
                return _open_folder(path)
        except OSError as error:
            if error.errno not in _NO_HOME:
                raise
    durable.make_folder(last)
    return _open_folder(last)


def _open_folder(path: str) -> int:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(folder)
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_MAY_WRITE:
        os.close(folder)
        text = "%s, where the locks of GPUs are, belongs to somebody else, or others can write to it: chmod 700 it"
        raise Refused("unsafe", text % path)
    return folder


def _open(folder: int, uuid: str, flags: int) -> int:
    flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(file_name(uuid), flags, 0o600, dir_fd=folder)


def _is_named(file: int, folder: int, uuid: str) -> bool:
    """Whether others who open it get the same file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(file_name(uuid), dir_fd=folder, follow_symlinks=False))
    return False


def _read(file: int) -> Record:
    """Empty for one who has just come, and has not written yet."""
    try:
        record = foreign.parsed(os.pread(file, _MOST_BYTES, 0))
    except ValueError:  # nothing, or a supervisor was killed while it wrote: it had started nothing
        return {}
    return record if isinstance(record, dict) else {}


def _write(file: int, content: bytes) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, content, 0)
