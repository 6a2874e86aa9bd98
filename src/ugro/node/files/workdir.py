"""The working directory of a run that is a copy of ours: which of its files the job made or changed.

A file counts if it is not in the job's code that was put there, or if its content differs; files of earlier attempts
that were put back count, too. Its time of change (ctime) shows most of those that are as they were: no program can
set it back. Links are not followed. Caches do not count, nor does the folder of the checkpoints, which outlives the
run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from typing import Dict, Iterator, Optional

from ugro.node import trees
from ugro.node.files import contents, listing
from ugro.node.files.listing import MOST_DEPTH, RunFile
from ugro.node.files.packs import LOCK_S, ContentStore, Lacking
from ugro.node.program import Refused
from ugro.node.runs.rundir import RunDir
from ugro.node.runs.runspec import RunSpec
from ugro.node.trees import TreeEntry

# What programs make again by themselves: neither fetched nor kept.
CACHES = frozenset(
    (
        b".git", b"__pycache__", b"node_modules", b".next", b".venv", b".pytest_cache", b".mypy_cache",
        b".ruff_cache", b".ipynb_checkpoints",
    )
)  # fmt: skip
_CACHE_ENDING = b".pyc"
_TICK_NS = 10_000_000  # the kernel's clock for files may be behind by that much
_LARGE_BYTES = 16 << 20  # not read to find out whether only its time of change differs

Entries = Optional[Dict[bytes, TreeEntry]]  # of a folder of the code; None: unknown


class WorkDir:
    def __init__(self, run: RunDir, spec: Optional[RunSpec]) -> None:
        self._run = run
        self.path = os.fsencode(run.file("work"))
        self.is_ours = spec is None or spec.cwd is None
        self.is_collected = self.is_ours and (spec is None or spec.collects_workdir)
        self._code = spec.base if spec is not None and self.is_ours else None
        self._apart = spec.checkpoint_dir if spec is not None else None
        self._since_ns = 0

    def may_have_any(self) -> bool:
        """Without reading the code."""
        return self.is_collected and self._run.has_work()

    def has_any(self) -> bool:
        """True as well if that cannot be found out at once."""
        if not self.may_have_any():
            return False
        if self._code is None and self._apart is None:
            return True
        try:
            return next(self.files(wait_s=0), None) is not None
        except (OSError, Refused):  # a supervisor asks, which has other runs, too
            return True

    def is_apart(self, name: bytes) -> bool:
        """Whether it is below the folder of the checkpoints."""
        return self._apart is not None and name.startswith(self._apart + b"/")

    def files(self, wait_s: float = LOCK_S) -> Iterator[RunFile]:
        """Sorted by folder. Raises ``Refused`` while the code on this node is being cleaned up."""
        if self.is_collected:
            for file in self.below(b"", wait_s):
                yield file._replace(is_work=True)

    def below(self, prefix: bytes, wait_s: float = LOCK_S) -> Iterator[RunFile]:
        """Those below a folder of it, whose name ends with a slash, or below all of it."""
        spec_ns, began_ns = _changed_ns(self._run.file("spec.json")), self._run.began_ns()
        self._since_ns = spec_ns if began_ns is None else min(spec_ns, began_ns)
        with contents.reading(self._run, self._code, wait_s) as store:
            yield from self._walk(store, prefix, self._entries(store, prefix), prefix.count(b"/"))

    def code_in(self, prefix: bytes) -> Dict[bytes, TreeEntry]:
        """The entries of a folder as they were put there; none if that is no longer known."""
        with contents.reading(self._run, self._code) as store:
            return self._entries(store, prefix) or {}

    # --- comparing with the code --------------------------------------------------------------------------------

    def _entries(self, store: Optional[ContentStore], prefix: bytes) -> Entries:
        if self._code is None:
            return {}
        entries = _read(store, self._code)
        for name in prefix.split(b"/")[:-1]:
            entries = _inside(store, entries, name)
        return entries

    def _walk(self, store: Optional[ContentStore], prefix: bytes, entries: Entries, depth: int) -> Iterator[RunFile]:
        for entry in _sorted(os.path.join(self.path, prefix)):
            name = prefix + entry.name
            if entry.name in CACHES or entry.name.endswith(_CACHE_ENDING):
                continue
            with contextlib.suppress(OSError):  # programs delete their files at any time
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    if depth < MOST_DEPTH and name != self._apart:
                        yield from self._walk(store, name + b"/", _inside(store, entries, entry.name), depth + 1)
                elif self._is_changed(entry.path, status, entries, entry.name):
                    yield listing.described(name, status)

    def _is_changed(self, path: bytes, status: os.stat_result, entries: Entries, name: bytes) -> bool:
        is_late = status.st_ctime_ns >= self._since_ns
        if entries is None:
            return is_late
        entry = entries.get(name)
        if entry is None:
            return True
        if stat.S_ISLNK(status.st_mode):
            return entry.kind != trees.LINK or os.readlink(path) != entry.body
        if not stat.S_ISREG(status.st_mode) or entry.kind != trees.FILE or status.st_size != entry.size:
            return True
        if not is_late or status.st_size < _LARGE_BYTES or status.st_ctime_ns <= self._since_ns + _TICK_NS:
            return is_late and not _is_same(path, entry)
        return True


def workdir_of(run: RunDir) -> WorkDir:
    fields = (run.envelope() or {}).get("spec")
    return WorkDir(run, RunSpec(fields) if fields else None)


def _inside(store: Optional[ContentStore], entries: Entries, name: bytes) -> Entries:
    if entries is None:
        return None
    entry = entries.get(name)
    return _read(store, entry.body) if entry is not None and entry.kind == trees.FOLDER else {}


def _read(store: Optional[ContentStore], tree: bytes) -> Entries:
    if store is None:
        return None
    try:
        return {entry.name: entry for entry in store.entries(tree)}
    except Lacking:
        return None


def _sorted(folder: bytes) -> Iterator[os.DirEntry[bytes]]:
    """What cannot be read is skipped."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        yield from sorted(entries, key=lambda entry: entry.name)


def _is_same(path: bytes, entry: TreeEntry) -> bool:
    with open(path, "rb") as file:
        return all(trees.identify(trees.CONTENT, file.read(trees.CHUNK)) == chunk for chunk in entry.chunks)


def _changed_ns(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime_ns
    return 0


# --- sdk --------------------------------------------------------------------------------------------------------------
# UGRO's own package for the ranks of a run: a file beside its working directory that their Python imports from.
#
# It comes through the content store, as code does, and goes with the run. A rank finds it by PYTHONPATH: after the
# places that the user names there, and before whatever is installed on the node.


FILE = "ugro.zip"
_FOLDER = "sdk"
_VARIABLE = b"PYTHONPATH"


def put(run: RunDir, tree: bytes, path: str, wait_s: float = LOCK_S) -> None:
    """``path``: the run's folder, or the one that will become it."""
    drop(path)
    contents.check_out(run, tree, _folder(path), wait_s)


def drop(path: str) -> None:
    if os.path.isdir(_folder(path)):
        shutil.rmtree(_folder(path), ignore_errors=True)


def findable(env: Dict[bytes, bytes], run: RunDir) -> Dict[bytes, bytes]:
    """``env`` with which Python finds the run's package."""
    place = os.fsencode("%s/%s" % (_folder(run.path), FILE))
    if b":" in place:  # it would be two places, and neither would be this one
        return env
    own = env.get(_VARIABLE)
    return {**env, _VARIABLE: own + b":" + place if own else place}


def _folder(path: str) -> str:
    return "%s/%s" % (path, _FOLDER)
