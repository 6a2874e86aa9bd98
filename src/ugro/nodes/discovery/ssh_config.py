"""Finds the machines that the user's ssh configuration already names."""

from __future__ import annotations

import asyncio
import glob
import shlex
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path

from ugro.config.names import is_host
from ugro.core.errors import UsageError
from ugro.core.support.destination import Destination
from ugro.nodes.discovery.source import Offer, Offers, SourceDown
from ugro.remote.globs import Glob

_MAX_INCLUDE_DEPTH = 8


@dataclass(frozen=True, slots=True)
class SshConfigSource:
    path: Path
    pattern: str
    interval_s: float
    name = "ssh_config"
    is_polled = True
    may_name_users = False  # ssh reads them itself

    @property
    def place(self) -> str:
        return f"{self.path}: {self.pattern}"

    async def watch(self) -> AsyncGenerator[Offers]:
        while True:
            yield self._offers()
            await asyncio.sleep(self.interval_s)

    def _offers(self) -> Offers:
        try:
            self.path.expanduser().open("rb").close()
        except OSError as error:
            raise SourceDown(f"{self.path} cannot be read: {(error.strerror or 'unknown').lower()}") from error
        pattern = Glob(self.pattern)
        return [Offer(host) for host in ssh_config_hosts(self.path) if pattern.fits(host)]


def ssh_config_hosts(path: Path) -> list[str]:
    """The plain names of all Host blocks, in order, without patterns and code-hosting logins (User git)."""
    hosts: list[str] = []
    skipped: set[str] = set()
    block: list[str] = []
    for key, words in _settings(path, _MAX_INCLUDE_DEPTH):
        if key == "match":
            block = []
        elif key == "host":
            block = [word for word in words if _is_machine(word)]
            hosts += [word for word in block if word not in hosts]
        elif key == "user" and words == ["git"]:
            skipped.update(block)
    return [host for host in hosts if host not in skipped]


def _is_machine(word: str) -> bool:
    """Neither a pattern nor a name that no other file could contain, such as one with a space."""
    if set(word) & set("*?!") or not is_host(word):
        return False
    try:
        return Destination.parse(word).host == word
    except UsageError:
        return False


def _settings(path: Path, depth: int) -> Iterator[tuple[str, list[str]]]:
    try:
        text = path.expanduser().read_text(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        words = _words(line)
        if len(words) < 2:
            continue
        key = words[0].lower()
        if key == "include" and depth:
            for pattern in words[1:]:
                for file in _included(pattern):
                    yield from _settings(file, depth - 1)
        else:
            yield key, words[1:]


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split = True
    lexer.whitespace += "="  # "Host=name" means the same as "Host name"
    try:
        return list(lexer)
    except ValueError:  # an unclosed quote; ssh itself reports it
        return []


def _included(pattern: str) -> list[Path]:
    # As ssh does: relative to ~/.ssh, wherever the including file is.
    whole = Path("~/.ssh").expanduser() / Path(pattern).expanduser()
    return [Path(name) for name in sorted(glob.glob(str(whole)))]
