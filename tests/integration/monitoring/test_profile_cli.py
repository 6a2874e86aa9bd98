"""``ugro profile`` on trainings of two ranks: one that writes the records of a training without being one, and, since
torch is slow to import, a real one that the long tests share.
"""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.training import Pretend
from tests.rig.waiting import wait_until
from ugro.train.rules.shares import Mode

TRAIN = """
import os, time, warnings
warnings.simplefilter("ignore")
import torch, ugro.train as ut
torch.set_num_threads(1)
run = ut.init(seed=1, balance="off")
model = run.wrap(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.keep(model=model, optimizer=optimizer)
made = torch.Generator().manual_seed(1)
dataset = torch.utils.data.TensorDataset(torch.randn(80, 8, generator=made), torch.zeros(80, 1))
loader = run.loader(dataset, global_batch=8)
for epoch in run.epochs(100000):
    for x, y in loader:
        with run.step() as step:
            time.sleep(0.01 if run.rank else 0.05)
            loss = step.loss(torch.nn.functional.mse_loss(model(x), y))
            step.backward(loss)
            optimizer.step(); optimizer.zero_grad()
        run.log(loss=loss)
"""
# The first rank writes records as a training does, a step at a time, from when the file of its first argument is there.
TELLS = """
import json, os, sys, time
if os.environ["RANK"] == "0":
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    with open(sys.argv[2]) as records, open(os.environ["UGRO_OUTPUT"] + "/metrics.jsonl", "w", buffering=1) as out:
        for line in records:
            out.write(line)
            if json.loads(line).get("step", 0) >= 60:
                time.sleep(0.05)
time.sleep(1000)
"""
LIMIT_S = 150

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def ugro() -> Iterator[Ugro]:
    with ExitStack() as stack:
        farm = Farms(stack)(2)
        nodes = {node.name: {"python": sys.executable} for node in farm.nodes}
        with commands(farm.cluster_yaml(nodes=nodes)) as ugro:
            _code(ugro).mkdir()
            (_code(ugro) / "train.py").write_text(TRAIN)
            (_code(ugro) / "tells.py").write_text(TELLS)
            yield ugro


@pytest.fixture(scope="module")
def job(ugro: Ugro) -> str:
    """Goes on until it is ended, and has told of some steps, of which the first rank's are the slowest."""
    pretend = Pretend([0.01, 0.002], batch=8, mode=Mode.OFF, names=tuple(_nodes(ugro)))
    pretend.run(4000)
    pretend.records.insert(60, {"kind": "checkpoint", "path": "/there/checkpoints/step_50", "step": 50})
    records, go = ugro.home / "steps.jsonl", ugro.home / "go"
    records.write_text("".join(json.dumps(record) + "\n" for record in pretend.records))
    _launch(ugro, "tells", "--nodes", "2", "--", str(go), str(records))
    seen = ugro("profile", "tells", "--json")
    assert seen.returncode == 4
    assert "docs/training.md" in seen.stderr
    go.touch()
    return _with_steps(ugro, "tells")


@pytest.fixture(scope="module")
def training(ugro: Ugro) -> str:
    """A real one."""
    _launch(ugro, "train", "--nodes", "2")
    return _with_steps(ugro, "train")


def _code(ugro: Ugro) -> Path:
    return ugro.home / "code"


def _launch(ugro: Ugro, name: str, *words: str) -> None:
    done = ugro("launch", str(_code(ugro) / f"{name}.py"), "--name", name, "--detach", *words)
    assert done.returncode == 0, done.stderr


def _with_steps(ugro: Ugro, name: str) -> str:
    def has_steps() -> bool:
        found = ugro("profile", name, "--json")
        return found.returncode == 0 and json.loads(found.stdout)["job"]["profile"]["steps"] >= 5

    wait_until(has_steps, LIMIT_S, "the first steps to come home")
    return name


def profile_of(ugro: Ugro, *words: str) -> dict[str, Any]:
    done = ugro("profile", *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["job"]["profile"]
    return found


@pytest.mark.proof
def test_a_slow_rank_is_told_while_the_training_runs(ugro: Ugro, training: str) -> None:
    found = profile_of(ugro, training)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["imbalance"] > 1.2
    assert found["lost_share"] > 0.1
    finding = next(one for one in found["findings"] if one["kind"] == "slow_rank")
    assert finding["ranks"] == [0]
    assert "UGRO_BALANCE=adaptive" in finding["remedy"]
    for rank in found["ranks"]:
        parts = ("data_s", "forward_s", "backward_s", "optimizer_s", "other_s", "communication_s", "waiting_s")
        assert sum(rank[part] for part in parts) == pytest.approx(found["step_s"], rel=0.5)


def test_without_a_terminal_it_is_a_table_of_whole_values(ugro: Ugro, job: str) -> None:
    done = ugro("profile", job, "--steps", "3")
    header, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert header[:4] == ["rank", "node", "samples", "own_s"]
    assert [row[0] for row in rows] == ["0", "1"]
    assert float(rows[0][header.index("step_s")]) > 0
    assert "slowest" in done.stderr


def test_on_a_terminal_it_is_a_bar_for_each_rank_without_colour_too(ugro: Ugro, job: str) -> None:
    shown = _on_a_terminal(ugro, "profile", job, env={"NO_COLOR": "1"})
    bars = re.findall(r"\|([dfboxc. ]+)\|", shown)
    assert len(bars) == 2
    assert len(bars[0]) == len(bars[1])
    assert "." in bars[1], "the fast rank waits"
    assert "d data  f forward" in shown
    assert "\x1b" not in shown
    assert "\x1b[32m" in _on_a_terminal(ugro, "profile", job)


def test_watching_shows_new_steps_until_ctrl_c(ugro: Ugro, job: str) -> None:
    watching = ugro.start("profile", job, "--watch", "--json")
    try:
        assert watching.stdout is not None
        steps = [json.loads(watching.stdout.readline())["job"]["profile"]["last_step"] for _ in range(2)]
        assert steps[1] > steps[0]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 0
    finally:
        watching.kill()
        watching.communicate()


@pytest.mark.proof
def test_a_trace_of_every_rank_is_recorded_at_the_same_steps_and_comes_home(ugro: Ugro, training: str) -> None:
    done = ugro("profile", training, "--trace", "3", "--json", timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    traces = json.loads(done.stdout)["job"]["traces"]
    assert [trace["rank"] for trace in traces] == [0, 1]
    assert len({trace["step"] for trace in traces}) == 1
    assert len({trace["node"] for trace in traces}) == 2
    for trace in traces:
        events = json.loads(gzip.decompress(Path(trace["path"]).read_bytes()))["traceEvents"]
        names = [event.get("name", "") for event in events]
        assert any("addmm" in name or "linear" in name for name in names)
        assert any("Optimizer.step" in name for name in names)
        forwards = [name for name in names if name == "DistributedDataParallel.forward"]
        assert len(forwards) == 3
    again = ugro("profile", training, "--trace", "1", "--json", timeout=LIMIT_S)
    assert again.returncode == 0, again.stderr
    later = json.loads(again.stdout)["job"]["traces"]
    assert [trace["rank"] for trace in later] == [0, 1]
    assert later[0]["step"] > traces[0]["step"] + 2


def test_what_cannot_be_asked_is_said(ugro: Ugro, job: str) -> None:
    assert "expected a whole number from 1 to 1000" in ugro("profile", job, "--trace", "0").stderr
    assert "takes no other option" in ugro("profile", job, "--trace", "1", "--watch").stderr
    missing = ugro("profile", job, "--attempt", "7")
    assert (missing.returncode, "has no attempt 7" in missing.stderr) == (4, True)
    assert ugro("run", "--name", "plain", "--", "true").returncode == 0
    plain = ugro("profile", "plain")
    assert plain.returncode == 4
    assert "job" in plain.stderr
    assert "has written no profile" in plain.stderr
    refused = ugro("profile", "plain", "--trace", "2")
    assert refused.returncode == 6
    assert "only future steps" in refused.stderr


def test_when_it_has_ended_its_results_tell_of_it(ugro: Ugro, job: str) -> None:
    metrics = _results_at_its_end(ugro, job)
    watched = ugro("profile", job, "--watch", "--json")
    assert watched.returncode == 0
    assert len(watched.stdout.splitlines()) == 1, "there is nothing to wait for"
    assert metrics["checkpoint_step"] == 50


@pytest.mark.proof
def test_a_training_that_is_ended_is_saved_first(ugro: Ugro, training: str) -> None:
    assert _results_at_its_end(ugro, training)["checkpoint_step"] > 0


def _results_at_its_end(ugro: Ugro, job: str) -> dict[str, Any]:
    assert ugro("cancel", job).returncode == 0
    ugro("wait", job)

    def results() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(ugro("results", job, "--json").stdout)["job"]["results"]
        return found

    wait_until(lambda: results()["state"] == "home", 60, "its results to be home")
    metrics: dict[str, Any] = results()["metrics"]
    assert metrics["throughput_name"] == "samples_per_s"
    assert metrics["throughput"] > 0
    assert metrics["imbalance"] > 1.1
    assert 0 < metrics["device_use"] < 1
    shown = ugro("results", job).stdout
    assert re.search(r"checkpoint .*checkpoints/\S+ \(step \d+\)", shown), shown
    return metrics


def test_a_launch_of_what_was_faster_on_fewer_nodes_is_told_so(ugro: Ugro) -> None:
    """The records of the first are written by the script itself, as a training would."""
    pretend = Pretend([0.001, 0.05], fixed_s=[0.001, 0.2], names=tuple(_nodes(ugro)))
    records = ugro.home / "records.jsonl"
    records.write_bytes(b"".join(pretend.run(60)))
    script = _code(ugro) / "copies.py"
    script.write_text(
        "import os, shutil\n"
        f"if os.environ['RANK'] == '0': shutil.copy({str(records)!r}, os.environ['UGRO_OUTPUT'] + '/metrics.jsonl')\n"
    )
    first = ugro("launch", str(script), "--nodes", "2", "--name", "small")
    assert first.returncode == 0, first.stderr
    assert "note: when it last ran" not in first.stderr

    def is_known() -> bool:
        return ugro("profile", "small").returncode == 0

    wait_until(is_known, 60, "its profile to be home")
    second = ugro("launch", str(script), "--nodes", "2", "--name", "small", "--dry-run")
    slow = _nodes(ugro)[1]
    assert f"without {slow} this job would be" in second.stderr, second.stderr
    assert "--nodes 1" in second.stderr
    alone = ugro("launch", str(script), "--nodes", "1", "--name", "small", "--dry-run")
    assert "note: when it last ran" not in alone.stderr
    launched = ugro("launch", str(script), "--nodes", "2", "--name", "small")
    assert launched.returncode == 0
    assert f"note: when it last ran, as job {json.loads(ugro('status', '--json').stdout)['jobs'][1]['id']}" in (
        launched.stderr
    )


def _nodes(ugro: Ugro) -> list[str]:
    return [node["name"] for node in json.loads(ugro("node", "ls", "--json").stdout)["nodes"]]


def _on_a_terminal(ugro: Ugro, *words: str, env: dict[str, str] | None = None) -> str:
    ours, theirs = pty.openpty()
    environment = {"TERM": "xterm", **ugro.environment(env)}
    command = subprocess.Popen(ugro.argv(*words), env=environment, cwd=ugro.home, stdout=theirs, stdin=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := _read(ours):
            shown += piece
        assert command.wait(60) == 0
    finally:
        os.close(ours)
        command.kill()
        command.wait()
    return shown.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # as a terminal tells its end
        return b""
