"""Sends what the agent on a master asks for of this machine: a job's file, its code, its folders.

It sends only what the command names. A master that asks for anything else, such as a private key or an environment
variable, is refused; so is one that asks for all of a home folder because a command was typed there, or for the code of
a command that sends none. The rules of its cluster leave files out; they never bring in what is left out here.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ugro.client.http import AgentGone
from ugro.kernel.files.code.scanner import Choices, Links
from ugro.kernel.files.code.snapshot_store import EMPTY, Reading, SnapshotRequest, SnapshotStore, folder_request
from ugro.kernel.files.model import EXCLUDED, Snapshot
from ugro.kernel.jobs.model import Folder
from ugro.kernel.jobs.script import Words, is_script, own_script, place_of, words_of
from ugro.kernel.support.errors import NotAllowed, UgroError, UsageError, Wanted
from ugro.kernel.support.quantities import format_size
from ugro.kernel.support.state_dir import StateDir
from ugro.node.trees import BLOCK, block, record

# --- trees ------------------------------------------------------------------------------------------------------------
# The code and the folders of this machine, sent to the store of a master: only contents that it lacks.
#
# They are read as the agent reads those of its own machine, by the same scanner, and copied into a store here first:
# what is sent is what was read, and an unchanged file is not read again.


CODE, FOLDERS = "code", "folders"
_LIMITS = {CODE: 2 << 30, FOLDERS: 4 << 30}  # bytes that are kept here after they were sent
_FEW = 64  # contents that are sent without asking
_MOST_KNOWN = 16
_IDS_AT_ONCE = 100_000  # of 32 bytes: a body on a team's socket has 4 MiB at most
_TRIES = 8
_CHUNK = 64 * 1024

Ask = Callable[[str, str, Any], Any]
Upload = Callable[[str, Iterator[bytes]], Any]


@dataclass(slots=True)
class Wire:
    """How to reach the agent. ``say``: how far it is."""

    ask: Ask
    upload: Upload
    say: Callable[[str], None]


class Trees:
    """Of one client: what was read before is remembered."""

    def __init__(self, home: StateDir, wire: Wire) -> None:
        self._home = home
        self._wire = wire
        self._stores: dict[str, SnapshotStore] = {}

    def code(self, folder: str, params: Mapping[str, Any]) -> Snapshot:
        """Read by the rules of the master's cluster. Stored there when this returns."""
        left_out = [self._home.path, *(Path(one) for one in params["without"])]
        about = [os.stat(path) for path in left_out if path.exists()]
        choices = Choices(
            tuple(map(str, params["exclude"])),
            bool(params["follows_links"]),
            Links(params["links_out"]),
            frozenset((one.st_dev, one.st_ino) for one in about),
        )
        request = SnapshotRequest(
            folder, choices, int(params["max_bytes"]), bool(params["force"]), bool(params["trusts_times"])
        )
        taken = self._store(CODE).take(request)
        self._send(CODE, taken.id)
        return Snapshot(taken.id, folder, taken.files, taken.bytes, taken.skipped)

    def folder(self, name: str, path: Path, params: Mapping[str, Any]) -> Folder:
        request = folder_request(name, path, int(params["max_bytes"]), Reading())
        taken = self._store(FOLDERS).take(request)
        if taken.skipped:
            raise UsageError(f"folder {name}: {taken.skipped[0]}", hint="remove it there, or name another folder")
        self._send(FOLDERS, taken.id)
        only = request.choices.only
        return Folder(name, str(path), taken.id, os.fsdecode(only) if only else "", taken.files, taken.bytes)

    def _store(self, which: str) -> SnapshotStore:
        if which not in self._stores:
            self._stores[which] = SnapshotStore(self._home.path / "remote" / which)
        return self._stores[which]

    # --- sending -----------------------------------------------------------------------------------------------

    def _send(self, which: str, root: str) -> None:
        snapshots = self._store(which)
        if root == EMPTY:
            return
        recent = [key.hex() for key, _ in snapshots.store.roots_by_use()[: _MOST_KNOWN + 1]]
        known = {"store": which, "root": root, "known": [one for one in recent if one != root][:_MOST_KNOWN]}
        answer = self._wire.ask("POST", "/v1/remote/known", known)
        if not answer["has"]:
            self._send_contents(which, root, answer["base"])
        if snapshots.size_bytes() > _LIMITS[which]:
            snapshots.tidy(_LIMITS[which], [])

    def _send_contents(self, which: str, root: str, base: str | None) -> None:
        snapshots = self._store(which)
        ids = snapshots.candidates(root, base)
        for is_first in (True, *[False] * (_TRIES - 1)):
            try:
                if not is_first or len(ids) > _FEW:
                    ids = self._missing(which, ids if is_first else snapshots.candidates(root, None))
                if not self._upload(which, root, ids):
                    return
            except AgentGone:
                continue  # what has arrived is kept there
        raise UgroError("the code could not be sent", hint="try again; if it stays so: ugro agent logs on the master")

    def _missing(self, which: str, ids: Sequence[bytes]) -> list[bytes]:
        found: list[bytes] = []
        for at in range(0, len(ids), _IDS_AT_ONCE):
            some = ids[at : at + _IDS_AT_ONCE]
            whole = b"".join(some)
            pieces = (whole[first : first + _CHUNK] for first in range(0, len(whole), _CHUNK))
            answer = self._wire.upload(f"/v1/remote/missing?{urlencode({'store': which})}", pieces)
            bits = base64.b64decode(str(answer["missing"]))
            found += [key for count, key in enumerate(some) if bits[count >> 3] >> (count & 7) & 1]
        return found

    def _upload(self, which: str, root: str, ids: Sequence[bytes]) -> bool:
        """Whether something is still missing."""
        store = self._store(which).store
        size = sum(store.locate(key).size for key in ids)
        query = urlencode({"store": which, "root": root, "bytes": size})
        answer = self._wire.upload(f"/v1/remote/trees?{query}", self._pieces(which, ids, size))
        return bool(answer["lacking"])

    def _pieces(self, which: str, ids: Sequence[bytes], size: int) -> Iterator[bytes]:
        store, sent = self._store(which).store, 0
        todo = sorted(ids, key=lambda key: store.locate(key)[:2], reverse=True)  # in the order on the disk
        while todo:
            parts: list[bytes] = []
            filled = 0
            while todo and filled < BLOCK:
                key = todo.pop()
                place = store.locate(key)
                parts += record(key, place.kind, store.read(key))
                filled += place.size
            content = block(b"".join(parts), compressed=True)
            for at in range(0, len(content), _CHUNK):
                yield content[at : at + _CHUNK]
            sent += filled
            self._wire.say(f"sending {which}: {format_size(sent)} of {format_size(size)}")


# --- offer ------------------------------------------------------------------------------------------------------------


_MOST_TEXT = 1 << 20
_WORDS = re.compile(r"[\s\"'=,:;()\[\]{}]+")
# A key and its value, in a job file.
_PAIR = re.compile(r"""([\w-]{1,64})["']?\s{0,200}:\s{0,200}["']?([^\s"'#,{}\[\]]+)""")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*", re.MULTILINE)
_BESIDE_A_LOCK = "pyproject.toml"
# In the environment of the command: the user says to send what a link leads to.
_FOLLOWS, _OUTSIDE, _FOLLOW = "UGRO_SYNC_FOLLOW_SYMLINKS", "UGRO_SYNC_OUTSIDE_LINKS", "follow"
_YES = frozenset({"true", "yes", "on", "1"})


@dataclass(slots=True)
class Offer:
    """For one request. ``send``: passes an item on to the agent."""

    home: StateDir
    body: Any
    trees: Trees
    send: Callable[[dict[str, Any]], None]
    made: frozenset[str] = frozenset()  # texts in the body that a master has made, so that they name nothing
    _words: set[str] = field(default_factory=set)
    _folders: set[str] = field(default_factory=set)  # in which a relative path may begin
    # Words that name a folder as that of the code, or as one of the job's folders.
    _as_code: set[str] = field(default_factory=set)
    _as_folder: set[str] = field(default_factory=set)
    _variables: set[str] = field(default_factory=set)  # words that may name one
    _scripts: set[str] = field(default_factory=set)  # words that name the script of a job

    def __post_init__(self) -> None:
        self._variables |= {str(name) for one in _maps(self.body) for name in _keys(one.get("env"))} - self.made
        for key, text in _strings(self.body):
            if text not in self.made:
                self._note(key, text)
        for one in _maps(self.body):
            if isinstance(command := one.get("command"), list) and command:
                words = words_of(list(map(str, command)))
                self._scripts |= {words[at] for at in [place_of(words)] if at is not None}

    def _note(self, key: str, text: str) -> None:
        """What a text of the command names."""
        if key != "here":  # where the command was typed is not what it names
            self._words |= {text, *_WORDS.split(text)}
            self._note_variables(text)
        if key == "workdir":
            self._as_code.add(text)
        if key == "script":
            self._scripts.add(text)
        if key == "text":
            self._note_pairs(text)
        if key == "folder":
            self._as_code.add(text)
            self._as_folder |= {text, text.partition("=")[2]}
        if key in ("here", "folder"):
            self._folders.add(os.path.normpath(text))
        elif key == "file":
            self._folders.add(os.path.normpath(os.path.dirname(text)))

    def provide(self, wanted: Wanted) -> None:
        """Raises why it cannot be sent."""
        item: dict[str, Any] = {"what": wanted.what, "path": wanted.path}
        if wanted.what == "script":
            self.send(item | self._script(wanted.params))
            return
        path = self._named(wanted)
        try:
            item["value"] = self._value(wanted, path)
        except OSError as error:
            item["problem"] = f"{path}: {error.strerror.lower() if error.strerror else error}"
        self.send(item)

    def expect_variables(self, names: Iterable[object]) -> None:
        """Raises NotAllowed for a variable of this machine that neither the command nor a file of it names."""
        for name in map(str, names):
            if name not in self._variables:
                shown = name[:100]
                text = f"the master asks for the variable {shown!r}, which this command does not name: it is not sent"
                raise NotAllowed(text, hint=f"if you mean it, name it: -e {shown}, or where it is used: --index-url")

    def _script(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Where the script of a job is; from now on its folder may be asked for as code."""
        here, flags = str(params.get("here")), ("is_command", "is_workdir_given", "follows_links")
        words = Words(tuple(map(str, params.get("argv") or [""])), *(params.get(name) is True for name in flags))
        at = words.at or 0
        word = words.argv[at]
        own = [one for one in words.argv[at + 1 :] if one in self._words]  # of others, nothing is said
        words = replace(words, argv=(*words.argv[: at + 1], *own))
        if word not in self._scripts or os.path.normpath(here) not in self._folders | self._workdirs:
            raise _not_named(word)
        try:
            found = own_script(here, words)
        except UgroError as error:
            return {"problem": f"{error.message}; {error.hint}"}
        if found is not None:
            self._folders.add(os.path.normpath(found.folder))
        return {"value": found and asdict(found)}

    @property
    def _workdirs(self) -> set[str]:
        """Those that the command, or a file of it, names as the folder of the code."""
        named = map(os.path.expanduser, self._as_code)
        return {os.path.normpath(os.path.join(folder, one)) for one in named for folder in self._places}

    def _value(self, wanted: Wanted, path: str) -> Any:
        match wanted.what:
            case "text":
                return self._text(path)
            case "hash":
                return _digest(path)
            case "place":
                return why_left_alone(path, self.home)
            case "code":
                if not _sends_code(self.body):
                    raise NotAllowed(f"the master asks for the code in {path}, and this command sends none")
                self._expect_meant(path, self._as_code, "--workdir PATH")
                self._folders.add(os.path.normpath(path))
                return asdict(self.trees.code(path, _own_rules(wanted.params)))
            case "folder":
                if not self._is_named(path, self._words):
                    raise _not_named(path)
                self._expect_meant(path, self._as_folder, "--folder NAME=PATH")
                return asdict(self.trees.folder(str(wanted.params.get("name")), Path(path), wanted.params))
        raise UgroError(f"the agent asks for {wanted.what!r}, which this version cannot send", hint="update ugro here")

    def _expect_meant(self, path: str, words: set[str], option: str) -> None:
        """That nobody means a whole home folder is decided here: a master may not be honest."""
        what = why_left_alone(path, self.home)
        if what is not None and not self._is_named(path, words):
            text = f"the master asks for all of {path}, which is {what}: it is not sent as a whole"
            raise NotAllowed(text, hint=f"if you mean it, name it: {option}")

    def _note_pairs(self, text: str) -> None:
        """Of the file of a job or a service."""
        text = _COMMENT.sub("", text)
        pairs = _PAIR.findall(text)
        self._as_code |= {value for name, value in pairs if name == "workdir"}
        self._scripts |= {value for name, value in pairs if name == "script"}
        self._scripts |= {word for word in _WORDS.split(text) if is_script(word)}
        self._as_folder |= {value for _, value in pairs}

    def _note_variables(self, text: str) -> None:
        self._variables |= set(_WORDS.split(_COMMENT.sub("", text)))

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
        self._note_pairs(text)
        self._note_variables(text)
        folder = os.path.normpath(os.path.dirname(path))
        self._folders.add(folder)
        self._words.add(os.path.join(folder, _BESIDE_A_LOCK))
        return text

    def _named(self, wanted: Wanted) -> str:
        asked = str(wanted.params.get("folder") or wanted.path)
        for path in (asked, _in_own_home(asked, wanted.params.get("home"))):
            if path is None or not os.path.isabs(path):
                continue
            if os.path.normpath(path) in self._folders or self._is_named(path, self._words):
                return path
        raise _not_named(asked)

    def _is_named(self, path: str, words: set[str]) -> bool:
        whole = os.path.normpath(path)
        named = (os.path.expanduser(word) for word in words if word)
        return any(os.path.normpath(os.path.join(folder, word)) == whole for word in named for folder in self._places)

    @property
    def _places(self) -> set[str]:
        return self._folders or {"/"}


def _not_named(asked: str) -> NotAllowed:
    return NotAllowed(
        f"the master asks for {asked[:300]}, which this command does not name: it is not sent",
        hint="if you mean it, name it by its whole path",
    )


def why_left_alone(folder: str, home: StateDir) -> str | None:
    """As on the agent's own machine: what is never sent as a whole."""
    for place, what in ((Path.home(), "your home folder"), (Path("/"), "/"), (home.path, "UGRO's own")):
        with contextlib.suppress(OSError):
            if os.path.samefile(folder, place):
                return what
    return None


def _own_rules(params: Mapping[str, Any]) -> dict[str, Any]:
    """As the master's cluster says; but it cannot have what is left out here, nor what is outside of the folder."""
    lines = [line for text in params["exclude"] for line in str(text).split("\n")]
    follows = os.environ.get(_FOLLOWS, "").lower() in _YES
    links_out = str(params["links_out"])
    if links_out == _FOLLOW and os.environ.get(_OUTSIDE) != _FOLLOW:
        links_out = "keep"
    return {
        **params,
        "exclude": [*EXCLUDED, *(line for line in lines if not line.startswith("!"))],
        "follows_links": follows and bool(params["follows_links"]),
        "links_out": links_out,
    }


def _sends_code(body: Any) -> bool:
    """Whether a command may send any: a sync of a folder, or jobs of which one is without --no-sync and --cwd."""
    if isinstance(body, Mapping) and "folder" in body:
        return True
    jobs = [one["fields"] for one in _maps(body) if isinstance(one.get("fields"), Mapping)]
    return any(fields.get("sync") is not False and fields.get("cwd") is None for fields in jobs)


def _in_own_home(asked: str, theirs: object) -> str | None:
    """The agent has expanded a ~ into the home folder of its own account."""
    if not isinstance(theirs, str) or len(theirs) < 2 or not asked.startswith(theirs.rstrip("/") + "/"):
        return None
    return os.path.expanduser("~") + asked[len(theirs.rstrip("/")) :]


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _maps(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _maps(inner)


def _keys(value: Any) -> Iterable[Any]:
    return value.keys() if isinstance(value, Mapping) else ()


def texts_of(value: Any) -> set[str]:
    return {text for _, text in _strings(value)}


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(inner, str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner, key)
