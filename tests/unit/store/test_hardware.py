"""Figures on disk: the newest of each part, the best ever, both directions of a link, and no more than a few."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.rig.stores import in_store
from ugro.features.hardware.model import (
    AllReduceFigures,
    CpuFigures,
    DeviceFigures,
    LinkFigures,
    Measurement,
    Mode,
    NodeFigures,
    StorageFigures,
)
from ugro.features.hardware.service import MeasuredHardware
from ugro.features.hardware.store import KEPT_RUNS
from ugro.kernel.store.database import Store

WHEN = "2026-01-01T00:00:00+00:00"
LATER = "2026-02-01T00:00:00+00:00"
CPU = CpuFigures(1e7, 4e7, 4)
GPU = DeviceFigures("GPU-1", "RTX", 0, bf16_tflops=100.0)
NODE = NodeFigures("a", WHEN, Mode.FULL, "550.1", "2.13.0", (GPU,), CPU, 2e10, StorageFigures(1e8))
LINK = LinkFigures("a", "b", WHEN, 1e9, 5e8, 1e-4, 1e-5, "10.0.0.2")


def of(*nodes: NodeFigures, links: tuple[LinkFigures, ...] = ()) -> Measurement:
    return Measurement(WHEN, Mode.FULL, 1.0, nodes, links)


def test_what_the_newest_measurement_left_out_comes_from_an_earlier_one(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.hardware.record(of(NODE), {})
        newest = NodeFigures("a", LATER, Mode.QUICK, cpu=replace(CPU, one_core_bytes_per_s=2e7))
        await store.hardware.record(of(newest), {})
        latest = (await store.hardware.latest())["a"]
        assert latest.cpu is not None
        assert latest.cpu.one_core_bytes_per_s == 2e7
        assert (latest.measured_at, latest.devices, latest.torch) == (LATER, (GPU,), "2.13.0")
        assert [run.measured_at for run in await store.hardware.history("a")] == [LATER, WHEN]

    in_store(tmp_path, work)


def test_figures_of_a_busy_node_stand_back_behind_earlier_ones(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.hardware.record(of(NODE), {})
        await store.hardware.record(of(replace(NODE, cpu=CpuFigures(1.0, 1.0, 4), is_forced=True)), {})
        assert (await store.hardware.latest())["a"].cpu == CPU

    in_store(tmp_path, work)


def test_a_link_is_known_from_both_ends_and_the_newer_measurement_counts(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.hardware.record(of(links=(LINK,)), {})
        assert await store.hardware.link("a", "b") == LINK
        back = await store.hardware.link("b", "a")
        assert back is not None
        assert (back.bytes_per_s, back.back_bytes_per_s, back.latency_s) == (5e8, 1e9, 1e-4)
        await store.hardware.record(of(links=(LinkFigures("b", "a", LATER, 7e8, 6e8),)), {})
        newer = await store.hardware.link("a", "b")
        assert newer is not None
        assert (newer.bytes_per_s, newer.measured_at) == (6e8, LATER)
        assert await store.hardware.link("a", "c") is None
        assert len(await store.hardware.links()) == 2

    in_store(tmp_path, work)


def test_a_link_that_was_measured_while_a_node_was_busy_replaces_no_better_figure(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        busy = LinkFigures("b", "a", LATER, 1.0, 1.0, is_forced=True)
        reduced = AllReduceFigures(("a", "b"), "gloo", 2, 10**6, 0.01, WHEN)
        slow = replace(reduced, seconds=9.0, is_forced=True)
        for one, other in ((busy, slow), (LINK, reduced), (busy, slow)):
            await store.hardware.record(replace(of(links=(one,)), allreduces=(other,)), {})
        assert await store.hardware.link("a", "b") == LINK
        assert await store.hardware.allreduces() == [reduced]
        await store.hardware.record(of(links=(replace(LINK, bytes_per_s=None, error="refused"),)), {})
        await store.hardware.record(of(links=(busy,)), {})
        newest = await store.hardware.link("b", "a")
        assert newest is not None
        assert newest.measured_at == LATER, "a figure is better than an error"

    in_store(tmp_path, work)


def test_all_reduces_are_known_by_their_set_of_nodes(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        one = AllReduceFigures(("b", "a"), "gloo", 2, 10**6, 0.01, WHEN)
        await store.hardware.record(replace(of(), allreduces=(one,)), {})
        assert await store.hardware.allreduces({"a", "b"}) == [one]
        assert await store.hardware.allreduces({"a"}) == []
        assert one.bytes_per_s == 1e8

    in_store(tmp_path, work)


def test_old_measurements_go_and_the_best_figure_stays(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        measured = MeasuredHardware(store.hardware)
        await measured.record(of(NODE))
        slow = replace(NODE, measured_at=LATER, devices=(replace(GPU, bf16_tflops=50.0),))
        for _ in range(KEPT_RUNS + 3):
            await measured.record(of(slow))
        assert len(await store.hardware.history("a")) == KEPT_RUNS
        best = {one.what: (one.value, one.measured_at) for one in await store.hardware.best("a")}
        assert best["GPU 0 bf16 of GPU-1"] == (100.0, WHEN)

    in_store(tmp_path, work)


def test_a_decline_is_known_after_a_restart_and_gone_with_the_node(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        first = MeasuredHardware(store.hardware)
        slow = replace(NODE, devices=(replace(GPU, bf16_tflops=50.0),))
        for run in (NODE, slow):
            await first.record(of(run, links=(LINK,)))
        assert first.findings("a") == []
        await first.record(of(slow))
        second = MeasuredHardware(store.hardware)
        await second.read()
        [finding] = second.findings("a")
        assert "bf16" in finding.text
        await second.forget("a")
        assert (second.findings("a"), second.latest_of("a"), await store.hardware.links()) == ((), None, [])

    in_store(tmp_path, work)
