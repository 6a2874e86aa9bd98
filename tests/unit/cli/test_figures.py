"""What was measured and used, as ``ugro node show`` and ``ugro results`` print it: every figure is there."""

from __future__ import annotations

from ugro.features.hardware.cli import details
from ugro.features.hardware.model import AllReduceFigures, DeviceFigures, LinkFigures, Mode, NodeFigures, StorageFigures
from ugro.features.hardware.operations import NodeHardware
from ugro.features.training.cli import energy_facts
from ugro.features.training.model import JobEnergy, RankEnergy

WHEN = "2026-01-01T00:00:00+00:00"
GPU = DeviceFigures("GPU-1", "RTX 4090", 0, 80.0, None, 160.0, None, None, 9e11, 2.4e10, 2.5e10)
FIGURES = NodeFigures("gpu1", WHEN, Mode.FULL, devices=(GPU,), storage=StorageFigures(1e9, 3e9, 12_345.6, 0.004))
LINK = LinkFigures("gpu1", "gpu2", WHEN, 1.1e9, 9e8, 2e-4, 1e-5)
REDUCED = AllReduceFigures(("gpu1", "gpu2"), "nccl", 2, 16 * 10**6, 0.02, WHEN)


def lines(hardware: NodeHardware) -> list[str]:
    return [text for _, text in details(hardware)]


def test_every_figure_of_a_node_is_shown() -> None:
    assert lines(NodeHardware(FIGURES, links=(LINK,), allreduces=(REDUCED,))) == [
        f"{WHEN}, full",
        "  GPU 0 RTX 4090: fp32 80 TFLOP/s, bf16 160 TFLOP/s, memory 838.2 GiB/s, to it 22.4 GiB/s, from it 23.3 GiB/s",
        "  storage writes 953.7 MiB/s, reads 2.8 GiB/s, 12,346 random reads/s, fsync 4.00 ms",
        "  to gpu2: 1.0 GiB/s there, 858.3 MiB/s back, round trip 0.20 ms, jitter 10.0 µs",
        "  all-reduce of 16 MB: 20.0 ms (nccl, 2 ranks on gpu1, gpu2)",
    ]


def test_links_are_shown_of_a_node_that_was_not_measured_by_itself() -> None:
    refused = LinkFigures("gpu1", "gpu3", WHEN, error="refused")
    assert lines(NodeHardware(links=(LinkFigures("gpu1", "gpu2", WHEN, 1.1e9), refused))) == [
        "its links",
        "  to gpu2: 1.0 GiB/s there",
        "  to gpu3: refused",
    ]
    assert lines(NodeHardware()) == []


def test_the_energy_of_each_rank_is_shown_if_there_are_several() -> None:
    def facts(*ranks: RankEnergy) -> list[tuple[str, str]]:
        return list(energy_facts(JobEnergy(7200.0, 2.0, 1, 1.0, "2.00 Wh (GPUs)", ranks=ranks)))

    own = [RankEnergy(0, "gpu1", 3600.0, False), RankEnergy(1, "gpu2", 3600.0, False)]
    assert facts(*own)[1:] == [("by rank", "0: 1.00 Wh, 1: 1.00 Wh")]
    assert facts(own[0])[1:] == []
    shared = [RankEnergy(rank, "gpu1", 3600.0, True) for rank in (0, 1)]
    assert len(facts(*shared)) == 3
