"""How fast devices should be, by what they are called."""

from __future__ import annotations

import pytest

from ugro.features.hardware.rules import Device, estimate


def of_gpus(*names: str) -> tuple[float, ...]:
    return estimate([Device(name) for name in names]).values


def test_gpus_are_as_fast_as_their_vendors_say_the_fastest_is_one() -> None:
    first, second = of_gpus("NVIDIA GeForce RTX 5070 Ti", "NVIDIA GeForce RTX 3070 Ti")
    assert first == 1.0
    assert 0.4 < second < 0.6


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ("NVIDIA GeForce RTX 4070", "NVIDIA GeForce RTX 4070 Ti"),
        ("NVIDIA GeForce RTX 4070 Ti", "NVIDIA GeForce RTX 4070 Ti SUPER"),
        ("Tesla T4", "NVIDIA L4"),
        ("NVIDIA RTX A6000", "NVIDIA A100-SXM4-40GB"),
        ("RTX3090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 3070 Ti Laptop GPU", "NVIDIA GeForce RTX 5070 Ti Laptop GPU"),
    ],
)
def test_names_that_begin_alike_are_told_apart(slower: str, faster: str) -> None:
    low, high = of_gpus(slower, faster)
    assert low < high == 1.0


@pytest.mark.parametrize("name", ["GeForce RTX 2080 with Max-Q Design", "GeForce GT 430", "Radeon RX 7900 XTX"])
def test_of_a_gpu_without_a_figure_nothing_is_claimed(name: str) -> None:
    found = estimate([Device("RTX 4090"), Device(name)])
    assert found.values == ()
    assert found.source == f"equal: no figures for {name}"


def test_without_gpus_cores_count_and_their_clock_where_all_have_told_it() -> None:
    clocked = estimate([Device(None, 8, "Intel(R) Xeon(R) CPU @ 2.00GHz"), Device(None, 4, "Core i7 @ 3.0 GHz")])
    assert clocked.values == pytest.approx((1.0, 0.75))
    assert "clock" in clocked.source
    assert estimate([Device(None, 8, "AMD EPYC"), Device(None, 4, "Core i7 @ 3.0 GHz")]).values == (1.0, 0.5)
    assert estimate([Device(None, 0), Device(None, 4)]).values == ()
    assert estimate([Device("RTX 4090"), Device(None, 4)]).values == ()
