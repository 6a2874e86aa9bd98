"""UGRO's own package as it is sent to nodes: one zip that Python imports from, a tree in the content store.

All of it that is Python: a script that imports more than ``ugro.train`` gets one version of everything, not a mix with
what a node has installed. The same files are the same bytes, so a node gets it once.
"""

from __future__ import annotations

import functools
import io
import zipfile
from pathlib import Path

import ugro
from ugro.agent.code.snapshot_store import SnapshotStore
from ugro.core.errors import UgroError
from ugro.remote.runs.sdk import FILE

_MIDNIGHT = (1980, 1, 1, 0, 0, 0)  # the first moment that a zip knows
_MODE = 0o600


class Sdk:
    def __init__(self, snapshots: SnapshotStore) -> None:
        self._snapshots = snapshots
        self.tree: str | None = None  # its hash, once it is known

    def stored(self) -> str:
        """The hash of its tree, which is in the store when this returns. Blocks."""
        if self.tree is None or not self._snapshots.has(self.tree):
            self.tree = self._store()
        return self.tree

    def _store(self) -> str:
        try:
            content = package()
        except OSError as error:
            text = f"UGRO's own files cannot be read: {error}"
            raise UgroError(text, hint="was UGRO removed or upgraded? Then: ugro agent restart") from error
        return self._snapshots.keep_file(FILE, content, _MODE)


@functools.cache
def package() -> bytes:
    """Read once: it stays what this agent is, whatever is installed while it runs."""
    root = Path(ugro.__file__).parent
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(root.rglob("*.py")):
            about = zipfile.ZipInfo(path.relative_to(root.parent).as_posix(), _MIDNIGHT)
            about.compress_type = zipfile.ZIP_DEFLATED
            about.create_system = 3  # Unix, wherever it is made
            archive.writestr(about, path.read_bytes())
    return found.getvalue()
