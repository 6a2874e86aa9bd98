"""``ugro profile`` as it is printed: what a device draws and does with it, where that is measured."""

from __future__ import annotations

import re

import pytest

from tests.rig.training import Pretend
from ugro.cli.output import Output
from ugro.features.training.cli import _lines
from ugro.features.training.cli import _profile_show as _show
from ugro.features.training.model import JobProfile
from ugro.features.training.rules_energy import with_energy
from ugro.features.training.rules_profile import alternatives, profile
from ugro.kernel.jobs.model import Job, JobSpec, JobState, Launcher
from ugro.kernel.telemetry.records import read

JOB = Job(17, JobSpec("train", ("train.py",), Launcher.DDP), "ann", JobState.RUNNING, "", "2030-01-01T00:00:00+00:00")
WATTS = {"gpu0": [120.0], "gpu1": [30.4]}


def measured(powers: dict[str, list[float]]) -> JobProfile:
    """Of a training that the second rank makes slower: its fixed time is more than the first needs for all."""
    training = read(Pretend([0.001, 0.001], fixed_s=[0.0, 0.3]).run(60))
    found = profile(training, 1)
    assert found is not None
    others = alternatives(found, training)
    return with_energy(found, powers, others.without_s, others.whole_s)


def shown(found: JobProfile) -> list[str]:
    return list(_lines(Output(), JOB, found))


def test_power_and_samples_per_joule_have_columns_and_a_sentence() -> None:
    found = measured(WATTS)
    lines = shown(found)
    header, first, second = lines[1:4]
    assert header.split() == ["RANK", "NODE", "SAMPLES", "OWN", "WAITS", "W", "S/J"]
    for line, rank, watts in ((first, found.ranks[0], "120"), (second, found.ranks[1], "30")):
        assert rank.samples_per_joule is not None
        assert line.partition("|")[0].split()[-2:] == [watts, f"{rank.samples_per_joule:.3g}"]
    assert f"{found.samples_per_joule:.3g} samples per joule, 150 W" in lines


def test_a_device_that_only_costs_energy_is_named_with_what_to_do() -> None:
    text = re.sub(r"\s+", " ", " ".join(shown(measured(WATTS))))
    assert "gpu1 makes it slower, with 20 % of the energy: without it, a joule would do " in text
    assert "→ if energy matters more than time, launch it without gpu1" in text


def test_where_one_device_is_not_read_nothing_is_said_of_all() -> None:
    lines = shown(measured({"gpu0": [120.0]}))
    header, first, second = lines[1:4]
    assert header.split()[-2:] == ["W", "S/J"]
    assert len(first.partition("|")[0].split()) == len(second.partition("|")[0].split()) + 2, "its cells are empty"
    assert not any("samples per joule" in line for line in lines)


def test_where_power_cannot_be_read_nothing_of_it_is_there() -> None:
    lines = shown(measured({}))
    assert lines[1].split() == ["RANK", "NODE", "SAMPLES", "OWN", "WAITS"]
    assert not any("joule" in line for line in lines)


def test_a_program_gets_the_whole_values(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(WATTS)
    _show(Output(), JOB, found)
    said = capsys.readouterr()
    header, *rows = [line.split("\t") for line in said.out.splitlines()]
    assert header[-2:] == ["watts", "samples_per_joule"]
    assert [row[-2] for row in rows] == ["120", "30.4"]
    assert [float(row[-1]) for row in rows] == pytest.approx([rank.samples_per_joule for rank in found.ranks], rel=1e-4)
    assert "gpu1 makes it slower, with 20 % of the energy" in said.err
    _show(Output(), JOB, measured({}))
    assert [line.split("\t")[-2:] for line in capsys.readouterr().out.splitlines()[1:]] == [["", ""], ["", ""]]
