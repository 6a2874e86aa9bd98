"""A training in a few numbers: the same ones wherever they are shown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.rig.metric_files import simple
from tests.rig.stores import in_metric_store
from tests.rig.training import Pretend
from ugro.features.experiments.rules.table import Column
from ugro.kernel.jobs.model import JobState
from ugro.kernel.telemetry.collector import Collector
from ugro.kernel.telemetry.curves import Wanted
from ugro.kernel.telemetry.metricstore import MetricStore
from ugro.kernel.telemetry.model import (
    Experiment,
    Measured,
    MetricsSummary,
    is_averaged,
    main_loss,
    read_totals,
    summary,
)


async def measured(store: MetricStore) -> Measured:
    figures = (await store.figures([7])).get(7, {})
    return Measured(figures, await store.means(7, [name for name in figures if is_averaged(name)], 1))


def summed_up(tmp_path: Path, lines: Iterable[bytes], events: bytes = b"") -> MetricsSummary | None:
    """From the files of a job; and every other place that shows its loss shows the same."""
    output = tmp_path / "jobs/7/attempt_1/output"
    (output / "runs").mkdir(parents=True)
    written = [line.rstrip() + b"\n" for line in lines]
    (output / "metrics.jsonl").write_bytes(b"".join(written))
    (output / "runs/events.out.tfevents.17.host").write_bytes(events)
    found: list[MetricsSummary | None] = []

    async def work(store: MetricStore) -> None:
        await Collector(tmp_path / "jobs", store).finish(7)
        known = await measured(store)
        found.append(summary(known, read_totals(written)))
        if found[0] is not None and (name := main_loss(known.figures)) is not None:
            run = Experiment(7, "train", "ann", JobState.SUCCEEDED, 0.0, figures=known.figures)
            values = [Column(kind, name).value(run, 0.0) for kind in ("last", "best")]
            assert values == [found[0].final_loss, found[0].best_loss]
            [key] = await store.keys(Wanted(("job/7",), (name,), rank=0))
            assert key.last_value == found[0].final_loss

    in_metric_store(tmp_path, work)
    return found[0]


def records(*some: dict[str, object]) -> list[bytes]:
    return [json.dumps(one).encode() for one in some]


def test_a_training_is_summed_up_from_its_records(tmp_path: Path) -> None:
    lines = records(*({"step": at, "values": {"loss": loss, "throughput": 100 * at}} for at, loss in ((1, 3), (2, 1))))
    found = summed_up(tmp_path, [*lines, *records({"step": 3, "values": {"loss": 2.0, "lr": 0.1}})])
    assert found is not None
    assert (found.last_step, found.loss_name, found.final_loss, found.best_loss) == (3, "loss", 2.0, 1.0)
    assert (found.best_step, found.throughput, found.throughput_name) == (2, 150.0, "throughput")


def test_what_is_no_record_is_passed_over(tmp_path: Path) -> None:
    lines = [b"", b"{", b"[1]", b"\xff\xff", b'"loss"', b'{"step": true, "values": {"loss": "low"}}', b"[" * 100_000]
    lines += [b'{"step": 4, "loss": 0.25}', b'{"step": 5, "values": {"loss": NaN}}', b'{"step": 6, "val']
    found = summed_up(tmp_path, lines)
    assert found is not None
    assert (found.final_loss, found.last_step, found.lost_at_step) == (0.25, 5, 5)


def test_of_nothing_there_is_no_summary(tmp_path: Path) -> None:
    assert summed_up(tmp_path, [b"no", b"{"]) is None


def test_what_a_script_logs_as_its_loss_is_the_loss_everywhere(tmp_path: Path) -> None:
    """The loss of the first rank, as logged, and the mean of all ranks are different values: one of them is shown."""
    pretend = Pretend([0.001, 0.003], batch=40, noise=0.0, communication_s=0.02)
    pretend.run(5)
    pretend._put("log", step=5, epoch=0, values={"loss": 9.0, "gpu_util": 80})
    pretend._put("checkpoint", step=5, path="/there/step_5.pt")
    found = summed_up(tmp_path, records(*pretend.records))
    assert found is not None
    assert (found.final_loss, found.best_loss, found.best_step) == (9.0, 9.0, 5)
    assert found.throughput_name == "samples_per_s"
    assert found.throughput is not None
    assert found.imbalance is not None
    assert found.imbalance > 1.1
    assert (found.device_use, found.device_use_name) == (0.8, "gpu_util")
    assert (found.checkpoint, found.checkpoint_step) == ("/there/step_5.pt", 5)


def test_the_mean_of_all_ranks_is_the_loss_of_a_script_that_logs_none(tmp_path: Path) -> None:
    pretend = Pretend([0.001, 0.001], batch=20, noise=0.0, communication_s=0.005, data_s=[0.005, 0.005])
    found = summed_up(tmp_path, pretend.run(10))
    assert found is not None
    assert found.final_loss is not None
    assert found.device_use == pytest.approx(0.5)
    assert found.device_use_name == "time computing"
    assert found.throughput == pytest.approx(1000)


def test_a_loss_that_is_no_number_any_more_is_said(tmp_path: Path) -> None:
    losses = ["NaN", 0.5, 0.25, "Infinity", "NaN"]
    lines = records(*({"kind": "log", "step": at, "values": {"loss": loss}} for at, loss in enumerate(losses)))
    found = summed_up(tmp_path, lines)
    assert found is not None
    assert (found.final_loss, found.best_loss, found.lost_at_step) == (0.25, 0.25, 3)


def test_a_script_that_writes_event_files_has_loss_and_throughput_as_well(tmp_path: Path) -> None:
    values = (("train/loss", 0.5), ("val/loss", 0.1), ("perf/samples_per_sec", 40.0))
    found = summed_up(tmp_path, [], b"".join(simple(tag, at, value / at) for at in (1, 2) for tag, value in values))
    assert found is not None
    assert (found.loss_name, found.final_loss, found.best_loss, found.best_step) == ("train/loss", 0.25, 0.25, 2)
    assert (found.throughput, found.throughput_name) == (30.0, "perf/samples_per_sec")
