"""Folders of the submitter that travel with a job: by content, once to each node, as they were at submission."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.conftest import Ugro, in_loop
from tests.integration.sharing import commands
from tests.rig.agent import holder
from tests.rig.code import AGENT, CodeRig, seen
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import wait_until, wait_until_dead
from ugro.kernel.files.code.folders import FolderTransfers
from ugro.kernel.links.node import Identity
from ugro.kernel.links.transport import node_program
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import TimedOut, Unreachable
from ugro.node import trees
from ugro.node.files.folders import Place
from ugro.node.runs.runspec import FolderAt

MIB = 1 << 20


@pytest.fixture
def here(ugro: Ugro, tmp_path: Path) -> Path:
    """The folder where commands are typed; two nodes of this machine are the cluster."""
    ugro.cluster = tmp_path / "cluster.yaml"
    entry = "  n{n}: {{transport: local, remote_root: {folder}/n{n}}}\n"
    nodes = "".join(entry.format(n=n, folder=tmp_path) for n in (1, 2))
    ugro.cluster.write_text(f"sync: {{folder_limit: 64MB}}\nnodes:\n{nodes}")
    return ugro.home / "cwd"


@pytest.fixture(scope="module")
def shared() -> Iterator[Ugro]:
    with commands() as ugro:
        yield ugro


def test_a_job_reads_its_folders_as_they_were_and_its_results_have_none_of_them(shared: Ugro) -> None:
    here = shared.home / "cwd"
    model = shared.home / "user" / "tiny model"
    model.mkdir()
    (model / "weights").write_text("the model\n")
    (model / ".gitignore").write_text("*\n")
    (shared.home / "user" / "text.txt").write_text("a text\n")
    command = "cat $UGRO_FOLDER_MODEL/weights $UGRO_FOLDER_DATA; echo made > new"
    (here / "job.yaml").write_text(f"command: {command}\nfolders: {{model: ~/tiny model}}\n")
    words = ["launch", "-f", "job.yaml", "--folder", "data=../user/text.txt"]
    planned = shared(*words, "--dry-run")
    assert "  folder   data: " in planned.stdout, planned.stderr
    assert "1 file, 7 B" in planned.stdout
    assert "in $UGRO_FOLDER_MODEL" in planned.stdout
    done = shared(*words)
    assert (done.returncode, done.stdout) == (0, "the model\na text\n"), done.stderr
    files = json.loads(shared("results", "last", "--json").stdout)["job"]["results"]["listed"]
    assert [one["name"] for one in files if one["name"] not in ("config.json", "logs/rank_0.log")] == ["new"]
    (model / "weights").write_text("edited\n")
    assert shared("retry", "last").stdout == "the model\na text\n"
    assert shared(*words).stdout == "edited\na text\n"


def test_a_folder_that_cannot_go_is_one_error(shared: Ugro) -> None:
    home = shared.home / "user"
    (home / "out").mkdir()
    (home / "out" / "away").symlink_to("/etc")
    for given, said in (
        ("model=nowhere", "folder model: {cwd}/nowhere: no such file or directory"),
        ("model=/dev/null", "folder model: /dev/null is neither a folder nor a file"),
        ("out=../user/out", "away leads out of the folder, to /etc"),
        ("nowhere", "--folder: expected a path on this machine"),
        ("a-b=../user", "--folder: expected names of letters, digits and _"),
    ):
        done = shared("run", "--folder", given, "true")
        assert done.returncode == 2, done.stderr
        assert said.format(cwd=shared.home / "cwd") in done.stderr
        assert done.stderr.count("error:") == 1
        assert "hint:" in done.stderr


@pytest.mark.proof
def test_a_folder_goes_over_ssh_to_every_node_once_and_is_kept_there(ugro: Ugro, cluster: SshdFarm) -> None:
    here = ugro.home / "cwd"
    (here / "model").mkdir()
    (here / "model" / "weights").write_bytes(os.urandom(9 * MIB))
    (here / "train.py").write_text(
        "import os, hashlib\nfolder = os.environ['UGRO_FOLDER_MODEL']\n"
        "print(os.environ['RANK'], hashlib.sha256(open(folder + '/weights', 'rb').read()).hexdigest())\n"
        "try:\n    open(folder + '/new', 'w')\nexcept OSError:\n    print('read-only')\n"
    )
    (here / ".ugroignore").write_text("model\n")
    for _ in range(2):
        done = ugro("launch", "train.py", "--nodes", "3", "--folder", "model=model")
        assert done.returncode == 0, done.stderr
        lines = ugro("logs", "last").stdout.splitlines()
        assert len({line.split()[-1] for line in lines if "read-only" not in line}) == 1
    sent = [line for line in (ugro.home / "agent.log").read_text().splitlines() if "sent folder" in line]
    assert len(sent) == 3, sent
    tidied = json.loads(ugro("node", "gc", "--json").stdout)["tidied"]
    assert all(one["kept_bytes"] >= 9 * MIB for one in tidied), tidied


@asynccontextmanager
async def transfers(rig: CodeRig, name: str) -> AsyncIterator[FolderTransfers]:
    async with rig.agent(name) as sending:
        store = Store(rig.folder / "state2.db")
        await store.open()
        found = FolderTransfers(rig.home, store.code, sending._node, Identity(AGENT, 1))
        try:
            yield found
        finally:
            await found.close()
            await store.close()


@pytest.mark.proof
@in_loop
async def test_a_link_that_is_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    rig = CodeRig(tmp_path)
    (rig.source / "large").write_bytes(os.urandom(160 * MIB))
    (rig.source / "small").write_text("x")
    taken = rig.take()
    rig.limits("n1").write_text(f"{len(node_program().content) + 90 * MIB}\n{len(node_program().content) + 5 * MIB}")
    async with transfers(rig, "n1") as sending:
        cuts = 0
        async with asyncio.timeout(120):
            while True:
                try:
                    await sending.ensure_all("n1", [taken.id])
                    break
                except (Unreachable, TimedOut):
                    cuts += 1
                    await asyncio.sleep(0.05)
        assert cuts >= 2
        assert sending.totals.bytes < 250 * MIB, "not all of it travelled again"
    place = Place(str(rig.root("n1")))
    found = seen(place.path(FolderAt(trees.parse_id(taken.id), b"")))
    assert {name: one[2] for name, one in found.items() if isinstance(one, tuple)} == {
        name: one[2] for name, one in seen(os.fsencode(rig.source)).items() if isinstance(one, tuple)
    }


@pytest.mark.proof
def test_an_agent_that_is_killed_while_it_sends_a_folder_starts_the_job_once(
    ugro: Ugro, here: Path, tmp_path: Path
) -> None:
    folder = ugro.home / "user" / "model"
    folder.mkdir()
    for number in range(6):
        (folder / f"part{number}").write_bytes(os.urandom(8 * MIB))
    starts = tmp_path / "starts"
    words = ["sh", "-c", f"echo started >> {starts}; cat $UGRO_FOLDER_MODEL/part* | wc -c"]
    arriving = [tmp_path / node / ".ugro" / "folders" for node in ("n1", "n2")]
    assert ugro("agent", "start").returncode == 0
    assert ugro("run", "-d", "--folder", f"model={folder}", *words).returncode == 0
    agent = holder(ugro.home)
    assert agent is not None
    wait_until(lambda: any(list(one.glob("*.arriving")) for one in arriving if one.is_dir()), 60, "it to be sent")
    os.kill(agent, 9)
    wait_until_dead([agent])
    for path in folder.iterdir():
        path.unlink()  # what was submitted is kept
    assert ugro("wait", "last").returncode == 0
    assert ugro("logs", "last").stdout.strip() == str(6 * 8 * MIB)
    assert starts.read_text() == "started\n"


@pytest.mark.proof
def test_tidying_up_takes_no_folder_from_a_job_that_runs_or_waits(ugro: Ugro, here: Path, tmp_path: Path) -> None:
    go = ugro.home / "user" / "go"
    for name in ("used", "queued", "idle"):
        (ugro.home / "user" / name).write_text(name)
    hold = f"while ! test -e {go}; do sleep 0.05; done; cat $UGRO_FOLDER_DATA"
    run = ["--folder", f"data={ugro.home}/user/used", "sh", "-c", hold]
    assert ugro("run", "-d", "--name", "runs", *run).returncode == 0
    waits = ["--after", "runs", "--folder", f"data={ugro.home}/user/queued", "sh", "-c", "cat $UGRO_FOLDER_DATA"]
    assert ugro("run", "-d", "--name", "waits", *waits).returncode == 0
    idle = ["--cpus", "0", "--folder", f"data={ugro.home}/user/idle", "sh", "-c", "cat $UGRO_FOLDER_DATA"]
    assert ugro("run", *idle).stdout == "idle"
    wait_until(lambda: "running" in ugro("status", "runs").stdout, 20, "the job to run")
    for path in [*tmp_path.glob("n*/.ugro/folders/*/record.json"), *(ugro.home / "folders" / "roots").iterdir()]:
        os.utime(path, (0, 0))
    tidied = json.loads(ugro("node", "gc", "--all", "--json").stdout)["tidied"]
    assert all(one["error"] is None for one in tidied), tidied
    left = [path.name for path in tmp_path.glob("n*/.ugro/folders/*") if len(path.name) == 64]
    assert len(left) == 1, "what runs is left on its node"
    assert len(list((ugro.home / "folders" / "roots").iterdir())) == 2, "and here what waits, too"
    go.touch()
    assert ugro("wait", "runs", "waits").returncode == 0
    assert [ugro("logs", name).stdout for name in ("runs", "waits")] == ["used", "queued"]


@pytest.mark.proof
def test_a_folder_over_the_limit_is_refused_and_says_which(ugro: Ugro, here: Path) -> None:
    large = ugro.home / "user" / "large"
    with large.open("wb") as file:
        file.truncate(65 * 10**6)
    done = ugro("run", "--folder", f"model={large}", "true")
    assert done.returncode == 2
    assert "more than sync.folder_limit (61.0 MiB)" in done.stderr


@pytest.mark.proof
def test_the_result_cache_knows_the_folders(ugro: Ugro, here: Path) -> None:
    data = ugro.home / "user" / "data.txt"
    words = ["run", "--cache", "--folder", f"data={data}", "sh", "-c", "cat $UGRO_FOLDER_DATA"]
    (here / "x").write_text("some code")
    data.write_text("one")
    assert ugro(*words).stdout == "one"
    assert "an identical job" in ugro(*words).stderr
    data.write_text("two")
    assert ugro(*words).stdout == "two"


