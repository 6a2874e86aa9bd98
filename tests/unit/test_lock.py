"""The lock of what developers and CI install: it has all that pyproject.toml asks for, and a hash of every file."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "scripts" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lock = _load()
GROUPS = lock.LOCKED_GROUPS


def pins(group: str) -> dict[str, set[str]]:
    """The versions by name; there are two where Pythons need different ones."""
    found: dict[str, set[str]] = {}
    for entry in lock.entries_of(lock.path_of(group)):
        requirement = Requirement(entry.split("\\", 1)[0].strip())
        [version] = requirement.specifier
        assert version.operator == "==", entry
        found.setdefault(lock.name_of(requirement.name), set()).add(version.version)
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_what_pyproject_asks_for_is_locked_in_a_version_that_fits(group: str) -> None:
    found = pins(group)
    for text in lock.requirements(group):
        wanted = Requirement(text)
        if wanted.name == "torch":
            assert lock.unlocked([group]) == [text], "installed by its version, without a hash"
            assert "torch" not in found
        else:
            versions = found.get(lock.name_of(wanted.name))
            assert versions, f"{text} is not locked; run: make lock"
            assert all(version in wanted.specifier for version in versions), f"{text}: {versions}; run: make lock"


@pytest.mark.parametrize("group", GROUPS)
def test_every_entry_has_hashes_and_nothing_of_the_machine_that_made_it(group: str) -> None:
    entries = lock.entries_of(lock.path_of(group))
    assert len(entries) > 15
    for entry in entries:
        first, *hashes = entry.splitlines()
        assert re.fullmatch(r"[a-z0-9.-]+==[^ ]+ ; [a-zA-Z0-9_' .=!<>()]+ \\", first), first
        assert hashes
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes), entry
    text = lock.path_of(group).read_text()
    assert text == lock._HEAD + "".join(entries), "nothing else is in it: no index, no path"


def test_all_groups_have_the_same_versions() -> None:
    largest = pins(GROUPS[-1])
    for group in GROUPS[:-1]:
        assert {name: largest[name] for name in pins(group)} == pins(group)


def test_what_is_not_locked_is_pytorch_and_the_tools_of_benchmarks() -> None:
    assert [Requirement(one).name for one in lock.unlocked(["test"])] == ["torch"]
    assert lock.unlocked(["dev"]) == []
    assert {"paramiko", "torch"} < {Requirement(one).name for one in lock.unlocked(["test", "bench"])}
