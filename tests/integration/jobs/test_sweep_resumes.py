"""A trial that makes way for an urgent job continues from its checkpoint; one that was made before is not run again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import Ugro
from tests.integration.sharing import commands
from tests.integration.sweeps import shown
from tests.rig.waiting import wait_until

pytestmark = pytest.mark.proof
_S = 90
SCRIPT = """
import json, os, pathlib, sys, time
kept = pathlib.Path(os.environ["UGRO_CHECKPOINT_DIR"]) / "step"
kept.parent.mkdir(parents=True, exist_ok=True)
begin = int(kept.read_text()) if kept.exists() else 0
with open(os.environ["MARKS"], "a") as file:
    file.write(f"{begin}\\n")
for step in range(begin + 1, int(os.environ["STEPS"]) + 1):
    with open(os.environ["UGRO_OUTPUT"] + "/metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "loss": 1 / step}) + "\\n")
    part = kept.with_name(f"{step}.new")
    part.write_text(str(step))
    part.rename(kept)
    time.sleep(0.1)
"""


@pytest.fixture
def ugro() -> Iterator[Ugro]:
    with commands() as ugro:
        (ugro.home / "code").mkdir()
        (ugro.home / "code" / "train.py").write_text(SCRIPT)
        yield ugro


def started(ugro: Ugro, name: str, *words: str, steps: int) -> None:
    env = ["--env", f"MARKS={ugro.home / 'marks'}", "--env", f"STEPS={steps}"]
    own = ["--workdir", str(ugro.home / "code"), "--name", name, "--metric", "loss", "--json"]
    done = ugro("sweep", "train.py", *own, *env, *words)
    assert done.returncode == 0, done.stderr


def marks(ugro: Ugro) -> list[int]:
    path: Path = ugro.home / "marks"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_a_trial_that_is_preempted_continues_from_its_checkpoint_as_the_same_trial(ugro: Ugro) -> None:
    cores = str(os.cpu_count())
    soft = ["--priority", "batch", "--preemptible", "--cpus", cores]
    started(ugro, "soft", "--x", "1..1000", "--trials", "1", "--method", "random", *soft, steps=60)
    wait_until(lambda: (shown(ugro, "soft")["trials"] or [{}])[0].get("step") or 0, _S, "some steps")
    urgent = ugro("run", "--priority", "urgent", "--cpus", cores, "--", "true")
    assert urgent.returncode == 0, urgent.stderr
    found = wait_until(lambda: (one := shown(ugro, "soft"))["state"] == "done" and one, _S, "the sweep to be done")
    assert found
    [trial] = found["trials"]
    assert (trial["state"], trial["step"]) == ("complete", 60), trial
    begun = marks(ugro)
    assert len(begun) == 2, begun
    assert begun[0] == 0 < begun[1], "the second attempt has not begun at the beginning"


def test_a_trial_that_succeeded_in_another_sweep_is_not_run_again(ugro: Ugro) -> None:
    for name, values in (("one", "1,2"), ("two", "1,2,3")):
        started(ugro, name, "--x", values, "--cache", steps=2)
        wait_until(lambda name=name: shown(ugro, name)["state"] == "done", _S, "the sweep to be done")  # type: ignore[misc]
    assert len(marks(ugro)) == 3
    found = shown(ugro, "two")
    assert [trial["state"] for trial in found["trials"]] == ["complete"] * 3
    assert [trial["best"] for trial in found["trials"]] == [0.5] * 3
    assert found["trials"][0]["reason"].startswith("cached from job ")
