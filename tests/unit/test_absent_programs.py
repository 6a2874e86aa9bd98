"""A test whose program is absent is skipped; in CI, which has them all, it fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig.podman import is_offline

ROOT = Path(__file__).resolve().parents[2]
_TEST = """
import pytest
from tests.rig import needs

@needs.programs("sh", "no-such-program")
def test_marked(): ...

def test_asked():
    pytest.skip("a server is not installed")

def test_of_the_machine():
    pytest.skip("no IPv6 here")

def test_fine(): ...
"""
_SKIP = re.compile(r"skipif\(\s*([^()]|\([^()]*\))*?(which|find_spec)\((.|\n)*?reason=.*")
_MODULE = "import pytest\npytest.importorskip('no_such_module')\ndef test_it(): ...\n"


@pytest.mark.parametrize(
    ("is_ci", "expected"),
    [(False, {"passed": 1, "skipped": 4}), (True, {"passed": 1, "skipped": 1, "failed": 1, "errors": 2})],
)
def test_a_skip_for_an_absent_program_is_a_failure_in_ci(tmp_path: Path, is_ci: bool, expected: dict[str, int]) -> None:
    (tmp_path / "test_programs.py").write_text(_TEST)
    (tmp_path / "test_module.py").write_text(_MODULE)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("CI", "PYTEST"))}
    env |= {"PYTHONPATH": str(ROOT)} | ({"CI": "true"} if is_ci else {})
    argv = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", os.devnull]
    argv += ["--continue-on-collection-errors", str(tmp_path)]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    *_, summary = done.stdout.splitlines()
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped|failed|errors)", summary)}
    assert counts == expected, done.stdout


def test_a_skip_because_of_a_program_or_package_says_that_it_is_not_installed() -> None:
    """Or CI would not notice it."""
    found = [
        f"{file.relative_to(ROOT)}: {mark.group()}"
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        for mark in _SKIP.finditer(file.read_text())
        if "not installed" not in mark.group() and "mount" not in mark.group()
    ]
    assert found == []


@pytest.mark.parametrize(
    ("said", "is_it"),
    [
        ("E: Failed getting release file http://deb.debian.org/debian/dists/stable/Release", True),
        ("W: Couldn't download package python3 (ver 3.13) at http://deb.debian.org/debian/pool/p.deb", True),
        ("WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(...)'", True),
        ("E: Unable to execute target architecture", False),
        ("ERROR: No matching distribution found for ugro[postgres]", False),
        ("error: subprocess-exited-with-error\nSyntaxError: invalid syntax", False),
    ],
)
def test_only_what_cannot_be_reached_excuses_a_container_that_is_not_built(said: str, is_it: bool) -> None:
    assert is_offline(said) is is_it
