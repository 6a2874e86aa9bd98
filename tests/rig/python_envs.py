"""What tests of Python environments share: a real uv, nodes of this machine, recipes, and contents on a node."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.rig.waiting import end_all_with_variable
from tests.rig.wheels import Wheel
from ugro.features.environments.model import Blob, Platform, Recipe
from ugro.features.environments.service.node_envs import PythonEnvs
from ugro.features.environments.service.tools import Tools, Workshop
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.node import Dialling, Identity, Node
from ugro.kernel.links.transport import SshOptions
from ugro.kernel.support.errors import EnvFailed
from ugro.node import trees
from ugro.node.files.contents import store_in
from ugro.node.files.packs import PackWriter

AGENT = "agent-1"
MARK = "TEST_ENV_NODE"
MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"


def uv_binary(factory: pytest.TempPathFactory) -> Path:
    """The uv that an agent would send to nodes like this machine."""
    return _uv_in(fetched_uv(factory))


def fetched_uv(factory: pytest.TempPathFactory) -> Path:
    """The folder of an agent with that uv, from PyPI; fetched once for all test processes of a session."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "agents-uv"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _uv_in(folder)
    return folder


def _uv_in(folder: Path) -> Path:
    platform = Platform(os.uname().machine, "glibc", (2, 28), MINOR)
    try:
        found = asyncio.run(Tools(Workshop(folder)).uv_for(platform))
    except EnvFailed as error:
        pytest.skip(f"uv cannot be had from PyPI: {error}")
    return found.folder / found.blob.name


# --- environments that somebody else made --------------------------------------------------------------------------


def virtual_environment(folder: Path) -> Path:
    """Returns the folder of its packages; so does the next one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    return packages


def conda_environment(folder: Path) -> Path:
    """As conda lays one out: an interpreter and a standard library of its own, conda-meta/, and no pyvenv.cfg."""
    binary, library = folder / "bin" / f"python{MINOR}", folder / "lib" / f"python{MINOR}"
    for made in (binary.parent, library, folder / "conda-meta"):
        made.mkdir(parents=True)
    (folder / "conda-meta" / "history").write_text("==> 2030-01-01 00:00:00 <==\n# cmd: conda create -n torch\n")
    # The interpreter finds its library beside itself, so it must be a file there and not a link.
    shutil.copy2(os.path.realpath(sys.executable), binary)
    for name in ("python", "python3"):
        (binary.parent / name).symlink_to(binary.name)
    for part in Path(sysconfig.get_path("stdlib")).iterdir():
        if part.name not in ("site-packages", "dist-packages", "__pycache__"):
            (library / part.name).symlink_to(part)
    for part in Path(sysconfig.get_config_var("LIBDIR")).glob("libpython*.so*"):  # of a shared build
        (folder / "lib" / part.name).symlink_to(part)
    asked = [str(binary), "-I", "-c", "import site; print(site.getsitepackages()[0])"]
    packages = Path(subprocess.check_output(asked, text=True).strip())
    packages.mkdir(parents=True, exist_ok=True)
    return packages


# --- contents on a node --------------------------------------------------------------------------------------------


@functools.cache
def blob(path: Path, name: str | None = None) -> Blob:
    content = path.read_bytes()
    return Blob(name or path.name, hashlib.sha256(content).hexdigest(), len(content))


def put(root: Path, files: Mapping[str, bytes]) -> str:
    """The tree of a folder with these files, put into a node's content store as a transfer would."""
    store = store_in(str(root))
    with store.using():
        writer = PackWriter(store)
        entries = [_entry(writer, name, content) for name, content in files.items()]
        listing = trees.encode(entries)
        tree = trees.identify(trees.TREE, listing)
        writer.add(tree, trees.TREE, listing)
        writer.finish()
        store.complete(tree)
    store.close()
    return tree.hex()


def _entry(writer: PackWriter, name: str, content: bytes) -> trees.TreeEntry:
    chunks = [content[at : at + trees.CHUNK] for at in range(0, len(content), trees.CHUNK)]
    keys = [trees.identify(trees.CONTENT, chunk) for chunk in chunks]
    for key, chunk in zip(keys, chunks, strict=True):
        writer.add(key, trees.CONTENT, chunk)
    return trees.TreeEntry(name.encode(), trees.FILE, 0o644, len(content), b"".join(keys))


def recipe(root: Path, uv: Path, wheels: Sequence[Wheel], *, name: str = "e1", url: str | None = None) -> Recipe:
    """``url``: of the index that the node asks; else the wheels are sent to it."""
    sent = () if url else tuple(wheels)
    files = {one.path.name: one.path.read_bytes() for one in sent}
    files["uv"] = uv.read_bytes()
    return Recipe(
        name,
        Platform(os.uname().machine, "glibc", (2, 28), MINOR),
        "".join(one.requirement for one in wheels),
        blob(uv, "uv"),
        put(root, files),
        wheels=tuple(blob(one.path) for one in sent),
        index_url=url,
    )


# --- nodes ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def python_envs(
    root: Path, *, agent: str = AGENT, crash: str = "", path: str = "", python: str = sys.executable
) -> AsyncIterator[PythonEnvs]:
    """This machine as a node; ``crash``: a point at which what it starts dies or stops; ``path``: PATH there."""
    root.mkdir(parents=True, exist_ok=True)
    env = {"PATH": path or os.environ["PATH"], "HOME": str(root.parent / "home"), MARK: str(root)}
    spec = NodeSpec("here", remote_root=str(root), python=python, transport="local")
    more = {"UGRO_CRASH_POINT": crash} if crash else {}
    node = Node(spec, Dialling(SshOptions(10.0), 100, asyncio.Semaphore(10), lambda: {**env, **more}))
    try:
        yield PythonEnvs(node, Identity(agent, 1), 20.0)
    finally:
        await node.close()
        end_all_with_variable(MARK, [str(root)])
