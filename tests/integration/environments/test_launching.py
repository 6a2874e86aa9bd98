"""Jobs in environments that UGRO makes, from the command line to the ranks: nodes whose Python lacks the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.python_envs import conda_environment, virtual_environment
from tests.rig.waiting import wait_until
from tests.rig.wheels import Index, Wheel, index, wheel

SCRIPT = "import os, sys\nimport tiny\nprint(os.environ['RANK'], tiny.__version__, sys.prefix)\n"
SHOW = "tiny-say; echo $VIRTUAL_ENV; command -v python"


def job_file(folder: Path, served: Index, more: str = "", packages: str = "tiny") -> None:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "job.yaml").write_text(
        f"script: train.py\nresources: {{nodes: 2}}\n"
        f"environment:\n  packages: [{packages}]\n  index_url: {served.url}\n{more}"
    )


@pytest.fixture
def ugro(tmp_path: Path, uv_home: Path) -> Iterator[Ugro]:
    """Two nodes of this machine, each with a folder of its own."""
    file = tmp_path / "cluster.yaml"
    file.write_text(nodes_of(tmp_path))
    with commands(file) as ugro:
        shutil.copytree(uv_home, ugro.home / "python", dirs_exist_ok=True)
        yield ugro


def nodes_of(tmp_path: Path, **env: str) -> str:
    """Two nodes of this machine, each with a folder of its own; ``env``: of both."""
    lines = [
        f"  {name}: {{transport: [sh, -c, 'exec \"$@\"', sh], remote_root: {tmp_path}/{name},"
        f" python: {sys.executable}, env: {json.dumps(env)}}}\n"
        for name in ("n1", "n2")
    ]
    return "nodes:\n" + "".join(lines)


def made_on(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("n*/.ugro/environments/*/made.json"))


@pytest.mark.proof
def test_where_the_index_fails_for_a_node_its_packages_are_sent(
    ugro: Ugro, tmp_path: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    with index(*wheels) as served:
        job_file(ugro.home / "cwd", served)
        first = ugro("node", "setup", "n1", "-f", "job.yaml")
        assert first.returncode == 0, first.stderr
        served.fault, served.fault_for = "503", "uv/"
        done = ugro("launch", "-f", "job.yaml")
        assert done.returncode == 0, done.stderr
        assert len(made_on(tmp_path)) == 2


@pytest.mark.proof
def test_a_job_brings_its_environment_and_the_next_one_finds_it(
    ugro: Ugro, tmp_path: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    with index(*wheels) as served:
        job_file(ugro.home / "cwd", served)
        planned = ugro("launch", "-f", "job.yaml", "--dry-run")
        assert "Python   tiny" in planned.stdout
        done = ugro("launch", "-f", "job.yaml")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("0 1.2 ")
        names = made_on(tmp_path)
        assert len(names) == 2
        assert names[0] == names[1]
        fetched = len(served.asked)
        again = ugro("launch", "-f", "job.yaml")
        assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr
        assert len(served.asked) == fetched, "nothing is resolved, downloaded or made again"
        file = ugro.home / "cwd" / "job.yaml"
        text = file.read_text().replace("script: train.py", f"command: {SHOW}")
        file.write_text(text.replace("nodes: 2", "nodes: 1"))
        shown = ugro("launch", "-f", "job.yaml")
        assert shown.returncode == 0, shown.stderr
        said, folder, python = shown.stdout.splitlines()
        assert said == "tiny 1.2"
        assert folder.endswith(names[0])
        assert python == f"{folder}/bin/python"


@pytest.mark.proof
def test_a_package_that_nobody_has_fails_the_job_once_with_the_installers_lines(
    ugro: Ugro, tmp_path: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    with index(*wheels) as served:
        job_file(ugro.home / "cwd", served, packages="tiny, nosuch==7")
        done = ugro("launch", "-f", "job.yaml")
    assert done.returncode == 1
    assert "the Python environment was not made" in done.stderr
    assert "nosuch" in done.stderr
    job = json.loads(ugro("status", "last", "--json").stdout)["job"]
    failure = job["attempts"][0]["failure"]
    assert (job["attempt"], failure["cause"]) == (1, "setup_failed")
    assert failure["last_lines"]
    assert made_on(tmp_path) == []


@pytest.mark.proof
def test_a_job_that_is_cancelled_while_its_environment_is_made_leaves_none(
    ugro: Ugro, tmp_path: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    hold = threading.Event()
    with index(*wheels, hold=hold) as served:
        hold.set()
        job_file(ugro.home / "cwd", served)
        assert ugro("launch", "-f", "job.yaml", "--dry-run").returncode == 0
        hold.clear()
        assert ugro("launch", "-f", "job.yaml", "--detach").returncode == 0
        wait_until(lambda: bool(served.files()), 60, "somebody to download a wheel")
        wait_until(
            lambda: "making the Python environment on" in ugro("status", "last").stdout, 20, "its state to say so"
        )
        assert ugro("cancel", "last").returncode == 0
        assert ugro("wait", "last").returncode == 130
        hold.set()
    assert made_on(tmp_path) == []


@pytest.mark.proof
def test_two_jobs_that_want_the_same_environment_make_it_once(
    ugro: Ugro, tmp_path: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    with index(*wheels) as served:
        job_file(ugro.home / "cwd", served, "  offline: true\n")
        for _ in range(2):
            assert ugro("launch", "-f", "job.yaml", "--detach", "--cpus", "0").returncode == 0
        for job in ("1", "2"):
            assert ugro("wait", job, timeout=120).returncode == 0
    assert len(made_on(tmp_path)) == 2
    log = (ugro.home / "agent.log").read_text()
    assert log.count("making Python environment") == 2


@pytest.mark.proof
def test_nodes_reached_by_ssh_train_with_packages_that_they_do_not_have(
    farm_of: Farms, uv_home: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    farm = farm_of(2)
    with commands(farm.cluster_yaml()) as ugro, index(*wheels) as served:
        shutil.copytree(uv_home, ugro.home / "python", dirs_exist_ok=True)
        job_file(ugro.home / "cwd", served)
        before = {node.name: sorted(path.name for path in node.home.iterdir()) for node in farm.nodes}
        done = ugro("launch", "-f", "job.yaml", timeout=180)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("0 1.2 ")
        for node in farm.nodes:
            new = {path.name for path in node.home.iterdir()} - set(before[node.name])
            assert new <= {"grid_workspace"}


@pytest.mark.proof
def test_a_node_that_does_not_reach_the_index_gets_its_packages_from_here(
    ugro: Ugro, tmp_path: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    nowhere = "http://127.0.0.1:9"
    (tmp_path / "cluster.yaml").write_text(nodes_of(tmp_path, http_proxy=nowhere, HTTP_PROXY=nowhere))
    with index(*wheels) as served:
        job_file(ugro.home / "cwd", served)
        done = ugro("launch", "-f", "job.yaml", timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 1.2 ")
    assert len(made_on(tmp_path)) == 2


@pytest.mark.proof
def test_a_result_is_reused_as_long_as_its_environment_is_the_same(
    ugro: Ugro, tmp_path: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    with index(*wheels) as served:
        job_file(ugro.home / "cwd", served)
        assert ugro("launch", "-f", "job.yaml", "--cache", timeout=180).returncode == 0
        again = ugro("launch", "-f", "job.yaml", "--cache")
        assert "an identical job" in again.stderr, again.stderr
        served.wheels.append(wheel(tmp_path / "new", "tiny", "1.3"))
        newer = ugro("launch", "-f", "job.yaml", "--cache", "--upgrade", timeout=180)
    assert (newer.returncode, newer.stdout[:6]) == (0, "0 1.3 "), newer.stderr
    assert "its environment was" in ugro("events", "last").stdout


@pytest.mark.proof
def test_a_pylock_decides_versions_and_hashes(
    ugro: Ugro, tmp_path: Path, uv: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    with index(*wheels) as served:
        job_file(ugro.home / "cwd", served)
        file, lock = ugro.home / "cwd" / "job.yaml", ugro.home / "cwd" / "pylock.toml"
        file.write_text(file.read_text().replace("packages: [tiny]", "lock: pylock.toml"))
        lock.write_text(pylock(uv, served, tmp_path))
        served.wheels.append(wheel(tmp_path / "new", "tiny", "1.3"))
        done = ugro("launch", "-f", "job.yaml", timeout=180)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("0 1.2 "), "as it was locked"
        names = made_on(tmp_path)
        assert len(names) == 2
        # The index has a file of that name, but not the one that was locked.
        lock.write_text(lock.read_text().replace(wheels[0].sha256, 64 * "0"))
        refused = ugro("launch", "-f", "job.yaml", timeout=180)
    assert refused.returncode == 1
    assert "the Python environment was not made" in refused.stderr
    assert "hash" in refused.stderr
    assert made_on(tmp_path) == names


def pylock(uv: Path, served: Index, folder: Path) -> str:
    """As uv writes it, of the newest tiny that is there now."""
    (folder / "requirements.in").write_text("tiny\n")
    argv = [
        *(str(uv), "pip", "compile", "--quiet", "--no-config", "--no-cache", "--python", sys.executable),
        *("--index-url", served.url, "--format", "pylock.toml", str(folder / "requirements.in")),
    ]
    environment = {"PATH": os.defpath, "HOME": str(folder)}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.proof
@pytest.mark.parametrize("make", [virtual_environment, conda_environment])
def test_an_environment_that_exists_is_used_as_it_is(
    ugro: Ugro, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    existing = tmp_path / "existing"
    packages = make(existing)
    (ugro.home / "cwd" / "train.py").write_text(SCRIPT)
    launch = ("launch", "train.py", "--nodes", "2", "--existing-environment")
    lacking = ugro(*launch, str(existing), timeout=120)
    assert lacking.returncode == 1
    assert "the Python environment on n1 and n2 lacks tiny, which the script imports" in lacking.stderr
    (packages / "tiny.py").write_text('__version__ = "own"\n')
    done = ugro(*launch, str(existing), timeout=120)
    assert (done.returncode, done.stdout) == (0, f"0 own {existing}\n"), done.stderr
    absent = ugro(*launch, str(tmp_path / "nowhere"), timeout=120)
    assert absent.returncode == 1
    assert "nowhere" in absent.stderr


@pytest.mark.proof
def test_a_script_in_an_environment_finds_ugro_which_is_not_among_its_packages(
    ugro: Ugro, wheels: tuple[Wheel, Wheel]
) -> None:
    with index(*wheels) as served:
        job_file(ugro.home / "cwd", served)
        (ugro.home / "cwd" / "train.py").write_text("import tiny, ugro.train\nprint(ugro.train.__file__)\n")
        done = ugro("launch", "-f", "job.yaml")
        assert done.returncode == 0, done.stderr
        assert "/sdk/ugro.zip/ugro/train/" in done.stdout
        (ugro.home / "cwd" / "train.py").write_text("import tiny, ugro.train, nosuch\n")
        refused = ugro("launch", "-f", "job.yaml")
    assert refused.returncode == 1
    assert "lacks nosuch, which the script imports" in refused.stderr
