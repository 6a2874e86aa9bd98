"""Code on its way: random trees, a home for them, and nodes of this machine whose links are cut at a chosen byte."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from hypothesis import strategies as st

from tests.rig.waiting import end_all_with_variable
from ugro.kernel.files.code.scanner import Choices
from ugro.kernel.files.code.snapshot_store import SnapshotRequest, SnapshotStore, StoredSnapshot
from ugro.kernel.files.code.transfer import CodeTransfers
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.node import Dialling, Identity, Node
from ugro.kernel.links.transport import SshOptions
from ugro.kernel.store.database import Store
from ugro.node import trees
from ugro.node.files.checkout import check_out
from ugro.node.files.contents import store_in

MARK = "TEST_CODE_NODE"
AGENT = "agent-1"
CHUNK = trees.CHUNK

# --- random trees -----------------------------------------------------------------------------------------------

_ODD = [b"-rf", b"with space", b"new\nline", b"\xff\xfe", b"caf\xc3\xa9", b"a" * 255, b"#x", b"*", b"'\"", b"~", b"-"]
NAMES = st.sampled_from(_ODD) | st.binary(min_size=1, max_size=12).filter(
    lambda name: name not in (b".", b"..", b".ugro", b".gitignore", b".ugroignore") and not set(name) & {0, ord("/")}
)
SIZES = st.sampled_from([0, 1, 2, 4095, 4096, 4097, 65535, 65536, 70_000]) | st.integers(0, 300)
LARGE = st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 7])
FILES = st.tuples(st.just("file"), SIZES | LARGE, st.integers(0, 3), st.sampled_from([0o644, 0o755, 0o600, 0o444]))
LINKS = st.tuples(st.just("link"), st.sampled_from([b"elsewhere", b"../up", b"-rf", b"/etc/hostname", b"."]))
TREES = st.recursive(
    st.dictionaries(NAMES, FILES | LINKS, max_size=5),
    lambda inner: st.dictionaries(NAMES, inner | FILES, max_size=4),
    max_leaves=12,
)


def make(tree: object, folder: bytes) -> None:
    """The folder becomes that tree, whatever it was."""
    shutil.rmtree(folder, ignore_errors=True)
    os.mkdir(folder)
    assert isinstance(tree, dict)
    for name, what in tree.items():
        path = os.path.join(folder, name)
        if isinstance(what, dict):
            make(what, path)
        elif what[0] == "link":
            os.symlink(what[1], path)
        else:
            _, size, seed, mode = what
            with open(path, "wb") as file:
                file.write((bytes([seed]) + b"%d" % seed * 7) * (size // 8 + 1))
                file.truncate(size)
            os.chmod(path, mode)


def seen(folder: bytes) -> dict[bytes, object]:
    """All that there is below a folder; equal trees are seen equal."""
    found: dict[bytes, object] = {}
    for place, folders, files in os.walk(folder):
        for name in folders + files:
            path = os.path.join(place, name)
            status = os.lstat(path)
            key = os.path.relpath(path, folder)
            if stat.S_ISLNK(status.st_mode):
                found[key] = ("link", os.readlink(path))
            elif stat.S_ISDIR(status.st_mode):
                found[key] = ("folder", status.st_mode & 0o777)
            else:
                with open(path, "rb") as file:
                    found[key] = ("file", status.st_mode & 0o777, file.read())
    return found


# --- a home and nodes -------------------------------------------------------------------------------------------


class CodeRig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.source = self.folder / "source"
        self.source.mkdir(exist_ok=True)
        self.home = SnapshotStore(self.folder / "contents")
        self._outs = 0

    def take(self, **choices: object) -> StoredSnapshot:
        return self.home.take(SnapshotRequest(str(self.source), Choices(**choices), 1 << 40))  # type: ignore[arg-type]

    def root(self, node: str) -> Path:
        return self.folder / node

    def limits(self, node: str) -> Path:
        return self.folder / f"{node}.limits"

    def there(self, node: str, tree: str) -> dict[bytes, object]:
        """A tree as a job would find it on that node."""
        self._outs += 1
        folder = self.folder / f"out{self._outs}"
        store = store_in(str(self.root(node)))
        with store.using():
            check_out(store, trees.parse_id(tree), str(folder))
        found = seen(os.fsencode(folder))
        shutil.rmtree(folder)
        return found

    @asynccontextmanager
    async def agent(self, *names: str) -> AsyncIterator[CodeTransfers]:
        store = Store(self.folder / "state.db")
        await store.open()
        nodes = {name: self._node(name) for name in names}
        sending = CodeTransfers(self.home, store.code, nodes.__getitem__, Identity(AGENT, 1))
        try:
            yield sending
        finally:
            await sending.close()
            await asyncio.gather(*(node.close() for node in nodes.values()))
            await store.close()
            end_all_with_variable(MARK, [str(self.root(name)) for name in names])

    def _node(self, name: str) -> Node:
        root = self.root(name)
        root.mkdir(exist_ok=True)
        cut = (sys.executable, str(Path(__file__).with_name("relay.py")), str(self.limits(name)))
        spec = NodeSpec(name, remote_root=str(root), python=sys.executable, transport=cut)
        return Node(spec, Dialling(SshOptions(10.0), 100, asyncio.Semaphore(10), lambda: {MARK: str(root)}))

