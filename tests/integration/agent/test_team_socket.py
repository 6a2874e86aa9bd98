"""The team's socket, with real users of this machine: the kernel says who is on the other end, and who gets there."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.rig.agent import AgentProcess, log_tail
from tests.rig.identity import MEMBER
from tests.rig.waiting import wait_until
from ugro import Client
from ugro.kernel.access.operations import ListAuditEntries
from ugro.kernel.access.service import user_name
from ugro.kernel.access.team_server import open_socket
from ugro.kernel.agent.model import AgentStatus
from ugro.kernel.files.operations import GetJobResults, SyncCode, SyncSent, SyncTaken
from ugro.kernel.jobs.model import Job
from ugro.kernel.support.errors import NotAllowed

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
_CURL = shutil.which("curl")
_CLUSTER = f"""\
nodes: {{here: {{transport: local}}}}
dashboard: {{enabled: false}}
team: {{group: {MEMBER}, roles: {{}}, socket: SOCKET}}
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """That others can get to, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="team-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def client(place: Path) -> Iterator[Client]:
    home, file = place / "home", place / "cluster.yaml"
    home.mkdir(mode=0o700)
    file.write_text(_CLUSTER.replace("SOCKET", str(place / "team" / "agent.sock")))
    with ExitStack() as ending:
        agent = AgentProcess(home, file)
        ending.callback(agent.stop)
        assert agent.wait_ready(), log_tail(home)
        found = ending.enter_context(Client(home=home, cluster=file))
        yield found


def opened(client: Client) -> str:
    def look() -> str | None:
        status = client.running_agent()
        assert isinstance(status, AgentStatus)
        assert status.team_problem is None
        return status.team_socket

    return str(wait_until(look, 30, "the team's socket"))


def ask(
    socket: str, user: str | int, method: str, path: str, body: Any = None, group: str | None = None
) -> dict[str, Any] | None:
    """As another user, and in the group of the same name or another; None if there is no way in."""
    assert _CURL is not None
    command = [_CURL, "-s", "--unix-socket", socket, "-X", method, f"http://agent{path}"]
    if body is not None:
        command += ["-H", "content-type: application/json", "-d", json.dumps(body)]
    done = subprocess.run(
        command, capture_output=True, user=user, group=group or user, extra_groups=[], timeout=60, cwd="/"
    )
    return json.loads(done.stdout) if done.returncode == 0 else None


@pytest.mark.skipif(_CURL is None, reason="curl asks as another user, and is not installed")
def test_a_member_is_who_the_kernel_says_and_others_do_not_get_in(client: Client) -> None:
    socket = opened(client)
    folder, file = os.stat(Path(socket).parent), os.stat(socket)
    assert (stat.S_IMODE(folder.st_mode), stat.S_IMODE(file.st_mode)) == (0o750, 0o660)
    assert stat.S_IMODE(os.stat(client.home.path).st_mode) == 0o700, "the state stays private"

    assert ask(socket, MEMBER, "GET", "/v1/whoami") == {"user": MEMBER, "role": "user", "owner": "root"}
    run = {"command": ["true"], "sync": False, "cwd": "/", "name": "theirs"}
    made = ask(socket, MEMBER, "POST", "/v1/jobs", {"user": "root", "key": "k", "fields": run})
    assert made is not None
    assert made["job"]["user"] == MEMBER, "whatever name it claims"
    assert (ask(socket, MEMBER, "POST", "/v1/exec", {"key": "k", "nodes": [], "argv": ["id"]}) or {})["error"][
        "kind"
    ] == "not_allowed"
    assert ask(socket, "bin", "GET", "/v1/whoami") is None, "not in the group"
    assert ask(str(client.home.socket), MEMBER, "GET", "/v1/whoami") is None, "the owner's socket is the owner's"

    expect_nobody_without_a_name(socket)
    own = client.jobs.submit(fields={**run, "name": "own", "env": {"DATA": "hush"}})
    refused = ask(socket, MEMBER, "POST", f"/v1/jobs/{own.id}/cancel")
    assert refused is not None
    assert refused["error"]["message"] == f"job {own.id} is root's"
    client.jobs.wait(made["job"]["id"])
    client.jobs.wait(own.id)
    theirs = json.dumps(ask(socket, MEMBER, "GET", f"/v1/jobs/{own.id}/results"))
    assert "rank_0.log" in theirs
    assert "hush" not in theirs
    assert "config.json" not in theirs, "it has the values of variables"
    assert "config.json" in [part.name for part in client.ask(GetJobResults(str(own.id))).results.parts]
    entries = [one for one in client.ask(ListAuditEntries()).audit if one.user == MEMBER]
    did = {(one.action, one.outcome) for one in entries}
    assert did >= {("submit", "done"), ("cancel", f"refused: job {own.id} is root's")}
    assert all(", uid 1" in one.via for one in entries)


def expect_nobody_without_a_name(socket: str) -> None:
    uid = next(number for number in range(60_000, 65_000) if user_name(number) is None)
    refused = ask(socket, uid, "GET", "/v1/whoami", group=MEMBER)
    assert refused is not None
    assert refused["error"]["message"].startswith(f"user id {uid} has no name on the agent's machine")


@contextmanager
def acting_as(user: str) -> Iterator[None]:
    """The kernel then says so of connections, and files are read with that user's rights."""
    account = pwd.getpwnam(user)
    os.setegid(account.pw_gid)
    os.seteuid(account.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def test_a_member_sends_code_and_fetches_results_that_the_agent_cannot_read(
    client: Client, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = place / "theirs"
    for folder in (theirs, theirs / "code"):
        folder.mkdir(mode=0o700)
        os.chown(folder, *_ids(MEMBER))
    monkeypatch.setenv("UGRO_HOME", str(theirs / "ugro"))
    monkeypatch.chdir(theirs / "code")
    Path("work.py").write_text("open('made.txt', 'w').write('by work.py')")
    os.chown("work.py", *_ids(MEMBER))
    fields = {"command": ["python3", "work.py"], "name": "theirs"}
    monkeypatch.setenv("UGRO_SOCKET", opened(client))
    member = Client()
    try:
        as_owner = member.jobs.submit(fields=fields)  # and loads all modules while they can be read
        assert as_owner.user == "root"
        pulled(member, member.jobs.wait(as_owner.id), place / "owners")
        assert synced_files(member, dry_run=True) == synced_files(member) == 1
        member.close()
        shutil.rmtree(theirs / "ugro")
        with acting_as(MEMBER):
            job = member.jobs.wait(member.jobs.submit(fields=fields).id)
            assert (job.user, str(job.state)) == (MEMBER, "succeeded")
            assert pulled(member, job, theirs / "got") == "by work.py"
            assert synced_files(member) == 1
            with pytest.raises(NotAllowed, match="run by its owner"):
                member.restart_agent()
        entries = client.ask(ListAuditEntries(user=MEMBER)).audit
        assert [one.outcome for one in entries if one.action == "sync"] == ["done"]
    finally:
        member.close()


def pulled(client: Client, job: Job, target: Path) -> str:
    client.pull(job.id, target)
    [made] = target.rglob("made.txt")
    return made.read_text()


def synced_files(client: Client, *, dry_run: bool = False) -> int:
    """Of the current folder, on the one node."""
    taken, *reports = client.follow(SyncCode(str(Path.cwd()), dry_run=dry_run))
    assert isinstance(taken, SyncTaken)
    last = reports[-1]
    assert isinstance(last, SyncSent)
    assert (last.node.state, last.node.error) == ("would" if dry_run else "done", None)
    return taken.snapshot.files


def test_code_of_a_member_that_only_the_agent_could_read_is_refused_in_one_sentence(client: Client) -> None:
    body = {"folder": str(client.home.path), "nodes": [], "dry_run": True}
    refused = ask(opened(client), MEMBER, "POST", "/v1/sync", body)
    assert refused is not None
    assert refused["error"]["kind"] == "not_allowed"
    assert refused["error"]["message"] == f"the agent does not read files for you: {client.home.path}"


def _ids(user: str) -> tuple[int, int]:
    account = pwd.getpwnam(user)
    return account.pw_uid, account.pw_gid


def test_a_team_is_opened_and_closed_by_an_edit_of_the_file(client: Client, place: Path) -> None:
    socket, file = Path(opened(client)), place / "cluster.yaml"
    text = file.read_text()
    file.write_text("nodes: {here: {transport: local}}\ndashboard: {enabled: false}\n")
    wait_until(lambda: not socket.exists(), 30, "the socket to go")
    file.write_text(text.replace(MEMBER, "no-such-group"))
    problem = wait_until(lambda: (client.running_agent() or AgentStatus(0, "")).team_problem, 30, "a problem")
    assert problem == "there is no group no-such-group; create it: sudo groupadd no-such-group"
    file.write_text(text)
    wait_until(socket.exists, 30, "the socket to come back")


def test_the_socket_needs_a_folder_of_its_own(place: Path) -> None:
    (place / "taken").mkdir(mode=0o700)
    (place / "taken" / "diary").write_text("dear diary")
    with pytest.raises(NotAllowed, match="needs a folder of its own"):
        open_socket(place / "taken" / "agent.sock", MEMBER)
    assert stat.S_IMODE((place / "taken").stat().st_mode) == 0o700
    (place / "link").symlink_to(place / "taken")
    with pytest.raises(NotAllowed, match="not a folder of this user"):
        open_socket(place / "link" / "agent.sock", MEMBER)
    (place / "foreign").mkdir()
    os.chown(place / "foreign", 1, 1)
    with pytest.raises(NotAllowed, match="not a folder of this user"):
        open_socket(place / "foreign" / "agent.sock", MEMBER)
    deep = place / ("long" * 30)
    open_socket(deep / "agent.sock", MEMBER).close()
    open_socket(deep / "agent.sock", MEMBER).close()  # that of a dead agent is replaced
