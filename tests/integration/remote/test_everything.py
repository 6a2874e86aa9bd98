"""The rest of the commands from another machine: commands on nodes, sweeps, the dashboard, the Python API."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path

import pytest

from tests.rig import needs
from tests.rig.certificates import make_certificate
from tests.rig.machines import Machines, machines
from tests.rig.ports import free_port
from tests.rig.waiting import wait_until
from ugro import Client
from ugro.client.http import Connection
from ugro.features.remote_access.client.agent import RemoteClient
from ugro.features.remote_access.client.link import MasterLink
from ugro.features.remote_access.client.master import Master
from ugro.kernel.jobs.model import JobState
from ugro.kernel.jobs.operations import CancelJob
from ugro.kernel.support.errors import NotAllowed, UsageError
from ugro.kernel.support.state_dir import StateDir

pytestmark = pytest.mark.proof
WAIT_S = 90


@pytest.fixture
def link(pair: Machines) -> Iterator[MasterLink]:
    found = MasterLink(Master("n001", ssh_config=str(pair.farm.ssh_config)), StateDir(pair.laptop / ".ugro"))
    yield found
    found.close()


@contextmanager
def client_of(pair: Machines, monkeypatch: pytest.MonkeyPatch, *, is_named: bool) -> Iterator[Client]:
    """``is_named``: in the program; otherwise as for every command, in the environment."""
    if is_named:
        master = Master("n001", ssh_config=str(pair.farm.ssh_config))
        with RemoteClient(master, home=pair.laptop / ".ugro") as found:
            yield found
        return
    monkeypatch.setenv("UGRO_HOME", str(pair.laptop / ".ugro"))
    monkeypatch.setenv("UGRO_MASTER", "n001")
    monkeypatch.setenv("UGRO_MASTER_SSH_CONFIG", str(pair.farm.ssh_config))
    with Client() as found:
        yield found


def test_commands_sweeps_and_code_go_through_the_master(pair: Machines) -> None:
    (pair.files / "train.py").write_text("import sys\nprint('laptop', sys.argv[1:], flush=True)\n")
    done = pair.ugro("--master", "n001", "exec", "@all", "--", "echo", "hi")
    assert (done.returncode, "hi" in done.stdout) == (0, True), done.stderr
    swept = pair.ugro("--master", "n001", "sweep", "train.py", "--lr", "1,2")
    assert swept.returncode == 0, swept.stderr
    assert "2 complete" in swept.stderr
    for words in (["sync", "--dry-run"], ["sync"]):
        synced = pair.ugro("--master", "n001", "--json", *words)
        assert synced.returncode == 0, synced.stderr
        assert json.loads(synced.stdout)["snapshot"]["files"] == 1, words
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


@pytest.fixture
def own_dashboard() -> Iterator[Machines]:
    """A master whose dashboard others reach."""
    directory = Path(tempfile.mkdtemp(prefix="m"))
    try:
        with machines(directory) as found:
            file = found.master.home / ".ugro" / "cluster.yaml"
            file.parent.mkdir(mode=0o700)
            nodes = f"nodes: {{here: {{transport: local, remote_root: {directory}/root}}}}"
            file.write_text(f"{nodes}\ndashboard: {{host: 0.0.0.0, port: {free_port()}}}\n")
            yield found
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@needs.programs("openssl")
def test_what_is_odd_about_a_forwarded_dashboard_is_said(own_dashboard: Machines) -> None:
    pair, file = own_dashboard, own_dashboard.master.home / ".ugro" / "cluster.yaml"
    settings = file.read_text()

    def says(text: str) -> bool:
        with pair.running("--master", "n001", "dashboard", "--no-open") as running:
            wait_until(lambda: running.says("until Ctrl-C"), WAIT_S, "the port")
            return running.says(text)

    assert says("it is not encrypted")
    made = make_certificate(file.parent)
    files = f"certificate_file: {made}, key_file: {made.with_name('key.pem')}"
    file.write_text(settings.replace("host: 0.0.0.0", f"host: 0.0.0.0, {files}"))
    wait_until(lambda: says("its certificate is for another name"), WAIT_S, "the dashboard with a certificate")
    assert not says("it is not encrypted")


@pytest.mark.parametrize("is_named", [True, False])
def test_the_python_api_submits_follows_cancels_and_pulls(
    pair: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    text = "import time\nopen('made', 'w').write('here')\nprint('begun', flush=True)\ntime.sleep(600)\n"
    (tmp_path / "work.py").write_text(text)
    with client_of(pair, monkeypatch, is_named=is_named) as client:
        job = client.jobs.submit(fields={"script": "work.py", "workdir": str(tmp_path)})
        for seen in client.jobs.follow(job.id):
            if getattr(seen, "content", b"") == b"begun\n":
                client.ask(CancelJob(str(job.id)))
        assert client.jobs.wait(job.id).state is JobState.CANCELLED
        client.pull(job.id, tmp_path / "got")
        assert (tmp_path / "got" / "made").read_text() == "here"
        with pytest.raises(NotAllowed, match="works on n001 alone"):
            client.stop_agent()
        with pytest.raises(NotAllowed, match="works on n001 alone"):
            _ = client.backups


def test_requests_about_files_of_the_master_are_refused_there_too(link: MasterLink) -> None:
    connection = Connection(Path("/"), dial=link.open, headers={"ugro-remote": "key laptop"})
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
    odd = Connection(Path("/"), dial=link.open, headers={"ugro-remote": "x"})
    with pytest.raises(UsageError, match="invalid header"):
        odd.ask("GET", "/v1/agent", timeout_s=WAIT_S)
    odd.close()


def test_a_relay_connects_to_nothing_but_the_agent_and_its_dashboard(link: MasterLink) -> None:
    for place in ("", "127.0.0.1:22", "/etc/passwd", "agent "):
        with pytest.raises(NotAllowed, match="does not connect"):
            link.open(place)
    with link.open() as found:
        assert isinstance(found, socket.socket)
