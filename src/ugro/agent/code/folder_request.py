"""How a folder that a job names is read; also on the machine of a client, which reads its own."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ugro.agent.code.scanner import Choices, Links
from ugro.agent.code.snapshot_store import Reading, SnapshotRequest
from ugro.core.errors import UsageError

_LINK_HINT = "put the file itself there instead of the link, or name the folder that the link leads to"


def folder_request(name: str, path: Path, limit_bytes: int, reading: Reading) -> SnapshotRequest:
    """Raises UsageError if it is neither a folder nor a file. Blocks."""
    is_file = stat.S_ISREG(_kind_of(name, path))
    choices = Choices(
        follows_links=is_file or _is_hub_snapshot(path),
        links_out=Links.ERROR,
        link_hint=_LINK_HINT,
        reads_rules=False,
        only=os.fsencode(path.name) if is_file else None,
    )
    folder = path.parent if is_file else path
    return SnapshotRequest(str(folder), choices, limit_bytes, is_code=False, reading=reading)


def _kind_of(name: str, path: Path) -> int:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UsageError(f"folder {name}: {path}: {why}", hint="name a folder or a file on this machine") from error
    kind = stat.S_IFMT(mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        raise UsageError(f"folder {name}: {path} is neither a folder nor a file", hint="name a folder or a file")
    return kind


def _is_hub_snapshot(path: Path) -> bool:
    """In a cache of Hugging Face: its files are links to those that all revisions share."""
    return path.parent.name == "snapshots" and (path.parent.parent / "blobs").is_dir()
