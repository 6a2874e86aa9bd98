"""Durations and sizes, as people write and read them."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.support.quantities import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (10, 10.0),
        (0, 0.0),
        (0.25, 0.25),
        ("10", 10.0),
        ("1.5", 1.5),
        ("500ms", 0.5),
        ("0.13 ms", 0.00013),
        ("3us", 3e-6),
        ("3 µs", 3e-6),
        ("1h30m", 5400.0),
        ("1h 30m 5s", 5405.0),
        (" 2d ", 172800.0),
        ("1H30M", 5400.0),
    ],
)
def test_a_duration_is_read_in_every_form_people_write(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "abc",
        "10 fortnights",
        "-5",
        "-5s",
        "30m1h",
        "1h1h",
        "h",
        "1h30",
        "1.s",
        "nan",
        "inf",
        "1e3",
        "١٠s",
    ],
)
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a duration such as 10, 500ms or 1h30m, got"):
        parse_duration(text)


@pytest.mark.parametrize(
    "value",
    [True, -1, math.nan, math.inf, 10**400, pytest.param(-(10**5000), id="a huge one"), "9" * 5000],
)
def test_numbers_that_are_no_amount_are_refused(value: str | float) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        parse_duration(value)
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(value)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (8, 8),
        ("8", 8),
        ("8GB", 8 * 10**9),
        ("12 GB", 12 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("8gib", 8 * 2**30),
        ("100B", 100),
        ("2TB", 2 * 10**12),
    ],
)
def test_a_size_is_read_with_decimal_and_binary_units(text: str | float, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "8G", "8 cows", "-8GB", "GB", "8GB8GB", "8,5GB", "0x10"])
def test_what_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a size such as 8GB, 512MiB or 1000, got"):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00013, "0.13 ms"),
        (0.000003, "3.00 µs"),
        (0.00002365, "23.6 µs"),
        (0.0123, "12.3 ms"),
        (0.5, "500 ms"),
        (0.9996, "1.00 s"),
        (12.34, "12.3 s"),
        (59.97, "1m"),
        (90, "1m30s"),
        (3599.6, "1h"),
        (4920, "1h22m"),
        (93600, "1d2h"),
        (-2, "-2.00 s"),
        (math.inf, "inf"),
    ],
)
def test_a_duration_is_shown_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (12 * 2**30, "12.0 GiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**60, "1024.0 PiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_a_size_is_shown_in_the_unit_that_fits(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.floats(min_value=1e-5, max_value=1e8))
def test_a_duration_that_is_shown_can_be_read_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.05)


@given(st.integers(min_value=0, max_value=2**55))
def test_a_size_that_is_shown_can_be_read_back(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.05)


@given(st.text())
def test_any_text_is_an_amount_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_duration(text) >= 0
    with contextlib.suppress(ValueError):
        assert parse_size(text) >= 0
