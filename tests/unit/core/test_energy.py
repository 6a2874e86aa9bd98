"""What a node reports of its devices' energy is bounded: it may be cut short, or wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.training.model import DeviceSum, read_samples
from ugro.kernel.support.quantities import format_cost, format_energy


def line(passed_s: float, **devices: object) -> bytes:
    return json.dumps({"s": passed_s, "time": 1000.0 + passed_s, "devices": devices}).encode()


def test_samples_are_read_in_order() -> None:
    later = line(3, gpu0=[30, 3, "counter"], cpu=[6, 2, "counter"])
    first, second = read_samples([line(1, gpu0=[10, 1, "counter"]), later])
    assert (first.passed_s, first.time_s, first.joules) == (1.0, 1001.0, 10.0)
    assert second.devices == {"gpu0": DeviceSum(30.0, 3.0, "counter"), "cpu": DeviceSum(6.0, 2.0, "counter")}
    assert second.joules == 36.0


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"{",
        b"[]",
        b'{"s": 5, "devices": {}}',
        b'{"s": -1, "time": 1, "devices": {}}',
        b'{"s": NaN, "time": 1, "devices": {}}',
        line(1),  # before the last one
        line(5, gpu0=[9, 5, "counter"]),  # it falls
        line(5, gpu1=[9, 5, "counter"]),  # a device is gone
        line(5, gpu0=[1e9, 5, "counter"], cpu=[1, 1, "counter"]),  # no GPU draws that much
        line(5, gpu0=[20, 50, "counter"]),  # longer than it was held
        line(5, gpu0=["20", 5, "counter"]),
        line(5, gpu0=[20, 5, "guess"]),
        line(5, gpu0=[True, 5, "counter"]),
    ],
)
def test_lines_that_cannot_be_are_skipped(bad: bytes) -> None:
    good = [line(2, gpu0=[10, 2, "counter"]), line(6, gpu0=[40, 6, "counter"])]
    found = read_samples([good[0], bad, good[1]])
    assert [sample.joules for sample in found] == [10.0, 40.0]


def test_names_that_are_no_devices_are_not_taken() -> None:
    names = ("gpu0", "gpu", "<b>", "0", "gpu\u0663", "cpu0")
    [sample] = read_samples([line(2, **{name: [1, 1, "power"] for name in names})])
    assert list(sample.devices) == ["gpu0"]


@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail(content: bytes) -> None:
    assert isinstance(read_samples(content.split(b"\n")), list)


@pytest.mark.parametrize(
    ("joules", "text"),
    [
        (0, "0 Wh"),
        (0.5, "0.50 J"),
        (30, "8.33 mWh"),
        (1800, "0.50 Wh"),
        (3600 * 412, "412 Wh"),
        (3600 * 999.96, "1.00 kWh"),
        (3600 * 12_340, "12.3 kWh"),
        (3600e3 * 12_340, "12,340 kWh"),
    ],
)
def test_energy_is_shown_in_watt_hours(joules: float, text: str) -> None:
    assert format_energy(joules) == text


@pytest.mark.parametrize(
    ("cost", "currency", "text"),
    [(0.0, "EUR", "0.00 EUR"), (0.0004321, "EUR", "0.00043 EUR"), (1234.5, "CHF", "1,234.50 CHF"), (2, "", "2.00")],
)
def test_cost_is_shown_with_cents(cost: float, currency: str, text: str) -> None:
    assert format_cost(cost, currency) == text
