"""Counts the files of a transfer: a large file is sent in several chunks, and files of equal content share theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from ugro.remote import trees
from ugro.remote.cas.packs import ContentStore


class FileCount:
    """The files of a tree of which a node lacks something."""

    def __init__(self, store: ContentStore, root: bytes, lacking: Collection[bytes]) -> None:
        self._waiting: list[int] = []  # for how many chunks, by file
        self._of: dict[bytes, list[int]] = defaultdict(list)  # files, by chunk
        wanted = frozenset(lacking)
        with store.using():
            if root in wanted:
                self._add(store, root, wanted)
            if any(key not in self._of and store.locate(key).kind == trees.CONTENT for key in wanted):
                # An interrupted transfer left trees without their contents: look into all.
                self._waiting, self._of = [], defaultdict(list)
                self._add(store, root, wanted, is_whole=True)

    @property
    def files(self) -> int:
        return len(self._waiting)

    def completed_by(self, keys: Iterable[bytes]) -> int:
        """How many files are complete once these chunks are sent, too."""
        completed = 0
        for key in keys:
            for file in self._of.pop(key, ()):
                self._waiting[file] -= 1
                completed += not self._waiting[file]
        return completed

    def _add(self, store: ContentStore, root: bytes, lacking: frozenset[bytes], *, is_whole: bool = False) -> None:
        todo = [root]
        while todo:
            for entry in store.entries(todo.pop()):
                if entry.kind == trees.FOLDER:
                    # One that the node has is complete there, as a rule.
                    todo += [entry.body] if is_whole or entry.body in lacking else []
                elif entry.kind == trees.FILE and (chunks := lacking.intersection(entry.chunks)):
                    for key in chunks:
                        self._of[key].append(len(self._waiting))
                    self._waiting.append(len(chunks))
