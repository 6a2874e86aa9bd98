"""``--cache``, ``retry --exact`` and ``compare`` as a user types them, on a real agent and a real sshd."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import wait_until

WORD = 'echo "$RANDOM_NAME" > "$UGRO_OUTPUT/made"; echo ran >> "$HOME/ran"; cat data.txt'


@pytest.fixture(scope="module")
def farm() -> Iterator[SshdFarm]:
    with ExitStack() as stack:
        yield Farms(stack)(1)


@pytest.fixture(scope="module")
def python(farm: SshdFarm) -> Path:
    """A Python of its own on the node, into which a package can be put."""
    place = farm.nodes[0].home / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return place


@pytest.fixture(scope="module")
def ugro(farm: SshdFarm, python: Path) -> Iterator[Ugro]:
    with commands(farm.cluster_yaml(nodes={farm.nodes[0].name: {"python": str(python / "bin" / "python3")}})) as ugro:
        yield ugro


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "data.txt").write_text("hello\n")
    (tmp_path / "input.csv").write_text("1,2,3\n")
    return tmp_path


def run(ugro: Ugro, project: Path, *options: str) -> dict[str, Any]:
    words = ("--workdir", str(project), "--cache-input", "input.csv", *options)
    done = ugro("run", "--json", *words, "--", "sh", "-c", WORD, cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    job: dict[str, Any] = json.loads(done.stdout)["job"]
    assert ugro("wait", str(job["id"])).returncode == 0
    return _status(ugro, int(job["id"]))


def _status(ugro: Ugro, job: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ugro("status", str(job), "--json").stdout)["job"]
    return found


def runs(farm: SshdFarm) -> int:
    ran = farm.nodes[0].home / "ran"
    return len(ran.read_text().splitlines()) if ran.exists() else 0


def events(ugro: Ugro, job: dict[str, Any]) -> str:
    return ugro("events", str(job["id"])).stdout


@pytest.mark.proof
def test_the_same_work_is_done_once_until_anything_that_counts_differs(
    ugro: Ugro, farm: SshdFarm, project: Path
) -> None:
    before = runs(farm)
    first = run(ugro, project, "--cache")
    second = run(ugro, project, "--cache", "--name", "other", "--priority", "batch")
    assert (first["cached_from"], second["cached_from"]) == (None, first["id"])
    assert second["reason"] == f"cached from job {first['id']}"
    assert runs(farm) == before + 1
    wait_until(lambda: "made" in ugro("results", str(second["id"])).stdout, 20, "the first's results to be shown")
    assert run(ugro, project, "--no-cache")["cached_from"] is None
    (project / "input.csv").write_text("changed\n")
    third = run(ugro, project, "--cache")
    assert (third["cached_from"], runs(farm)) == (None, before + 3)
    assert run(ugro, project, "--cache", "--env", "A=1")["cached_from"] is None
    (project / "data.txt").write_text("other code\n")
    assert run(ugro, project, "--cache")["cached_from"] is None
    (project / "data.txt").write_text("hello\n")
    assert run(ugro, project, "--cache")["cached_from"] == third["id"]


@pytest.mark.proof
def test_what_was_removed_or_ran_with_other_packages_stands_for_nobody(
    ugro: Ugro, farm: SshdFarm, project: Path, python: Path
) -> None:
    (project / "data.txt").write_text("of this test\n")
    first = run(ugro, project, "--cache")
    site = next(python.glob("lib/python3*/site-packages")) / "newcomer-1.0.dist-info"
    site.mkdir()
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: newcomer\nVersion: 1.0\n")
    try:
        second = run(ugro, project, "--cache")
        assert second["cached_from"] is None
        assert "newcomer was not there and is 1.0; the job is run" in events(ugro, second)
        compared = ugro("compare", str(first["id"]), str(second["id"])).stdout
        assert "package newcomer\t-\t1.0" in compared
        assert "package pip" not in compared
        assert run(ugro, project, "--cache")["cached_from"] == second["id"]
        assert ugro("results", str(second["id"]), "--rm", "--yes").returncode == 0
        assert run(ugro, project, "--cache")["cached_from"] is None
    finally:
        shutil.rmtree(site)


def test_without_code_that_is_sent_along_the_cache_does_not_apply_and_says_so(ugro: Ugro, project: Path) -> None:
    job = json.loads(ugro("run", "--json", "--cache", "--no-sync", "--", "true", cwd=project).stdout)["job"]
    assert ugro("wait", str(job["id"])).returncode == 0
    assert "the cache does not apply" in events(ugro, job)
    refused = ugro("retry", str(job["id"]), "--exact")
    assert refused.returncode == 6
    assert "no code was sent with it" in refused.stderr


def test_an_input_that_is_not_there_is_a_clear_error(ugro: Ugro, project: Path) -> None:
    refused = ugro("run", "--cache", "--cache-input", "nowhere.csv", "--", "true", cwd=project)
    assert refused.returncode == 2
    assert "nowhere.csv: no such file or directory" in refused.stderr
    assert refused.stderr.count("\n") == 2


@pytest.mark.proof
def test_an_exact_retry_runs_the_code_that_was_submitted_whatever_is_there_now(
    ugro: Ugro, farm: SshdFarm, project: Path
) -> None:
    (project / "data.txt").write_text("as it was\n")
    first = run(ugro, project, "--job-seed", "7")
    (project / "data.txt").write_text("edited\n")
    again = ugro("retry", str(first["id"]), "--exact", cwd=project)
    assert (again.returncode, again.stdout) == (0, "as it was\n")
    second = _status(ugro, int(first["id"]) + 1)
    assert (second["spec"]["snapshot"], second["spec"]["seed"]) == (first["spec"]["snapshot"], 7)
    assert f"its environment is the same as for job {first['id']}" in events(ugro, second)
    rows = json.loads(ugro("compare", str(first["id"]), str(second["id"]), "--json").stdout)["rows"]
    assert {row["key"] for row in rows} <= {"took"}
    everything = json.loads(ugro("compare", str(first["id"]), "last", "--all", "--json").stdout)["rows"]
    assert {"command", "code", "python", "nodes", "exit code"} <= {row["key"] for row in everything}


def test_one_job_has_nothing_to_be_compared_with(ugro: Ugro) -> None:
    refused = ugro("compare", "last")
    assert refused.returncode == 2
    assert "at least two jobs" in refused.stderr
