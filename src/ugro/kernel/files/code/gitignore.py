"""Which files are not sent: patterns as in ``.gitignore``, of the configuration, ``.gitignore`` and ``.ugroignore``.

The last matching pattern decides. The patterns of a file apply to its folder and everything below it, before those of
folders above. A ``.ugroignore`` overrides the configuration, which overrides every ``.gitignore``: ``!*/`` is common
there and is not meant to include ``.git``. Everything in an ignored folder is ignored.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from ugro.node.globs import Glob, PathGlob

_OWN = b".ugroignore"
FILES = (b".gitignore", _OWN)
_GIT_NAME, _OWN_NAME, _CONFIGURED = ".gitignore", ".ugroignore", "sync.exclude_patterns"
_MOST_BYTES = 1 << 20
_MOST_WITH_STARS = 2000  # each costs every file of the folder some time


@dataclass(frozen=True, slots=True)
class _Rule:
    is_for_folders: bool
    is_kept: bool  # the pattern began with a !
    name: Glob[bytes] | None = None  # of the last part of a path, wherever it is
    path: PathGlob[bytes] | None = None  # or of a whole path, from the folder of its file

    def fits(self, name: bytes, parts: list[bytes]) -> bool:
        return self.name.fits(name) if self.name is not None else self.path is not None and self.path.fits(parts)


class _RuleFile:
    """The rules of one file, with a fast check for the many names that match none of them."""

    def __init__(self, depth: int, rules: tuple[_Rule, ...]) -> None:
        self.depth = depth  # bytes of the path of its folder
        self.rules = rules  # the last one first
        names = [rule.name for rule in rules if rule.name is not None]
        paths = [rule.path for rule in rules if rule.path is not None]
        self._names = frozenset(text for one in names for text in one.whole)
        self._beginnings = tuple(text for one in names for text in one.beginnings)
        self._endings = tuple(text for one in names for text in one.endings)
        self._other_names = [one for one in names if not one.is_simple]
        self._paths = frozenset(one.whole for one in paths if one.whole is not None)
        self._other_paths = [one for one in paths if one.whole is None]
        heads = [one.head for one in self._other_paths if one.head is not None]
        self._heads = tuple(head + b"/" for head in heads) if len(heads) == len(self._other_paths) else (b"",)

    @property
    def has_too_many(self) -> bool:
        return len(self._other_names) + len(self._other_paths) > _MOST_WITH_STARS

    def deciding(self, path: bytes, name: bytes, *, is_folder: bool) -> _Rule | None:
        """Returns the last rule that matches, if one does."""
        if not self.may_fit(path, name):
            return None
        parts = path[self.depth :].split(b"/")
        fitting = (rule for rule in self.rules if is_folder or not rule.is_for_folders)
        return next((rule for rule in fitting if rule.fits(name, parts)), None)

    def may_fit(self, path: bytes, name: bytes) -> bool:
        if name in self._names or name.endswith(self._endings) or name.startswith(self._beginnings):
            return True
        if self._paths and path[self.depth :] in self._paths:
            return True
        if self._other_names and any(one.fits(name) for one in self._other_names):
            return True
        if not self._other_paths or not path.startswith(self._heads, self.depth):
            return False
        parts = path[self.depth :].split(b"/")
        return any(one.fits(parts) for one in self._other_paths)


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """The rules that apply in one folder."""

    # In each, those that take precedence come first.
    own: tuple[_RuleFile, ...] = ()
    configured: tuple[_RuleFile, ...] = ()
    gits: tuple[_RuleFile, ...] = ()

    @classmethod
    def of(cls, patterns: Iterable[str], folder: bytes) -> IgnoreRules:
        return cls(configured=(_rule_file(os.fsencode("\n".join(patterns)), len(folder)),))

    def with_rules(self, name: bytes, text: bytes, folder: bytes) -> IgnoreRules:
        """``folder``: where the rules are; empty, or with a slash at its end. All paths are relative to one root.

        Raises OSError with the name of a file that has too many patterns.
        """
        if not text:
            return self
        rules = _rule_file(text, len(folder))
        if rules.has_too_many:
            raise OSError(errno.EFBIG, f"more than {_MOST_WITH_STARS:,} of its patterns have a *, ? or [", name)
        return replace(self, own=(rules, *self.own)) if name == _OWN else replace(self, gits=(rules, *self.gits))

    def ignores(self, folder: bytes, name: bytes, *, is_folder: bool) -> bool:
        """No folder above it is ignored."""
        return self.named_by(folder, name, is_folder=is_folder) is not None

    def named_by(self, folder: bytes, name: bytes, *, is_folder: bool) -> str | None:
        """Whose rule ignores it: ``.gitignore``, for example. None: it is not ignored."""
        path = folder + name
        for source, files in ((_OWN_NAME, self.own), (_CONFIGURED, self.configured), (_GIT_NAME, self.gits)):
            for file in files:
                if (rule := file.deciding(path, name, is_folder=is_folder)) is not None:
                    return None if rule.is_kept else source
        return None


def read_rules(name: bytes, folder: int) -> bytes:
    """Of a file in an open folder; empty if there is none, or a folder or a link. Raises OSError with its name."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            text = os.read(fd, _MOST_BYTES + 1)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
            return b""
        raise OSError(error.errno, error.strerror, name) from error
    if len(text) > _MOST_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), name)
    return text


def above(folder: str) -> list[tuple[bytes, bytes, str]]:
    """The rules of the repository that a folder is in, from its root down to above the folder, and where each is.

    Raises OSError with the path of a file that cannot be read.
    """
    chain = []
    place = folder
    while not os.path.lexists(os.path.join(place, ".git")):
        parent = os.path.dirname(place)
        if parent == place:
            return []
        chain.append(parent)
        place = parent
    found = []
    for one in reversed(chain):
        fd = os.open(one, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # it need not be readable
        try:
            found += [(name, text, one) for name in FILES if (text := read_rules(name, fd))]
        except OSError as error:
            path = os.path.join(one, os.fsdecode(error.filename))
            raise OSError(error.errno, error.strerror, path) from error
        finally:
            os.close(fd)
    return found


@functools.lru_cache(maxsize=1024)
def _rule_file(text: bytes, depth: int) -> _RuleFile:
    """The same one for the same text: whether rules have changed is asked often."""
    found = (_rule(line) for line in text.removeprefix(b"\xef\xbb\xbf").split(b"\n"))
    return _RuleFile(depth, tuple(rule for rule in found if rule is not None)[::-1])


def _rule(line: bytes) -> _Rule | None:
    line = _without_trailing_spaces(line.removesuffix(b"\r"))
    if not line or line.startswith(b"#"):
        return None
    is_kept = line.startswith(b"!")
    pattern = line[is_kept:]
    is_for_folders = pattern.endswith(b"/")
    pattern = pattern.rstrip(b"/") if is_for_folders else pattern
    if not pattern:
        return None
    if b"/" in pattern:
        path = PathGlob(pattern.removeprefix(b"/"), has_escapes=True)
        return _Rule(is_for_folders, is_kept, path=path)
    return _Rule(is_for_folders, is_kept, Glob(pattern, has_escapes=True))


def _without_trailing_spaces(line: bytes) -> bytes:
    stripped = line.rstrip(b" \t")
    has_escape = (len(stripped) - len(stripped.rstrip(b"\\"))) % 2 == 1
    return stripped + line[len(stripped) :][:1] if has_escape else stripped


def folder_rules(names: Container[str], folder: int, ignoring: IgnoreRules, path: bytes) -> IgnoreRules:
    """Adds the rules of the folder itself. Raises OSError with the name of a file that cannot be read."""
    for name in FILES:
        if os.fsdecode(name) in names:
            ignoring = ignoring.with_rules(name, read_rules(name, folder), path)
    return ignoring
