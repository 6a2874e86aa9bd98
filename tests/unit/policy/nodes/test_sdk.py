"""With which jobs UGRO's own package goes, and which Pythons can import it."""

from __future__ import annotations

import pytest

from tests.unit.policy.nodes.test_imports import Files
from ugro.features.environments.rules.imports import (
    is_for,
    is_named_in,
    is_wanted,
    lack_of_packages,
    scripts_in,
    still_missing,
)
from ugro.features.environments.rules.versions import lack_of_imports


@pytest.mark.parametrize(
    ("version", "fits"), [("3.11", True), ("3.11.2", True), ("3.14.0rc1", True), ("3.10.12", False), ("", False)]
)
def test_a_python_that_is_too_old_for_it_still_lacks_it(version: str, fits: bool) -> None:
    assert is_for(version) is fits
    assert still_missing(["torch", "ugro"], version) == ({"torch"} if fits else {"torch", "ugro"})


@pytest.mark.parametrize(
    "text",
    [
        "import ugro.train as ut",
        "from ugro import train",
        "def main():\n    import ugro.train",
        "try:\n    import ugro.train as ut\nexcept ImportError:\n    ut = None",
        "import own",
    ],
)
def test_a_script_that_imports_it_anywhere_or_by_its_own_modules_wants_it(text: str) -> None:
    assert is_wanted("train.py", Files(train=text, own="from ugro.train import init")) is True


def test_a_script_that_surely_does_without_it_gets_none() -> None:
    assert is_wanted("train.py", Files(train="import torch\n'ugro is not needed'")) is False
    assert is_wanted("train.py", Files(train="import sys\nsys.path.append('lib')\nimport helper")) is None
    assert is_wanted("-m", Files(train="import ugro")) is None


def test_a_module_of_the_users_own_with_this_name_is_the_one_that_is_meant() -> None:
    script = "import ugro"
    assert is_wanted("train.py", Files(train=script, ugro="x = 1")) is False
    assert is_wanted("a/train.py", Files(a__train=script, a__ugro__init="x = 1")) is False
    assert is_wanted("a/train.py", Files(a__train=script, ugro__init="x = 1")) is False
    # Where Python does not look for it, as in a clone of UGRO itself.
    assert is_wanted("examples/train.py", Files(examples__train=script, src__ugro__init="x = 1")) is True
    # A folder with other files: Python goes on looking for a package.
    assert is_wanted("train.py", Files(train=script, ugro__job="x = 1")) is True


@pytest.mark.parametrize(
    ("argv", "scripts"),
    [
        ("python train.py --lr 1", ["train.py"]),
        ("python3.12 -u ./src/train.py", ["src/train.py"]),
        ("torchrun --nproc-per-node 2 train.py", ["train.py"]),
        ("./train.py", ["train.py"]),
        ("python -m pkg.train --x", ["pkg/train.py", "pkg/train/__main__.py"]),
        ("python /data/train.py", []),
        ("sleep 1", []),
        ("tool -m", []),
    ],
)
def test_the_scripts_of_a_command_are_the_python_files_it_names(argv: str, scripts: list[str]) -> None:
    assert list(scripts_in(argv.split())) == scripts


def test_a_text_for_python_may_say_itself_that_it_imports_it() -> None:
    assert is_named_in(["python", "-c", "import ugro.train as ut; ut.init()"])
    assert is_named_in(["sh", "-c", "exec python -c 'from  ugro import train'"])
    assert not is_named_in(["ugro", "run", "import", "ugro"])
    assert not is_named_in(["python", "-c", "import ugropy"])


def test_who_lacks_it_is_told_to_use_a_newer_python_not_to_install_it() -> None:
    failure = lack_of_imports({"gpu1": ["ugro"]}, {"gpu1": "/usr/bin/python3"})
    assert failure is not None
    assert "not started: gpu1 lacks ugro" in failure.reason
    assert "ugro.train needs Python 3.11 or newer" in str(failure.hint)
    assert "under gpu1 in cluster.yaml" in str(failure.hint)
    ours, theirs = (lack_of_packages({"gpu1": ["ugro"]}, is_ours) for is_ours in (True, False))
    assert ours is not None
    assert theirs is not None
    assert "environment.python" in str(ours.hint)
    assert "install" not in str(theirs.hint)
