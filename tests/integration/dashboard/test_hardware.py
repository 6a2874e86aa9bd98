"""The page of measured hardware in a real browser: bars, the matrix of links, and a device that became slower."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.rig.browser import Dashboard, accessibility_problems, dashboards
from ugro.features.hardware.model import (
    AllReduceFigures,
    CpuFigures,
    DeviceFigures,
    LinkFigures,
    Measurement,
    Mode,
    NodeFigures,
    Skipped,
    StorageFigures,
)
from ugro.features.hardware.service import MeasuredHardware
from ugro.features.health.operations import Diagnose
from ugro.kernel.agent.model import Grade
from ugro.kernel.store.database import Store
from ugro.kernel.support.state_dir import StateDir

WHEN = "2026-01-01T00:00:00+00:00"
NODES = "nodes:\n" + "".join(f"  gpu{n}: {{transport: local, remote_root: '%(home)s/gpu{n}'}}\n" for n in (1, 2, 3))
GPU = DeviceFigures("GPU-1", "NVIDIA GeForce RTX 4090", 0, 80.0, 82.0, 160.0, 161.0, 310.0, 9e11, 2.4e10, 2.5e10)
DISK = StorageFigures(1e9, 3e9, 1e4, 0.004)
FAST = NodeFigures("gpu1", WHEN, Mode.FULL, "550.1", "2.13.0", (GPU,), CpuFigures(3e7, 4e8, 16), 4e10, DISK)
SLOW = NodeFigures(
    "gpu2", WHEN, Mode.QUICK, cpu=CpuFigures(2e7, 1e8, 8), skipped=(Skipped("devices", "PyTorch is not there"),)
)
LINKS = (LinkFigures("gpu1", "gpu2", WHEN, 1.1e9, 9e8, 2e-4, 1e-5), LinkFigures("gpu1", "gpu3", WHEN, error="refused"))


def fill(home: Path) -> None:
    async def work() -> None:
        store = Store(StateDir(home).database)
        await store.open()
        measured = MeasuredHardware(store.hardware)
        weak = replace(FAST, devices=(replace(GPU, bf16_tflops=70.0),))
        reduced = AllReduceFigures(("gpu1", "gpu2"), "gloo", 2, 16 * 10**6, 0.02, WHEN)
        for run in (FAST, weak, weak):
            await measured.record(Measurement(WHEN, Mode.FULL, 60.0, (run, SLOW), LINKS, (reduced,)))
        await store.close()

    asyncio.run(work())


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    with dashboards(NODES, before=fill) as found:
        yield found


def test_the_page_has_bars_of_devices_a_matrix_of_links_and_what_became_slower(
    dashboard: Dashboard, page: Page
) -> None:
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Hardware").click()
    fast = page.locator("[data-node=gpu1]")
    expect(fast).to_contain_text("GPU 0 fp16")
    expect(fast).to_contain_text("161 TFLOP/s")
    expect(page.locator("[data-node=gpu2]")).to_contain_text("1 not measured")
    expect(fast).to_contain_text("2.8 GiB/s")
    expect(fast).to_contain_text("250/s")
    matrix = page.get_by_role("group", name="Matrix of links")
    expect(matrix.locator("tbody tr", has_text="gpu2")).to_contain_text("858.3 MiB/s")
    expect(matrix.locator("tbody tr", has_text="gpu1")).to_contain_text("1.0 GiB/s")
    expect(matrix).to_contain_text("✕")
    expect(page.locator("main")).to_contain_text("70 TFLOP/s in the last two measurements, 160 TFLOP/s before")
    expect(page.locator("main")).to_contain_text("16 MB in 20.0 ms")
    assert accessibility_problems(page) == []
    page.goto(f"{dashboard.url}/nodes/gpu1")
    expect(page.locator("main")).to_contain_text("3 measurements")
    [worse] = [one for one in dashboard.client.follow(Diagnose(("gpu1",))) if one.check == "measured"]
    assert (worse.subject, worse.grade) == ("gpu1", Grade.WARNING)
    page.goto(f"{dashboard.url}/nodes/gpu3")
    expect(page.locator("main")).to_contain_text("Not measured yet")


def test_prometheus_gets_links_and_all_reduces_too(dashboard: Dashboard) -> None:
    exposed = dashboard.client.metrics_page().decode()
    assert 'ugro_node_measured_storage_fsync_seconds{node="gpu1"} 0.004\n' in exposed
    assert 'ugro_node_measured_link_jitter_seconds{node="gpu2",to="gpu1"} 1e-05\n' in exposed
    everyone = 'nodes="gpu1,gpu2",backend="gloo",bytes="16000000"'
    assert f"ugro_node_measured_allreduce_seconds{{{everyone}}} 0.02\n" in exposed
