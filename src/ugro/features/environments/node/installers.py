"""The commands of uv that make an environment, and the variables in which it finds what it needs.

Nothing outside UGRO's folder is written, and no configuration of the user is read: the home folder that uv sees is
an empty one. Addresses of indexes may hold passwords: they are passed as variables, which others cannot read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import zipfile
from typing import Dict, Iterable, Iterator, List

from ugro.features.environments.node.failures import NETWORK, Failed, index_variables
from ugro.features.environments.node.place import Blob, Place, Recipe, delete
from ugro.node import machine as disk
from ugro.node import trees
from ugro.node.files.contents import store_in
from ugro.node.files.packs import ContentStore, Lacking
from ugro.node.process.execute import MARK

# --- blobs ------------------------------------------------------------------------------------------------------------
# Installers and wheels out of the content store of this node, where the agent has put them.
#
# An installer is executed only if it has the hash that the agent named, each time. Wheels are checked by the installer:
# every requirement has the hash of its file.


_PIECE = 1 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def installer(place: Place, recipe: Recipe) -> str:
    """The path of the program, verified; written there first if it is missing or damaged."""
    blob = recipe.installer
    path = os.path.join(place.tools, "%s-%s" % (blob.name, blob.sha256[:32]))
    if not _is_valid(path, blob.sha256):
        _write_tool(place, recipe, blob, path)
    with contextlib.suppress(OSError):
        os.utime(path)  # it was used: others are deleted first
    return path


def _is_valid(path: str, sha256: str) -> bool:
    """Ours alone, and with that hash."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
        return _sha256(iter(lambda: file.read(_PIECE), b"")) == sha256


def _sha256(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _write_tool(place: Place, recipe: Recipe, blob: Blob, path: str) -> None:
    fresh = "%s.%s.new" % (path, os.urandom(6).hex())
    expect_room(place, blob.size, "the installer")
    try:
        with _using(place, recipe) as entries:
            _write(entries.store, entries.found(blob), fresh, 0o700)
        if not _is_valid(fresh, blob.sha256):
            raise Failed("hash", "the installer %s does not have the expected hash; it was not started" % blob.name)
        os.rename(fresh, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)


def unpack_wheels(place: Place, recipe: Recipe, folder: str) -> None:
    """Into a new folder. Refused if what is in them will not fit, too."""
    expect_room(place, sum(wheel.size for wheel in recipe.wheels), "the wheels")
    os.mkdir(folder, 0o700)
    with _using(place, recipe) as entries:
        for wheel in recipe.wheels:
            _write(entries.store, entries.found(wheel), os.path.join(folder, wheel.name), 0o600)
    expect_room(place, sum(_unpacked_bytes(os.path.join(folder, wheel.name)) for wheel in recipe.wheels), "this")


def expect_room(place: Place, size: int, what: str) -> None:
    text = disk.shortage(place.folder, size, what)
    asides = place.set_asides() if text is not None else []
    if asides:  # their space counts as free, and soon is
        for path in asides:
            delete(path)
        text = disk.shortage(place.folder, size, what)
    if text is not None:
        raise Failed(disk.NO_SPACE, text)


def _unpacked_bytes(wheel: str) -> int:
    try:
        with zipfile.ZipFile(wheel) as file:
            return sum(one.file_size for one in file.infolist())
    except (zipfile.BadZipFile, OSError):  # the installer says what is wrong with it
        return 0


class _Entries:
    def __init__(self, store: ContentStore, entries: List[trees.TreeEntry]) -> None:
        self.store = store
        self._entries: Dict[bytes, trees.TreeEntry] = {one.name: one for one in entries if one.kind == trees.FILE}

    def found(self, blob: Blob) -> trees.TreeEntry:
        entry = self._entries.get(blob.name.encode())
        if entry is None or entry.size != blob.size:
            raise Failed("no-contents", "%s is not among what was sent" % blob.name)
        return entry


@contextlib.contextmanager
def _using(place: Place, recipe: Recipe) -> Iterator[_Entries]:
    """What the recipe's tree has, while nothing is deleted from the store."""
    assert recipe.tree is not None
    store = store_in(place.root)
    try:
        with store.using():
            if not store.has_root(recipe.tree):
                raise Lacking([recipe.tree])
            yield _Entries(store, store.entries(recipe.tree))
    except Lacking as error:
        raise Failed("no-contents", "the installer and the wheels are not on this node") from error


def _write(store: ContentStore, entry: trees.TreeEntry, path: str, mode: int) -> None:
    fd = os.open(path, _NEW, mode)
    with os.fdopen(fd, "wb") as file:
        for chunk in entry.chunks:
            file.write(store.read(chunk))


# --- installers -------------------------------------------------------------------------------------------------------


class Site:
    """Where one environment is built: a folder that is deleted afterwards, whatever happens."""

    def __init__(self, place: Place, folder: str) -> None:
        self.place = place
        self.folder = folder
        self.env = os.path.join(folder, "env")
        self.wheels = os.path.join(folder, "wheels")
        self.home = os.path.join(folder, "home")
        self.tmp = os.path.join(folder, "tmp")
        self.requirements = os.path.join(folder, "requirements.txt")

    @property
    def python(self) -> str:
        return os.path.join(self.env, "bin", "python")

    def variables(self, marker: str) -> Dict[str, str]:
        """Returns those that uv needs anywhere. By ``marker`` the processes are found that it leaves behind."""
        passed = {name: os.environ[name] for name in NETWORK if name in os.environ}
        folders = {"HOME": self.home, "TMPDIR": self.tmp, "XDG_CONFIG_HOME": self.home, "XDG_DATA_HOME": self.home}
        texts = {"LC_ALL": "C.UTF-8", "NO_COLOR": "1", "COLUMNS": "200", "PYTHONNOUSERSITE": "1", MARK: marker}
        return {"PATH": os.defpath, **passed, **folders, **texts}


class Uv:
    def __init__(self, path: str, site: Site, recipe: Recipe) -> None:
        self._path = path
        self._site = site
        self._recipe = recipe

    @property
    def cache(self) -> str:
        """Of wheels that were sent, nothing is kept there: the content store has them."""
        return os.path.join(self._site.folder if self._recipe.is_offline else self._site.place.cache, "uv")

    def variables(self) -> Dict[str, str]:
        place, recipe = self._site.place, self._recipe
        found = {
            "UV_CACHE_DIR": self.cache,
            "UV_PYTHON_INSTALL_DIR": place.pythons,
            "UV_PYTHON_BIN_DIR": os.path.join(self._site.home, "bin"),
            "UV_PYTHON_INSTALL_BIN": "0",
            "UV_TOOL_DIR": os.path.join(self._site.home, "tools"),
            "UV_CREDENTIALS_DIR": os.path.join(self._site.home, "credentials"),
            "UV_NO_CONFIG": "1",
            "UV_NO_PROGRESS": "1",
            "UV_LINK_MODE": "hardlink",
        }
        if recipe.extra_index_urls and not recipe.is_offline:
            # Which index a file comes from does not matter: it has the hash that was resolved, or it is refused.
            found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
        if not recipe.is_offline:
            found.update(index_variables("uv", recipe.index_url, recipe.extra_index_urls, recipe.find_links))
        return found

    def version(self) -> List[str]:
        return [self._path, "--version"]

    def get_python(self, minor: str) -> List[str]:
        return [self._path, "python", "install", "--no-config", minor]

    def create(self, python: str) -> List[str]:
        prompt = ["--prompt", self._recipe.name[:12]]
        return [self._path, "venv", "--no-config", "--no-project", "--python", python, *prompt, self._site.env]

    def install(self) -> List[str]:
        offline = ["--offline", "--no-index", "--find-links", self._site.wheels] if self._recipe.is_offline else []
        how = ["--no-config", "--require-hashes", "--no-deps", *offline]
        return [self._path, "pip", "install", "--python", self._site.python, *how, "-r", self._site.requirements]
