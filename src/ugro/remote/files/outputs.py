"""`outputs.*`: what runs wrote to be kept: listed, sent from an offset on, compared, put aside before the run goes.

A run's outputs are the files below its folder ``UGRO_OUTPUT``, and those in its working directory that its patterns
name and that changed since it began. Where both have a name, the folder goes first. Links are not followed, and only
regular files are sent: everything else is told by name.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
import stat
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from ugro.remote import durable, worker
from ugro.remote.files import resumable
from ugro.remote.files.tail import open_below
from ugro.remote.program import Call, Refused
from ugro.remote.state.rundir import AgentDir, RunDir
from ugro.remote.state.runspec import RunSpec

MOST_FILES = 100_000
MOST_DEPTH = 100
_KEPT = "kept"
_REMOVING = ".removing"
_TICK_NS = 10_000_000  # a kernel's clock for files is behind by that much
_SECOND_NS = 1_000_000_000  # and some file systems know no more than seconds

Answer = Dict[str, Any]
Found = Tuple[bytes, bytes, os.stat_result]  # the name, where it is, what it is


def filled(call: Call, params: Dict[str, Any]) -> None:
    """Of many runs, the places in the list of those that have written anything: one question instead of many."""
    agent = AgentDir(call.program.root, str(params["agent"]), call.program.node_key)
    agent.admit(int(params["generation"]))
    runs = [agent.run(str(job), int(attempt)) for job, attempt in params["runs"]]
    call.finish({"filled": [place for place, run in enumerate(runs) if run.has_written()]})


def list_(call: Call, params: Dict[str, Any]) -> None:
    outputs = Outputs(_run(call, params))
    if not outputs.has_any():  # most have none, and are asked again and again
        call.finish({"files": 0, "now_ns": time.time_ns()})
        return
    worker.send(call, lambda into: _list(outputs, into))


def send(call: Call, params: Dict[str, Any]) -> None:
    outputs = Outputs(_run(call, params))
    wanted = [(_encoded(name), int(offset), str(check)) for name, offset, check in params["files"]]
    worker.send(call, lambda into: _send(outputs, wanted, into))


def hashes(call: Call, params: Dict[str, Any]) -> None:
    outputs = Outputs(_run(call, params))
    names = [_encoded(name) for name in params["names"]]
    worker.do(call, lambda: {"hashes": [outputs.content_hash(name) for name in names]})


def keep(call: Call, params: Dict[str, Any]) -> None:
    """What does not come home stays on this node when the run is removed."""
    outputs = Outputs(_run(call, params))
    names = [_encoded(name) for name in params["names"]]
    worker.do(call, lambda: {"kept": outputs.keep(names)})


def forget(call: Call, params: Dict[str, Any]) -> None:
    run = _run(call, params)
    worker.do(call, lambda: _forget(run.agent, run.job))


METHODS: Dict[str, Callable[[Call, Dict[str, Any]], None]] = {
    "filled": filled,
    "list": list_,
    "send": send,
    "hashes": hashes,
    "keep": keep,
    "forget": forget,
}


class Outputs:
    def __init__(self, run: RunDir) -> None:
        self._run = run
        spec = (run.envelope() or {}).get("spec") or {}
        self._patterns = [str(pattern) for pattern in spec.get("outputs") or ()]
        self._folder = os.fsencode(run.file("output"))
        self._cwd = os.fsencode(run.file("work"))
        if self._patterns:
            self._cwd = RunSpec(spec).cwd or self._cwd

    def has_any(self) -> bool:
        return bool(self._patterns) or self._run.has_written()

    def all(self) -> Iterator[Found]:
        seen = set()
        for found in self._in_both():
            if found[0] not in seen:
                seen.add(found[0])
                yield found

    def open(self, name: bytes) -> Optional[int]:
        """None when it is no longer there."""
        parts = [os.fsdecode(part) for part in name.split(b"/")]
        if b"\0" in name or any(part in ("", ".", "..") for part in parts):
            raise ValueError("no name of an output: %.80r" % name)
        for folder in (self._folder, self._cwd) if self._patterns else (self._folder,):
            with contextlib.suppress(FileNotFoundError):
                fd = open_below(os.fsdecode(folder), parts)
                if fd is not None:
                    return fd
        return None

    def content_hash(self, name: bytes) -> Optional[str]:
        try:
            fd = self.open(name)
        except (OSError, Refused):
            return None
        if fd is None:
            return None
        try:
            return resumable.content_hash(fd)
        finally:
            os.close(fd)

    def keep(self, names: List[bytes]) -> str:
        """Moved where that is no copy; what is in a folder of the user's is where it stays anyway."""
        kept = os.path.join(self._run.agent.path, _KEPT, self._run.name)
        ours = os.fsencode(self._run.path) + b"/"
        roots = [root for root in (self._folder, self._cwd) if root.startswith(ours)]
        for name in names:
            target = os.path.join(os.fsencode(kept), name)
            for root in roots:
                if stat.S_ISREG(_mode(os.path.join(root, name))):
                    os.makedirs(os.path.dirname(target), 0o700, exist_ok=True)
                    os.rename(os.path.join(root, name), target)
                    break
        return kept

    def _in_both(self) -> Iterator[Found]:
        yield from _below(self._folder, b"", 0)
        if self._patterns:
            since_ns = self._began_ns()
            for pattern in self._patterns:
                for name in _matches(self._cwd, b"", pattern.split("/")):
                    for found in _file_or_below(self._cwd, name):
                        if _is_since(found[2].st_mtime_ns, since_ns):
                            yield found

    def _began_ns(self) -> int:
        state = self._run.state() or {}
        return int(float(state.get("started_at") or 0) * 1e9)


def _is_since(changed_ns: int, since_ns: int) -> bool:
    return changed_ns >= since_ns - (_TICK_NS if changed_ns % _SECOND_NS else _SECOND_NS)


def _list(outputs: Outputs, into: int) -> Answer:
    count = 0
    lines: List[str] = []
    for name, _, status in outputs.all():
        count += 1
        if count <= MOST_FILES:
            lines.append(json.dumps([_text(name), *_facts(status), _problem(status.st_mode)]))
        if len(lines) >= 500:
            _write_lines(into, lines)
    _write_lines(into, lines)
    return {"files": count, "now_ns": time.time_ns()}


def _write_lines(into: int, lines: List[str]) -> None:
    if lines:
        durable.write_all(into, ("\n".join(lines) + "\n").encode("ascii"))
        lines.clear()


def _facts(status: os.stat_result) -> Tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino


def _problem(mode: int) -> Optional[str]:
    if stat.S_ISREG(mode):
        return None
    return "a symbolic link" if stat.S_ISLNK(mode) else "no regular file"


def _send(outputs: Outputs, wanted: List[Tuple[bytes, int, str]], into: int) -> Answer:
    for number, (name, offset, check) in enumerate(wanted):
        problem = "it is no longer there"
        try:
            fd = outputs.open(name)
        except (OSError, Refused) as error:
            fd, problem = None, str(error)
        if fd is None:
            durable.write_all(into, resumable.send_problem(number, problem))
            continue
        try:
            for piece in resumable.send(number, fd, offset, check):
                durable.write_all(into, piece)
        finally:
            os.close(fd)
    return {}


def _forget(agent: AgentDir, job: str) -> Answer:
    folder = os.path.join(agent.path, _KEPT)
    names: List[str] = []
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(folder)
    for name in names:
        if name.rpartition(".")[0] == job or name.endswith(_REMOVING):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    return {}


# --- looking ----------------------------------------------------------------------------------------------------


def _below(folder: bytes, prefix: bytes, depth: int) -> Iterator[Found]:
    for name in _names(folder):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if not stat.S_ISDIR(status.st_mode):
                yield prefix + name, path, status
            elif depth < MOST_DEPTH:
                yield from _below(path, prefix + name + b"/", depth + 1)


def _file_or_below(root: bytes, name: bytes) -> Iterator[Found]:
    path = os.path.join(root, name)
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode):
            yield from _below(path, name + b"/", name.count(b"/"))
        else:
            yield name, path, status


def _matches(root: bytes, name: bytes, parts: List[str], depth: int = 0) -> Iterator[bytes]:
    """Names below ``root`` that the pattern fits; ``**`` is any number of folders. Through real folders only."""
    if not parts:
        if name:
            yield name
        return
    folder = os.path.join(root, name)
    if depth > MOST_DEPTH or not stat.S_ISDIR(_mode(folder) if name else os.stat(folder).st_mode):
        return
    first, rest = parts[0], parts[1:]
    if first == "**":
        yield from _matches(root, name, rest, depth + 1)
    for one in _names(folder):
        inner = name + b"/" + one if name else one
        if first == "**" and stat.S_ISDIR(_mode(os.path.join(root, inner))):
            yield from _matches(root, inner, parts, depth + 1)
        elif first != "**" and _fits(one, first):
            yield from _matches(root, inner, rest, depth + 1)


def _names(folder: bytes) -> List[bytes]:
    """What we cannot look into is passed over: it is the program's own, and changes while we look."""
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def _fits(name: bytes, pattern: str) -> bool:
    """As in a shell: what begins with a dot is named with it."""
    if name.startswith(b".") and not pattern.startswith("."):
        return False
    return fnmatch.fnmatchcase(_text(name), pattern)


def _mode(path: bytes) -> int:
    with contextlib.suppress(OSError):
        return os.lstat(path).st_mode
    return 0


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _encoded(name: Any) -> bytes:
    return str(name).encode("utf-8", "surrogateescape")


def _run(call: Call, params: Dict[str, Any]) -> RunDir:
    agent = AgentDir(call.program.root, str(params["agent"]), call.program.node_key)
    agent.admit(int(params["generation"]))
    return agent.run(str(params["job"]), int(params["attempt"]))
