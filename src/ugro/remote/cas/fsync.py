"""Packs are used before they are on the disk, and synced afterwards: only then do they survive a power cut.

Until then, a file beside a pack names the boot in which it was written. If that was an earlier boot, the pack is
checked again: its valid part is kept, and no tree counts as complete before it was checked, too.
"""

from __future__ import annotations

import contextlib
import os
from typing import Callable, List

from ugro.remote import durable
from ugro.remote.clock import boot_id

_UNSYNCED = ".fresh"
_PACK, _ARRIVING = ".pack", ".arriving"


def mark_unsynced(folder: str, pack: str) -> None:
    """Before the pack gets its name."""
    with open(os.path.join(folder, pack + _UNSYNCED), "w", encoding="ascii") as file:
        file.write(boot_id())


def sync_packs(folder: str) -> None:
    """When this returns, every pack that existed before is on the disk."""
    synced = [pack for pack in _unsynced(folder) if _is_synced(folder, pack)]
    if synced:
        durable.sync_folder(folder)
    for pack in synced:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, pack + _UNSYNCED))


def sync_in_background(folder: str, then: Callable[[], None]) -> None:
    """In a detached process, which outlives this one."""
    from ugro.remote.process.execute import close_all_but

    pid = os.fork()
    if pid == 0:
        try:
            if os.fork() == 0:
                close_all_but([])
                sync_packs(folder)
                then()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def recheck(folder: str, roots: str) -> None:
    """Marks packs that an earlier boot left unsynced as incomplete, so that they are checked again."""
    unsynced = [pack for pack in _unsynced(folder) if _boot_of(folder, pack) != boot_id()]
    if not unsynced:
        return
    for root in os.listdir(roots):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(roots, root))
    for pack in unsynced:
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(folder, pack), _arriving(folder, pack))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, pack + _UNSYNCED))


def _is_synced(folder: str, pack: str) -> bool:
    """False for a pack that is about to get its name: its writer marked it, and will have it synced."""
    is_arriving = os.path.exists(_arriving(folder, pack))  # checked first: it may get its name meanwhile
    with contextlib.suppress(FileNotFoundError):
        durable.sync_file(os.path.join(folder, pack))
        return True
    return not is_arriving  # it was deleted


def _arriving(folder: str, pack: str) -> str:
    return os.path.join(folder, pack[: -len(_PACK)] + _ARRIVING)


def _unsynced(folder: str) -> List[str]:
    return [name[: -len(_UNSYNCED)] for name in os.listdir(folder) if name.endswith(_UNSYNCED)]


def _boot_of(folder: str, pack: str) -> str:
    path = os.path.join(folder, pack + _UNSYNCED)
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return file.read()
    return ""
