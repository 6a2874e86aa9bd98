"""Curves of scripts that know nothing of UGRO: from files of other libraries, and from what they print."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rig.metric_files import (
    config,
    event,
    field,
    history,
    hparams,
    mlflow_run,
    simple,
    tensor_scalar,
    wandb_file,
)
from tests.rig.stores import in_metric_store
from ugro.telemetry.collector import Collector
from ugro.telemetry.curves import Wanted
from ugro.telemetry.metricstore import MOST_FOUND, MetricStore
from ugro.telemetry.series import Points
from ugro.telemetry.sources import huggingface, mlflow, tensorboard, wandb
from ugro.telemetry.sources.discovery import prefixes, writer_of
from ugro.telemetry.sources.reading import Piece, Read, Reading

EVENTS = "events.out.tfevents.1700000000.host.17.0"


def collected(
    tmp_path: Path, work: Callable[[Path, Collector, MetricStore], Awaitable[None]], attempt: str = "attempt_1"
) -> None:
    folder = tmp_path / "jobs/7" / attempt
    folder.mkdir(parents=True)

    async def run(store: MetricStore) -> None:
        await work(folder, Collector(tmp_path / "jobs", store, looking_share=math.inf), store)

    in_metric_store(tmp_path, run)


async def curves(store: MetricStore, rank: int | None = None) -> dict[str, list[float]]:
    found = await store.points(Wanted(("job/7",), rank=rank))
    return {key.key: points.values for key, points in found.items()}


def put(path: Path, content: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(content.encode() if isinstance(content, str) else content)


# --- where curves come from ---------------------------------------------------------------------------------------


def test_event_files_become_curves_while_they_grow(tmp_path: Path) -> None:
    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        file = folder / "output/runs/exp1" / EVENTS
        half = simple("loss", 2, 0.25)
        put(file, simple("loss", 0, 1.0) + tensor_scalar("loss", 1, 0.5) + half[:-3])
        assert await collector.collect(7) == 2
        put(file, half[-3:] + simple("lr", 2, math.nan))
        assert await collector.collect(7) == 2
        assert await collector.finish(7) == 0
        found = await curves(store)
        assert found["loss"] == [1.0, 0.5, 0.25]
        assert math.isnan(found["lr"][0])

    collected(tmp_path, work)


def test_a_record_larger_than_what_is_read_at_once_is_in_nobodys_way(tmp_path: Path) -> None:
    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        file = folder / "output" / EVENTS
        picture = event("picture", 1, field(4, b"\x07" * (5 << 20)))
        put(file, simple("a", 1, 1.0) + picture[:-9])
        assert await collector.collect(7) == 1
        put(file, picture[-9:] + simple("a", 2, 2.0))
        await collector.finish(7)
        assert await curves(store) == {"a": [1.0, 2.0]}

    collected(tmp_path, work)


def test_wandb_runs_become_curves_and_parameters(tmp_path: Path) -> None:
    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        file = folder / "output/wandb/offline-run-20240101_000000-ab12/run-ab12.wandb"
        records = [history(step, {"loss": 1 / (step + 1), "val.acc": 0.5, "note": "x" * 300}) for step in range(400)]
        given = {"lr": 0.01, "epochs": 3, "model": {"depth": 3}, "_wandb": {"v": 1}, "api_key": "secret"}
        put(file, wandb_file(config(given), *records))
        await collector.finish(7)
        found = await store.points(Wanted(("job/7",), ("loss",)))
        [points] = found.values()
        assert points.steps == list(range(400))
        assert points.values == [1 / (step + 1) for step in range(400)]
        assert (await curves(store))["val.acc"] == [0.5] * 400
        assert await store.parameters([7]) == {7: {"epochs": "3", "lr": "0.01", "model.depth": "3"}}

    collected(tmp_path, work)


def test_an_mlflow_store_becomes_curves_and_parameters(tmp_path: Path) -> None:
    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        run = folder / "output/mlruns/0/0123abc"
        mlflow_run(run, {"train/loss": [1.0, 0.5], "bad": [math.nan]}, {"lr": "0.1"})
        put(run / "artifacts/metrics.bin", "1 2 3\n")
        await collector.finish(7)
        assert (await curves(store))["train/loss"] == [1.0, 0.5]
        assert await store.parameters() == {7: {"lr": "0.1"}}

    collected(tmp_path, work)


def test_lines_of_a_trainer_in_the_log_become_curves(tmp_path: Path) -> None:
    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        log = folder / "logs/rank_0.log"
        put(log, "loading\n" + "{'not': 'a number'}\n{'loss': 9.0}\n" * 3)
        assert await collector.collect(7) == 0
        put(log, "\r  5%|▌   | 50/1000 [00:10<03:20, 4.7it/s]\r     \r{'loss': 2.5, 'grad_norm': nan, 'epoch': 0.1}\n")
        put(log, "\r100%|████| 8/8 [00:01<00:00]\r{'eval_loss': 2.25, 'epoch': 0.1}\n")
        put(log, "\r 10%|▌   | 100/1000 [00:20]\r{'loss': '2.0', 'learning_rate': '5e-05', 'epoch': '0.2'}\n")
        put(log, "{'loss': 1.0, 'ep")
        assert await collector.collect(7) == 5
        found = {key.key: points for key, points in (await store.points(Wanted(("job/7",)))).items()}
        assert (found["loss"].steps, found["loss"].values) == ([50, 100], [2.5, 2.0])
        assert found["eval_loss"].steps == [50]
        assert "epoch" not in found
        assert all(found["loss"].times_ms), "a curve without a time would count as old"
        put(log, "och': 0.3}\n")
        assert await collector.finish(7) == 1

    collected(tmp_path, work)


def test_lines_that_a_buffer_held_back_are_counted(tmp_path: Path) -> None:
    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        log = folder / "logs/rank_0.log"
        put(log, "\r 40%|▌| 400/1000 [00:10]\n")
        for begin in (0, 3):
            put(log, "".join(f"{{'loss': {1.0 + at}, 'epoch': 0.{at}}}\n" for at in range(begin, begin + 3)))
            await collector.collect(7)
        [points] = (await store.points(Wanted(("job/7",), ("loss",)))).values()
        assert (points.steps, points.values) == ([1, 2, 3, 4, 5, 6], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    collected(tmp_path, work)


def test_a_trainer_that_prints_nothing_is_read_from_its_states(tmp_path: Path) -> None:
    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        history = [{"loss": 1.0 / step, "epoch": 1, "step": step} for step in range(1, 31)]
        for step in (10, 20):
            state = {"global_step": step, "max_steps": 30, "log_history": history[:step]}
            put(folder / f"output/out/checkpoint-{step}/trainer_state.json", json.dumps(state))
            await collector.collect(7)
        put(folder / "output/out/trainer_state.json", json.dumps({"log_history": history}))
        await collector.finish(7)
        found = {key.key: points for key, points in (await store.points(Wanted(("job/7",)))).items()}
        assert found["loss"].steps == list(range(1, 31))
        assert set(found.pop("progress/total_steps").values) == {30.0}, "the number of steps that there will be"
        assert list(found) == ["loss"]

    collected(tmp_path, work)


# --- one curve for one name ---------------------------------------------------------------------------------------


def test_of_several_writers_of_one_name_only_the_most_explicit_counts(tmp_path: Path) -> None:
    """Each comes later than the one before and replaces it; nothing is doubled."""

    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        output = folder / "output"
        put(folder / "logs/rank_0.log", "{'loss': 5.0, 'epoch': 1}\n{'loss': 5.5, 'epoch': 2}\n")
        await collector.collect(7)
        assert await curves(store) == {"loss": [5.0, 5.5]}
        mlflow_run(output / "mlruns/0/0123abc", {"loss": [4.0]}, {})
        await collector.collect(7)
        assert await curves(store) == {"loss": [4.0]}
        put(output / "wandb/run-1-a/run-a.wandb", wandb_file(history(0, {"loss": 3.0})))
        await collector.collect(7)
        assert await curves(store) == {"loss": [3.0]}
        put(output / "runs" / EVENTS, simple("loss", 0, 2.0))
        await collector.collect(7)
        assert await curves(store) == {"loss": [2.0]}
        put(output / "metrics.jsonl", '{"step": 1, "loss": 1.0}\n')
        put(folder / "logs/rank_0.log", "{'loss': 5.0, 'epoch': 3}\n")
        put(output / "runs" / EVENTS, simple("loss", 1, 2.0))
        await collector.finish(7)
        assert await curves(store) == {"loss": [1.0]}

    collected(tmp_path, work)


def test_the_mean_loss_of_all_ranks_counts_if_a_script_logs_none(tmp_path: Path) -> None:
    steps = '{"kind": "profile", "step": 1, "loss": 1.5}\n{"kind": "profile", "step": 2, "loss": "NaN"}\n'

    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        put(folder / "output/metrics.jsonl", steps)
        await collector.collect(7)
        [figure] = (await store.figures())[7].values()
        assert (figure.last, figure.odd_step) == (1.5, 2)
        put(folder / "output/metrics.jsonl", '{"step": 1, "values": {"loss": 1.75}}\n' + steps)
        await collector.finish(7)
        figures = (await store.figures())[7]
        assert {name: one.last for name, one in figures.items()} == {"loss": 1.75}

    collected(tmp_path, work)


def test_files_of_one_run_are_one_curve_and_several_runs_get_prefixes(tmp_path: Path) -> None:
    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        runs = folder / "output/runs/exp1"
        put(runs / "train" / EVENTS, simple("loss", 0, 1.0))
        put(runs / "train" / EVENTS.replace("17000", "17001"), simple("loss", 1, 0.5))
        put(folder / "logs/rank_0.log", "{'loss': 5.0, 'epoch': 1}\n")
        await collector.collect(7)
        assert await curves(store) == {"loss": [1.0, 0.5]}
        put(runs / "val" / EVENTS, simple("loss", 1, 0.75))
        await collector.finish(7)
        assert await curves(store) == {"train/loss": [1.0, 0.5], "val/loss": [0.75], "loss": [5.0]}

    collected(tmp_path, work)


def test_files_of_other_nodes_are_told_apart_by_rank(tmp_path: Path) -> None:
    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        plan = {"nodes": [{"node": name, "ranks": [{"rank": rank}]} for name, rank in (("a", 0), ("b", 4), ("c", 8))]}
        put(folder.parent / "config.json", json.dumps({"attempt": 1, "plan": plan}))
        put(folder / "output/runs" / EVENTS, simple("loss", 0, 1.0))
        put(folder / "nodes/c/runs" / EVENTS, simple("loss", 0, 3.0))
        await collector.finish(7)
        assert await curves(store, rank=0) == {"loss": [1.0]}
        assert await curves(store, rank=8) == {"loss": [3.0]}

    collected(tmp_path, work)


def test_prefixes_are_what_paths_do_not_share() -> None:
    assert prefixes(["runs/a"]) == {"runs/a": ""}
    assert prefixes(["runs/a/x", "runs/a/y"]) == {"runs/a/x": "x/", "runs/a/y": "y/"}
    assert prefixes(["runs", "runs/y"]) == {"runs": "", "runs/y": "y/"}
    assert prefixes(["a", "b/c"]) == {"a": "a/", "b/c": "b/c/"}
    assert prefixes([".", "b"]) == {".": "", "b": "b/"}
    assert prefixes([]) == {}


# --- content that nobody should trust -----------------------------------------------------------------------------

_READERS: list[tuple[Read, bytes]] = [
    (tensorboard.read, simple("loss", 1, 0.5) * 3 + hparams({"lr": 0.1, "opt": "adam"})),
    (wandb.read, wandb_file(config({"lr": 1}), *[history(at, {"loss": 0.5, "x": "y" * 9000}) for at in range(9)])),
    (mlflow.read_metric, b"1700000000000 0.5 1\n1700000000000 inf 2\n1700000000000 0.5 --5\n"),
    (mlflow.read_parameter, b"0.1"),
    (huggingface.read_log, b"{'loss': 0.5, 'epoch': 1}\n  5%|x| 3/9 [\n{'loss': 0.25, 'epoch': 2}\n"),
    (huggingface.read_state, b'{"log_history": [{"loss": 1, "step": 2}, {"loss": 1e999, "step": 3}]}'),
]


def piece(content: bytes, offset: int = 0, state: str = "", size: int | None = None) -> Piece:
    return Piece(content, offset, offset + len(content) if size is None else size, state, "name")


@pytest.mark.parametrize(("read", "content"), _READERS)
def test_a_reader_survives_any_damage(read: Read, content: bytes) -> None:
    chance = random.Random(3)
    for _ in range(300):
        spoilt = bytearray(content)
        for _ in range(chance.randrange(1, 6)):
            spoilt[chance.randrange(len(spoilt))] = chance.randrange(256)
        found = read(piece(bytes(spoilt[: chance.randrange(len(spoilt) + 1)])))
        assert 0 <= found.end <= len(spoilt)
        assert all(len(points) == len(points.values) == len(points.times_ms) for points in found.points.values())


@pytest.mark.parametrize("read", [read for read, _ in _READERS])
@given(content=st.binary(max_size=200))
def test_a_reader_survives_any_bytes(read: Read, content: bytes) -> None:
    assert 0 <= read(piece(content)).end <= len(content)


@pytest.mark.parametrize(("read", "content"), [_READERS[0], _READERS[1], _READERS[2], _READERS[4]])
def test_a_file_that_arrives_byte_by_byte_gives_the_same_points(read: Read, content: bytes) -> None:
    whole = read(piece(content))
    parts, at, state = Reading(), 0, ""
    steps = [*range(0, min(len(content), 700)), *range(0, len(content), 997), len(content)]
    for end in sorted(set(steps)):
        found = read(piece(content[at:end], at, state))
        at, state = at + found.end, found.state if found.end else state
        for key, points in found.points.items():
            parts.points.setdefault(key, Points()).extend(points)
        parts.parameters |= found.parameters
    assert at == whole.end
    assert parts.parameters == whole.parameters
    assert {key: points.values for key, points in parts.points.items()} == {
        key: points.values for key, points in whole.points.items()
    }


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics1²2.jsonl", '{"step": 1, "loss": 1.0}\n'),  # a digit that is no number
        ("mlruns/0/abc/metrics/loss", "1700000000000 0.5 --5\n1700000000000 1.0 1\n"),
    ],
)
def test_odd_digits_do_not_end_the_reading_of_all_jobs(tmp_path: Path, name: str, content: str) -> None:
    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        put(folder / "output" / name, content)
        assert await collector.having_news([7], [7]) == [7, 7]
        assert await collector.finish(7) == 1
        assert list((await curves(store)).values()) == [[1.0]]

    collected(tmp_path, work)


def test_a_wandb_file_is_read_on_after_a_damaged_block() -> None:
    content = bytearray(wandb_file(*[history(at, {"loss": float(at), "x": "y" * 5000}) for at in range(60)]))
    content[40_000] ^= 1
    found = wandb.read(piece(bytes(content)))
    [points] = found.points.values()
    assert found.end == len(content)
    assert points.steps[0] == 0
    assert points.steps[-1] == 59
    assert 45 < len(points) < 60


def test_an_event_file_ends_where_it_is_damaged_and_stays_there() -> None:
    content = bytearray(simple("loss", 1, 0.5) * 3)
    content[-10] ^= 1
    first = tensorboard.read(piece(bytes(content)))
    assert sum(map(len, first.points.values())) == 2
    rest = tensorboard.read(piece(bytes(content[first.end :]), first.end))
    assert (rest.end, rest.points) == (len(content) - first.end, {})
    more = tensorboard.read(piece(simple("loss", 4, 0.5), len(content), rest.state))
    assert more.points == {}


def test_a_million_names_do_not_fill_the_store(tmp_path: Path) -> None:
    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        put(folder / "output" / EVENTS, b"".join(simple(f"tag{at}", 0, 1.0) for at in range(3000)))
        put(folder / "output" / EVENTS.replace("17000", "17001"), simple("tag0", 1, 2.0) + simple("late", 1, 2.0))
        await collector.finish(7)
        found = await curves(store)
        assert len(found) == MOST_FOUND
        assert found["tag0"] == [1.0, 2.0]

    collected(tmp_path, work)


def test_names_and_steps_that_cannot_be_shown_are_skipped() -> None:
    reading = tensorboard.read(piece(simple("x" * 300, 0, 1.0) + simple("a\nb", 0, 1.0) + simple("far", 1 << 60, 1.0)))
    assert reading.points == {}


@pytest.mark.parametrize("name", ["model.pt", "mlruns/0/a/tags/mlflow.user", "mlruns/0/a/meta.yaml", "x/events.txt"])
def test_other_files_have_no_reader(name: str) -> None:
    assert writer_of(name) is None


def test_a_look_that_is_cut_short_doubles_nothing(tmp_path: Path) -> None:
    """Its transaction may be done although nobody waited for it."""

    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        file = folder / "output" / EVENTS
        for begin in range(0, 200, 20):
            put(file, b"".join(simple("loss", step, 1.0) for step in range(begin, begin + 20)))
            task = asyncio.create_task(collector.collect(7))
            for _ in range(begin // 20):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await collector.finish(7)
        [points] = (await store.points(Wanted(("job/7",)))).values()
        assert points.steps == list(range(200))

    collected(tmp_path, work)


def test_only_jobs_whose_files_have_grown_are_looked_at(tmp_path: Path) -> None:
    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        assert await collector.having_news([7], []) == []
        put(folder / "logs/rank_0.log", "hello\n")
        assert await collector.having_news([7, 8], []) == [7]
        await collector.collect(7)
        assert await collector.having_news([7], []) == []
        assert await collector.having_news([], [7]) == [7]
        put(folder / "logs/rank_0.log", "{'loss': 1.0, 'epoch': 1}\n")
        assert await collector.having_news([7], []) == [7]
        assert await collector.collect(7) == 1

    collected(tmp_path, work)


def test_a_line_without_an_end_is_left_out_and_said(tmp_path: Path) -> None:
    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        file = folder / "output/metrics.jsonl"
        put(file, '{"step": 1, "loss": 0.5}\n')
        with file.open("r+b") as endless:
            endless.truncate(30 << 20)
        await collector.collect(7)
        put(file, '\n{"step": 2, "loss": 0.25}\n')
        await collector.collect(7)
        assert (await curves(store))["loss"] == [0.5, 0.25]
        assert collector.take_cut(7) == {"output/metrics.jsonl"}
        assert collector.take_cut(7) == set()

    collected(tmp_path, work)


def test_a_log_without_metrics_costs_no_transaction_until_its_job_is_over(tmp_path: Path) -> None:
    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        log = folder / "logs/rank_0.log"
        for _ in range(3):
            put(log, "no metrics here\n" * 100)
            await collector.collect(7)
            assert await store.places("job/7") == {}
        await collector.finish(7)
        [place] = (await store.places("job/7")).values()
        assert place.offset == log.stat().st_size

    collected(tmp_path, work)
