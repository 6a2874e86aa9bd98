"""Which files are not sent: patterns as in ``.gitignore``, of the configuration, ``.gitignore`` and ``.ugroignore``.

The last matching pattern decides. The patterns of a file apply to its folder and everything below it, before those of
folders above. A ``.ugroignore`` overrides the configuration, which overrides every ``.gitignore``: ``!*/`` is common
there and is not meant to include ``.git``. Everything in an ignored folder is ignored.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

_OWN = b".ugroignore"
FILES = (b".gitignore", _OWN)
_GIT_NAME, _OWN_NAME, _CONFIGURED = ".gitignore", ".ugroignore", "sync.exclude_patterns"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Rule:
    fits: re.Pattern[bytes]  # a path below the folder of its file
    is_for_folders: bool
    is_kept: bool  # the pattern began with a !
    name: bytes = b""  # everything it matches has this name
    ending: bytes = b""  # everything it matches ends with this


class _RuleFile:
    """The rules of one file, with a fast check for the many names that match none of them."""

    def __init__(self, depth: int, rules: tuple[_Rule, ...]) -> None:
        self.depth = depth  # bytes of the path of its folder
        self.rules = rules  # the last one first
        self._names = frozenset(rule.name for rule in rules if rule.name)
        self._endings = tuple(rule.ending for rule in rules if rule.ending)
        others = [rule.fits.pattern for rule in rules if not rule.name and not rule.ending]
        self._others = re.compile(b"|".join(b"(?:%s)" % one for one in others), re.DOTALL) if others else None

    def may_fit(self, path: bytes, name: bytes) -> bool:
        if name in self._names or name.endswith(self._endings):
            return True
        return self._others is not None and self._others.fullmatch(path, self.depth) is not None


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
        """``folder``: where the rules are; empty, or with a slash at its end. All paths are relative to one root."""
        if not text:
            return self
        rules = _rule_file(text, len(folder))
        return replace(self, own=(rules, *self.own)) if name == _OWN else replace(self, gits=(rules, *self.gits))

    def ignores(self, folder: bytes, name: bytes, *, is_folder: bool) -> bool:
        """No folder above it is ignored."""
        return self.named_by(folder, name, is_folder=is_folder) is not None

    def named_by(self, folder: bytes, name: bytes, *, is_folder: bool) -> str | None:
        """Whose rule ignores it: ``.gitignore``, for example. None: it is not ignored."""
        path = folder + name
        for source, files in ((_OWN_NAME, self.own), (_CONFIGURED, self.configured), (_GIT_NAME, self.gits)):
            for file in files:
                if file.may_fit(path, name):
                    for rule in file.rules:
                        if (is_folder or not rule.is_for_folders) and rule.fits.fullmatch(path, file.depth):
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
    is_anchored = b"/" in pattern
    try:
        fits = re.compile((b"" if is_anchored else b"(?:.*/)?") + _translated(pattern.removeprefix(b"/")), re.DOTALL)
    except re.error:
        return None
    is_plain = not is_anchored and not re.search(rb"[\[\]?*\\]", pattern.removeprefix(b"*"))
    is_ending = is_plain and pattern.startswith(b"*") and len(pattern) > 1
    name, ending = (b"", pattern[1:]) if is_ending else (pattern if is_plain else b"", b"")
    return _Rule(fits, is_for_folders, is_kept, name if name != b"*" else b"", ending)


def _without_trailing_spaces(line: bytes) -> bytes:
    stripped = line.rstrip(b" \t")
    has_escape = (len(stripped) - len(stripped.rstrip(b"\\"))) % 2 == 1
    return stripped + line[len(stripped) :][:1] if has_escape else stripped


def _translated(pattern: bytes) -> bytes:
    parts = pattern.split(b"/")
    made: list[bytes] = []
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        if part == b"**":
            made.append(b".+" if is_last else b"(?:.*/)?")
        else:
            made.append(_of_name(part) + (b"" if is_last else b"/"))
    return b"".join(made)


def _of_name(part: bytes) -> bytes:
    made: list[bytes] = []
    at = 0
    while at < len(part):
        one = part[at : at + 1]
        at += 1
        if one == b"*":
            made.append(b"[^/]*")
        elif one == b"?":
            made.append(b"[^/]")
        elif one == b"[" and (choice := _choice(part, at)) is not None:
            text, at = choice
            made.append(text)
        else:
            if one == b"\\" and at < len(part):
                one = part[at : at + 1]
                at += 1
            made.append(re.escape(one))
    return b"".join(made)


def _choice(part: bytes, at: int) -> tuple[bytes, int] | None:
    """A character class such as [a-z]; None if it is not closed."""
    first = at + (part[at : at + 1] in (b"!", b"^"))
    end = part.find(b"]", first + 1)
    if end < 0:
        return None
    inside = part[first:end].replace(b"\\", b"\\\\").replace(b"[", b"\\[").replace(b"&", b"\\&").replace(b"~", b"\\~")
    return (b"(?!/)[" + (b"^" if first > at else b"") + inside.replace(b"|", b"\\|") + b"]", end + 1)


def folder_rules(names: Container[str], folder: int, ignoring: IgnoreRules, path: bytes) -> IgnoreRules:
    """Adds the rules of the folder itself. Raises OSError with the name of a file that cannot be read."""
    for name in FILES:
        if os.fsdecode(name) in names:
            ignoring = ignoring.with_rules(name, read_rules(name, folder), path)
    return ignoring
