"""What a measuring process writes is believed only as far as it can be true."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ugro.features.hardware.model import CpuFigures, DeviceFigures, StorageFigures, Surroundings
from ugro.features.hardware.subject import Lines
from ugro.kernel.support.codec import DecodeError


def heard(*messages: dict[str, Any]) -> Lines:
    lines = Lines()
    for message in messages:
        lines.take(json.dumps(message).encode())
    return lines


def test_figures_are_kept_as_they_come() -> None:
    cpu = {"one_core_bytes_per_s": 1.5e7, "all_cores_bytes_per_s": 3e7, "cores": 2}
    lines = heard(
        {"torch": "2.13.0+cpu"}, {"cpu": cpu}, {"memory_bytes_per_s": 2e10}, {"storage": {"write_bytes_per_s": 1e8}},
        {"device": {"index": None, "fp32_tflops": 0.1}}, {"skipped": {"what": "tf32", "why": "none"}},
    )  # fmt: skip
    assert lines.cpu == CpuFigures(1.5e7, 3e7, 2)
    assert lines.storage == StorageFigures(1e8)
    assert (lines.torch, lines.memory_bytes_per_s, lines.devices[0].fp32_tflops) == ("2.13.0+cpu", 2e10, 0.1)


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[1]",
        b'{"memory_bytes_per_s": NaN}',
        b'{"gpus": 65}',
        b'{"gpus": true}',
        b'{"memory_bytes_per_s": Infinity}',
        b'{"memory_bytes_per_s": -1}',
        b'{"memory_bytes_per_s": "fast"}',
        b'{"memory_bytes_per_s": 1e300}',
        b'{"cpu": {"one_core_bytes_per_s": -1, "all_cores_bytes_per_s": 1, "cores": 1}}',
        b'{"device": {"index": 0, "fp32_tflops": NaN}}',
        b'{"device": {"index": 0, "pcie_width": -1}}',
        b'{"device": 3}',
        b'{"port": 0}',
        b'{"port": true}',
        b'{"port": 70000}',
        b'{"allreduce": {"size_bytes": 1000000, "seconds": 0}}',
        b'{"skipped": "all"}',
        b"[" * 100_000,
    ],
)
def test_what_cannot_be_true_is_refused(line: bytes) -> None:
    with pytest.raises(DecodeError):
        Lines().take(line)


def test_words_of_a_node_are_short_and_cannot_steer_a_terminal() -> None:
    phases: list[str] = []
    lines = Lines(phases.append)
    lines.take(json.dumps({"phase": "\x1b[2Jcpu" + "x" * 1000, "torch": "\x07" * 500}).encode())
    for _ in range(100):
        lines.skip("a\nb", "\x1b]0;title\x07" * 100)
    assert phases[0].startswith("�[2Jcpu")
    assert len(phases[0]) <= 40
    assert lines.torch is not None
    assert len(lines.torch) <= 40
    assert len(lines.skipped) <= 40
    assert all(one.why.isprintable() and len(one.why) <= 300 and "\n" not in one.what for one in lines.skipped)


def test_what_a_newer_node_program_says_besides_is_ignored() -> None:
    assert heard({"quantum": 1}).cpu is None


def test_a_node_does_not_say_whose_a_device_is_or_what_was_seen_of_it() -> None:
    said = {"index": 0, "pcie_width": 4, "uuid": "GPU-1", "name": "\x1b[2J", "seen": {"temperature_c": 99.0}}
    assert heard({"device": said}).devices == [DeviceFigures("", "", 0, seen=Surroundings(pcie_width=4))]
