"""What the libraries themselves write is read. BENCH_PEERS names a Python that has them; else this is skipped."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.rig.stores import in_metric_store
from ugro.kernel.telemetry.collector import Collector
from ugro.kernel.telemetry.metricstore import MetricStore

PYTHON = os.environ.get("BENCH_PEERS", "")
pytestmark = [pytest.mark.proof, pytest.mark.skipif(not PYTHON, reason="BENCH_PEERS is not set")]

_TENSORBOARD = """
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
writer = EventFileWriter("runs/exp1")
for step in range(300):
    value = Summary.Value(tag="train/loss", simple_value=1 / (step + 1))
    writer.add_event(Event(wall_time=1.7e9 + step, step=step, summary=Summary(value=[value])))
writer.close()
"""
_WANDB = """
import wandb
run = wandb.init(project="p", mode="offline", config={"lr": 0.01, "model": {"depth": 3}})
for step in range(300):
    run.log({"train": {"loss": 1 / (step + 1)}, "note": "x" * 500})
run.finish()
"""
_PARAMETERS = {"lr": "0.01", "model.depth": "3"}


@pytest.mark.parametrize(
    ("library", "script", "name", "parameters"),
    [
        ("tensorboard", _TENSORBOARD, "train/loss", {}),
        ("wandb", _WANDB, "train.loss", _PARAMETERS),
    ],
)
def test_what_a_library_writes_is_read(
    tmp_path: Path, library: str, script: str, name: str, parameters: dict[str, str]
) -> None:
    if subprocess.run([PYTHON, "-c", f"import {library}"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{library} is not installed there")
    output = tmp_path / "jobs/7/attempt_1/output"
    output.mkdir(parents=True)
    environment = {**os.environ, "WANDB_SILENT": "true"}
    subprocess.run([PYTHON, "-c", script], cwd=output, env=environment, check=True, capture_output=True, timeout=300)

    async def work(store: MetricStore) -> None:
        await Collector(tmp_path / "jobs", store).finish(7)
        figure = (await store.figures([7]))[7][name]
        assert (figure.count, figure.last_step, figure.most) == (300, 299, 1.0)
        assert figure.last == pytest.approx(1 / 300)
        assert (await store.parameters([7])).get(7, {}) == parameters

    in_metric_store(tmp_path, work)
