"""pip and uv on this machine, and the uv that is sent to nodes.

uv comes from its wheel on PyPI, whose hash is stated below: fetched once by pip, with the user's own settings for
it, and kept in the state directory.

They run with the agent's account. For packages that others than its owner chose they see an empty home folder, and of
the agent's variables only those that lead to the network: no login, no secret and no setting of the owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ugro.features.environments.model import Blob, EnvRequest, Platform, Whose
from ugro.features.environments.node.failures import NETWORK, Mask, explain
from ugro.kernel.support.aio import SharedWork, to_the_end
from ugro.kernel.support.errors import EnvFailed, TimedOut
from ugro.kernel.support.secrets import without_userinfo

# --- process ----------------------------------------------------------------------------------------------------------
# Runs pip and uv on this machine: without a shell, in a session of their own, ended with their caller.
#
# They end also if the agent is killed. What they leave then, the next use removes.


# Becomes the program, which the kernel kills when its parent ends: a fork of the agent itself, which has threads, must
# not run Python in between. The first word is the parent's process id, in case that has ended already.
_BECOME = """
import ctypes, os, signal, sys
parent, *argv = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != int(parent):
    sys.exit(1)
try:
    os.execvp(argv[0], argv)
except OSError as error:
    sys.exit(f"{argv[0]}: {error.strerror}")
"""


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str


async def run(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout_s: float) -> Ended:
    """Raises TimedOut. A program that cannot be started has a code and says why, as one that fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid())),
        *argv,
        env=dict(env),
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    except TimeoutError as error:
        raise TimedOut(f"{Path(argv[0]).name} did not end within {timeout_s:.0f} s") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


# --- uv wheels --------------------------------------------------------------------------------------------------------
# Which uv is used: one version, and for each platform the SHA-256 of its wheel on PyPI.


UV_VERSION = "0.13.8"


@dataclass(frozen=True, slots=True)
class UvWheel:
    tag: str  # the platform, as pip names it
    sha256: str


# By architecture and C library, as nodes name them.
UV_WHEELS = {
    ("x86_64", "glibc"): UvWheel(
        "manylinux_2_17_x86_64", "e18a57b8b352eb7c8feb317b9f6f533c8f0ad9673fd6cf34bbe3cf1a9f6a8984"
    ),
    ("x86_64", "musl"): UvWheel(
        "musllinux_1_1_x86_64", "29451c60f5e8b07403e0a175d5229efc36b0289b34143ff4aaa499a5dd52553a"
    ),
    ("aarch64", "glibc"): UvWheel(
        "manylinux_2_17_aarch64", "0b3e8b1a4f5e405e31e2ff33de8af4744831e9f7338539671efbd8c3c94e791d"
    ),
    ("aarch64", "musl"): UvWheel(
        "musllinux_1_1_aarch64", "0b3e8b1a4f5e405e31e2ff33de8af4744831e9f7338539671efbd8c3c94e791d"
    ),
}


# --- workshop ---------------------------------------------------------------------------------------------------------
# Folders to work in: beside what is kept, removed afterwards, also those that an agent before us left.


_PREFIX = ".work-"


class Workshop:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cleaning = asyncio.Lock()
        self._is_clean = False

    @asynccontextmanager
    async def work(self) -> AsyncIterator[Path]:
        """An empty folder. It may come to hold a hundred thousand files, so it is removed in a thread."""
        async with self._cleaning:
            if not self._is_clean:
                await to_the_end(self._clean)
                self._is_clean = True
        path = Path(tempfile.mkdtemp(dir=self.folder, prefix=_PREFIX))
        try:
            yield path
        finally:
            await to_the_end(lambda: shutil.rmtree(path, ignore_errors=True))

    def _clean(self) -> None:
        """One agent has the folder, and it has not begun anything yet."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self.folder.glob(f"{_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)


# --- tools ------------------------------------------------------------------------------------------------------------


_FETCH_S = 600.0
_VERSION_S = 60.0
_PIP_AGE_S = 60.0
_LAST_LINES = 20
_PIECE = 1 << 20
_UV = "uv"
_NO_PIP = "this machine has no pip, which fetches uv for it and for the nodes"
_HINT = f"install it: {sys.executable} -m ensurepip"


@dataclass(frozen=True, slots=True)
class UvFile:
    """A uv for a node: alone in its folder."""

    folder: Path
    blob: Blob


@dataclass(frozen=True, slots=True)
class Pip:
    argv: list[str]
    settings: str  # as ``pip config list`` writes them
    asked_at: float

    @property
    def indexes(self) -> tuple[str | None, tuple[str, ...]]:
        """The package indexes that it is configured to use, as far as nodes can reach them too."""
        found = self._values()
        index, extra = (
            [one for one in found.get(name, ()) if one.startswith(("http://", "https://"))]
            for name in ("index-url", "extra-index-url")
        )
        return (index[0] if index else None), tuple(extra)

    @property
    def network(self) -> dict[str, str]:
        """How it is configured to reach the network, as variables; without logins to an index."""
        found = {name: " ".join(words) for name, words in self._values().items()}
        proxy = dict.fromkeys(("http_proxy", "https_proxy"), found["proxy"]) if "proxy" in found else {}
        own = {f"PIP_{name.upper().replace('-', '_')}": found[name] for name in _OF_NETWORK if name in found}
        return {**proxy, **own}

    def _values(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for line in self.settings.splitlines():
            name, _, value = line.partition("=")
            # Later lines count more: a user's settings come after those of the machine.
            found[name.rpartition(".")[2]] = value.strip("'\"").replace("\\n", " ").split()
        return found


class Tools:
    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._folder = workshop.folder / f"uv-{UV_VERSION}"
        self._fetching: SharedWork[tuple[str, str], Path] = SharedWork("fetch uv")
        self._known_pip: Pip | None = None

    async def uv_here(self) -> str:
        """uv for this machine: that of the user if it has the same version, else ours."""
        found = shutil.which(_UV)
        if found is not None and await _version_of(found) == UV_VERSION:
            return found
        arch, libc = platform.machine(), "glibc" if platform.libc_ver()[0] == "glibc" else "musl"
        if (arch, libc) not in UV_WHEELS:
            hint = f"install uv {UV_VERSION} here yourself: https://docs.astral.sh/uv"
            raise EnvFailed(f"there is no uv for this machine ({arch}, {libc})", hint=hint, cause="not-found")
        return str(await self._fetched(arch, libc) / _UV)

    async def uv_for(self, node: Platform) -> UvFile:
        if (node.arch, node.libc) not in UV_WHEELS:
            hint = "use an environment that is there: existing: /path/to/venv"
            raise EnvFailed(f"there is no uv for nodes with {node.arch} and {node.libc}", hint=hint, cause="not-found")
        folder = await self._fetched(node.arch, node.libc)
        return UvFile(folder, await asyncio.to_thread(blob_of, folder / _UV))

    async def pip(self) -> list[str]:
        """The words that run pip: of our own Python, or of another on this machine."""
        return (await self._pip()).argv

    async def sources_of(self, request: EnvRequest) -> EnvRequest:
        """The request with the indexes of pip on this machine, if it names none; for others without their logins."""
        if request.index_url is not None or request.no_index:
            return request
        try:
            index, extra = (await self._pip()).indexes
        except EnvFailed:
            return request
        if request.is_foreign:
            index, extra = without_userinfo(index) if index else None, tuple(map(without_userinfo, extra))
        return replace(request, index_url=index, extra_index_url=(*request.extra_index_url, *extra))

    async def lends_login(self, request: EnvRequest) -> bool:
        """Whether it is a job of somebody else whose packages come from here with a login of pip's own settings."""
        if request.whose in (None, Whose.OWNER):
            return False
        added = {*(await self.sources_of(request)).addresses} - {*request.addresses}
        return any(without_userinfo(address) != address for address in added)

    async def variables(self, request: EnvRequest, own: Mapping[str, str], work: Path) -> dict[str, str]:
        """For pip and uv here. ``own``: besides. ``work``: a folder that is removed afterwards."""
        if not request.is_foreign:
            return environment(own)
        home = work / ".home"
        home.mkdir(mode=0o700, exist_ok=True)
        try:
            network = (await self._pip()).network
        except EnvFailed:
            network = {}
        return {**environment_for_others(home), **network, **own}

    async def close(self) -> None:
        await self._fetching.close()

    async def _pip(self) -> Pip:
        """It takes pip a second to say how it is configured: kept for a while."""
        if self._known_pip is None or time.monotonic() - self._known_pip.asked_at > _PIP_AGE_S:
            self._known_pip = await pip_here()
        return self._known_pip

    async def _fetched(self, arch: str, libc: str) -> Path:
        folder = self._folder / f"{arch}-{libc}"
        if not await asyncio.to_thread(_is_whole, folder):
            await self._fetching.do((arch, libc), lambda: self._fetch(folder, UV_WHEELS[arch, libc]))
        return folder

    async def _fetch(self, folder: Path, wheel: UvWheel) -> Path:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with self._workshop.work() as work:
            (work / "uv.txt").write_text(f"uv=={UV_VERSION} --hash=sha256:{wheel.sha256}\n")
            argv = [
                *await self.pip(),
                *("download", "--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", "--require-hashes"),
                *("--only-binary", ":all:", "--platform", wheel.tag, "--dest", str(work), "-r", str(work / "uv.txt")),
            ]
            ended = await run(argv, env=environment({}), cwd=work, timeout_s=_FETCH_S)
            if ended.code != 0:
                raise failed("pip", ended.code, ended.err, Mask(()), f"uv {UV_VERSION} cannot be downloaded")
            await asyncio.to_thread(_take_out, work, folder)
        return folder


def _take_out(work: Path, folder: Path) -> None:
    """pip has compared the wheel's hash; what is kept is the program alone, whole or not at all."""
    [wheel] = work.glob("*.whl")
    fresh = work / "uv-folder"
    fresh.mkdir(mode=0o700)
    with zipfile.ZipFile(wheel) as archive:
        [member] = [one for one in archive.infolist() if one.filename.endswith(f".data/scripts/{_UV}")]
        with archive.open(member) as source, (fresh / _UV).open("xb") as target:
            shutil.copyfileobj(source, target, _PIECE)
            target.flush()
            os.fsync(target.fileno())
    (fresh / _UV).chmod(0o700)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    _record(folder).write_text(blob_of(fresh / _UV).content)
    fresh.rename(folder)


def _is_whole(folder: Path) -> bool:
    """Whether the program that was fetched is there, and has not changed since. Blocks."""
    try:
        return blob_of(folder / _UV).content == _record(folder).read_text()
    except OSError:
        return False


def _record(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.sha256")


async def pip_here() -> Pip:
    for python in (sys.executable, shutil.which("python3")):
        if python is None:
            continue
        argv = [python, "-m", "pip"]
        with contextlib.suppress(OSError):
            ended = await run([*argv, "config", "list"], env=os.environ, cwd=Path("/"), timeout_s=_VERSION_S)
            if ended.code == 0:
                return Pip(argv, ended.out, time.monotonic())
    raise EnvFailed(_NO_PIP, hint=_HINT, cause="not-found")


def blob_of(path: Path) -> Blob:
    """Blocks."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Blob(path.name, digest, path.stat().st_size)


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """For what the owner has chosen: the owner's own, without what would change the result unseen."""
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    return {**kept, **_TEXTS, **own}


def environment_for_others(home: Path) -> dict[str, str]:
    """``home``: an empty folder. The owner's has logins (.netrc), settings, and files that pip fetched with a login."""
    network = {name: os.environ[name] for name in NETWORK if name in os.environ}
    # A proxy's address may hold a password. What a package says that it needs may have variables in it, which uv
    # replaces: those in capital letters.
    proxies = {name.lower(): network.pop(name) for name in tuple(network) if name.endswith("_PROXY")}
    return {
        **proxies,
        **network,
        **_TEXTS,
        **dict.fromkeys(("HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"), str(home)),
        # pip itself may be in the owner's home folder.
        "PYTHONUSERBASE": os.environ.get("PYTHONUSERBASE") or os.path.expanduser("~/.local"),
        **{"NETRC": os.devnull, "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"},
        **{"PIP_KEYRING_PROVIDER": "disabled", "UV_KEYRING_PROVIDER": "disabled"},
        "UV_CREDENTIALS_DIR": str(home / "credentials"),
        # The ssh of git would find the owner's keys by itself. A package may still name a repository that it needs.
        "GIT_ALLOW_PROTOCOL": "none",
    }


def pages_of(request: EnvRequest) -> list[str]:
    """Of ``find_links``, what may hold a password: for a variable."""
    return [link for link in request.find_links if "://" in link]


def folder_arguments(request: EnvRequest) -> list[str]:
    """The folders of ``find_links``, for uv and pip: as addresses, because uv takes a comma for the end of a path."""
    folders = [Path(os.path.abspath(link)) for link in request.find_links if "://" not in link]
    return [word for folder in folders for word in ("--find-links", folder.as_uri())]


_TEXTS = {"NO_COLOR": "1", "LC_ALL": "C.UTF-8", "COLUMNS": "200"}
_OF_NETWORK = ("cert", "trusted-host", "timeout", "default-timeout", "retries")
# Variables of virtual environments, and of uv, that name other indexes, versions and options than the job.
_FOREIGN = frozenset(
    {
        *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "PIP_REQUIRE_VIRTUALENV", "PIP_TARGET"),
        *("UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX"),
        *("UV_PYTHON", "UV_PRERELEASE", "UV_RESOLUTION", "UV_EXCLUDE_NEWER", "UV_CONSTRAINT", "UV_OVERRIDE"),
        *("UV_INDEX_STRATEGY", "UV_OFFLINE", "UV_CONFIG_FILE", "UV_PROJECT_ENVIRONMENT", "UV_TORCH_BACKEND"),
    }
)


def failed(tool: str, code: int, said: str, mask: Mask, what: str) -> EnvFailed:
    """``said``: what the tool wrote; its passwords are hidden."""
    lines = [mask(line) for line in said.splitlines() if line.strip()]
    reason = explain(lines, f"{tool} ended with code {code}")
    return EnvFailed(f"{what}: {reason.text}", cause=reason.kind, tail=tuple(lines[-_LAST_LINES:]))


async def _version_of(uv: str) -> str | None:
    with contextlib.suppress(OSError):
        ended = await run([uv, "--version"], env=os.environ, cwd=Path("/"), timeout_s=_VERSION_S)
        words = ended.out.split()
        return words[1] if ended.code == 0 and len(words) > 1 else None
    return None
