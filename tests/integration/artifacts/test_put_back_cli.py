"""A training that saves its snapshot in its working directory goes on there when it is tried again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands

# The shape of PyTorch's tutorial on fault tolerance: a trainer that loads its snapshot if there is one.
SCRIPT = """
import json, os, signal, sys

class Trainer:
    def __init__(self, path, total):
        self.path, self.total, self.epochs_run, self.has_loaded = path, total, 0, False
        if os.path.exists(path):
            with open(path) as file:
                self.epochs_run = json.load(file)["EPOCHS_RUN"]
            self.has_loaded = True
            print(f"Resuming training from snapshot at epoch {self.epochs_run}", flush=True)

    def train(self, ended_at):
        if os.environ["RANK"] != "0" and not self.has_loaded:
            signal.pause()  # as a rank does that waits for the first one
        for epoch in range(self.epochs_run, self.total):
            print(f"epoch {epoch}", flush=True)
            if epoch == ended_at and not self.has_loaded:
                os.kill(os.getpid(), 9) if sys.argv[1] == "kill" else os._exit(3)
            if int(os.environ["RANK"]) == 0:
                with open(self.path, "w") as file:
                    json.dump({"EPOCHS_RUN": epoch + 1}, file)

open("notes.txt", "a").write("changed by the job\\n")
if not os.path.exists("vocabulary.txt"):  # made once, and read from then on
    open("vocabulary.txt", "w").write("a b c")
Trainer("snapshot.pt", 6).train(3)
"""


@pytest.fixture(scope="module")
def ugro() -> Iterator[Ugro]:
    with ExitStack() as stack, commands(Farms(stack)(2).cluster_yaml()) as ugro:
        folder = ugro.home / "project"
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        (folder / "notes.txt").write_text("of the user\n")
        yield ugro


def launch(ugro: Ugro, *words: str, how: str = "exit") -> tuple[int, str]:
    script = str(ugro.home / "project" / "train.py")
    done = ugro("launch", *words, "--workdir", str(ugro.home / "project"), script, how)
    return done.returncode, done.stdout + done.stderr


def events(ugro: Ugro, job: str) -> str:
    return ugro("events", job).stdout


def test_a_retry_goes_on_at_the_snapshot_of_the_attempt_that_was_killed(ugro: Ugro) -> None:
    code, said = launch(ugro, "--retries", "1", "--name", "killed", "--nodes", "2", how="kill")
    assert code == 0, said
    assert "snapshot.pt, vocabulary.txt of attempt 1 are put back" in said
    log = ugro("logs", "killed", "--rank", "0").stdout
    assert "Resuming training from snapshot at epoch 3" in log
    assert "epoch 2" not in log
    other = ugro("logs", "killed", "--rank", "1").stdout
    assert "Resuming training from snapshot at epoch 3" in other, "the other node has the snapshot of the first, too"
    told = events(ugro, "killed")
    assert "snapshot.pt, vocabulary.txt of attempt 1 are put back" in told
    assert "notes.txt of attempt 1 is a part of the code, and not put back" in told
    folder = Path(json.loads(ugro("results", "killed", "--json").stdout)["job"]["results"]["folder"])
    assert json.loads((folder / "snapshot.pt").read_text()) == {"EPOCHS_RUN": 6}
    assert (folder / "vocabulary.txt").read_text() == "a b c", "what is as it was belongs to the results, too"
    assert (folder / "notes.txt").read_text() == "of the user\nchanged by the job\n"


def test_a_job_that_failed_goes_on_when_it_is_submitted_again_and_a_finished_one_begins_anew(ugro: Ugro) -> None:
    code, _ = launch(ugro, "--name", "once")
    assert code != 0
    assert ugro("retry", "once").returncode == 0
    log = ugro("logs", "last").stdout
    assert "Resuming training from snapshot at epoch 3" in log
    assert "put back" in events(ugro, "last")
    assert ugro("retry", "last").returncode != 0, "it fails in its third epoch, as the first did"
    assert "Resuming" not in ugro("logs", "last").stdout


def test_it_can_be_turned_off(ugro: Ugro) -> None:
    code, _ = launch(ugro, "--retries", "1", "--no-put-back", "--name", "off")
    assert code != 0
    assert "Resuming" not in ugro("logs", "off").stdout
    assert "put back" not in events(ugro, "off")
    assert launch(ugro, "--name", "fresh")[0] != 0
    assert ugro("retry", "fresh", "--no-put-back").returncode != 0
    assert "Resuming" not in ugro("logs", "last").stdout
