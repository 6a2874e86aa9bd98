"""Sends what the agent on a master asks for of this machine: a job's file, its code, its folders.

It sends only what the command names. A master that asks for anything else, such as a private key, is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ugro.client.remote.trees import Trees
from ugro.core.errors import NotAllowed, UgroError, Wanted
from ugro.core.support.state_dir import StateDir

_MOST_TEXT = 1 << 20
_WORDS = re.compile(r"[\s\"'=,:;()\[\]{}]+")
_BESIDE_A_LOCK = "pyproject.toml"


@dataclass(slots=True)
class Offer:
    """For one request. ``send``: passes an item on to the agent."""

    home: StateDir
    body: Any
    trees: Trees
    send: Callable[[dict[str, Any]], None]
    _words: set[str] = field(default_factory=set)
    _folders: set[str] = field(default_factory=set)  # in which a relative path may begin

    def __post_init__(self) -> None:
        for key, text in _strings(self.body):
            self._words |= {text, *_WORDS.split(text)}
            if key in ("here", "folder"):
                self._folders.add(os.path.normpath(text))
            elif key == "file":
                self._folders.add(os.path.normpath(os.path.dirname(text)))

    def provide(self, wanted: Wanted) -> None:
        """Raises why it cannot be sent."""
        path = self._named(wanted)
        item: dict[str, Any] = {"what": wanted.what, "path": wanted.path}
        try:
            item["value"] = self._value(wanted, path)
        except OSError as error:
            item["problem"] = f"{path}: {error.strerror.lower() if error.strerror else error}"
        self.send(item)

    def _value(self, wanted: Wanted, path: str) -> Any:
        match wanted.what:
            case "text":
                return self._text(path)
            case "hash":
                return _digest(path)
            case "place":
                return why_left_alone(path, self.home)
            case "code":
                self._folders.add(os.path.normpath(path))
                return asdict(self.trees.code(path, wanted.params))
            case "folder":
                return asdict(self.trees.folder(str(wanted.params.get("name")), Path(path), wanted.params))
        raise UgroError(f"the agent asks for {wanted.what!r}, which this version cannot send", hint="update ugro here")

    def _text(self, path: str) -> str:
        with open(path, "rb") as file:
            content = file.read(_MOST_TEXT + 1)
        if len(content) > _MOST_TEXT:
            raise OSError(f"larger than {_MOST_TEXT} bytes")
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise OSError("not a text in UTF-8") from None
        # What it names may be asked for next.
        self._words |= {*_WORDS.split(text), *(line.strip() for line in text.splitlines())}
        folder = os.path.normpath(os.path.dirname(path))
        self._folders.add(folder)
        self._words.add(os.path.join(folder, _BESIDE_A_LOCK))
        return text

    def _named(self, wanted: Wanted) -> str:
        asked = str(wanted.params.get("folder") or wanted.path)
        for path in (asked, _in_own_home(asked, wanted.params.get("home"))):
            if path is not None and os.path.isabs(path) and self._is_named(path):
                return path
        raise NotAllowed(
            f"the master asks for {asked[:300]}, which this command does not name: it is not sent",
            hint="if you mean it, name it by its whole path",
        )

    def _is_named(self, path: str) -> bool:
        whole = os.path.normpath(path)
        if whole in self._folders:
            return True
        named = (os.path.expanduser(word) for word in self._words)
        return any(os.path.normpath(os.path.join(folder, word)) == whole for word in named for folder in self._places)

    @property
    def _places(self) -> set[str]:
        return self._folders or {"/"}


def why_left_alone(folder: str, home: StateDir) -> str | None:
    """As on the agent's own machine: what is never sent as a whole."""
    for place, what in ((Path.home(), "your home folder"), (Path("/"), "/"), (home.path, "UGRO's own")):
        with contextlib.suppress(OSError):
            if os.path.samefile(folder, place):
                return what
    return None


def _in_own_home(asked: str, theirs: object) -> str | None:
    """The agent has expanded a ~ into the home folder of its own account."""
    if not isinstance(theirs, str) or len(theirs) < 2 or not asked.startswith(theirs.rstrip("/") + "/"):
        return None
    return os.path.expanduser("~") + asked[len(theirs.rstrip("/")) :]


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(inner, str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner, key)
