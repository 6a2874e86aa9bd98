"""UGRO's folder on this node as a link finds it: safe, and with the node program in it for the next link."""

from __future__ import annotations

import os
import time

from ugro.remote import trust

_LEFTOVER_S = 600.0
_SUFFIX = ".program"


def settle(root: str, name: str, received: bytes, nonce: str) -> None:
    """``received``: the node program if it was sent, else empty. ``Unsafe`` where others could change the folder."""
    folder = trust.prepare(root)
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
