"""How far a transfer is, in words."""

from __future__ import annotations

import pytest

from ugro.kernel.support.quantities import Progress, Speed, together

MB = 1 << 20


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (
            Progress(120 * MB, 1200 * MB, 3100, 40_000, 38 * MB),
            "120.0 MiB of 1.2 GiB, 3,100 of 40,000 files, 38.0 MiB/s, 28 s left",
        ),
        (Progress(0, 500, 0, 1), "0 B of 500 B, 0 of 1 file"),
        (Progress(0, 500, 0, 2, 0.0), "0 B of 500 B, 0 of 2 files, 0 B/s"),
        (Progress(499, 500, 1, 2, 500.0), "499 B of 500 B, 1 of 2 files, 500 B/s, 1 s left"),
        (Progress(500, 500, 2, 2, 500.0), "500 B of 500 B, 2 of 2 files, 500 B/s"),
        (Progress(0, 7200 * MB, 0, 2, MB), "0 B of 7.0 GiB, 0 of 2 files, 1.0 MiB/s, 2h left"),
    ],
)
def test_it_says_bytes_files_speed_and_time_left(progress: Progress, words: str) -> None:
    assert str(progress) == words


def test_several_at_once_are_summed_up() -> None:
    both = together([Progress(10, 100, 1, 4, 5.0), Progress(20, 100, 2, 4)])
    assert both == Progress(30, 200, 3, 8, 5.0)
    assert together([]).bytes_per_s is None


def test_the_speed_is_that_of_the_last_seconds() -> None:
    speed = Speed(100.0)
    assert speed.at(100.1) is None, "too short to say"
    for second in range(1, 21):
        speed.note(100.0 + second, 1000 * second)
    assert speed.at(120.0) == pytest.approx(1000, rel=0.1)
    for second in range(21, 41):
        speed.note(100.0 + second, 20_000 + 10 * (second - 20))
    assert speed.at(140.0) == pytest.approx(10, rel=0.1)
    assert (speed.at(1140.0) or 0) < 1, "nothing for a long time"
