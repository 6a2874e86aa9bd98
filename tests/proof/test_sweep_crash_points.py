"""The agent is killed at every step of a sweep: no trial is lost, none is made twice, and no point is asked twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.proof.place import Place
from tests.rig.engines import on_each
from tests.rig.stores import use_engine
from tests.rig.tiers import sample
from tests.rig.waiting import wait_until
from ugro import Client
from ugro.features.sweeps.client import SweepWish
from ugro.features.sweeps.model import Budget, SweepReport
from ugro.features.sweeps.operations import GetSweep
from ugro.kernel.support.process import SWEEP_POINTS

_REACHED_S = 60
_OVER_S = 90
# The best point ends by itself; the others run until they are pruned.
SCRIPT = """
import json, os, sys, time
x = int(sys.argv[1].partition("=")[2])
with open("begun", "a") as file:
    file.write(f"{x}\\n")
for step in range(1, 11 if x == 0 else 6000):
    with open(os.environ["UGRO_OUTPUT"] + "/metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "loss": x + 1 / step}) + "\\n")
    time.sleep(0.1)
"""
LATER = ("trial.recorded@3", "trial.submitted@3", "trial.ended@2", "trial.closed@3")


@on_each
@pytest.mark.parametrize("point", sample([*SWEEP_POINTS, *LATER]))
def test_a_sweep_whose_agent_is_killed_at_any_step_loses_and_doubles_nothing(point: str, engine: str) -> None:
    with Place(2) as place:
        use_engine(place.home)
        code = place.folder / "code"
        code.mkdir()
        (code / "train.py").write_text(SCRIPT)
        armed = place.agent(point)
        assert armed.wait_ready()
        begin(place, code)
        try:
            wait_until(lambda: armed.was_killed, _REACHED_S, "the agent to die")
        except AssertionError as error:
            raise AssertionError(place.seen(f"{point} was not reached")) from error
        finally:
            armed.kill()
        found = ended(place)
        begun = Counter((code / "begun").read_text().split())
        assert begun == {"0": 1, "1": 1, "2": 1, "3": 1}, (begun, found)
        assert [(trial.number, trial.values["x"]) for trial in found.trials] == [(1, 0), (2, 1), (3, 2), (4, 3)]
        assert [trial.state for trial in found.trials] == ["complete", "pruned", "pruned", "pruned"], found
        jobs = place.ask(lambda client: client.jobs.newest(None))
        assert sorted(job.id for job in jobs) == sorted(trial.job or 0 for trial in found.trials)


def begin(place: Place, code: Path) -> None:
    fields = {"script": "train.py", "args": ["--x", "0,1,2,3"], "cwd": str(code)}
    wish = SweepWish(fields, metric="loss", prune="asha", budget=Budget(parallel=2))
    place.ask(lambda client: client.sweeps.start(wish=wish, env={}, key="one"))


def ended(place: Place) -> SweepReport:
    def look(client: Client) -> SweepReport:
        return client.ask(GetSweep("train")).sweep

    try:
        wait_until(lambda: place.ask(look).is_over, _OVER_S, "the sweep to be over")
    except AssertionError as error:
        raise AssertionError(place.seen(f"{error}: {place.ask(look)}")) from error
    return place.ask(look)
