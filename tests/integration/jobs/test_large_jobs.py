"""Jobs and sweeps as large as they may be: they start. What is larger is refused at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ugro
from tests.integration.sharing import commands
from ugro.kernel.jobs.config.kinds import MOST_BYTES

COUNT = "import os, sys\nprint(sum(map(len, sys.argv[1:])), len(os.environ.get('LONG', '')), flush=True)\n"


@pytest.fixture(scope="module")
def ugro(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ugro]:
    folder = tmp_path_factory.mktemp("nodes")
    file = folder / "cluster.yaml"
    file.write_text(f"nodes:\n  n1: {{transport: local, remote_root: {folder}/n1}}\n")
    with commands(file) as ugro:
        (ugro.home / "cwd" / "count.py").write_text(COUNT)
        yield ugro


def document(ugro: Ugro, *words: str) -> Any:
    done = ugro(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_job_as_large_as_may_be_starts_and_lists_have_the_beginning_of_its_command(ugro: Ugro) -> None:
    long = "x" * 125_000
    done = ugro("run", "--name", "large", "--env", f"LONG={long}", "--", "python3", "count.py", long)
    assert (done.returncode, done.stdout) == (0, f"{len(long)} {len(long)}\n"), done.stderr[-500:]
    [listed] = [job for job in document(ugro, "status", "--all")["jobs"] if job["spec"]["name"] == "large"]
    assert len(json.dumps(listed)) < 8000
    assert listed["spec"]["argv"][-1] == "…"
    assert document(ugro, "status", "large")["job"]["spec"]["argv"][-1] == long


def test_a_script_as_large_as_may_be_starts(ugro: Ugro) -> None:
    words = ["y" * 9_000] * 5
    done = ugro("launch", "count.py", *words)
    assert done.returncode == 0, done.stderr[-500:]
    assert "45000 0" in done.stdout


def test_what_is_larger_is_refused_at_once_with_the_limit(ugro: Ugro, tmp_path: Path) -> None:
    done = ugro("launch", "count.py", *["y" * 100_000] * 10)
    assert done.returncode == 2
    assert "may have 48.0 KiB, and these have 976" in done.stderr
    assert "put them into a file" in done.stderr
    file = tmp_path / "sweep.yaml"
    file.write_text("method: grid\nparameters:\n  lr: {values: [" + "1, " * 1_000_000 + "2]}\n")
    done = ugro("sweep", "count.py", "-f", str(file))
    assert done.returncode == 2
    assert "larger than 256 KiB" in done.stderr
    assert "range" in done.stderr


def test_a_sweep_whose_trials_would_be_too_large_is_refused_before_any_starts(ugro: Ugro, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(f"method: grid\nparameters:\n  text: {{values: [a, {'b' * 60_000}]}}\n")
    done = ugro("sweep", "count.py", "-f", str(file))
    assert done.returncode == 2
    assert "a trial is too large: the words and variables" in done.stderr
    assert file.stat().st_size < MOST_BYTES
    assert document(ugro, "sweep", "ls")["sweeps"] == []
