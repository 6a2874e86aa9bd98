"""Imports the node program from memory: what was verified is what runs, whatever happens to files later.

Nothing that lies on the node's disk is imported, neither a source nor a compiled file. The agent sends this file along
with the first stage, which executes it.
"""

from __future__ import annotations

import json
import os
import sys
import zlib

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Dict, Optional, Sequence, Tuple

# The program of a fresh Python that gets the modules by a descriptor, its first argument. The others are a module,
# whose ``main`` is called, and the words for that.
FRESH = (
    "import importlib, os, sys\n"
    "with os.fdopen(int(sys.argv[1]), 'rb') as file: loader, archive = file.read(int(file.readline())), file.read()\n"
    "names = {'__name__': 'loader'}\n"
    "exec(loader, names)\n"
    "names['install'](archive)\n"
    "importlib.import_module(sys.argv[2]).main(sys.argv[3:])\n"
)
_ITSELF = "ugro/node/loader.py"


def pack(sources: Dict[str, bytes]) -> bytes:
    """One line of JSON, the path and size of each file; then the files, each compressed."""
    parts = [(name, zlib.compress(text, 9)) for name, text in sources.items()]
    head = json.dumps([(name, len(part)) for name, part in parts]).encode()
    return b"\n".join((head, b"".join(part for _, part in parts)))


class Modules:
    """A finder and loader for ``sys.meta_path``; a source is known by its path, as ``ugro/node/main.py``."""

    def __init__(self, archive: bytes) -> None:
        self._archive = archive
        self._places: Dict[str, Tuple[int, int]] = {}
        head = archive.index(b"\n")
        begin = head + 1
        for name, size in json.loads(archive[:head]):
            self._places[name] = (begin, begin + size)
            begin += size

    def find_spec(self, name: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None) -> Any:
        place = name.replace(".", "/")
        for file, is_package in ((place + ".py", False), (place + "/__init__.py", True)):
            if file in self._places:
                # A ModuleSpec, without loading the module that has it.
                return type(sys.__spec__)(name, self, origin=file, is_package=is_package)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> None:
        return None  # the usual one

    def exec_module(self, module: ModuleType) -> None:
        file = str(module.__spec__.origin)  # type: ignore[union-attr]
        exec(compile(self._source(file), file, "exec", dont_inherit=True), module.__dict__)

    def get_source(self, name: str) -> str:
        """For the lines in a traceback."""
        return self._source(self.find_spec(name).origin).decode()

    def _source(self, file: str) -> bytes:
        begin, end = self._places[file]
        return zlib.decompress(self._archive[begin:end])

    def descriptor(self, folder: str) -> int:
        """For ``FRESH``: a file without a name that holds all modules. ``folder`` is one that only we can write."""
        path = "%s/modules.%d.%s" % (folder, os.getpid(), os.urandom(4).hex())
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        os.unlink(path)
        own = self._source(_ITSELF)
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(b"%d\n%s%s" % (len(own), own, self._archive))
        os.lseek(fd, 0, os.SEEK_SET)
        os.set_inheritable(fd, True)
        return fd


def install(archive: bytes) -> None:
    # First, so that no file on the import path can stand in for a module of ours.
    sys.meta_path.insert(0, Modules(archive))


def installed() -> Modules:
    """By the name of its class: it was executed by the first stage, and this file is a module since then."""
    found: Any = next(finder for finder in sys.meta_path if type(finder).__name__ == Modules.__name__)
    return found  # type: ignore[no-any-return]
