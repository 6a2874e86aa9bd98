"""One environment, from an empty folder to its name: unpacked, created, installed, checked, and renamed at the end."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import select
import signal
import stat
import subprocess
import time
from typing import Any, Callable, Deque, Dict, Iterator, List, Protocol, Sequence

from ugro.features.environments.node import installers as blobs
from ugro.features.environments.node import interpreters
from ugro.features.environments.node.failures import MOST_LINES, Failed, explain
from ugro.features.environments.node.installers import Site, Uv
from ugro.features.environments.node.place import CACHE_LOCK, RECORD, Place, Recipe, normal, required_names, shown
from ugro.node import durable
from ugro.node.clock import boot_id
from ugro.node.process import process_tree
from ugro.node.program import Refused
from ugro.node.runs.rundir import point

# --- commands ---------------------------------------------------------------------------------------------------------
# Runs an installer: hears what it says, tells how far it is, and explains its failure.


_LOOK_S = 0.25
_MOST_UNREAD = 64 * 1024


class Installer:
    """Environment and folder of all commands that make one environment."""

    def __init__(self, env: Dict[str, str], cwd: str, mask: Callable[[str], str]) -> None:
        self.env = env
        self._cwd = cwd
        self._mask = mask
        self.tick: Callable[[int, str], None] = lambda pid, line: None  # called often: its process, its latest line

    def run(self, argv: Sequence[str]) -> List[str]:
        """What it said last; ``Failed`` if it fails."""
        lines: Deque[str] = collections.deque(maxlen=MOST_LINES)
        process = self._start(argv)
        assert process.stdout is not None
        self._follow(process, process.stdout.fileno(), lines)
        code = process.wait()
        process.stdout.close()
        if code != 0:
            name = os.path.basename(argv[0]).partition("-")[0]
            how = "%s ended with code %d" % (name, code) if code > 0 else "%s was ended by signal %d" % (name, -code)
            kind, text = explain(list(lines), how)
            is_killed = code == -signal.SIGKILL and kind == "crashed"  # the kernel does it when memory runs out
            raise Failed("killed" if is_killed else kind, text, tail=list(lines))
        return list(lines)

    def _start(self, argv: Sequence[str]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self._cwd,
            env=self.env,
            preexec_fn=process_tree.die_with_parent,
        )

    def _follow(self, process: "subprocess.Popen[bytes]", fd: int, lines: Deque[str]) -> None:
        """Until it says no more. What it started may hold the pipe after it has ended: then not for long."""
        unread, ended_at = b"", 0.0
        while True:
            ready, _, _ = select.select([fd], [], [], _LOOK_S)
            part = os.read(fd, 65536) if ready else b""
            if ready and not part:
                break
            *whole, unread = (unread + part).replace(b"\r", b"\n").split(b"\n")
            unread = unread[-_MOST_UNREAD:]
            lines.extend(self._mask(line.decode("utf-8", "replace")) for line in whole if line.strip())
            self.tick(process.pid, lines[-1] if lines else "")
            if not ready and process.poll() is not None:
                ended_at = ended_at or time.monotonic()
                if time.monotonic() - ended_at > 2 * _LOOK_S:
                    break
        if unread.strip():
            lines.append(self._mask(unread.decode("utf-8", "replace")))


def written_bytes(pid: int) -> int:
    """By that process, so far; 0 where the kernel does not say."""
    try:
        with open("/proc/%d/io" % pid, "rb") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(b"wchar:")), 0)
    except (OSError, ValueError):
        return 0


# --- build ------------------------------------------------------------------------------------------------------------


_CACHE_S = 30.0
_CHECK_S = 300.0
_MOST_SCRIPT = 1 << 20
_LEAST_BYTES = 16 << 20
_libc = ctypes.CDLL(None, use_errno=True)


class Progress(Protocol):
    def say(self, phase: str, done: int = 0, written: int = 0, line: str = "") -> None: ...


class Build:
    def __init__(self, recipe: Recipe, site: Site, marker: str, progress: Progress) -> None:
        self._place: Place = site.place
        self._recipe = recipe
        self._site = site
        self._progress = progress
        self._written = 0
        self._archives = 0  # in the cache, before
        self._cache = ""  # uv's
        self._installer = Installer(site.variables(marker), site.folder, recipe.mask)

    def run(self) -> Dict[str, Any]:
        with self._using_cache():
            self._unpack()
            uv = self._uv()
            self._create(uv)
            self._install(uv)
        self._progress.say("checking", self._recipe.count, self._written)
        record = self._check()
        self._publish(record)
        return {**record, "used_at": record["made_at"]}

    @contextlib.contextmanager
    def _using_cache(self) -> Iterator[None]:
        """Shared with others who make environments; who deletes the cache has it alone."""
        fd = self._place.lock(CACHE_LOCK, alone=False, wait_s=_CACHE_S)
        if fd is None:
            raise Refused("busy", "the downloads on this node are being deleted")
        try:
            yield
        finally:
            os.close(fd)

    def _unpack(self) -> None:
        self._progress.say("unpacking")
        for folder in (self._site.home, self._site.tmp):
            os.mkdir(folder, 0o700)
        blobs.expect_room(self._place, _LEAST_BYTES, "an environment")
        if self._recipe.wheels:
            blobs.unpack_wheels(self._place, self._recipe, self._site.wheels)
        with open(self._site.requirements, "w", encoding="utf-8") as file:
            file.write(self._recipe.requirements)
        point("env.unpacked")

    def _uv(self) -> Uv:
        uv = Uv(blobs.installer(self._place, self._recipe), self._site, self._recipe)
        self._installer.env.update(uv.variables())
        try:
            self._installer.run(uv.version())
        except (Failed, OSError) as error:
            text = "uv does not start on this node (%.200s)" % error
            raise Failed("crashed", text, error.tail if isinstance(error, Failed) else ()) from error
        return uv

    def _create(self, uv: Uv) -> None:
        self._progress.say("python")
        self._installer.run(uv.create(self._interpreter(uv)))
        point("env.created")

    def _interpreter(self, uv: Uv) -> str:
        minor, pythons = self._recipe.python, self._place.pythons
        found = interpreters.find(minor, pythons)
        if found is not None:
            return found.path
        if self._recipe.is_offline:
            raise interpreters.missing(minor, pythons, ", and it cannot download one")
        self._installer.tick = lambda pid, line: self._progress.say("python", 0, written_bytes(pid), line)
        try:
            self._installer.run(uv.get_python(minor))
        except Failed as failed:
            if failed.kind == "server-failed":
                text = "uv could not download Python %s: %s" % (minor, failed)
                raise Failed(failed.kind, text, failed.tail) from failed
            why = "; uv could not download one: %s" % (failed.tail[-1:] or [str(failed)])[0].strip()
            raise interpreters.missing(minor, pythons, why, tuple(failed.tail)) from failed
        found = interpreters.find(minor, pythons)
        if found is None:
            raise interpreters.missing(minor, pythons, "; uv installed none that starts")
        return found.path

    def _install(self, uv: Uv) -> None:
        self._cache = uv.cache
        self._archives = self._count_archives()
        self._installer.tick = self._tick
        self._progress.say("installing")
        if self._recipe.count:
            self._installer.run(uv.install())
        point("env.installed")

    def _tick(self, pid: int, line: str) -> None:
        self._written = max(self._written, written_bytes(pid))
        done = max(len(_packages_in(self._site.env)), self._count_archives() - self._archives)
        self._progress.say("installing", done, self._written, line)

    def _count_archives(self) -> int:
        """uv unpacks each package there before it installs all of them."""
        with contextlib.suppress(OSError):
            return len(os.listdir(os.path.join(self._cache, "archive-v0"))) if self._cache else 0
        return 0

    def _check(self) -> Dict[str, Any]:
        """By its own interpreter: the right version, and every package that was asked for."""
        about = interpreters.describe(self._site.python, _CHECK_S, alone=True)
        if about["version"].rpartition(".")[0] != self._recipe.python:
            raise Failed("crashed", "it has Python %s instead of %s" % (about["version"], self._recipe.python))
        there = {normal(name) for name, _ in about["packages"]}
        lacking = [name for name in required_names(self._recipe.requirements) if name not in there]
        if lacking:
            raise Failed("crashed", "uv left out %s" % ", ".join(lacking[:10]))
        final = self._place.environment(self._recipe.name)
        _bake_in(self._site.env, final)
        return {
            "name": self._recipe.name,
            "folder": final,
            "python": os.path.join(final, "bin", "python"),
            "version": about["version"],
            "size": _settled_bytes(self._site.env),
            "made_at": shown(time.time()),
            "packages": about["packages"],
            "torch_cuda": about["torch_cuda"],
            "is_made": True,
            "label": self._recipe.label,
            "boot_id": boot_id(),
        }

    def _publish(self, record: Dict[str, Any]) -> None:
        """On the disk first: a power cut must not leave a name with empty files behind it."""
        durable.write_json(os.path.join(self._site.env, RECORD), record, is_lasting=False)
        _sync(self._site.env)
        point("env.recorded")
        final = self._place.environment(self._recipe.name)
        try:
            os.rename(self._site.env, final)
        except OSError:
            # Another machine with the same folder was first, where locks do not reach across: its one is as good.
            if self._place.made(self._recipe.name) is None:
                raise
        durable.sync_folder(self._place.folder)
        point("env.renamed")


def _packages_in(env: str) -> List[str]:
    lib = os.path.join(env, "lib")
    with contextlib.suppress(OSError):
        found = [os.path.join(lib, name, "site-packages") for name in os.listdir(lib) if name.startswith("python")]
        return [one for folder in found for one in os.listdir(folder) if one.endswith(".dist-info")]
    return []


def _bake_in(env: str, final: str) -> None:
    """Scripts name the interpreter that they start, and the folder that they activate: those of its final place."""
    paths = [os.path.join(env, "pyvenv.cfg")]
    paths += [entry.path for entry in os.scandir(os.path.join(env, "bin")) if entry.is_file(follow_symlinks=False)]
    for path in paths:
        with open(path, "rb") as file:
            content = file.read(_MOST_SCRIPT + 1)
        is_text = len(content) <= _MOST_SCRIPT and b"\0" not in content
        if is_text and os.fsencode(env) in content:
            mode = stat.S_IMODE(os.stat(path).st_mode)
            os.unlink(path)  # not written in place: it may be a link to a file of the cache
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as script:
                script.write(content.replace(os.fsencode(env), os.fsencode(final)))


def _settled_bytes(env: str) -> int:
    """What it takes on the disk. Its files are made read-only: they may be shared with other environments."""
    size = 0
    for folder, _, names in os.walk(env):
        for name in names:
            path = os.path.join(folder, name)
            found = os.lstat(path)
            size += found.st_blocks * 512
            if stat.S_ISREG(found.st_mode):
                os.chmod(path, stat.S_IMODE(found.st_mode) & ~0o222)
    return size


def _sync(folder: str) -> None:
    """All of its file system: far quicker than thousands of files, one after the other."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            os.sync()
    finally:
        os.close(fd)
