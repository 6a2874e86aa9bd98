"""Locks what this project's developers and CI install: requirements/GROUP.txt, with a hash of every file.

    python scripts/lock.py                    # resolves what pyproject.toml asks for; keeps versions that fit
    python scripts/lock.py --upgrade          # newest versions
    python scripts/lock.py --unlocked test    # prints what a group needs that is not locked

Resolving needs uv (`make lock` installs it into build/); installing needs pip alone. The files hold for Linux and
Python 3.11 to 3.13. PyTorch is not locked: its builds for CPUs and GPUs have different hashes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKED_GROUPS = ("demo", "dev", "test", "proof")
# Its GPU builds need packages of these names, with versions of its own choice.
_UNLOCKED = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)")
_BUILD = ("editables>=0.5",)  # what hatchling needs for an editable installation
_PLATFORM = "sys_platform == 'linux'"
_HEAD = "# Written by `make lock` from pyproject.toml; scripts/setup.sh installs it with --require-hashes.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--uv", default="uv", help="the program")
    parser.add_argument("--upgrade", action="store_true", help="take newest versions")
    parser.add_argument("--unlocked", nargs="+", metavar="GROUP", help="print what these groups need and no lock has")
    wanted = parser.parse_args()
    if wanted.unlocked:
        sys.stdout.writelines(f"{requirement}\n" for requirement in unlocked(wanted.unlocked))
        return
    # The largest first: the others get the same versions.
    for group in reversed(LOCKED_GROUPS):
        lock(group, wanted.uv, upgrade=wanted.upgrade and group == LOCKED_GROUPS[-1])


def lock(group: str, uv: str, *, upgrade: bool) -> None:
    file, largest = path_of(group), path_of(LOCKED_GROUPS[-1])
    argv = [uv, "pip", "compile", "-", "--universal", "--python-version", "3.11", "--generate-hashes"]
    argv += ["--no-header", "--no-annotate", "--no-config", "--quiet", "--output-file", str(file)]
    argv += ["--upgrade"] if upgrade else []
    argv += ["--constraints", str(largest)] if file != largest else []
    text = "".join(f"{requirement} ; {_PLATFORM}\n" for requirement in requirements(group))
    file.parent.mkdir(exist_ok=True)
    subprocess.run(argv, input=text, text=True, check=True, cwd=ROOT)
    entries = [entry for entry in entries_of(file) if not _UNLOCKED.fullmatch(name_of(entry))]
    file.write_text(_HEAD + "".join(entries))


def path_of(group: str) -> Path:
    return ROOT / "requirements" / f"{group}.txt"


def entries_of(file: Path) -> list[str]:
    """Each package of a lock file, with the lines of its hashes."""
    return re.findall(r"^[^\s#].*\n(?:[ \t].*\n)*", file.read_text(), re.MULTILINE)


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def requirements(group: str) -> list[str]:
    """All that is installed for a group, without what that needs in turn."""
    project = _pyproject()
    build = [*project["build-system"]["requires"], *_BUILD]
    return list(dict.fromkeys([*project["project"]["dependencies"], *build, *_of_group(project, group)]))


def unlocked(groups: Sequence[str]) -> list[str]:
    """PyTorch, and the groups that have no lock."""
    project = _pyproject()
    found = [(group, one) for group in groups for one in _of_group(project, group)]
    return list(dict.fromkeys(one for group, one in found if group not in LOCKED_GROUPS or name_of(one) == "torch"))


def _pyproject() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _of_group(project: dict[str, dict[str, list[str]]], group: str) -> Iterator[str]:
    entries: list[str | dict[str, str]] = list(project["dependency-groups"][group])
    for entry in entries:
        yield from [entry] if isinstance(entry, str) else _of_group(project, entry["include-group"])


if __name__ == "__main__":
    main()
