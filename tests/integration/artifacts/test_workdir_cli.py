"""Files that a plain script makes in its working directory, as a user sees them, over real sshds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.artifacts.conftest import results_of, until_home
from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import wait_until

# What most scripts do: folders beside the script, a table, an input that is changed, a copy with an old date.
SCRIPT = """
import os, pathlib, shutil, helper
os.makedirs("checkpoints", exist_ok=True)
for epoch in range(3):
    pathlib.Path(f"checkpoints/epoch_{epoch}.pt").write_text(str(epoch) * 10)
pathlib.Path("results.csv").write_text("a,b\\n1,2\\n")
pathlib.Path("config.txt").write_text("lr=2")
pathlib.Path("touched.txt").touch()
shutil.copy2("data.txt", "copied.txt")
os.utime("copied.txt", (0, 0))
pathlib.Path("cache.log").write_text("left behind")
pathlib.Path("big.bin").write_bytes(bytes(3_000_000))
os.symlink("results.csv", "latest")
pathlib.Path("new\\nline.txt").write_text("x")
"""


@pytest.fixture(scope="module")
def farm() -> Iterator[SshdFarm]:
    with ExitStack() as stack:
        yield Farms(stack)(2)


@pytest.fixture(scope="module")
def ugro(farm: SshdFarm) -> Iterator[Ugro]:
    with commands(farm.cluster_yaml()) as ugro:
        yield ugro


def project(ugro: Ugro) -> Path:
    folder = ugro.home / "project"
    folder.mkdir(exist_ok=True)
    for name, text in {
        "train.py": SCRIPT, "helper.py": "", "config.txt": "lr=1", "touched.txt": "same", "data.txt": "data",
        ".gitignore": "*.log\n",
    }.items():  # fmt: skip
        (folder / name).write_text(text)
    return folder


def made(results: dict[str, Any]) -> set[str]:
    return {one["name"] for one in results["listed"] if not one["name"].startswith(("logs/", "config.json"))}


@pytest.fixture(scope="module")
def plain(ugro: Ugro) -> dict[str, Any]:
    words = ("--workdir", str(project(ugro)), "--result-workdir-limit", "1MB", "--name", "plain")
    done = ugro("run", *words, "--", "python3", "train.py")
    assert done.returncode == 0, done.stderr
    assert "files: 7 files, 47 B in" in done.stderr, done.stderr
    assert "left: 2 files, 2.9 MiB on" in done.stderr
    assert "ugro results 1 --fetch" in done.stderr
    return until_home(ugro, "plain")


def test_what_a_script_made_or_changed_comes_and_its_code_does_not(ugro: Ugro, plain: dict[str, Any]) -> None:
    checkpoints = {f"checkpoints/epoch_{epoch}.pt" for epoch in range(3)}
    assert made(plain) == {*checkpoints, "results.csv", "config.txt", "copied.txt", "new\nline.txt"}
    folder = Path(plain["folder"])
    assert (folder / "config.txt").read_text() == "lr=2"
    assert (folder / "checkpoints" / "epoch_2.pt").read_text() == "2" * 10
    [node] = plain["nodes"]
    assert {one["name"] for one in node["unsendable"]} == {"latest"}


def test_what_did_not_come_is_listed_with_its_reason_and_the_command_that_fetches_it(
    ugro: Ugro, plain: dict[str, Any]
) -> None:
    [node] = plain["nodes"]
    reasons = {one["name"]: one["reason"] for one in node["left"]}
    assert reasons == {"big.bin": "over results.workdir_limit, 976.6 KiB", "cache.log": "named by .gitignore"}
    shown = ugro("results", "plain").stdout
    assert "2 files, 2.9 MiB left on the node:" in shown
    assert "fetch them: ugro results 1 --fetch" in shown
    assert "new\\nline.txt" in shown, "a name stays on its line"
    assert "left: 2 files" in ugro("why", "plain").stdout
    assert "2 files, 2.9 MiB on n00" in ugro("status", "plain").stdout


def test_what_was_left_is_fetched_when_somebody_asks_for_it(ugro: Ugro, farm: SshdFarm, plain: dict[str, Any]) -> None:
    [node] = plain["nodes"]
    kept = [path for one in farm.nodes for path in one.home.glob("grid_workspace/.ugro/agents/*/kept/1.1")]
    assert sorted(path.name for path in kept[0].iterdir()) == ["big.bin", "cache.log"]
    nothing = ugro("results", "plain", "--fetch", "*.pt")
    assert nothing.returncode == 4
    assert "no file that was left on a node matches *.pt" in nothing.stderr
    done = ugro("results", "plain", "--fetch", "*.log")
    assert (done.returncode, "fetched 1 file, 11 B" in done.stderr) == (0, True), done.stderr
    assert (Path(plain["folder"]) / "cache.log").read_text() == "left behind"
    assert [path.name for path in kept[0].iterdir()] == ["big.bin"]
    away = farm[node["node"]]
    away.stop()
    refused = ugro("results", "plain", "--fetch")
    assert refused.returncode == 5, refused.stderr
    assert node["node"] in refused.stderr.splitlines()[0]
    assert [path.name for path in kept[0].iterdir()] == ["big.bin"], "nothing is lost"
    away.start()
    wait_until(lambda: ugro("results", "plain", "--fetch").returncode == 0, 30, "the node to be back")
    after = results_of(ugro, "plain")
    assert {"big.bin", "cache.log"} < made(after)
    assert (after["state"], after["nodes"][0]["left_count"]) == ("home", 0)
    assert not kept[0].exists(), "what is here is not there any more"
    assert "has left no files" in ugro("results", "plain", "--fetch").stderr


def test_every_file_is_listed_when_nobody_looks(ugro: Ugro) -> None:
    command = "mkdir many; for i in $(seq 1200); do echo $i > many/$i; done"
    assert ugro("run", "--no-sync", "--name", "many", "--", "sh", "-c", command).returncode == 0
    until_home(ugro, "many")
    lines = ugro("results", "many").stdout.splitlines()
    assert sum(line.startswith("many/") for line in lines) == 1200
    assert len(made(results_of(ugro, "many"))) == 1200


def test_collecting_can_be_turned_off_and_a_folder_of_the_users_is_left_alone(ugro: Ugro, tmp_path: Path) -> None:
    assert ugro("run", "--no-result-workdir", "--name", "off", "--", "sh", "-c", "echo 1 > a").returncode == 0
    assert results_of(ugro, "off")["state"] == "none"
    done = ugro("run", "--cwd", str(tmp_path), "--name", "mine", "--", "sh", "-c", "echo 1 > a")
    assert done.returncode == 0
    assert results_of(ugro, "mine")["state"] == "none"
    assert f"what it wrote in {tmp_path} stays there" in ugro("results", "mine").stdout
    assert (tmp_path / "a").exists()


# Fails after its second checkpoint, once; resumes from what it finds in its own folder.
RESUMES = """
import glob, os, pathlib, sys, time
place, first_end = sys.argv[1:]
os.makedirs(place, exist_ok=True)
assert os.path.samefile(place, os.environ["UGRO_CHECKPOINT_DIR"])
found = sorted(os.path.basename(name) for name in glob.glob(place + "/epoch_*.pt"))
resume = os.environ.get("UGRO_RESUME_DIR")
print("found", *found, "resume", *(os.listdir(resume) if resume else ["nothing"]), flush=True)
begin = int(found[-1][6:-3]) + 1 if found else 0
for epoch in range(begin, begin + 2):
    unfinished = pathlib.Path(place, f"epoch_{epoch}.pt.tmp")
    unfinished.write_text(f"weights {epoch}")
    unfinished.rename(pathlib.Path(place, f"epoch_{epoch}.pt"))
pathlib.Path("epochs.csv").write_text(str(epoch))
while os.environ["UGRO_ATTEMPT"] == "1":
    if first_end == "fail":
        sys.exit(3)
    time.sleep(0.1)
"""


def resuming(ugro: Ugro, name: str) -> Path:
    folder = ugro.home / name
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "pretrained_100.pt").write_text("of the code")
    (folder / "train.py").write_text(RESUMES)
    return folder


def stored_on(farm: SshdFarm, job: int) -> list[Path]:
    inside = [f"checkpoints/{job}", f"resume/{job}", f"kept/{job}.*", f"runs/{job}.*"]
    agents = [agent for node in farm.nodes for agent in node.home.glob("grid_workspace/.ugro/agents/*")]
    return [path for agent in agents for one in inside for path in agent.glob(one)]


@pytest.mark.parametrize("place", ["checkpoints", "ckpt/run1"])
def test_a_retry_finds_the_checkpoints_of_earlier_attempts_in_its_own_folder(
    ugro: Ugro, farm: SshdFarm, place: str
) -> None:
    folder = resuming(ugro, f"resumes-{place[:4]}")
    option = () if place == "checkpoints" else ("--checkpoint-dir", place)
    words = ("--workdir", str(folder), "--retries", "1", "--name", folder.name, *option)
    done = ugro("launch", *words, "train.py", "--", place, "fail")
    assert done.returncode == 0, done.stderr
    assert "found epoch_0.pt epoch_1.pt resume epoch_1.pt" in done.stdout
    assert "files: 5 files" in done.stderr, "as many as the program wrote"
    results = until_home(ugro, folder.name)
    assert made(results) == {*(f"{place}/epoch_{epoch}.pt" for epoch in range(4)), "epochs.csv"}
    here = Path(results["folder"]) / place
    assert sorted(path.name for path in here.iterdir()) == [f"epoch_{epoch}.pt" for epoch in range(4)]
    assert (here / "epoch_0.pt").read_text() == "weights 0"
    wait_until(lambda: not stored_on(farm, results["job"]), 20, "the nodes to forget the job")


@pytest.mark.proof
def test_checkpoints_outlive_a_node_that_dies_and_a_retry_elsewhere_has_the_newest(ugro: Ugro, farm: SshdFarm) -> None:
    folder = resuming(ugro, "moves")
    words = ("--workdir", str(folder), "--retries", "1", "--name", "moves", "--result-checkpoints", "last 3", "--json")
    job = json.loads(ugro("launch", *words, "train.py", "--", "checkpoints", "wait").stdout)["job"]["id"]
    wait_until(lambda: "checkpoints/epoch_1.pt" in made(results_of(ugro, "moves")), 30, "the checkpoint to be here")
    first = results_of(ugro, "moves")["nodes"][0]["node"]
    assert ugro("node", "drain", first).returncode == 0
    farm[first].power_off()
    farm[first].start()
    assert ugro("wait", "moves", "--timeout", "60").returncode == 0
    assert "found epoch_1.pt resume epoch_1.pt" in ugro("logs", "moves").stdout
    results = until_home(ugro, "moves")
    assert made(results) == {*(f"checkpoints/epoch_{epoch}.pt" for epoch in range(4)), "epochs.csv"}
    here = Path(results["folder"]) / "checkpoints"
    assert {path.name: path.read_text() for path in here.iterdir()} == {
        f"epoch_{epoch}.pt": f"weights {epoch}" for epoch in range(4)
    }
    wait_until(lambda: not stored_on(farm, job), 20, "the nodes to forget the job")
    assert ugro("node", "resume", first).returncode == 0
