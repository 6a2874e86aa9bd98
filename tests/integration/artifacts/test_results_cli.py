"""``ugro results`` as a user types it, over real sshds: what a job wrote is shown, copied and freed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.artifacts.conftest import results_of, until_home
from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import wait_until

TRAIN = """
import json, os, pathlib, socket, sys, time
def meet():  # nobody ends before the other has written
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == "0":
        with socket.create_server(place) as listener:
            return listener.accept()[0]
    for _ in range(600):
        try:
            return socket.create_connection(place)
        except ConnectionRefusedError:
            time.sleep(0.1)
out = pathlib.Path(os.environ["UGRO_OUTPUT"])
rank = os.environ["RANK"]
(out / f"rank_{rank}.txt").write_text(rank)
(out / "same.txt").write_text("the same everywhere")
if rank == "0":
    with (out / "metrics.jsonl").open("a") as file:
        for step in range(3):
            print(json.dumps({"step": step, "values": {"loss": 1 / (step + 1), "throughput": 10}}), file=file)
    (out / "tensorboard").mkdir()
    (out / "tensorboard" / "events").write_bytes(bytes(range(256)))
if "fail" in sys.argv:
    meet()
    sys.exit(3)
"""


@pytest.fixture(scope="module")
def farm() -> Iterator[SshdFarm]:
    with ExitStack() as stack:
        yield Farms(stack)(2)


@pytest.fixture(scope="module")
def ugro(farm: SshdFarm) -> Iterator[Ugro]:
    with commands(farm.cluster_yaml()) as ugro:
        script = ugro.home / "code" / "train.py"
        script.parent.mkdir()
        script.write_text(TRAIN)
        yield ugro


def run_folders(farm: SshdFarm) -> list[Path]:
    return [path for node in farm.nodes for path in node.home.glob("grid_workspace/.ugro/agents/*/runs/*.*")]


@pytest.fixture(scope="module")
def failed(ugro: Ugro) -> str:
    """The name of a training that failed on two nodes; what it wrote is home."""
    words = ("--nodes", "2", "--name", "fails", "--env", "MY_TOKEN=hidden")
    assert ugro("launch", str(ugro.home / "code" / "train.py"), *words, "--", "fail").returncode == 3
    until_home(ugro, "fails")
    return "fails"


def test_what_a_failed_training_wrote_on_two_nodes_is_home_and_then_gone_from_the_nodes(
    ugro: Ugro, farm: SshdFarm, failed: str
) -> None:
    made = results_of(ugro, failed)
    names = {file["name"] for file in made["listed"]}
    folder = Path(made["folder"])
    assert {"config.json", "metrics.jsonl", "rank_0.txt", "same.txt", "tensorboard/events"} <= names
    assert {"logs/rank_0.log", "logs/rank_1.log"} <= names
    other = [name for name in names if name.startswith("nodes/")]
    assert [name.rpartition("/")[2] for name in other] == ["rank_1.txt"], "what is the same is here once"
    assert (folder / "metrics.jsonl").read_text().count("loss") == 3
    assert (folder / "tensorboard" / "events").read_bytes() == bytes(range(256))
    assert (folder / "logs" / "rank_1.log").exists()
    config = (folder / "config.json").read_text()
    assert json.loads(config)["spec"]["env"] == {"MY_TOKEN": "***"}
    assert "hidden" not in config
    metrics = made["metrics"]
    assert (metrics["last_step"], metrics["best_step"], metrics["throughput"]) == (2, 2, 10)
    wait_until(lambda: not run_folders(farm), 30, "the runs to be removed from the nodes")


def test_results_are_shown_and_copied_and_what_differs_is_not_written_over(
    ugro: Ugro, failed: str, tmp_path: Path
) -> None:
    shown = ugro("results", failed).stdout
    assert "complete" in shown
    assert "best 0.3333 at step 2" in shown
    target = tmp_path / "pulled"
    assert ugro("results", failed, "--pull", str(target)).returncode == 0
    assert (target / "tensorboard" / "events").read_bytes() == bytes(range(256))
    assert (target / "logs" / "rank_0.log").exists()
    assert not list(target.rglob("*.times"))
    again = ugro("results", failed, "--pull", str(target))
    assert again.returncode == 0
    assert "copied 0 files" in again.stderr
    (target / "same.txt").write_text("mine")
    refused = ugro("results", failed, "--pull", str(target))
    assert refused.returncode == 1
    assert "same.txt" in refused.stderr
    assert (target / "same.txt").read_text() == "mine"
    assert ugro("results", failed, "--pull", str(target), "--force").returncode == 0
    assert (target / "same.txt").read_text() == "the same everywhere"


def test_pull_waits_for_what_is_on_its_way(ugro: Ugro, tmp_path: Path) -> None:
    word = 'head -c 20000000 /dev/zero > "$UGRO_OUTPUT/big"'
    assert ugro("run", "--name", "big", "--", "sh", "-c", word).returncode == 0
    assert ugro("results", "big", "--pull", str(tmp_path)).returncode == 0
    assert (tmp_path / "big").stat().st_size == 20_000_000


def test_a_job_that_goes_on_shows_what_came_so_far_and_keeps_it(ugro: Ugro) -> None:
    word = 'echo one > "$UGRO_OUTPUT/a"; while [ ! -e "$UGRO_OUTPUT/end" ]; do sleep 0.1; done'
    submitted = ugro("run", "--json", "--name", "live", "--", "sh", "-c", word)
    job = json.loads(submitted.stdout)["job"]["id"]
    wait_until(lambda: "a" in {f["name"] for f in results_of(ugro, "live")["listed"]}, 30, "the file to come home")
    assert results_of(ugro, "live")["state"] == "live"
    refused = ugro("results", str(job), "--rm", "--yes")
    assert refused.returncode == 6
    assert "its results are not complete yet" in refused.stderr
    assert ugro("cancel", str(job)).returncode == 0
    assert until_home(ugro, "live")["files"] >= 2, "also of a job that was cancelled"


def test_rm_frees_the_space_here_and_on_the_nodes_and_keeps_the_logs(ugro: Ugro, farm: SshdFarm) -> None:
    word = 'cd $UGRO_OUTPUT; mkdir checkpoints; for i in 1 2 3; do echo $i > checkpoints/step_$i; done; echo said'
    assert ugro("run", "--name", "frees", "--result-checkpoints", "last 1", "--", "sh", "-c", word).returncode == 0
    made = until_home(ugro, "frees")
    assert {file["name"] for node in made["nodes"] for file in node["left"]} == {
        "checkpoints/step_1", "checkpoints/step_2",
    }  # fmt: skip
    shown = ugro("results", "frees").stdout
    assert "2 files, 4 B left on the node:\n    results.checkpoints is last 1:\n" in shown
    kept = [path for node in farm.nodes for path in node.home.glob("grid_workspace/.ugro/agents/*/kept/*")]
    assert len(kept) == 1
    assert ugro("results", "frees", "--rm").returncode != 0, "it asks, and nobody answers"
    assert (Path(made["folder"]) / "attempt_1" / "output").exists()
    assert ugro("results", "frees", "--rm", "--yes").returncode == 0
    assert not kept[0].exists()
    assert not (Path(made["folder"]) / "attempt_1" / "output").exists()
    assert results_of(ugro, "frees")["state"] == "removed"
    assert ugro("logs", "frees").stdout == "said\n"
    gone = ugro("results", "frees", "--pull", "somewhere")
    assert gone.returncode == 6
    assert "were removed" in gone.stderr


def test_a_job_that_wrote_nothing_costs_no_word_with_its_node(ugro: Ugro) -> None:
    assert ugro("run", "--name", "quiet", "--", "true").returncode == 0
    made = results_of(ugro, "quiet")
    assert made["state"] == "none"
    assert not (Path(made["folder"]) / "attempt_1" / ".mirror").exists(), "nobody asked for outputs"


def test_names_that_no_terminal_should_see_are_shown_harmlessly_and_copied_as_they_are(
    ugro: Ugro, tmp_path: Path
) -> None:
    word = 'cd $UGRO_OUTPUT; echo x > "$(printf "a\\nb\\033[2J")"; echo y > "$(printf "\\377")"'
    assert ugro("run", "--name", "weird", "--", "sh", "-c", word).returncode == 0
    until_home(ugro, "weird")
    shown = ugro("results", "weird")
    assert "\x1b" not in shown.stdout
    assert ugro("results", "weird", "--pull", str(tmp_path)).returncode == 0
    assert {b"a\nb\x1b[2J", b"\xff"} <= set(os.listdir(os.fsencode(tmp_path)))
