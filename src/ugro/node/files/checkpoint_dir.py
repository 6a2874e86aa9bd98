"""Where a job writes its checkpoints on this node; ``api`` lists, sends and drops them.

By default that is a folder of the working directory of its run. Each attempt has a working directory of its own, so the
entries move: into the new attempt's folder when it starts, and into a folder of the job when a run is removed. They
move one by one, each by a rename, and everything that looks for them looks in all of these places: nothing is lost
wherever a process is killed. With ``cwd`` or an absolute path, the folder is the user's and nothing moves; the same
holds where a link of the code leads to it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

from ugro.node import durable
from ugro.node.files import listing
from ugro.node.files.listing import MOST_FILES, PART, RunFile, Unsendable, is_complete, number
from ugro.node.files.outputs import ARRIVING, REMOVING, beside, keep, link_all, link_or_copy, move, names_in, remove_all
from ugro.node.files.workdir import workdir_of
from ugro.node.program import Refused
from ugro.node.runs.logs import open_below
from ugro.node.runs.rundir import AgentDir, RunDir
from ugro.node.runs.runspec import inner_folder

# --- checkpoint order -------------------------------------------------------------------------------------------------
# The order in which a job wrote its checkpoints on this node, and in which attempt it wrote each.
#
# Times of files do not say it: a node's clock may be hours off, and may be set at any time. An entry that was not there
# at the last look, or is another one now, gets the next number. A move from folder to folder does not make it another.


class Written(NamedTuple):
    attempt: int
    serial: int


class Entry(NamedTuple):
    """As it is now, and the attempt that wrote it unless that is known already."""

    name: str
    status: os.stat_result
    attempt: int
    folder: str = ""


class Order:
    """The caller holds a lock while it uses this."""

    def __init__(self, path: str) -> None:
        self._path = path
        content = durable.read_json(path)
        known = content.get("entries") if content else None
        self._known: Dict[str, List[Any]] = known if isinstance(known, dict) else {}
        self._begun = int((content or {}).get("begun") or 0)
        self._next = int((content or {}).get("next") or 1)
        self._has_changed = False

    def find(self, name: str, status: os.stat_result) -> Optional[Written]:
        """None: it was not noted, or is another one now."""
        known = self._known.get(name)
        return Written(*known[-2:]) if known is not None and known[:-2] == _identity(status) else None

    def note(self, entries: Iterable[Entry]) -> None:
        """Of several that are new, the times of their files decide: one clock wrote them, a moment ago."""
        new = [one for one in entries if self.find(one.name, one.status) is None]
        for one in sorted(new, key=lambda one: (one.attempt, number(one.name) or -1, one.status.st_mtime_ns, one.name)):
            self._known[one.name] = [*_identity(one.status), one.attempt, self._next]
            self._next += 1
            self._has_changed = True

    def begin(self, attempt: int, entries: Iterable[Entry]) -> None:
        """Before the attempt starts: what is there now is of earlier ones."""
        if attempt > self._begun:
            self._begun, self._has_changed = attempt, True
            self.note([one._replace(attempt=min(one.attempt, attempt - 1)) for one in entries])

    def forget_others(self, names: Iterable[str]) -> None:
        """These are all that are left."""
        kept = set(names)
        for name in [name for name in self._known if name not in kept]:
            del self._known[name]
            self._has_changed = True

    def save(self) -> None:
        """Not needed after a power cut, which ends the attempt, nor worth a failure: the disk may be full."""
        if self._has_changed:
            content = {"begun": self._begun, "next": self._next, "entries": self._known}
            with contextlib.suppress(OSError):
                durable.make_folder(os.path.dirname(self._path))
                durable.write_json(self._path, content, is_lasting=False)
            self._has_changed = False


def _identity(status: os.stat_result) -> List[int]:
    return [status.st_ino, status.st_mtime_ns]


# --- checkpoint dir ---------------------------------------------------------------------------------------------------


DEFAULT = "checkpoints"
_MOST_LOOKED_AT = 20
_MOST_OLDER = 3
_LOCK_S = 60.0

Answer = Dict[str, Any]


class _Place(NamedTuple):
    """A folder with checkpoints; those of a run may have files of the code among them."""

    path: str
    run: Optional[RunDir] = None
    is_ours: bool = True  # else what is in it stays there, and may be of other jobs


class Found:
    """A complete checkpoint: its name, kind and time of change, and when it was written, compared with others."""

    def __init__(self, folder: str, name: str, status: os.stat_result, written: Written) -> None:
        self.folder = folder
        self.name = name
        self.kind = _kind(status.st_mode)
        self.changed_ns = status.st_mtime_ns
        self.written = written
        self.number = number(name)

    @property
    def order(self) -> Tuple[int, Written]:
        """The newest has the highest."""
        return (-1 if self.number is None else self.number, self.written)


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
        # In a folder of the user, what is older is not the job's. By our clock: the agent's may differ.
        age_s = params.get("age_s")
        self._since_ns = 0 if age_s is None else time.time_ns() - int(float(age_s) * 1e9)

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
    def _resumed(self) -> str:
        """Says under which name the attempt finds what it resumes from."""
        return self.resume + ".json"

    @property
    def _order_path(self) -> str:
        return self.resume + ".order.json"

    @property
    def _lock(self) -> str:
        """One for all jobs whose checkpoints move. A folder of a user may be slow: that keeps nobody else waiting."""
        return self.resume + ".lock" if self._inner is None else os.path.join(self.agent.path, "checkpoints.lock")

    @property
    def _run(self) -> RunDir:
        return self.agent.run(self.job, self._attempt)

    def _in_run(self, run: RunDir) -> str:
        return run.file("work", self._inner or DEFAULT)

    def make(self) -> str:
        """Before the attempt starts."""
        path = self._make()
        with self._ordering() as order:
            order.begin(self._attempt, self._all_complete(order))
        return path

    def _make(self) -> str:
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
        return any(names_in(place.path) for place in self._places())

    def place_of(self, name: str) -> str:
        """The folder that has an entry of that name; of several the newest attempt's."""
        return _first_with(name, self._places())

    def own_place_of(self, name: str) -> str:
        """Of those that are no folder of the user."""
        return _first_with(name, self._own_places())

    def newest(self) -> List[Answer]:
        """The newest that can be sent, preceded by newer ones that cannot, with the reason."""
        described: List[Answer] = []
        for found in self.complete()[:_MOST_LOOKED_AT]:
            with contextlib.suppress(FileNotFoundError):
                described.append(_describe(found))
                if described[-1]["problem"] is None:
                    break
        return described

    def complete(self) -> List[Found]:
        """Newest first."""
        with self._ordering() as order:
            entries = list(self._all_complete(order))
            order.note(entries)
            order.forget_others(one.name for one in entries)
            written = ((one, order.find(one.name, one.status)) for one in entries)
            found = [Found(one.folder, one.name, one.status, when) for one, when in written if when is not None]
        return sorted(found, key=lambda one: one.order, reverse=True)

    @contextlib.contextmanager
    def _ordering(self) -> Iterator[Order]:
        """Nothing moves meanwhile, and nobody else numbers what is new."""
        durable.make_folder(os.path.dirname(self._lock))
        with durable.locked(self._lock, _LOCK_S):
            order = Order(self._order_path)
            yield order
            order.save()

    def _all_complete(self, order: Order) -> Iterator[Entry]:
        for place, name in self._entries():
            if is_complete(name):
                with contextlib.suppress(FileNotFoundError):  # programs delete their old ones at any time
                    status = os.lstat(os.path.join(place.path, name))
                    is_new = status.st_mtime_ns >= self._since_ns or order.find(name, status) is not None
                    if _kind(status.st_mode) and (place.is_ours or is_new):
                        yield Entry(name, status, place.run.attempt if place.run else self._attempt, place.path)

    def older(self) -> List[str]:
        """The newest of those in a folder of the user that are older than the job, and so not the job's."""
        if self._users is None:
            return []
        skipped: List[Tuple[int, str]] = []
        with self._ordering() as order:
            ours = {one.name for one in self._all_complete(order)}
        for name in names_in(self._users):
            if is_complete(name) and name not in ours:
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(self._users, name))
                    if _kind(status.st_mode):
                        skipped.append((status.st_mtime_ns, name))
        return [name for _, name in sorted(skipped, reverse=True)[:_MOST_OLDER]]

    def files(self) -> List[RunFile]:
        """All of them, under the names by which the job wrote them."""
        with self._alone():
            entries = [(place.path, name) for place, name in self._entries() if place.is_ours]
            return [file for folder, name in entries for file in self._files_of(folder, name)]

    def _files_of(self, folder: str, name: str) -> Iterator[RunFile]:
        path, named = os.fsencode(os.path.join(folder, name)), self.prefix + os.fsencode(name)
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                yield from (file for file in listing.below(path, named + b"/", 1) if not file.is_folder)
            else:
                yield listing.described(named, status)

    def _entries(self) -> Iterator[Tuple[_Place, str]]:
        """Each folder and name of what the job wrote, complete or not; of several with one name the newest."""
        seen: Set[str] = set()
        for place in self._places():
            for name in _made(place, self._inner):
                if name not in seen:
                    seen.add(name)
                    yield place, name

    def _places(self) -> List[_Place]:
        """The newest attempt's first."""
        if self._users is not None:
            return [_Place(self._users, is_ours=False)]
        runs = self._runs() if self._inner else []
        return [*map(self._place_in, runs), _Place(self._own)]

    def _own_places(self) -> List[_Place]:
        return [place for place in self._places() if place.is_ours] or [_Place(self._own)]

    def _place_in(self, run: RunDir) -> _Place:
        path = self._in_run(run)
        is_ours = _is_real_folder(run.file("work"), path)
        return _Place(path, run if is_ours else None, is_ours)

    def _runs(self) -> List[RunDir]:
        start = self.job + "."
        names = [name for name in names_in(self.agent.runs_path) if name.startswith(start)]
        runs = [run for run in map(self.agent.named, names) if run is not None and run.job == self.job]
        return sorted(runs, key=lambda run: run.attempt, reverse=True)

    # --- moving -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nothing moves meanwhile: what is on its way would be in neither place."""
        if self._inner is None:
            yield
            return
        with durable.locked(self._lock, _LOCK_S):
            yield

    def gather(self) -> None:
        """Before the ranks start: all that is here of earlier attempts, and what this one resumes from."""
        if not self._place_in(self._run).is_ours:
            return
        with self._ordering() as order:
            os.makedirs(self.path, exist_ok=True)
            order.note(self._of_earlier(order))
            for place in reversed(self._own_places()):
                if place.path != self.path:
                    self._move_all(place, self.path)
            self._place_resumed()
            order.note(self._of_earlier(order))
        self._clean_up()

    def _of_earlier(self, order: Order) -> Iterator[Entry]:
        """No rank of this attempt has started yet."""
        for one in self._all_complete(order):
            yield one._replace(attempt=min(one.attempt, self._attempt - 1))

    def save(self, run: RunDir) -> None:
        """Before the folder of the run is removed."""
        place = self._place_in(run)
        with self._ordering() as order:
            if place.is_ours and any(True for _ in _made(place, self._inner)):
                order.note(self._all_complete(order))
                durable.make_folder(self._own)
                self._move_all(place, self._own)
        self._clean_up()

    def _move_all(self, place: _Place, folder: str) -> None:
        for name in list(_made(place, self._inner)):
            self._put(os.path.join(place.path, name), os.path.join(folder, name))

    def _put(self, path: str, target: str) -> None:
        if os.path.lexists(target):
            durable.make_folder(os.path.dirname(self._own))
            move(target, beside(self._own, REMOVING))
        move(path, target)

    def note_resumed(self, name: str, kind: str, fingerprint: str) -> None:
        record = {"name": name, "kind": kind, "fingerprint": fingerprint}
        durable.write_json(self._resumed, record, is_lasting=False)

    def forget_resumed(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._resumed)

    def _place_resumed(self) -> None:
        """The checkpoint that the attempt resumes from, under its name: links to its files, or copies."""
        record = durable.read_json(self._resumed)
        if not record or not is_complete(str(record.get("name"))):
            return
        name, source = str(record["name"]), os.path.join(self.resume, str(record["fingerprint"]))
        if not os.path.isdir(source) or _fingerprint(os.path.join(self.path, name)) == record["fingerprint"]:
            return
        durable.make_folder(self._own)
        fresh = beside(os.path.join(self._own, name), ARRIVING)
        if record["kind"] == "file":
            link_or_copy(os.fsencode(os.path.join(source, name)), os.fsencode(fresh))
        else:
            link_all(source, fresh, link_or_copy)
        self._put(fresh, os.path.join(self.path, name))

    # --- the end ------------------------------------------------------------------------------------------------

    def keep(self, names: List[bytes], *, with_unlisted: bool) -> Answer:
        """Moves these files to where what is left of the attempt is kept, and those that are too many to be listed."""
        found = self.files()[MOST_FILES:] if with_unlisted else []
        with self._alone():
            for name in [*names, *(file.name for file in found)]:
                parts = self.parts_inside(name)
                place = os.path.join(self.own_place_of(parts[0]), *parts)
                keep(self._run, name, [os.fsencode(place)], PART)
        return {}

    def expect_over(self) -> None:
        """A supervisor may outlive the exit record for a moment; ranks do not."""
        if any(run.exit() is None and run.is_alive() for run in self._runs()):
            raise Refused("busy", "job %s is running here: its checkpoints stay" % self.job)

    def drop(self) -> Answer:
        """Deletes the folders that are ours."""
        self.expect_over()
        durable.make_folder(os.path.dirname(self._own))
        with self._alone():
            written = [place.path for place in self._own_places() if place.path != self._own]
            for folder in (*written, self._own, self.resume):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    move(folder, beside(self._own, REMOVING))
            self.forget_resumed()
            for path in (self._order_path, self.resume + ".lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
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
    """All files of a job's checkpoints, to be sent when it is over. None of a folder of the user."""

    def __init__(self, folder: CheckpointDir) -> None:
        self._folder = folder

    def has_any(self) -> bool:
        self._folder.expect_over()  # they are deleted after this transfer, with those that would still be written
        return self._folder.is_ours and self._folder.has_any()

    def files(self) -> Iterator[RunFile]:
        return iter(self._folder.files() if self._folder.is_ours else ())

    def open(self, name: bytes) -> Optional[int]:
        """None when it is no longer there."""
        parts = self._folder.parts_inside(name)
        for _ in range(2):  # it may move while it is looked for
            with contextlib.suppress(FileNotFoundError):
                fd = open_below(self._folder.own_place_of(parts[0]), parts)
                if fd is not None:
                    return fd
        return None


def of_run(run: RunDir) -> Optional[CheckpointDir]:
    """None if the run has no checkpoints in its working directory."""
    fields = (run.envelope() or {}).get("spec") or {}
    if not fields.get("checkpoint_dir"):
        return None
    return CheckpointDir(run.agent, {"job": run.job, "attempt": run.attempt, "dir": fields["checkpoint_dir"]})


def _first_with(name: str, places: List[_Place]) -> str:
    return next((one.path for one in places if os.path.lexists(os.path.join(one.path, name))), places[-1].path)


def _is_real_folder(root: str, path: str) -> bool:
    """Whether it is below ``root`` without a link on the way, or can be made there."""
    while path != root:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                return False
        path = os.path.dirname(path)
    return True


def _made(place: _Place, inner: Optional[str]) -> Iterator[str]:
    """The entries of a folder that the job made or changed."""
    names = [name for name in names_in(place.path) if not name.startswith((REMOVING, ARRIVING))]
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
    described.update(found.written._asdict())
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
