"""Where a job writes its checkpoints on this node.

By default that is a folder of the working directory of its run. Each attempt has a working directory of its own, so the
entries move: into the new attempt's folder when it starts, and into a folder of the job when a run is removed. They
move one by one, each by a rename, and everything that looks for them looks in all of these places: nothing is lost
wherever a process is killed. With ``cwd`` or an absolute path, the folder is the user's and nothing moves.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import stat
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from ugro.remote import durable
from ugro.remote.files import listing
from ugro.remote.files.checkpoint_names import is_complete, number
from ugro.remote.files.listing import MOST_FILES, RunFile, Unsendable
from ugro.remote.files.outputs import keep
from ugro.remote.files.tail import open_below
from ugro.remote.files.workdir import workdir_of
from ugro.remote.program import Refused
from ugro.remote.state.rundir import AgentDir, RunDir
from ugro.remote.state.runspec import inner_folder

DEFAULT = "checkpoints"
REMOVING = ".removing."
_ARRIVING = ".arriving."
_RESUMED = ".name"
_MOST_LOOKED_AT = 20

Answer = Dict[str, Any]


class _Place(NamedTuple):
    """A folder with checkpoints; those of a run may have files of the code among them."""

    path: str
    run: Optional[RunDir] = None


class Found:
    """A complete checkpoint by its name, kind and time of change."""

    def __init__(self, folder: str, name: str, kind: str, changed_ns: int) -> None:
        self.folder = folder
        self.name = name
        self.kind = kind
        self.changed_ns = changed_ns
        self.number = number(name)

    @property
    def order(self) -> Tuple[int, int, str]:
        """The newest has the highest."""
        return (-1 if self.number is None else self.number, self.changed_ns, self.name)


class CheckpointDir:
    """The folders of a job on this node: where it writes checkpoints, and where those it resumes from are."""

    def __init__(self, agent: AgentDir, params: Dict[str, Any]) -> None:
        self.agent = agent
        self._attempt = int(params.get("attempt") or 1)
        self.job = agent.run(str(params["job"]), self._attempt).job
        self._own = os.path.join(agent.path, "checkpoints", self.job)
        self.resume = os.path.join(agent.path, "resume", self.job)
        self._inner: Optional[str] = None  # below the working directory of a run, if that is ours
        self._users: Optional[str] = None
        self._choose(params.get("dir"), params.get("cwd"))
        self._since_ns = 0 if self.is_ours else int(float(params.get("since") or 0) * 1e9)

    def _choose(self, chosen: Optional[str], cwd: Optional[str]) -> None:
        path = os.path.expanduser(str(chosen or DEFAULT))
        if "\0" in path or ".." in path.split("/"):
            raise ValueError("not a folder for checkpoints: %.200r" % path)
        if os.path.isabs(path):
            self._users = path
        elif not cwd:
            self._inner = os.fsdecode(inner_folder(path) or b"")
        elif chosen:
            base = os.path.expanduser(str(cwd))
            if not os.path.isabs(base):
                raise ValueError("cwd must be absolute or begin with ~: %.200r" % base)
            self._users = os.path.join(base, path)

    @property
    def is_ours(self) -> bool:
        return self._users is None

    @property
    def path(self) -> str:
        """Where the attempt writes."""
        return self._users or (self._in_run(self._run) if self._inner else self._own)

    @property
    def _run(self) -> RunDir:
        return self.agent.run(self.job, self._attempt)

    def _in_run(self, run: RunDir) -> str:
        return run.file("work", self._inner or DEFAULT)

    def make(self) -> str:
        if self._inner is not None:
            return self.path  # it is made when the run starts
        if self.is_ours:
            durable.make_folder(self.path)
            return self.path
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as error:
            raise Refused("checkpoint-dir", "checkpoint.dir cannot be created: %s" % error) from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise Refused("checkpoint-dir", "checkpoint.dir is not writable: %s" % self.path)
        return self.path

    # --- what is there ------------------------------------------------------------------------------------------

    def has_any(self) -> bool:
        """Or may have: files of the code count here."""
        return any(_names(place.path) for place in self._places())

    def place_of(self, name: str) -> str:
        """The folder that has an entry of that name; of several the newest attempt's."""
        places = self._places()
        return next((one.path for one in places if os.path.lexists(os.path.join(one.path, name))), places[-1].path)

    def newest(self) -> List[Answer]:
        """The newest that can be sent, preceded by newer ones that cannot, with the reason."""
        described: List[Answer] = []
        for found in sorted(self._complete(), key=lambda one: one.order, reverse=True)[:_MOST_LOOKED_AT]:
            with contextlib.suppress(FileNotFoundError):
                described.append(_describe(found))
                if described[-1]["problem"] is None:
                    break
        return described

    def entries(self) -> Iterator[Tuple[str, str]]:
        """Each folder and name of what the job wrote, complete or not; of several with one name the newest."""
        seen: Set[str] = set()
        for place in self._places():
            for name in _made(place, self._inner):
                if name not in seen:
                    seen.add(name)
                    yield place.path, name

    def _places(self) -> List[_Place]:
        """The newest attempt's first."""
        if self._users is not None:
            return [_Place(self._users)]
        runs = self._runs() if self._inner else []
        return [*(_Place(self._in_run(run), run) for run in runs), _Place(self._own)]

    def _runs(self) -> List[RunDir]:
        start = self.job + "."
        names = [name for name in _names(self.agent.runs_path) if name.startswith(start)]
        runs = [run for run in map(self.agent.named, names) if run is not None and run.job == self.job]
        return sorted(runs, key=lambda run: run.attempt, reverse=True)

    def _complete(self) -> Iterator[Found]:
        for folder, name in self.entries():
            if is_complete(name):
                with contextlib.suppress(FileNotFoundError):  # programs delete their old ones at any time
                    status = os.lstat(os.path.join(folder, name))
                    kind = _kind(status.st_mode)
                    if kind and status.st_mtime_ns >= self._since_ns:
                        yield Found(folder, name, kind, status.st_mtime_ns)

    # --- moving -------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Before the ranks start: all that is here of earlier attempts, and what this one resumes from."""
        os.makedirs(self.path, exist_ok=True)
        for place in reversed(self._places()):
            if place.path != self.path:
                self._move_all(place, self.path)
        self._place_resumed()
        self._clean_up()

    def save(self, run: RunDir) -> None:
        """Before the folder of the run is removed."""
        place = _Place(self._in_run(run), run)
        if any(True for _ in _made(place, self._inner)):
            durable.make_folder(self._own)
            self._move_all(place, self._own)
            self._clean_up()

    def _move_all(self, place: _Place, folder: str) -> None:
        for name in list(_made(place, self._inner)):
            self._put(os.path.join(place.path, name), os.path.join(folder, name))

    def _put(self, path: str, target: str) -> None:
        if os.path.lexists(target):
            durable.make_folder(os.path.dirname(self._own))
            os.rename(target, beside(self._own, REMOVING))
        os.rename(path, target)

    def note_resumed(self, name: str, kind: str, fingerprint: str) -> None:
        record = {"name": name, "kind": kind, "fingerprint": fingerprint}
        durable.write_json(os.path.join(self.resume, _RESUMED), record, is_lasting=False)

    def forget_resumed(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.resume, _RESUMED))

    def _place_resumed(self) -> None:
        """Links to the files of the checkpoint that the attempt resumes from, under its name."""
        record = durable.read_json(os.path.join(self.resume, _RESUMED))
        if not record or not is_complete(str(record.get("name"))):
            return
        name, source = str(record["name"]), os.path.join(self.resume, str(record["fingerprint"]))
        if not os.path.isdir(source) or _fingerprint(os.path.join(self.path, name)) == record["fingerprint"]:
            return
        durable.make_folder(self._own)
        fresh = beside(os.path.join(self._own, name), _ARRIVING)
        if record["kind"] == "file":
            link_or_copy(os.fsencode(os.path.join(source, name)), os.fsencode(fresh))
        else:
            link_all(source, fresh)
        self._put(fresh, os.path.join(self.path, name))

    # --- the end ------------------------------------------------------------------------------------------------

    def keep(self, names: List[bytes], *, with_unlisted: bool) -> Answer:
        """Moves these files to where what is left of the attempt is kept, and those that are too many to be listed."""
        found = itertools.islice(Checkpoints(self).files(), MOST_FILES, None) if with_unlisted else ()
        for name in [*names, *(file.name for file in found)]:
            parts = self.parts_inside(name)
            place = os.path.join(self.place_of(parts[0]), *parts)
            keep(self._run, name, [os.fsencode(place)])
        return {}

    def drop(self) -> Answer:
        """Deletes the folders that are ours. A supervisor may outlive the exit record for a moment; ranks do not."""
        runs = self._runs()
        if any(run.exit() is None and run.is_alive() for run in runs):
            raise Refused("busy", "job %s is running here: its checkpoints stay" % self.job)
        written = [self._in_run(run) for run in runs] if self._inner else []
        durable.make_folder(os.path.dirname(self._own))
        for folder in (*written, self._own, self.resume):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.rename(folder, beside(self._own, REMOVING))
        self._clean_up()
        return {}

    def _clean_up(self) -> None:
        remove_all(os.path.dirname(self._own), REMOVING)

    # --- as results ---------------------------------------------------------------------------------------------

    @property
    def prefix(self) -> bytes:
        """What the names of all results in it begin with."""
        return os.fsencode(self._inner or DEFAULT) + b"/"

    def parts_inside(self, name: bytes) -> List[str]:
        if not name.startswith(self.prefix):
            raise ValueError("not below the folder for checkpoints: %.80r" % name)
        return listing.parts_of(name[len(self.prefix) :])


class Checkpoints:
    """All files of a job's checkpoints, under the names by which the job wrote them. None of a folder of the user."""

    def __init__(self, folder: CheckpointDir) -> None:
        self._folder = folder

    def has_any(self) -> bool:
        return self._folder.is_ours and self._folder.has_any()

    def files(self) -> Iterator[RunFile]:
        prefix = self._folder.prefix
        for folder, name in self._folder.entries() if self._folder.is_ours else ():
            path = os.fsencode(os.path.join(folder, name))
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                if stat.S_ISDIR(status.st_mode):
                    inside = listing.below(path, prefix + os.fsencode(name) + b"/", 1)
                    yield from (file for file in inside if not file.is_folder)
                else:
                    yield listing.described(prefix + os.fsencode(name), status)

    def open(self, name: bytes) -> Optional[int]:
        """None when it is no longer there."""
        parts = self._folder.parts_inside(name)
        with contextlib.suppress(FileNotFoundError):
            return open_below(self._folder.place_of(parts[0]), parts)
        return None


def of_run(run: RunDir) -> Optional[CheckpointDir]:
    """None if the run has no checkpoints in its working directory."""
    fields = (run.envelope() or {}).get("spec") or {}
    if not fields.get("checkpoint_dir"):
        return None
    return CheckpointDir(run.agent, {"job": run.job, "attempt": run.attempt, "dir": fields["checkpoint_dir"]})


def _made(place: _Place, inner: Optional[str]) -> Iterator[str]:
    """The entries of a folder that the job made or changed."""
    names = [name for name in _names(place.path) if not name.startswith((REMOVING, _ARRIVING))]
    if place.run is None or inner is None or not names:
        return iter(names)
    work = workdir_of(place.run)
    prefix = os.fsencode(inner) + b"/"
    code = {os.fsdecode(name) for name in work.code_in(prefix)}
    if code.isdisjoint(names):
        return iter(names)
    changed = {os.fsdecode(file.name[len(prefix) :].split(b"/")[0]) for file in work.below(prefix)}
    return (name for name in names if name not in code or name in changed)


def _describe(found: Found) -> Answer:
    described = {"name": found.name, "kind": found.kind, "number": found.number, "changed_ns": found.changed_ns}
    try:
        files = listing.files_of(os.path.join(found.folder, found.name))
    except Unsendable as error:
        return {**described, "bytes": 0, "fingerprint": "", "problem": str(error)}
    size = sum(file.size for file in files)
    return {**described, "bytes": size, "fingerprint": listing.fingerprint(files), "problem": None}


def _fingerprint(path: str) -> Optional[str]:
    with contextlib.suppress(OSError, Unsendable):
        return listing.fingerprint(listing.files_of(path))
    return None


def _kind(mode: int) -> Optional[str]:
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else None


def _names(folder: str) -> List[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(os.listdir(folder))
    return []


# --- files ------------------------------------------------------------------------------------------------------


def link_all(path: str, root: str) -> None:
    """A new folder with hard links to the files of a folder, or to the one file."""
    os.mkdir(root, 0o700)
    base = path if os.path.isdir(path) else os.path.dirname(path)
    for file in listing.files_of(path):
        target = os.path.join(os.fsencode(root), file.name)
        if file.is_folder:
            os.mkdir(target, 0o700)
        else:
            os.link(os.path.join(os.fsencode(base), file.name), target, follow_symlinks=False)


def link_or_copy(path: bytes, target: bytes) -> None:
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, target, follow_symlinks=False)


def beside(path: str, mark: str) -> str:
    return os.path.join(os.path.dirname(path), mark + os.urandom(8).hex())


def remove_all(folder: str, *marks: str) -> None:
    """Those of these names that no process has locked."""
    for path in [os.path.join(folder, name) for name in _names(folder) if name.startswith(marks)]:
        if os.path.isdir(path) and not os.path.islink(path):
            if not _is_held(path):
                shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _is_held(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not durable.lock_within(fd, fcntl.LOCK_EX, 0)
    finally:
        os.close(fd)
