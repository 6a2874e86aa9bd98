"""Measured hardware for Prometheus: every figure that is kept has a name there, and the documentation has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ugro.features.hardware.model import (
    AllReduceFigures,
    CpuFigures,
    DeviceFigures,
    LinkFigures,
    Mode,
    NodeFigures,
    StorageFigures,
)
from ugro.features.hardware.service import of_hardware
from ugro.kernel.telemetry.prometheus_text import exposition

WHEN = "2026-01-01T00:00:00+00:00"
GPU = DeviceFigures("GPU-1", "RTX 4090", 0, 1.0, 2.0, 3.0, 4.0, 5.0, 6e11, 7e9, 8e9)
NODE = NodeFigures(
    "gpu1", WHEN, Mode.FULL, devices=(GPU,), cpu=CpuFigures(3e7, 4e8, 16), memory_bytes_per_s=4e10,
    storage=StorageFigures(1e9, 3e9, 1e4, 0.005),
)  # fmt: skip
BARE = NodeFigures("gpu2", WHEN, Mode.QUICK, devices=(DeviceFigures("cpu", "EPYC", fp32_tflops=0.5),))
LINK = LinkFigures("gpu1", "gpu2", WHEN, 1.1e9, 9e8, 0.0002, 0.00005)
BROKEN = LinkFigures("gpu1", "gpu3", WHEN, error="refused")
REDUCED = AllReduceFigures(("gpu2", "gpu1"), "gloo", 2, 16 * 10**6, 0.02, WHEN)
DEVICE = 'node="gpu1",device="0",model="RTX 4090"'
LINES = (
    'ugro_node_measured_time_seconds{node="gpu1"} 1767225600',
    'ugro_node_measured_cpu_bytes_per_second{node="gpu1"} 400000000',
    'ugro_node_measured_cpu_core_bytes_per_second{node="gpu1"} 30000000',
    'ugro_node_measured_memory_bytes_per_second{node="gpu1"} 40000000000',
    'ugro_node_measured_storage_read_bytes_per_second{node="gpu1"} 3000000000',
    'ugro_node_measured_storage_write_bytes_per_second{node="gpu1"} 1000000000',
    'ugro_node_measured_storage_random_reads_per_second{node="gpu1"} 10000',
    'ugro_node_measured_storage_fsync_seconds{node="gpu1"} 0.005',
    f'ugro_node_measured_device_operations_per_second{{{DEVICE},precision="fp32"}} 1000000000000',
    f'ugro_node_measured_device_operations_per_second{{{DEVICE},precision="int8"}} 5000000000000',
    f"ugro_node_measured_device_memory_bytes_per_second{{{DEVICE}}} 600000000000",
    f'ugro_node_measured_device_copy_bytes_per_second{{{DEVICE},direction="to"}} 7000000000',
    f'ugro_node_measured_device_copy_bytes_per_second{{{DEVICE},direction="from"}} 8000000000',
    'ugro_node_measured_link_bytes_per_second{node="gpu1",to="gpu2"} 1100000000',
    'ugro_node_measured_link_latency_seconds{node="gpu1",to="gpu2"} 0.0002',
    'ugro_node_measured_link_jitter_seconds{node="gpu1",to="gpu2"} 5e-05',
    'ugro_node_measured_allreduce_seconds{nodes="gpu1,gpu2",backend="gloo",bytes="16000000"} 0.02',
)


@pytest.fixture
def text() -> str:
    return exposition(of_hardware({"gpu1": NODE, "gpu2": BARE}, [LINK, BROKEN], [REDUCED]))


def test_every_figure_that_is_kept_is_exposed(text: str) -> None:
    lines = text.splitlines()
    assert [line for line in LINES if line not in lines] == []
    families = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {line.partition("{")[0] for line in LINES} == families


def test_what_was_not_measured_has_no_series(text: str) -> None:
    assert "gpu3" not in text
    of_bare = [line for line in text.splitlines() if 'node="gpu2"' in line]
    assert [line.partition("{")[0] for line in of_bare] == [
        "ugro_node_measured_time_seconds",
        "ugro_node_measured_device_operations_per_second",
    ]


def test_the_documentation_names_each(text: str) -> None:
    documented = (Path(__file__).parents[3] / "docs" / "monitoring.md").read_text()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert [name for name in names if f"`{name}`" not in documented] == []
