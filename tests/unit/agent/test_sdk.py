"""UGRO's own package as it is sent: what is in it, what it needs, and for which jobs it is looked at."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rig.code import CodeRig, seen
from ugro.features.environments.service.installed import ScriptImports
from ugro.kernel.files.code import service as sdk
from ugro.kernel.jobs.model import JobSpec, Launcher
from ugro.node import trees
from ugro.node.files.checkout import check_out
from ugro.node.files.workdir import FILE

# Everything that scripts import by themselves; the other integrations need a library of their own.
IMPORTS = "import ugro, ugro.train, ugro.train.reporting, ugro.train.integrations.journal; print(ugro.__file__)"
MOST_BYTES = 2_500_000


@pytest.fixture
def rig(tmp_path: Path) -> CodeRig:
    return CodeRig(tmp_path)


def spec(*argv: str, launcher: Launcher = Launcher.COMMAND, snapshot: str | None = None) -> JobSpec:
    return JobSpec("j", argv, launcher, snapshot=snapshot)


def test_the_package_needs_the_standard_library_only(tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.write_bytes(sdk.package())
    argv = [sys.executable, "-S", "-s", "-W", "error", "-c", IMPORTS]
    env = {"PYTHONPATH": str(file)}
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() == f"{file}/ugro/__init__.py"


def test_a_python_that_is_too_old_for_it_says_so(tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.write_bytes(sdk.package())
    code = "import sys; sys.version_info = (3, 10, 12); import ugro.train"
    argv, env = [sys.executable, "-S", "-s", "-c", code], {"PYTHONPATH": str(file)}
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"ugro.train needs Python 3.11 or newer; this is 3.10, {sys.executable}" in done.stderr


def test_the_same_files_are_the_same_bytes_and_little_of_them() -> None:
    first = sdk.package()
    sdk.package.cache_clear()
    assert sdk.package() == first
    assert len(first) < MOST_BYTES
    names = zipfile.ZipFile(io.BytesIO(first)).namelist()
    assert "ugro/train/__init__.py" in names
    assert all(name.startswith("ugro/") and name.endswith(".py") for name in names)


def test_it_is_stored_once_and_again_when_it_was_deleted(rig: CodeRig) -> None:
    own = sdk.Sdk(rig.home)
    tree = own.stored()
    assert own.stored() == sdk.Sdk(rig.home).stored() == tree
    packs = os.listdir(rig.home.store.packs)
    assert len([name for name in packs if name.endswith(".pack")]) == 1
    rig.home.store.disown(trees.parse_id(tree))
    assert own.stored() == tree
    assert rig.home.has(tree)
    with rig.home.store.using():
        check_out(rig.home.store, trees.parse_id(tree), str(rig.folder / "out"))
    assert seen(os.fsencode(rig.folder / "out")) == {FILE.encode(): ("file", 0o600, sdk.package())}


def test_a_file_of_several_chunks_is_stored_whole(rig: CodeRig) -> None:
    content = os.urandom(trees.CHUNK + 1)
    tree = rig.home.keep_file("large", content, 0o644)
    with rig.home.store.using():
        check_out(rig.home.store, trees.parse_id(tree), str(rig.folder / "out"))
    assert (rig.folder / "out" / "large").read_bytes() == content


@pytest.mark.parametrize("argv", [("true",), ("sleep", "1"), ("python", "-c", "print(1)"), ("sh", "-c", "echo ugro")])
def test_nobody_looks_at_the_code_of_a_plain_command(rig: CodeRig, argv: tuple[str, ...]) -> None:
    assert ScriptImports(rig.home).known_sdk(spec(*argv, snapshot=rig.take().id)) is False


def test_a_command_gets_it_if_a_script_that_it_names_imports_it(rig: CodeRig) -> None:
    (rig.source / "train.py").write_text("import ugro.train\n")
    (rig.source / "plain.py").write_text("print(1)\n")
    (rig.source / "odd.py").write_text("import sys\nsys.path.append('lib')\nimport helper\n")
    found, snapshot = ScriptImports(rig.home), rig.take().id
    for script, wants in (("train.py", True), ("plain.py", False), ("odd.py", True), ("absent.py", False)):
        job = spec("python", script, snapshot=snapshot)
        assert found.known_sdk(job) is None
        assert found.sdk(job) is wants
        assert found.known_sdk(replace(job, argv=(*job.argv, "--seed", "7"))) is wants, "it is looked at once"
    (rig.source / "train.py").unlink()
    assert found.sdk(spec("python", "odd.py", snapshot=rig.take().id)) is False, "no file of the code names it"
    assert found.known_sdk(spec("python", "-c", "import ugro.train")) is True


@pytest.mark.parametrize("launcher", [Launcher.DDP, Launcher.TORCHRUN])
def test_a_training_gets_it_unless_it_surely_does_without(rig: CodeRig, launcher: Launcher) -> None:
    (rig.source / "train.py").write_text("def main():\n    import ugro.train\n")
    (rig.source / "plain.py").write_text("import torch\n")
    (rig.source / "odd.py").write_text("import sys\nsys.path.append('lib')\nimport helper\n")
    found, snapshot = ScriptImports(rig.home), rig.take().id
    for script, wants in (("train.py", True), ("plain.py", False), ("odd.py", True), ("-m", True)):
        assert found.sdk(spec(script, launcher=launcher, snapshot=snapshot)) is wants
    assert found.known_sdk(spec("/data/train.py", launcher=launcher)) is True, "its code is not known"
