"""A Ray cluster that lasts, in the account of its user: real sshds, each with accounts of its own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.engine.test_accounts import ACCOUNT, MINE, NODE_PYTHON
from tests.integration.ray.conftest import Clusters
from tests.rig.accounts import AccountsFarm, AccountsNode
from tests.rig.ray import LIMIT_S, TASKS, document
from tests.rig.waiting import processes_with, wait_until


@pytest.fixture
def farm(farm_of: Farms) -> AccountsFarm:
    return farm_of.with_accounts([MINE])


@pytest.fixture
def python(farm: AccountsFarm, ugro: Ugro) -> Path:
    """On the node, with the Ray of this test, for everybody: the Python of the test may be in somebody's home."""
    found = subprocess.run(
        [NODE_PYTHON, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, check=True, text=True
    )
    if found.stdout.split() != [str(part) for part in sys.version_info[:2]]:
        pytest.skip(f"{NODE_PYTHON} has another version than the Python of this test")
    place = farm.directory / "python"
    subprocess.run([NODE_PYTHON, "-m", "venv", "--without-pip", str(place)], check=True)
    [packages] = place.glob("lib/python3*/site-packages")
    (packages / "ray.pth").write_text(sysconfig.get_path("purelib"))
    made = place / "bin" / "python"
    keys = {"remote_root": "~/grid_workspace", "python": str(made)}
    ugro.cluster = farm.cluster_yaml(team={"account": ACCOUNT}, nodes={"n001": keys})
    return made


def run_driver(node: AccountsNode, python: Path, env: dict[str, str]) -> str:
    """In the account: what it makes is removed with the rest."""
    token = Path(env["RAY_AUTH_TOKEN_PATH"]).read_text()
    given = {**env, "RAY_AUTH_TOKEN": token, "HOME": str(node.home_of(MINE)), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    del given["RAY_AUTH_TOKEN_PATH"]
    argv = node.placed(MINE, str(python), "-c", TASKS, "4")
    done = subprocess.run(argv, env=given, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.stdout.strip() or done.stderr


def leftovers(node: AccountsNode, key: str) -> list[str]:
    base = Path(f"/tmp/ugro-ray-{node.uid_of(MINE)}")
    folders = [*base.glob(f"{key}-*"), *node.home_of(MINE).glob(f"grid_workspace/.ugro/ray/{key}")]
    return [*map(str, folders), *map(str, processes_with(f"{base}/{key}-".encode()))]


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_a_cluster_runs_in_the_account_of_its_user_and_leaves_nothing(
    ugro: Ugro, farm: AccountsFarm, python: Path, clusters: Clusters
) -> None:
    node = farm["n001"]
    key = clusters.start()
    assert run_driver(node, python, clusters.env()) == "14"
    [shown] = document(ugro("cluster", "status", "--json"))["clusters"]
    parts = [shown["head"], *shown["workers"]]
    assert [(part["node"], part["state"]) for part in parts] == [("n001", "running")] * 2
    accounts = {one["account"] for job in document(ugro("status", "--json"))["jobs"] for one in job["nodes"]}
    assert accounts == {MINE}
    assert leftovers(node, key), "it would see them"
    stopped = document(ugro("cluster", "stop", "--json", timeout=LIMIT_S))["cluster"]
    assert stopped["state"] == "stopped"
    wait_until(lambda: not leftovers(node, key), 20, "nothing of it to be left")


@pytest.mark.proof
def test_who_has_no_account_on_a_node_gets_one_error(ugro: Ugro, farm_of: Farms) -> None:
    farm = farm_of.with_accounts(["somebody"])
    ugro.cluster = farm.cluster_yaml(team={"account": ACCOUNT}, nodes={"n001": {"remote_root": "~/grid_workspace"}})
    done = ugro("cluster", "start", timeout=LIMIT_S)
    assert done.returncode != 0
    assert f"{MINE}@n001" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
