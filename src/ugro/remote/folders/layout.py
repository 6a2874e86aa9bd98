"""Where the contents of a tree go: its folders, links and files, and every place of each chunk."""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Tuple

from ugro.remote import trees

_MOST_ENTRIES = 2_000_000


class FileAt(NamedTuple):
    path: bytes
    mode: int
    size: int
    body: bytes  # the hashes of its chunks


class Layout:
    """``entries`` reads a tree; those that it does not have are in ``lacking``, and what is below them is left out."""

    def __init__(self, root: bytes, entries: Callable[[bytes], List[trees.TreeEntry]]) -> None:
        self.trees: List[bytes] = []
        self.lacking: List[bytes] = []
        self.folders: List[Tuple[bytes, int]] = []  # those above others first
        self.links: List[Tuple[bytes, bytes]] = []
        self.files: List[FileAt] = []
        self._entries = entries
        self._walk(root)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def places(self) -> Dict[bytes, List[Tuple[int, int]]]:
        """By chunk: the number of a file, and the offset in it."""
        found: Dict[bytes, List[Tuple[int, int]]] = {}
        for number, file in enumerate(self.files):
            for index, at in enumerate(range(0, len(file.body), trees.ID_BYTES)):
                key = file.body[at : at + trees.ID_BYTES]
                found.setdefault(key, []).append((number, index * trees.CHUNK))
        return found

    def chunk_bytes(self, place: Tuple[int, int]) -> int:
        number, offset = place
        return min(trees.CHUNK, self.files[number].size - offset)

    def _walk(self, root: bytes) -> None:
        todo = [(b"", root, 0)]
        count = 0
        while todo:
            path, tree, depth = todo.pop()
            self.trees.append(tree)
            try:
                entries = self._entries(tree)
            except KeyError:
                self.lacking.append(tree)
                continue
            count += len(entries)
            if count > _MOST_ENTRIES or depth > trees.MOST_DEPTH:
                raise ValueError("a folder with more than %d entries, or too deep" % _MOST_ENTRIES)
            for entry in entries:
                whole = path + entry.name
                if entry.kind == trees.FOLDER:
                    self.folders.append((whole, entry.mode))
                    todo.append((whole + b"/", entry.body, depth + 1))
                elif entry.kind == trees.LINK:
                    self.links.append((whole, entry.body))
                else:
                    self.files.append(FileAt(whole, entry.mode, entry.size, entry.body))
