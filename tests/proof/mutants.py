"""Takes the protocol's guards away, one at a time, in a copy of the tree: some test must notice each.

    python -m tests.proof.mutants [--only WORD]

A guard that another one backs up is taken away together with it. What survives is a guard that no test proves.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.proof.guards import Edit, Mutant, NotFoundOnce, all_mutants

ROOT = Path(__file__).resolve().parents[2]
_COPIED = ("src", "tests", "pyproject.toml")
_LIMIT_S = 240


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose name has this word")
    parser.add_argument("--at-once", type=int, default=2, help="how many are tested side by side")
    wanted = parser.parse_args()
    chosen = [mutant for mutant in all_mutants() if wanted.only in mutant.name]
    suites = list(dict.fromkeys(mutant.tests for mutant in chosen))
    with ThreadPoolExecutor(wanted.at_once) as pool:
        # A test that fails anyway would notice everything.
        sound = {tests for tests, passes in zip(suites, pool.map(_passes, suites), strict=True) if passes}
        words = list(pool.map(_run, (mutant for mutant in chosen if mutant.tests in sound)))
    survivors = len(chosen) - words.count("noticed")
    _say(f"{len(chosen) - survivors} of {len(chosen)} mutants were noticed")
    sys.exit(1 if survivors else 0)


def _passes(tests: tuple[str, ...]) -> bool:
    return _run(Mutant(" ".join(tests), (), tests)) == "SURVIVES"


def _run(mutant: Mutant) -> str:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        copy = _copy(Path(folder))
        problem = next((found for edit in mutant.edits if (found := _apply(copy, edit))), None)
        word = problem or _test(copy, mutant.tests)
    words = {"SURVIVES": "passes", "noticed": "FAILS as it is"}
    shown = word if mutant.edits else words.get(word, word)
    _say(f"{shown:<10} {time.monotonic() - began:5.0f} s  {mutant.name}")
    return word


def _copy(folder: Path) -> Path:
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def _apply(copy: Path, edit: Edit) -> str | None:
    """Returns None when it is done, or what to say when the code has changed."""
    file = edit.path(copy)
    try:
        file.write_text(edit.applied(file.read_text()))
    except (NotFoundOnce, FileNotFoundError):
        return "not found"
    return None


def _test(copy: Path, tests: tuple[str, ...]) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith("UGRO_")}
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            argv,
            cwd=copy,
            # The state machine looks longer than in a usual run: it goes by chance.
            env={"PROOF_EXAMPLES": "200", **env, "PYTHONPATH": str(copy / "src")},
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "noticed"  # it hangs, where it did not before
    return {0: "SURVIVES", 1: "noticed"}.get(done.returncode, f"broken {done.returncode}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
