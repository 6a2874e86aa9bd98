"""Services in the accounts of their users: real sshds, each with accounts of its own, behind a real HAProxy."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.engine.test_accounts import MINE, NODE_PYTHON, command_of, personal
from tests.rig import needs
from tests.rig.accounts import AccountsFarm
from tests.rig.ports import free_port
from tests.rig.service import SERVER
from tests.rig.waiting import processes_with_variable, wait_until

pytestmark = [pytest.mark.proof, pytest.mark.timeout(240), needs.programs("haproxy")]
RUNS = "grid_workspace/.ugro/agents/*/runs/*"


@pytest.fixture
def farm(farm_of: Farms, ugro: Ugro) -> AccountsFarm:
    farm = farm_of.with_accounts([MINE])
    ugro.cluster = personal(farm)
    return farm


def serve(ugro: Ugro, *words: str) -> dict[str, Any]:
    (ugro.home / "cwd" / "server.py").write_text(SERVER)
    options = ["--name", "echo", "--port", str(free_port()), "--health", "/health", *words]
    done = ugro("serve", *options, "--json", "--", NODE_PYTHON, "server.py", "{port}", "one")
    assert done.returncode == 0, done.stdout + done.stderr
    return service(done.stdout)


def service(text: str) -> dict[str, Any]:
    return dict(json.loads(text)["service"])


def answer(url: str) -> bytes:
    with urllib.request.urlopen(f"{url}/", timeout=60) as found:
        return bytes(found.read())


def doors(home: Path) -> list[int]:
    """The processes of the service's door in an account, HAProxy aside."""
    return [pid for pid in processes_with_variable("HOME", [str(home)]) if b"\0door\0echo\0" in command_of(pid)]


def state(home: Path) -> list[Path]:
    return list(home.glob("grid_workspace/.ugro/services/*/door.json"))


def test_a_service_runs_in_its_users_account_with_its_door_and_leaves_nothing(farm: AccountsFarm, ugro: Ugro) -> None:
    node, mine = farm["n001"], farm["n001"].home_of(MINE)
    other = ugro("serve", "--name", "echo", "--door", f"{MINE}@n001", "--", NODE_PYTHON, "server.py", "{port}", "one")
    assert f"no node '{MINE}@n001'" in other.stderr, other.stderr
    found = serve(ugro, "--door", "n001")
    assert (found["state"], found["ready"], found["door"]["node"]) == ("ready", 1, "n001")
    assert [one["node"] for one in found["replicas"]] == ["n001"]
    assert answer(found["url"]) == b"1 one"
    assert doors(mine)
    assert not doors(node.home)
    assert state(mine)[0].stat().st_uid == node.uid_of(MINE)
    assert not state(node.home), "nothing of it is in the account of the node's entry"
    stopped = ugro("serve", "stop", "echo", "--json")
    assert (service(stopped.stdout)["state"], service(stopped.stdout)["replicas"]) == ("stopped", []), stopped.stderr
    wait_until(lambda: not doors(mine) and not list(mine.glob(RUNS)), 30, "its processes and folders to be gone")


def test_a_door_that_starts_again_after_its_node_got_accounts_answers_from_there(
    farm: AccountsFarm, ugro: Ugro
) -> None:
    node, mine, whole = farm["n001"], farm["n001"].home_of(MINE), personal(farm).read_text()
    ugro.cluster = farm.cluster_yaml(nodes={"n001": {"remote_root": "~/grid_workspace"}})
    found = serve(ugro)
    assert answer(found["url"]) == b"1 one"
    before = wait_until(lambda: doors(node.home), 30, "the door in the account of the node's entry")
    ugro.cluster.write_text(whole)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: doors(mine), 60, "the door in the account of its user")
    assert answer(found["url"]) == b"1 one", "requests wait until it has its servers again"
    assert service(ugro("serve", "status", "echo", "--json").stdout)["door"]["is_open"]
    assert ugro("serve", "stop", "echo").returncode == 0
