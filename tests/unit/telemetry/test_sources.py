"""Curves of scripts that know nothing of UGRO, from files of other libraries."""

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
    simple,
    tensor_scalar,
    wandb_file,
)
from tests.rig.stores import in_metric_store
from ugro.features.trackers import readers as tensorboard
from ugro.features.trackers import wandb
from ugro.kernel.telemetry.collector import Collector, prefixes, writer_of
from ugro.kernel.telemetry.curves import Points, Wanted
from ugro.kernel.telemetry.metricstore import MOST_FOUND, MetricStore
from ugro.kernel.telemetry.readers import Piece, Read, Reading

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


# --- one curve for one name ---------------------------------------------------------------------------------------


def test_of_several_writers_of_one_name_only_the_most_explicit_counts(tmp_path: Path) -> None:
    """Each comes later than the one before and replaces it; nothing is doubled."""

    async def work(folder: Path, collector: Collector, store: MetricStore) -> None:
        output = folder / "output"
        put(output / "wandb/run-1-a/run-a.wandb", wandb_file(history(0, {"loss": 3.0})))
        await collector.collect(7)
        assert await curves(store) == {"loss": [3.0]}
        put(output / "runs" / EVENTS, simple("loss", 0, 2.0))
        await collector.collect(7)
        assert await curves(store) == {"loss": [2.0]}
        put(output / "metrics.jsonl", '{"step": 1, "loss": 1.0}\n')
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
        put(folder / "output/wandb/run-1-a/run-a.wandb", wandb_file(history(0, {"loss": 5.0})))
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
]


def piece(content: bytes, offset: int = 0, state: str = "", size: int | None = None) -> Piece:
    return Piece(content, offset, offset + len(content) if size is None else size, state)


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


@pytest.mark.parametrize(("read", "content"), _READERS)
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


@pytest.mark.parametrize("name", ["model.pt", "x/events.txt", "trainer_state.json"])
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
        put(folder / "output/metrics.jsonl", "hello\n")
        assert await collector.having_news([7, 8], []) == [7]
        await collector.collect(7)
        assert await collector.having_news([7], []) == []
        assert await collector.having_news([], [7]) == [7]
        put(folder / "output/metrics.jsonl", '{"step": 1, "loss": 1.0}\n')
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
