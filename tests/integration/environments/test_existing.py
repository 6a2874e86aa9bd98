"""What is on a node already: environments that somebody else made, interpreters, and indexes that it reaches."""

from __future__ import annotations

import os
import sys
import venv
from pathlib import Path

import pytest

from tests.integration.conftest import in_loop
from tests.rig.python_envs import MINOR, conda_environment, python_envs
from tests.rig.wheels import index
from ugro.kernel.support.errors import EnvFailed


@in_loop
async def test_an_existing_environment_is_checked_and_not_changed(root: Path) -> None:
    home = root.parent / "home"
    venv.create(home / "envs" / "mine", symlinks=True)
    package = home / "envs" / "mine" / "lib" / f"python{MINOR}" / "site-packages" / "torch-2.13.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")
    before = sorted(str(path) for path in home.rglob("*"))
    async with python_envs(root) as envs:
        found = await envs.check("~/envs/mine")
        assert found.name == str(home / "envs" / "mine")
        assert found.python == str(home / "envs" / "mine" / "bin" / "python")
        assert (found.version.startswith(MINOR), found.is_made) == (True, False)
        assert dict(found.packages)["torch"] == "2.13.0+cpu"
        assert (await envs.check("~/envs/mine/bin/python")).name == found.name
        assert await envs.list() == ()
        for path, cause, words in (
            ("~/envs/other", "not-found", "does not exist"),
            ("envs/mine", "not-found", "absolute"),
            ("~/envs", "python-missing", "not an environment"),
            ("/bin/false", "crashed", "ended with code 1"),
        ):
            with pytest.raises(EnvFailed, match=words) as failed:
                await envs.check(path)
            assert failed.value.cause == cause
    assert sorted(str(path) for path in home.rglob("*")) == before


@in_loop
async def test_an_environment_of_conda_is_checked_and_not_changed(root: Path) -> None:
    folder = root.parent / "home" / "miniconda3" / "envs" / "torch"
    package = conda_environment(folder) / "torch-2.13.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    (package.parent / "torch").mkdir()
    (package.parent / "torch" / "version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = None\n")
    (folder / "conda-meta").mkdir(exist_ok=True)
    (folder / "conda-meta" / "nccl-2.27.3.1-h03a54cd_0.json").write_text("{}")
    assert not (folder / "pyvenv.cfg").exists()
    before = sorted(str(path) for path in folder.rglob("*"))
    async with python_envs(root) as envs:
        found = await envs.check("~/miniconda3/envs/torch")
        assert (found.name, found.python) == (str(folder), str(folder / "bin" / "python"))
        assert (found.version.startswith(MINOR), found.is_made) == (True, False)
        assert found.packages == (("torch", "2.13.0"),), "nothing of the interpreter that it is a copy of"
        assert (found.torch_cuda, found.nccl) == ("none (cpu)", "2.27.3")
        assert (await envs.check("~/miniconda3/envs/torch/bin/python")).name == found.name
    assert sorted(str(path) for path in folder.rglob("*")) == before


@in_loop
async def test_a_node_says_what_fits_it_and_what_it_reaches(root: Path, tmp_path: Path) -> None:
    with index() as packages:
        async with python_envs(root) as envs:
            urls = [packages.url, packages.url.replace("http://", "http://ann:pw@"), str(tmp_path), "/no/such"]
            found = await envs.about([*urls, "http://127.0.0.1:1/simple"])
    assert found.reaches == (True, True, True, False, False)
    assert found.arch == os.uname().machine
    assert found.libc == "glibc"
    assert found.libc_version > (2, 17)
    version, path = found.pythons[0]
    assert (version, path) == ("{}.{}.{}".format(*sys.version_info), sys.executable)
