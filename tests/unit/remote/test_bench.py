"""What measures on a node, without an agent: the disk, the network with its secret, and what a device has."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ugro.features.hardware.node import devices, machine, network
from ugro.features.hardware.node import machine as storage
from ugro.node.hardware.gpu_facts import gpu_process


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[[], list[dict[str, Any]]]:
    return lambda: [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_a_measured_disk_has_figures_and_no_file_is_left(
    tmp_path: Path, said: Callable[[], list[dict[str, Any]]]
) -> None:
    storage.storage(str(tmp_path), 0.05, 1 << 20)
    found = said()[-1]["storage"]
    for name in ("write_bytes_per_s", "read_bytes_per_s", "random_reads_per_s", "fsync_s"):
        assert found[name] > 0, name
    assert os.listdir(tmp_path) == []


def test_a_disk_with_little_room_is_not_filled(tmp_path: Path, said: Callable[[], list[dict[str, Any]]]) -> None:
    usage = os.statvfs(tmp_path)
    free = usage.f_bavail * usage.f_frsize
    storage.storage(str(tmp_path), 0.05, max(1, free - storage.LEFT_FREE + (64 << 20)))
    [message] = said()
    assert message["skipped"]["what"] == "storage"
    assert "is full" in message["skipped"]["why"]


def test_cpu_and_memory_have_figures_of_one_core_and_of_all(said: Callable[[], list[dict[str, Any]]]) -> None:
    found = machine.cpu(0.02)
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["one_core_bytes_per_s"] > 0
    assert found["all_cores_bytes_per_s"] > 0
    machine.memory(0.02)
    [message] = said()
    assert message["memory_bytes_per_s"] > 0


@pytest.fixture
def listener(capfd: pytest.CaptureFixture[str]) -> Iterator[tuple[int, threading.Thread]]:
    """Its port, and the thread that serves it."""
    params = {"address": "127.0.0.1", "secret": "s3cret", "limit_s": 10.0}
    thread = threading.Thread(target=network.listen, args=(params,), daemon=True)
    thread.start()
    out = ""
    while "\n" not in out:
        out += capfd.readouterr().out
    yield json.loads(out)["port"], thread
    thread.join(10)
    assert not thread.is_alive(), "it serves one connection and ends"


def test_a_link_is_measured_in_both_directions(
    listener: tuple[int, threading.Thread], said: Callable[[], list[dict[str, Any]]]
) -> None:
    port, _ = listener
    network.connect({"address": "127.0.0.1", "port": port, "secret": "s3cret", "limit_s": 10.0, "seconds": 0.1})
    found = said()[-1]["link"]
    for name in ("latency_s", "jitter_s", "bytes_per_s", "back_bytes_per_s"):
        assert found[name] > 0, name


def test_a_stranger_is_turned_away_and_the_expected_peer_still_served(
    listener: tuple[int, threading.Thread], said: Callable[[], list[dict[str, Any]]]
) -> None:
    port, _ = listener
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        challenge = stranger.recv(16)
        stranger.sendall(network._proof(b"guess", challenge))
        assert stranger.recv(1) == b"", "no answer, and the connection is closed"
    network.connect({"address": "127.0.0.1", "port": port, "secret": "s3cret", "limit_s": 10.0, "seconds": 0.05})
    assert said()[-1]["link"]["back_bytes_per_s"] > 0


def test_a_listener_is_bound_to_its_address_alone(listener: tuple[int, threading.Thread]) -> None:
    port, _ = listener
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    network.connect({"address": "127.0.0.1", "port": port, "secret": "s3cret", "limit_s": 10.0, "seconds": 0.01})


def test_the_width_of_a_pcie_link_is_read_where_the_kernel_says_it(tmp_path: Path) -> None:
    place = tmp_path / "0000:41:00.0"
    place.mkdir()
    (place / "current_link_width").write_text("4\n")
    (place / "max_link_width").write_text("16\n")
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x41, pci_device_id=0)
    assert devices.pcie_width(properties, str(tmp_path)) == {"pcie_width": 4, "pcie_width_max": 16}
    assert devices.pcie_width(SimpleNamespace(), str(tmp_path)) == {}


def test_a_cpu_has_bf16_if_the_kernel_lists_it(tmp_path: Path) -> None:
    (tmp_path / "intel").write_text("processor : 0\nflags\t\t: fpu avx512f avx512_bf16\n")
    (tmp_path / "arm").write_text("processor : 0\nFeatures\t: fp asimd bf16\n")
    assert "avx512_bf16" in devices.cpu_flags(str(tmp_path / "intel"))
    assert "bf16" in devices.cpu_flags(str(tmp_path / "arm"))


@pytest.mark.parametrize(("name", "is_ours"), [("UGRO_BENCH", True), ("UGRO_BENCHES", False)])
def test_what_measures_a_gpu_is_not_taken_for_its_owner(name: str, is_ours: bool) -> None:
    argv = [sys.executable, "-c", "print(flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, env={name: "{}"}) as measuring:
        assert measuring.stdout is not None
        measuring.stdout.readline()  # a process that has just begun has no environment for a moment
        assert gpu_process(measuring.pid, None)["is_ours"] is is_ours
        measuring.communicate(b"\n")


class _Torch:
    """A GPU that nobody has here, as PyTorch describes it."""

    def __init__(self, capability: tuple[int, int], hip: str | None = None) -> None:
        self.cuda = SimpleNamespace(get_device_capability=lambda index: capability)
        self.version = SimpleNamespace(hip=hip)


@pytest.mark.parametrize(
    ("torch", "lacks"),
    [
        (_Torch((6, 1)), {"tf32_tflops", "bf16_tflops", "int8_tops"}),
        (_Torch((7, 5)), {"tf32_tflops", "bf16_tflops"}),
        (_Torch((8, 6)), set()),
        (_Torch((9, 4), hip="6.2"), {"tf32_tflops"}),
    ],
)
def test_only_precisions_that_a_device_has_are_measured(torch: Any, lacks: set[str]) -> None:
    device = devices.Device(torch, "cuda:0", 0)
    names = ("fp32_tflops", "tf32_tflops", "bf16_tflops", "fp16_tflops", "int8_tops", "memory_bytes_per_s")
    assert {name for name in names if device._lack(name)} == lacks


class _PretendedGpus:
    """PyTorch on a machine with two GPUs, which are this CPU."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 2,
            get_device_capability=lambda index: (8, 6),
            get_device_properties=lambda index: SimpleNamespace(),
            synchronize=lambda index: None,
        )

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._torch, name)
        if name not in ("randn", "randint", "ones", "empty"):
            return found
        return lambda *args, device=None, **more: found(*args, **more)


@pytest.mark.parametrize(("is_available", "gpus"), [(True, 2), (False, 0)])
def test_pytorch_can_be_asked_for_its_gpus_alone(
    said: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, is_available: bool, gpus: int
) -> None:
    cuda = SimpleNamespace(device_count=lambda: 2, is_available=lambda: is_available)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.13.0", cuda=cuda))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    devices.count({})
    assert said()[-1] == {"torch": "2.13.0", "gpus": gpus}


@pytest.mark.proof
def test_each_gpu_has_its_share_of_the_time_and_what_fails_is_said(
    said: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "torch", _PretendedGpus(torch))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    devices.devices({"gpus": 3, "seconds": 4.0, "limit_s": 60.0})
    messages = said()
    newest = {message["device"]["index"]: message["device"] for message in messages if "device" in message}
    found = list(newest.values())
    skipped = {message["skipped"]["what"]: message["skipped"]["why"] for message in messages if "skipped" in message}
    assert list(newest) == [0, 1]
    for name in ("fp32_tflops", "tf32_tflops", "bf16_tflops", "fp16_tflops", "int8_tops", "memory_bytes_per_s"):
        assert all(device[name] > 0 for device in found), (name, messages)
    assert "sees 2 of 3 GPUs" in skipped["devices"]
    assert "cuda:0 to_device_bytes_per_s" in skipped, "memory cannot be pinned without a GPU"
    assert torch.get_float32_matmul_precision() == "highest"
