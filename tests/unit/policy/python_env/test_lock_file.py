"""Lock files: their kind, and the packages of a ``pylock.toml``."""

from __future__ import annotations

import pytest

from ugro.features.environments.rules.requirements import (
    BadRequirement,
    kind_of_lock,
    lock_indexes,
    pylock_requirements,
)

A, B = "a" * 64, "b" * 64
PYLOCK = f"""\
lock-version = "1.0"
created-by = "tests"
[[packages]]
name = "numpy"
version = "2.0"
marker = "python_version > '3.8'"
wheels = [{{name = "numpy-2.0-cp311.whl", url = "https://h/n.whl", hashes = {{sha256 = "{B}"}}}}]
sdist = {{name = "numpy.tar.gz", hashes = {{sha256 = "{A}"}}}}
"""


def test_the_kind_of_a_lock_is_seen_in_its_text() -> None:
    assert kind_of_lock(PYLOCK) == "pylock.toml"
    assert kind_of_lock('version = 1\nrequires-python = ">=3.11"\n[[package]]\nname = "a"\n') == "uv.lock"
    for text in ("x = 1\n", "a b c"):
        with pytest.raises(BadRequirement):
            kind_of_lock(text)


def test_a_pylock_becomes_pinned_requirements_with_hashes() -> None:
    wheel_only = PYLOCK.replace(f'sdist = {{name = "numpy.tar.gz", hashes = {{sha256 = "{A}"}}}}\n', "")
    assert pylock_requirements(wheel_only) == (f"numpy==2.0 ; python_version > '3.8' --hash=sha256:{B}",)
    assert f"--hash=sha256:{A} --hash=sha256:{B}" in pylock_requirements(PYLOCK)[0]


UV_LOCK = """\
version = 1
[[package]]
name = "x"
source = { virtual = "." }
[[package]]
name = "numpy"
source = { registry = "https://pypi.org/simple" }
[[package]]
name = "torch"
source = { registry = "https://download.pytorch.org/whl/cu126" }
[[package]]
name = "torchvision"
source = { registry = "https://download.pytorch.org/whl/cu126" }
[[package]]
name = "mine"
source = { registry = "https://pypi.example.org/simple/" }
[[package]]
name = "local"
source = { registry = "../wheels" }
"""


def test_a_lock_says_in_which_indexes_its_packages_are() -> None:
    torch, mine = "https://download.pytorch.org/whl/cu126", "https://pypi.example.org/simple/"
    assert lock_indexes(UV_LOCK) == (torch, mine)
    assert lock_indexes(UV_LOCK, ["https://ann:pw@pypi.example.org/simple"]) == (torch,), "that one has the login"
    assert lock_indexes(PYLOCK) == ()
    assert lock_indexes(PYLOCK.replace('version = "2.0"', f'version = "2.0"\nindex = "{torch}"')) == (torch,)
    for wrong in ("https://h/${TOKEN}/simple", "https://h/ file:///home"):
        with pytest.raises(BadRequirement, match="address of an index"):
            lock_indexes(UV_LOCK.replace(mine, wrong))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("version = \"2.0\"", 'version = "2.0"\nvcs = {type = "git"}'), "numpy comes from a vcs"),
        (("python_version > '3.8'", "'gpu' in extras"), "numpy depends on an extra or a group"),
        (("python_version > '3.8'", "python_version > '3.8'\\r-r /etc/passwd"), "not a package"),
        (("python_version > '3.8'", "python_version > '${HOME}'"), "a variable in a package"),
        ((B, "zz"), "numpy has no version or no hashes"),
        (('name = "numpy"\n', 'name = "../x"\n'), "not a package's name"),
    ],
)
def test_what_cannot_be_pinned_is_refused(change: tuple[str, str], message: str) -> None:
    text = PYLOCK.replace(f'sdist = {{name = "numpy.tar.gz", hashes = {{sha256 = "{A}"}}}}\n', "")
    with pytest.raises(BadRequirement, match=message):
        pylock_requirements(text.replace(*change, 1))
