"""Contents reach the disk after everybody has gone on with them: only then do they survive a power cut.

Until that is done, a file beside a pack says in which boot it was written. Whoever finds one of an earlier boot does
not believe the pack: what is whole of it is kept, and no tree counts as whole before it was looked at again.
"""

from __future__ import annotations

import contextlib
import os
from typing import Callable, List

from ugro.remote import durable
from ugro.remote.clock import boot_id

_FRESH = ".fresh"
_PACK, _ARRIVING = ".pack", ".arriving"


def note(folder: str, pack: str) -> None:
    """Before it has its name."""
    with open(os.path.join(folder, pack + _FRESH), "w", encoding="ascii") as file:
        file.write(boot_id())


def settle(folder: str) -> None:
    """When this returns, every pack that was there before is on the disk."""
    settled = [pack for pack in _fresh(folder) if _is_settled(folder, pack)]
    if settled:
        durable.sync_folder(folder)
    for pack in settled:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, pack + _FRESH))


def settle_soon(folder: str, then: Callable[[], None]) -> None:
    """In a process of its own, which is nobody's child and outlives this one."""
    from ugro.remote.process.execute import close_all_but

    pid = os.fork()
    if pid == 0:
        try:
            if os.fork() == 0:
                close_all_but([])
                settle(folder)
                then()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def distrust(folder: str, roots: str) -> None:
    """What another boot left unsettled is to be looked at again."""
    doubtful = [pack for pack in _fresh(folder) if _boot_of(folder, pack) != boot_id()]
    if not doubtful:
        return
    for root in os.listdir(roots):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(roots, root))
    for pack in doubtful:
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(folder, pack), _arriving(folder, pack))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, pack + _FRESH))


def _is_settled(folder: str, pack: str) -> bool:
    """False for one that is about to get its name: its writer has noted it, and sees to it that it is settled."""
    is_arriving = os.path.exists(_arriving(folder, pack))  # asked first: afterwards it may have its name
    with contextlib.suppress(FileNotFoundError):
        durable.sync_file(os.path.join(folder, pack))
        return True
    return not is_arriving  # it was tidied away


def _arriving(folder: str, pack: str) -> str:
    return os.path.join(folder, pack[: -len(_PACK)] + _ARRIVING)


def _fresh(folder: str) -> List[str]:
    return [name[: -len(_FRESH)] for name in os.listdir(folder) if name.endswith(_FRESH)]


def _boot_of(folder: str, pack: str) -> str:
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, pack + _FRESH), encoding="ascii") as file:
        return file.read()
    return ""
