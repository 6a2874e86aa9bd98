"""The vendors' tools as stub executables that print what the real ones print."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.rig.waiting import wait_until_dead
from ugro.node.hardware.gpu_facts import SourceAbsentError, SourceError
from ugro.node.hardware.gpu_tools import AmdSmi, NvidiaSmi, RocmSmi
from ugro.node.hardware.gpus import Sources

MIB = 1024**2

TWO_CARDS = """\
0, 00000000:01:00.0, GPU-aaaa, NVIDIA GeForce RTX 5070 Ti, 12227, 812, 37, 61, 88.35, 140.00, 575.57.08
1, 00000000:41:00.0, GPU-bbbb, Tesla V100-SXM2-16GB, 16160, 3, 0, 34, 41.20, 300.00, 575.57.08
"""
NO_HANDLE = "Unable to determine the device handle for GPU"
LOST = "the GPU is lost: it fell off the bus; a reboot may bring it back"


class Bench:
    """A PATH with nothing on it but the tools a test installs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def install(self, tool: str, answers: Mapping[str, str], code: int = 0) -> None:
        """Prints the answer whose key is in the arguments."""
        cases = [f"*{key}*) printf %s {shlex.quote(text)}; exit {code} ;;" for key, text in answers.items()]
        self.script(tool, "\n".join(['case "$*" in', *cases, "esac", "exit 64"]))

    def script(self, tool: str, body: str) -> None:
        program = self._folder / tool
        program.write_text(f'#!/bin/sh\necho "$*" >> {shlex.quote(str(self._log(tool)))}\n{body}\n')
        program.chmod(0o755)

    def calls(self, tool: str, word: str) -> int:
        return sum(word in line for line in self._log(tool).read_text().splitlines())

    def _log(self, tool: str) -> Path:
        return self._folder / f"{tool}.log"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("PATH", str(tmp_path))
    return Bench(tmp_path)


def amd_metric(gpu: int, **parts: Any) -> dict[str, Any]:
    return {"gpu": gpu, **parts}


def quantity(value: float, unit: str) -> dict[str, Any]:
    return {"value": value, "unit": unit}


def test_nvidia_smi_gives_two_unlike_gpus_with_their_processes(bench: Bench) -> None:
    apps = f"GPU-bbbb, {os.getpid()}, /usr/bin/python3, 2048\nGPU-bbbb, 4194999, [Not Found], [N/A]\n"
    bench.install("nvidia-smi", {"--query-gpu=": TWO_CARDS, "--query-compute-apps=": apps})
    reading = NvidiaSmi().read()
    first, second = reading.gpus
    assert reading.driver == "575.57.08"
    assert (first["uuid"], first["name"]) == ("GPU-aaaa", "NVIDIA GeForce RTX 5070 Ti")
    assert (first["memory_total_bytes"], first["memory_used_bytes"]) == (12227 * MIB, 812 * MIB)
    assert (first["use_ratio"], first["temperature_c"]) == (0.37, 61.0)
    assert (first["power_w"], first["power_limit_w"]) == (88.35, 140.0)
    assert (first["error"], first["processes"]) == (None, [])
    own, ended = second["processes"]
    assert own["name"] == Path("/proc/self/comm").read_text().strip()
    assert (own["pid"], own["memory_bytes"]) == (os.getpid(), 2048 * MIB)
    assert (ended["name"], ended["memory_bytes"], ended["is_ours"]) == ("unknown", None, False)


@pytest.mark.parametrize("words", ["[N/A]", "[Not Supported]", "N/A", "[Insufficient Permissions]"])
def test_a_value_that_the_driver_does_not_support_is_unknown_and_no_error(bench: Bench, words: str) -> None:
    row = f"0, 00000000:01:00.0, GPU-a, NVIDIA GB10, {words}, {words}, 3, 40, {words}, {words}, 580.95\n"
    bench.install("nvidia-smi", {"--query-gpu=": row, "--query-compute-apps=": ""})
    (gpu,) = NvidiaSmi().read().gpus
    assert gpu["error"] is None
    assert gpu["memory_total_bytes"] is gpu["memory_used_bytes"] is gpu["power_w"] is None
    assert (gpu["use_ratio"], gpu["temperature_c"]) == (0.03, 40.0)


@pytest.mark.parametrize(
    ("mark", "error"),
    [
        ("[GPU is lost]", LOST),
        ("[Unknown Error]", "unknown driver error"),
        ("[GPU requires reset]", "the GPU needs a reset before it can be used again"),
    ],
)
def test_a_lost_gpu_keeps_its_name_and_leaves_the_others_alone(bench: Bench, mark: str, error: str) -> None:
    source = NvidiaSmi()
    bench.install("nvidia-smi", {"--query-gpu=": TWO_CARDS, "--query-compute-apps=": ""})
    source.read()
    second = TWO_CARDS.splitlines()[1]
    lost = f"0, 00000000:01:00.0, {', '.join([mark] * 8)}, 575.57.08\n{second}\n"
    bench.install("nvidia-smi", {"--query-gpu=": lost, "--query-compute-apps=": ""}, code=15)
    first, second_gpu = source.read().gpus
    assert (first["uuid"], first["name"]) == ("GPU-aaaa", "NVIDIA GeForce RTX 5070 Ti")
    assert (first["error"], first["memory_used_bytes"]) == (error, None)
    assert (second_gpu["error"], second_gpu["memory_used_bytes"]) == (None, 3 * MIB)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (f"{NO_HANDLE} 0000:01:00.0: GPU is lost.  Reboot the system to recover this GPU", LOST),
        (f"{NO_HANDLE}0000:01:00.0: Unknown Error", "unknown driver error"),
        (f"{NO_HANDLE}0: 0000:01:00.0: Unknown Error", "unknown driver error"),
        (f"{NO_HANDLE}0: Timeout", "timeout"),
    ],
)
def test_a_gpu_that_cannot_be_opened_stays_in_the_list(bench: Bench, line: str, error: str) -> None:
    output = f"{line}\n{TWO_CARDS.splitlines()[1]}\n"
    bench.install("nvidia-smi", {"--query-gpu=": output, "--query-compute-apps=": ""}, code=255)
    broken, working = NvidiaSmi().read().gpus
    assert (broken["index"], broken["name"], broken["error"]) == (0, "unknown", error)
    assert (working["index"], working["uuid"], working["error"]) == (1, "GPU-bbbb", None)


def test_a_gpu_that_can_no_longer_be_opened_is_remembered_by_its_bus(bench: Bench) -> None:
    source = NvidiaSmi()
    bench.install("nvidia-smi", {"--query-gpu=": TWO_CARDS, "--query-compute-apps=": ""})
    source.read()
    line = f"{NO_HANDLE} 0000:41:00.0: GPU is lost."
    bench.install("nvidia-smi", {"--query-gpu=": line}, code=15)
    (gpu,) = source.read().gpus
    assert (gpu["index"], gpu["uuid"], gpu["name"]) == (1, "GPU-bbbb", "Tesla V100-SXM2-16GB")
    assert gpu["error"] == LOST


def test_no_devices_found_is_an_answer_and_not_a_failure(bench: Bench) -> None:
    bench.install("nvidia-smi", {"--query-gpu=": "No devices were found\n"}, code=6)
    assert NvidiaSmi().read() == ([], None)


def test_what_nvidia_smi_says_of_a_broken_driver_is_passed_on(bench: Bench) -> None:
    words = "Failed to initialize NVML: Driver/library version mismatch"
    bench.install("nvidia-smi", {"--query-gpu=": words}, code=18)
    with pytest.raises(SourceError, match="version mismatch"):
        NvidiaSmi().read()


def test_the_gpus_are_shown_although_their_processes_cannot_be_listed(bench: Bench) -> None:
    bench.install("nvidia-smi", {"--query-gpu=": TWO_CARDS})
    assert [gpu["processes"] for gpu in NvidiaSmi().read().gpus] == [[], []]


def test_a_tool_that_hangs_is_killed_with_its_children(bench: Bench, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    bench.script("nvidia-smi", f"/bin/sleep 600 &\necho $$ $! > {shlex.quote(str(pids))}\nwait")
    with pytest.raises(SourceError, match="nvidia-smi gave no answer within 3 s"):
        NvidiaSmi().read()
    wait_until_dead([int(pid) for pid in pids.read_text().split()])


def test_amd_smi_of_rocm_7_is_understood(bench: Bench) -> None:
    metric = {
        "gpu_data": [
            amd_metric(
                0,
                usage={"gfx_activity": quantity(94, "%"), "mm_activity": "N/A"},
                power={"socket_power": quantity(612, "W"), "gfx_voltage": "N/A"},
                temperature={"edge": "N/A", "hotspot": quantity(71, "C"), "mem": quantity(60, "C")},
                mem_usage={"total_vram": quantity(196592, "MB"), "used_vram": quantity(17153, "MB")},
            )
        ]
    }
    static = {
        "gpu_data": [
            {
                "gpu": 0,
                "asic": {"market_name": "AMD Instinct MI300X", "asic_serial": "0x6F1F0A2B3C4D5E6F"},
                "bus": {"bdf": "0000:83:00.0"},
                "driver": {"name": "amdgpu", "version": "6.12.12"},
                "limit": {
                    "ppt0": {"max_power_limit": quantity(750, "W"), "socket_power_limit": quantity(600, "W")},
                    "ppt1": {"max_power_limit": "N/A", "socket_power_limit": "N/A"},
                },
            }
        ]
    }
    process = {"process_info": {"name": "/bin/train", "pid": 4194999, "mem_usage": quantity(6 * MIB, "B")}}
    bench.install(
        "amd-smi",
        {
            "metric": json.dumps(metric, indent=4),
            "static": json.dumps(static),
            "process": json.dumps([{"gpu": 0, "process_list": [process]}]),
        },
    )
    reading = AmdSmi().read()
    (gpu,) = reading.gpus
    assert reading.driver == "6.12.12"
    assert (gpu["uuid"], gpu["name"]) == ("GPU-6f1f0a2b3c4d5e6f", "AMD Instinct MI300X")
    assert (gpu["memory_total_bytes"], gpu["memory_used_bytes"]) == (196592 * MIB, 17153 * MIB)
    assert (gpu["use_ratio"], gpu["temperature_c"]) == (0.94, 71.0)
    assert (gpu["power_w"], gpu["power_limit_w"], gpu["error"]) == (612.0, 600.0, None)
    (listed,) = gpu["processes"]
    assert (listed["pid"], listed["name"], listed["memory_bytes"]) == (4194999, "train", 6 * MIB)


def test_amd_smi_of_rocm_6_is_understood_with_its_warning_before_the_document(bench: Bench) -> None:
    warning = "WARNING: User is missing the following required groups: render, video.\n[hint] add them\n"
    metric = [
        amd_metric(
            0,
            usage={"gfx_activity": "2 %"},
            power={"average_socket_power": 20},
            temperature={"edge_temperature": "41.5 C"},
            mem_usage={"total_vram": "16368 MB", "used_vram": "14569 MB"},
        ),
        amd_metric(1, usage="N/A", power="N/A", temperature="N/A", mem_usage="N/A"),
    ]
    legacy_limit = {"max_power": quantity(263, "W"), "socket_power": quantity(0, "W")}
    static = [
        {
            "gpu": 0,
            "asic": {"market_name": "AMD Radeon RX 7800 XT", "asic_serial": "N/A"},
            "bus": {"bdf": "0000:03:00.0"},
            "limit": legacy_limit,
        }
    ]
    none = [{"gpu": 0, "process_list": [{"process_info": "No running processes detected"}]}]
    bench.install(
        "amd-smi",
        {
            "metric": warning + json.dumps(metric, indent=4) + "\n",
            "static": warning + json.dumps(static) + "\nWARNING: done\n",
            "process": json.dumps(none),
        },
    )
    first, silent = AmdSmi().read().gpus
    assert (first["uuid"], first["power_w"], first["power_limit_w"]) == ("PCI-0000:03:00.0", 20.0, 263.0)
    assert (first["memory_used_bytes"], first["temperature_c"]) == (14569 * MIB, 41.5)
    assert (first["processes"], first["error"]) == ([], None)
    assert (silent["index"], silent["name"]) == (1, "unknown")
    assert silent["error"] == "the driver reports no readings for it"


def test_a_process_that_amd_smi_lists_everywhere_is_on_the_gpu_whose_memory_it_has(bench: Bench) -> None:
    def listed(gpu: int, **memory: int) -> dict[str, Any]:
        processes = [
            {"process_info": {"name": "N/A", "pid": pid, "memory_usage": {"vram_mem": quantity(vram, "B")}}}
            for pid, vram in ((4194998, memory["placed"]), (4194999, memory["unplaced"]))
        ]
        return {"gpu": gpu, "process_list": processes}

    use = {"usage": {"gfx_activity": quantity(1, "%")}}
    bench.install(
        "amd-smi",
        {
            "metric": json.dumps([amd_metric(0, **use), amd_metric(1, **use)]),
            "static": "[]",
            "process": json.dumps([listed(0, placed=0, unplaced=0), listed(1, placed=7, unplaced=0)]),
        },
    )
    first, second = AmdSmi().read().gpus
    assert [process["pid"] for process in first["processes"]] == [4194999]
    assert [(process["pid"], process["memory_bytes"]) for process in second["processes"]] == [
        (4194998, 7),
        (4194999, None),
    ]


def test_what_hardly_changes_is_not_asked_of_amd_smi_each_time(bench: Bench) -> None:
    metric = json.dumps([amd_metric(0, usage={"gfx_activity": quantity(1, "%")})])
    bench.install("amd-smi", {"metric": metric, "static": "[]", "process": "[]"})
    source = AmdSmi()
    source.read()
    source.read()
    assert (bench.calls("amd-smi", "metric"), bench.calls("amd-smi", "static")) == (2, 1)


def test_rocm_smi_is_understood_with_warnings_before_its_document(bench: Bench) -> None:
    cards = {
        "card0": {
            "Device Name": "0x744c",
            "Card Series": "Radeon RX 7900 XTX",
            "Card Model": "0x744c",
            "Unique ID": "0x33d8808f71bf6cd4",
            "PCI Bus": "0000:03:00.0",
            "Temperature (Sensor edge) (C)": "49.0",
            "Temperature (Sensor junction) (C)": "55.0",
            "Average Graphics Package Power (W)": "19.0",
            "Max Graphics Package Power (W)": "303.0",
            "GPU use (%)": "12",
            "GPU Memory Allocated (VRAM%)": "3",
            "VRAM Total Memory (B)": "25753026560",
            "VRAM Total Used Memory (B)": "794341376",
        },
        "system": {"Driver version": "6.8.0-60-generic"},
    }
    warning = "WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status\n\n"
    bench.install("rocm-smi", {"--showuse": warning + json.dumps(cards) + "\n"})
    reading = RocmSmi().read()
    (gpu,) = reading.gpus
    assert reading.driver == "6.8.0-60-generic"
    assert (gpu["uuid"], gpu["name"]) == ("GPU-33d8808f71bf6cd4", "Radeon RX 7900 XTX")
    assert (gpu["memory_total_bytes"], gpu["memory_used_bytes"]) == (25753026560, 794341376)
    assert (gpu["use_ratio"], gpu["temperature_c"]) == (0.12, 49.0)
    assert (gpu["power_w"], gpu["power_limit_w"], gpu["error"]) == (19.0, 303.0, None)


def test_rocm_smi_of_other_versions_has_other_keys(bench: Bench) -> None:
    cards = {
        "card1": {"Card series": "Vega 20", "Temperature (Sensor #1) (c)": "38.0", "GPU use (%)": "N/A"},
        "card0": {
            "Device Name": "Phoenix3",
            "Unique ID": "N/A",
            "PCI Bus": "0000:C4:00.0",
            "Current Socket Graphics Package Power (W)": "7.222",
            "GPU use (%)": "19",
        },
        "card10": {"Average Graphics Package Power (W)": "N/A (Secondary die)", "GPU use (%)": "4"},
    }
    bench.install("rocm-smi", {"--showuse": json.dumps(cards)})
    laptop, old, secondary = RocmSmi().read().gpus
    assert (laptop["index"], laptop["name"], laptop["uuid"]) == (0, "Phoenix3", "PCI-0000:c4:00.0")
    assert (laptop["power_w"], laptop["use_ratio"]) == (7.222, 0.19)
    assert (old["index"], old["name"], old["temperature_c"]) == (1, "Vega 20", 38.0)
    assert (old["use_ratio"], old["error"]) == (None, None)
    assert (secondary["index"], secondary["power_w"]) == (10, None)


def test_what_rocm_smi_says_of_a_missing_driver_is_passed_on(bench: Bench) -> None:
    bench.script("rocm-smi", "echo 'ERROR:root:Driver not initialized (amdgpu not found in modules)' >&2")
    with pytest.raises(SourceError, match="amdgpu not found in modules"):
        RocmSmi().read()


def test_rocm_smi_without_any_gpu_is_an_answer(bench: Bench) -> None:
    bench.script("rocm-smi", "echo 'WARNING: No AMD GPUs specified'; exit 0")
    assert RocmSmi().read() == ([], None)


def test_a_tool_that_is_not_installed_is_no_fault(bench: Bench) -> None:
    if any(Path(folder, "nvidia-smi").exists() for folder in ("/usr/lib/wsl/lib", "/opt/rocm/bin")):
        pytest.skip("nvidia-smi is installed where it is always looked for")
    with pytest.raises(SourceAbsentError):
        NvidiaSmi().read()


def test_the_next_tool_is_asked_when_one_refuses_and_kept_while_it_works(bench: Bench) -> None:
    bench.install("amd-smi", {"metric": "RuntimeError: User is missing the required groups"}, code=1)
    bench.install("rocm-smi", {"--showuse": json.dumps({"card0": {"GPU use (%)": "5"}})})
    sources = Sources([AmdSmi(), RocmSmi()])
    assert sources.sample()["source"] == "rocm-smi"
    assert sources.sample()["source"] == "rocm-smi"
    assert bench.calls("amd-smi", "metric") == 1


def test_the_first_source_is_asked_again_when_the_kept_one_fails(bench: Bench) -> None:
    metric = json.dumps([amd_metric(0, usage={"gfx_activity": quantity(1, "%")})])
    bench.install("amd-smi", {"metric": "Segmentation fault"}, code=139)
    bench.install("rocm-smi", {"--showuse": json.dumps({"card0": {"GPU use (%)": "5"}})})
    sources = Sources([AmdSmi(), RocmSmi()])
    assert sources.sample()["source"] == "rocm-smi"
    bench.install("rocm-smi", {"--showuse": "Traceback"}, code=1)
    bench.install("amd-smi", {"metric": metric, "static": "[]", "process": "[]"})
    assert sources.sample()["source"] == "amd-smi"


def test_a_broken_driver_is_not_hidden_by_a_tool_that_sees_no_gpu(bench: Bench) -> None:
    bench.install("nvidia-smi", {"--query-gpu=": "Failed to initialize NVML: Unknown Error"}, code=255)
    bench.script("rocm-smi", "echo 'WARNING: No AMD GPUs specified'")
    answer = Sources([NvidiaSmi(), RocmSmi()]).sample()
    assert answer["error"] == "nvidia-smi: Failed to initialize NVML: Unknown Error"
    assert (answer["gpus"], answer["source"]) == ([], None)
