"""The rest of the commands from another machine: commands on nodes, sweeps, the dashboard, the Python API."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path

import pytest

from tests.rig.machines import Machines
from tests.rig.waiting import wait_until
from ugro.client.http import Connection
from ugro.client.remote.client import RemoteClient
from ugro.client.remote.master import Master
from ugro.core.errors import NotAllowed, UsageError
from ugro.core.job import JobState

pytestmark = pytest.mark.proof
WAIT_S = 90


@pytest.fixture
def client(pair: Machines) -> Iterator[RemoteClient]:
    master = Master("n001", ssh_config=str(pair.farm.ssh_config))
    with RemoteClient(master, home=pair.laptop / ".ugro") as found:
        yield found


def test_commands_sweeps_and_code_go_through_the_master(pair: Machines) -> None:
    (pair.files / "train.py").write_text("import sys\nprint('laptop', sys.argv[1:], flush=True)\n")
    done = pair.ugro("--master", "n001", "exec", "@all", "--", "echo", "hi")
    assert (done.returncode, "hi" in done.stdout) == (0, True), done.stderr
    swept = pair.ugro("--master", "n001", "sweep", "train.py", "--lr", "1,2")
    assert swept.returncode == 0, swept.stderr
    assert "2 complete" in swept.stderr
    synced = pair.ugro("--master", "n001", "--json", "sync")
    assert synced.returncode == 0, synced.stderr
    for words in (["health"], ["node", "ls"], ["events"], ["metrics"], ["audit"], ["why", "last"]):
        assert pair.ugro("--master", "n001", *words).returncode == 0, words


def test_the_audit_log_has_one_entry_for_a_submission_by_the_account_there(pair: Machines) -> None:
    (pair.files / "train.py").write_text("print('x')\n")
    done = pair.ugro("--master", "n001", "--json", "run", "-d", "--", "true")
    number = json.loads(done.stdout)["job"]["id"]
    entries = json.loads(pair.on_master("--json", "audit").stdout)["audit"]
    about = [one for one in entries if one["action"] == "submit" and one["subject"] == str(number)]
    assert len(about) == 1
    assert not [one for one in entries if "wanted" in json.dumps(one) or "needs" in one["outcome"]]


def test_the_dashboard_is_reached_through_a_port_of_this_machine(pair: Machines) -> None:
    with pair.running("--master", "n001", "dashboard", "--no-open") as running:
        wait_until(lambda: running.says("until Ctrl-C"), WAIT_S, "the port")
        url = running.out[0].strip()
        assert url.startswith("http://127.0.0.1:")
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        with opener.open(url, timeout=WAIT_S) as answer:
            page = answer.read().decode()
        assert "<title>" in page
        assert "UGRO" in page
        os.kill(running.process.pid, signal.SIGINT)
        assert running.end() == 130


def test_the_python_api_submits_follows_and_cancels(client: RemoteClient, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    job = client.jobs.submit(fields={"script": "work.py", "workdir": str(tmp_path)})
    for seen in client.jobs.follow(job.id):
        if getattr(seen, "content", b"") == b"begun\n":
            client.jobs.cancel(job.id)
    assert client.jobs.wait(job.id).state is JobState.CANCELLED
    with pytest.raises(NotAllowed, match="works on n001 alone"):
        client.stop_agent()
    with pytest.raises(NotAllowed, match="works on n001 alone"):
        _ = client.backups


def test_requests_about_files_of_the_master_are_refused_there_too(client: RemoteClient) -> None:
    connection = client.connection()
    for method, path, body in (
        ("PUT", "/v1/cluster", {"path": "/etc/passwd"}),
        ("PUT", "/v1/cluster/file", {"path": "/tmp/x", "wish": {}}),
        ("GET", "/v1/cluster/file?path=/etc/passwd", None),
        ("POST", "/v1/agent/stop", None),
        ("GET", "/v1/ssh-hosts?ssh_config=/etc/passwd", None),
    ):
        with pytest.raises(NotAllowed, match="on the master alone"):
            connection.ask(method, path, body, timeout_s=WAIT_S)
    connection.close()
    odd = Connection(Path("/"), dial=client.link.open, headers={"ugro-remote": "x"})
    with pytest.raises(UsageError, match="invalid header"):
        odd.ask("GET", "/v1/agent", timeout_s=WAIT_S)
    odd.close()


def test_a_relay_connects_to_nothing_but_the_agent_and_its_dashboard(client: RemoteClient) -> None:
    for place in ("", "127.0.0.1:22", "/etc/passwd", "agent "):
        with pytest.raises(NotAllowed, match="does not connect"):
            client.link.open(place)
    with client.link.open() as found:
        assert isinstance(found, socket.socket)
