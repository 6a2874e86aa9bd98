"""``ugro sweep --study``: workers of one Optuna script share a study that the agent keeps; whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from tests.integration.conftest import Ugro
from tests.integration.sharing import commands
from tests.integration.sweeps import over, shown
from tests.rig.waiting import wait_until

pytestmark = pytest.mark.proof
_OVER_S = 60
# It has a storage and a seed of its own, as such scripts do, and knows nothing of UGRO.
SCRIPT = """
import os, sys, time
import optuna

def objective(trial):
    x = trial.suggest_float("x", -10, 10)
    kind = trial.suggest_categorical("kind", ["a", "b"])
    with open(os.environ["MARKS"], "a") as file:
        file.write(f"{trial.number} {os.getpid()}\\n")
    for step in range(int(os.environ["STEPS"])):
        trial.report(abs(x), step)
        time.sleep(0.1)
    return x * x + (kind == "a")

if __name__ == "__main__":
    study = optuna.create_study(storage="sqlite:///mine.db", sampler=optuna.samplers.TPESampler(seed=3))
    study.enqueue_trial({"x": 1.0, "kind": "b"})
    study.optimize(objective, n_trials=int(sys.argv[1]))
    print("the best is", study.best_value)
"""


@pytest.fixture(scope="module")
def ugro() -> Iterator[Ugro]:
    with commands() as ugro:
        (ugro.home / "code").mkdir()
        (ugro.home / "code" / "search.py").write_text(SCRIPT)
        yield ugro


def started(ugro: Ugro, name: str, *words: str, steps: int = 2) -> None:
    env = ["--env", f"MARKS={ugro.home / name}", "--env", f"STEPS={steps}"]
    own = ["--name", name, "--workdir", str(ugro.home / "code"), *env, "--json", "--existing-environment", sys.prefix]
    done = ugro("sweep", "--study", *own, "--parallel", "2", *words)
    assert done.returncode == 0, done.stderr


def marks(ugro: Ugro, name: str) -> list[tuple[int, int]]:
    """The trials that began, with the processes that ran them."""
    path: Path = ugro.home / name
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines]


def test_two_workers_share_one_study_and_its_trials_are_seen(ugro: Ugro) -> None:
    started(ugro, "shared", "search.py", "10")
    found = over(ugro, "shared")
    assert (found["state"], found["reason"]) == ("done", "all 10 trials were made"), ugro("logs", "1").stdout
    assert [(trial["number"], trial["state"]) for trial in found["trials"]] == [(n, "complete") for n in range(10)]
    assert Counter(number for number, _ in marks(ugro, "shared")) == Counter(range(10)), "each once"
    assert len({trial["parameters"]["x"] for trial in found["trials"]}) == 10, "one seed, and other points"
    assert found["trials"][0]["parameters"] == {"x": 1.0, "kind": "b"}, "enqueued by both, and made once"
    best = min(found["trials"], key=lambda trial: float(trial["best"]))
    assert found["best"] == best["number"]
    assert ugro("sweep", "best", "shared").stdout.startswith(f"trial {best['number']} (job {best['job']})")
    assert ugro("sweep", "importance", "shared").stdout.startswith("parameter")
    for worker in found["workers"]:
        assert "the best is" in ugro("logs", str(worker["job"])).stdout
    assert ugro("sweep", "resume", "shared", "--trials", "+4").returncode == 0
    assert len(over(ugro, "shared")["trials"]) == 14
    path = ugro.home / "sweeps" / str(found["id"]) / "journal.log"
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    assert len(optuna.load_study(study_name="shared", storage=storage).trials) == 14, "Optuna opens it, too"


def test_a_worker_that_is_killed_loses_one_trial_which_is_made_again(ugro: Ugro) -> None:
    started(ugro, "killed", "--retries", "1", "search.py", "6", steps=8)
    wait_until(lambda: len(marks(ugro, "killed")) >= 3, _OVER_S, "three trials to begin")
    number, process = marks(ugro, "killed")[-1]
    os.kill(process, signal.SIGKILL)
    found = over(ugro, "killed")
    states = Counter(trial["state"] for trial in found["trials"])
    assert states == {"complete": 6, "failed": 1}, found
    lost = found["trials"][number]
    assert (lost["state"], lost["reason"]) == ("failed", "its worker ended")
    again = [trial for trial in found["trials"] if trial["parameters"] == lost["parameters"]]
    assert [trial["state"] for trial in again] == ["failed", "complete"]
    assert max(Counter(number for number, _ in marks(ugro, "killed")).values()) == 1


def test_an_agent_that_is_killed_loses_no_trial_and_doubles_none(ugro: Ugro) -> None:
    started(ugro, "agent", "search.py", "12", steps=5)
    for count in (2, 6):
        # The first command after a kill starts the next agent.
        wait_until(lambda: shown(ugro, "agent") and len(marks(ugro, "agent")) >= count, _OVER_S, "trials to begin")  # noqa: B023
        os.kill(json.loads(ugro("agent", "status", "--json").stdout)["agent"]["pid"], signal.SIGKILL)
    found = over(ugro, "agent")
    assert Counter(trial["state"] for trial in found["trials"]) == {"complete": 12}, found
    assert Counter(number for number, _ in marks(ugro, "agent")) == Counter(range(12))
    assert [worker["state"] for worker in found["workers"]] == ["complete", "complete"]


def test_a_study_can_be_stopped_and_goes_on_with_what_it_has(ugro: Ugro) -> None:
    started(ugro, "halt", "search.py", "8", steps=20)
    wait_until(lambda: len(marks(ugro, "halt")) >= 2, _OVER_S, "two trials to begin")
    assert ugro("sweep", "stop", "halt").returncode == 0
    found = over(ugro, "halt")
    assert (found["state"], {trial["state"] for trial in found["trials"]}) == ("stopped", {"failed"})
    assert ugro("sweep", "resume", "halt", "--trials", "3").returncode == 0
    found = over(ugro, "halt")
    assert Counter(trial["state"] for trial in found["trials"]) == {"failed": 2, "complete": 3}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--study", "search.py", "--metric", "loss"], "--metric and --study exclude each other"),
        (["--study", "search.py", "--dry-run"], "a study has no --dry-run"),
        (["--study"], "a script or a sweep file is needed"),
    ],
)
def test_a_mistake_is_one_clear_error(ugro: Ugro, words: list[str], says: str) -> None:
    done = ugro("sweep", *words, "--workdir", str(ugro.home / "code"))
    assert (done.returncode, says in done.stderr, done.stderr.count("error:")) == (2, True, 1), done.stderr
