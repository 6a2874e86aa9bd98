"""The sampler as the process it is, with pretend NVIDIA libraries in place of a driver."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import ugro
from ugro.kernel.links.model import Gpu, GpuProcess
from ugro.kernel.support.errors import UgroError
from ugro.lab.nodes import GPU_IS_LOST, SIMULATED_MODELS, SimulatedGpu, build_nvml_stub, write_gpus, write_nvidia_smi

GIB = 1024**3
LOST = "the GPU is lost: it fell off the bus; a reboot may bring it back"
ANSWER_S = 20.0

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="not installed: a C compiler",
)


class SamplerProcess:
    """What the node program sees of the sampler: two pipes and a process."""

    def __init__(self, env: dict[str, str], python: str = sys.executable) -> None:
        package_folder = str(Path(ugro.__file__).parents[1])
        self.process = subprocess.Popen(
            [python, "-W", "error", "-c", "from ugro.node.hardware.gpus import serve; serve(0, 1, '.')"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": "/nowhere", "PYTHONPATH": package_folder, **env},
        )
        self._line = b""

    def ask(self, timeout_s: float = ANSWER_S) -> dict[str, Any] | None:
        """The answer, or None without one in time or at the end of the pipe."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"?\n")
        self.process.stdin.flush()
        return self.receive(timeout_s)

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._line:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([self.process.stdout], [], [], left_s)[0]:
                return None
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                return None
            self._line += part
        line, _, self._line = self._line.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def gpus(self) -> list[Gpu]:
        answer = self.ask()
        assert answer is not None, f"the sampler ended with {self.process.poll()}"
        assert (answer["source"], answer["error"]) == ("nvml", None)
        return [parsed(gpu) for gpu in answer["gpus"]]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def parsed(gpu: dict[str, Any]) -> Gpu:
    assert gpu.keys() == {field.name for field in dataclasses.fields(Gpu)}
    processes = tuple(GpuProcess(**process) for process in gpu["processes"])
    return Gpu(**{**gpu, "processes": processes})


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    built: dict[tuple[str, ...], Path] = {}

    def library(*defines: str) -> Path:
        if defines not in built:
            built[defines] = build_nvml_stub(tmp_path_factory.mktemp("nvml"), defines=defines)
        return built[defines]

    return library


@pytest.fixture
def gpus_file(tmp_path: Path) -> Path:
    return tmp_path / "gpus"


@pytest.fixture
def start() -> Iterator[Callable[..., SamplerProcess]]:
    started: list[SamplerProcess] = []

    def begin(env: dict[str, str], python: str = sys.executable) -> SamplerProcess:
        started.append(SamplerProcess(env, python))
        return started[-1]

    yield begin
    for sampler in started:
        sampler.end()


@pytest.fixture
def sampler(
    start: Callable[..., SamplerProcess], libraries: Callable[..., Path], gpus_file: Path
) -> SamplerProcess:
    write_gpus(gpus_file, [])
    return start(pretend_env(libraries(), gpus_file))


def pretend_env(library: Path, gpus_file: Path) -> dict[str, str]:
    return {"UGRO_NVML_LIBRARY": str(library), "UGRO_PRETEND_GPUS": str(gpus_file)}


def compiled(folder: Path, source: str) -> Path:
    (folder / "library.c").write_text(source)
    library = folder / "library.so"
    subprocess.run(
        ["cc", "-O0", "-fPIC", "-shared", "-o", str(library), str(folder / "library.c")],
        check=True,
        timeout=60,
    )
    return library


@needs_compiler
def test_two_unlike_gpus_are_read_each_with_its_own_values(sampler: SamplerProcess, gpus_file: Path) -> None:
    first = dataclasses.replace(
        SIMULATED_MODELS["rtx-5070-ti"],
        uuid="GPU-one",
        memory_used_bytes=3 * GIB,
        use_percent=87,
        temperature_c=71,
        power_w=131.25,
        energy_j=5_000_000_000.25,  # more than 32 bits of millijoules
    )
    write_gpus(gpus_file, [first, SIMULATED_MODELS["v100"]])
    one, two = sampler.gpus()
    assert one == Gpu(
        index=0,
        uuid="GPU-one",
        name="NVIDIA GeForce RTX 5070 Ti Laptop GPU",
        memory_total_bytes=12 * GIB,
        memory_used_bytes=3 * GIB,
        use_ratio=0.87,
        temperature_c=71.0,
        power_w=131.25,
        power_limit_w=140.0,
        energy_j=5_000_000_000.25,
    )
    assert (two.index, two.name, two.memory_total_bytes) == (1, "Tesla V100-SXM2-16GB", 16 * GIB)
    assert two.uuid.startswith("GPU-")
    assert two.uuid != one.uuid


@needs_compiler
def test_what_slows_a_gpu_down_is_told_in_words_and_idleness_is_none_of_it(
    sampler: SamplerProcess, gpus_file: Path
) -> None:
    bits = (None, 0x01 | 0x02 | 0x10, 0x04, 0x40, 0x08 | 0x20 | 0x80)
    write_gpus(gpus_file, [SimulatedGpu(throttle=one) for one in bits])
    told = [None if gpu.throttle is None else list(gpu.throttle) for gpu in sampler.gpus()]
    assert told == [None, [], ["power"], ["heat"], ["power", "heat", "hardware"]]


@needs_compiler
def test_a_gpu_that_fails_from_the_start_leaves_the_others_alone(
    sampler: SamplerProcess, gpus_file: Path
) -> None:
    write_gpus(gpus_file, [SimulatedGpu(error=999), SimulatedGpu(uuid="GPU-fine")])
    broken, fine = sampler.gpus()
    assert broken == Gpu(0, "", "unknown", error="cannot read its handle: unknown driver error")
    assert (fine.uuid, fine.error, fine.temperature_c) == ("GPU-fine", None, 38.0)


@needs_compiler
def test_a_gpu_that_falls_off_the_bus_keeps_its_name_until_it_is_back(
    sampler: SamplerProcess, gpus_file: Path
) -> None:
    steady, unlucky = SimulatedGpu(uuid="GPU-steady"), SimulatedGpu("Tesla V100", "GPU-unlucky")
    write_gpus(gpus_file, [unlucky, steady])
    assert [gpu.error for gpu in sampler.gpus()] == [None, None]
    write_gpus(gpus_file, [dataclasses.replace(unlucky, error=GPU_IS_LOST), steady])
    lost, other = sampler.gpus()
    assert lost == Gpu(0, "GPU-unlucky", "Tesla V100", error=LOST)
    assert (other.uuid, other.error, other.memory_total_bytes) == ("GPU-steady", None, 8 * GIB)
    write_gpus(gpus_file, [unlucky, steady])
    assert [(gpu.uuid, gpu.error) for gpu in sampler.gpus()] == [("GPU-unlucky", None), ("GPU-steady", None)]


@needs_compiler
def test_a_name_is_not_given_twice_when_the_gpus_change_places(
    sampler: SamplerProcess, gpus_file: Path
) -> None:
    write_gpus(gpus_file, [SimulatedGpu(uuid="GPU-a"), SimulatedGpu(uuid="GPU-b")])
    sampler.gpus()
    write_gpus(gpus_file, [SimulatedGpu(error=GPU_IS_LOST), SimulatedGpu(uuid="GPU-a")])
    assert [gpu.uuid for gpu in sampler.gpus()] == ["", "GPU-a"]


@needs_compiler
def test_values_that_the_driver_does_not_support_are_unknown_and_no_error(
    sampler: SamplerProcess, gpus_file: Path
) -> None:
    nothing = SimulatedGpu(
        uuid="GPU-quiet",
        memory_total_bytes=None,
        memory_used_bytes=None,
        use_percent=None,
        temperature_c=None,
        power_w=None,
        power_limit_w=None,
    )
    write_gpus(gpus_file, [nothing])
    assert sampler.gpus() == [Gpu(0, "GPU-quiet", nothing.name)]


@needs_compiler
def test_a_value_that_cannot_be_read_is_said_and_the_others_are_shown(
    sampler: SamplerProcess, gpus_file: Path
) -> None:
    gpus_file.write_text("GPU-a|A100|1000|10|!999|50|!4|300000|0|\n")
    (gpu,) = sampler.gpus()
    assert gpu.error == "cannot read its utilisation: unknown driver error"
    assert (gpu.use_ratio, gpu.power_w) == (None, None)
    assert (gpu.memory_used_bytes, gpu.temperature_c, gpu.power_limit_w) == (10, 50.0, 300.0)


@needs_compiler
def test_a_gpu_that_is_lost_between_two_values_is_asked_nothing_more(
    sampler: SamplerProcess, gpus_file: Path
) -> None:
    gpus_file.write_text("GPU-a|A100|!15|10|20|50|1000|300000|0|\n")
    assert sampler.gpus() == [Gpu(0, "GPU-a", "A100", error=LOST)]


@needs_compiler
@pytest.mark.parametrize("driver", [(), ("UGRO_OLD_DRIVER",), ("UGRO_WIDE_PROCESSES",)])
def test_process_lists_of_any_length_are_read_from_any_driver(
    start: Callable[..., SamplerProcess],
    libraries: Callable[..., Path],
    gpus_file: Path,
    driver: Sequence[str],
) -> None:
    write_gpus(gpus_file, [])
    sampler = start(pretend_env(libraries(*driver), gpus_file))
    for length in (1, 2, 32, 33, 700, 0):
        # No system gives pids above 2²², so none of these is anybody's.
        expected = [(2**22 + 1 + number, (number + 1) * 1000) for number in range(length)]
        write_gpus(gpus_file, [SimulatedGpu(processes=tuple(expected))])
        (gpu,) = sampler.gpus()
        assert [(process.pid, process.memory_bytes) for process in gpu.processes] == expected
        assert {process.name for process in gpu.processes} <= {"unknown"}


@needs_compiler
def test_a_process_that_computes_and_draws_is_listed_once(sampler: SamplerProcess, gpus_file: Path) -> None:
    gpus_file.write_text(
        "GPU-a|A100|1000|10|20|50|1000|2000|0|4194998:70,4194999:-,4194998:70:g,4194997:5:g\n"
    )
    (gpu,) = sampler.gpus()
    listed = [(process.pid, process.memory_bytes) for process in gpu.processes]
    assert listed == [(4194998, 70), (4194999, None), (4194997, 5)]


@needs_compiler
def test_our_own_processes_are_known_by_their_mark(sampler: SamplerProcess, gpus_file: Path) -> None:
    marks = {"UGRO_RUN": "a1/j7.1", "UGRO_JOB": "j7"}
    ours = subprocess.Popen(["/bin/sh", "-c", "read line"], stdin=subprocess.PIPE, env=marks)
    theirs = subprocess.Popen(["/bin/sh", "-c", "read line"], stdin=subprocess.PIPE, env={"UGRO_JOBS": "x"})
    try:
        write_gpus(gpus_file, [SimulatedGpu(processes=((ours.pid, 5), (theirs.pid, 6)))])
        (gpu,) = sampler.gpus()
    finally:
        for process in (ours, theirs):
            process.communicate(b"\n", timeout=10)
    assert gpu.processes == (
        GpuProcess(ours.pid, "sh", 5, is_ours=True, job="j7"),
        GpuProcess(theirs.pid, "sh", 6, is_ours=False, job=None),
    )


@needs_compiler
def test_a_driver_that_was_reloaded_is_used_again(sampler: SamplerProcess, gpus_file: Path) -> None:
    write_gpus(gpus_file, [SimulatedGpu(uuid="GPU-a")])
    sampler.gpus()
    gpus_file.unlink()
    answer = sampler.ask()
    assert answer is not None
    assert (answer["gpus"], answer["source"]) == ([], None)
    assert answer["error"] == "nvml: the NVIDIA driver is not loaded"
    write_gpus(gpus_file, [SimulatedGpu(uuid="GPU-a")])
    assert [gpu.uuid for gpu in sampler.gpus()] == ["GPU-a"]


@needs_compiler
def test_a_driver_without_gpus_is_no_error(sampler: SamplerProcess) -> None:
    assert sampler.ask() == {"gpus": [], "source": "nvml", "driver": "pretend", "error": None}


def test_a_library_that_does_not_exist_is_said(start: Callable[..., SamplerProcess]) -> None:
    answer = start({"UGRO_NVML_LIBRARY": "/nonexistent/libnvidia-ml.so.1"}).ask()
    assert answer is not None
    assert answer["error"].startswith("nvml: /nonexistent/libnvidia-ml.so.1: cannot open")


@needs_compiler
def test_each_request_has_one_answer_and_the_end_of_input_ends_the_sampler(
    sampler: SamplerProcess, gpus_file: Path
) -> None:
    write_gpus(gpus_file, [SimulatedGpu()])
    output, _ = sampler.process.communicate(b"?\n?\n?\n", timeout=ANSWER_S)
    assert [json.loads(line)["source"] for line in output.splitlines()] == ["nvml"] * 3
    assert sampler.process.returncode == 0


@needs_compiler
def test_a_library_that_crashes_ends_only_the_sampler(
    start: Callable[..., SamplerProcess], tmp_path: Path
) -> None:
    library = compiled(tmp_path, "int nvmlInit_v2(void) { return *(volatile int *)0; }\n")
    sampler = start({"UGRO_NVML_LIBRARY": str(library)})
    assert sampler.ask() is None
    assert sampler.process.wait(timeout=ANSWER_S) == -signal.SIGSEGV


@needs_compiler
def test_a_library_that_blocks_forever_gives_no_answer(
    start: Callable[..., SamplerProcess], tmp_path: Path
) -> None:
    source = """
    #include <stdio.h>
    #include <unistd.h>
    int nvmlInit_v2(void) { fclose(fopen("%s", "w")); for (;;) pause(); }
    """
    reached = tmp_path / "reached"
    sampler = start({"UGRO_NVML_LIBRARY": str(compiled(tmp_path, source % reached))})
    assert sampler.ask(timeout_s=1) is None
    deadline = time.monotonic() + ANSWER_S
    while not reached.exists():
        assert time.monotonic() < deadline, "the library was never called"
        assert sampler.receive(timeout_s=0.05) is None
    assert sampler.receive(timeout_s=0.2) is None
    assert sampler.process.poll() is None


@needs_compiler
def test_the_pretend_nvidia_smi_tells_the_same_as_the_pretend_library(
    start: Callable[..., SamplerProcess], libraries: Callable[..., Path], gpus_file: Path, tmp_path: Path
) -> None:
    own = (os.getpid(), 2 * GIB)
    gpus = [
        dataclasses.replace(SIMULATED_MODELS["rtx-3070-ti"], use_percent=93, power_w=211.37, processes=(own,)),
        SimulatedGpu(memory_used_bytes=None, memory_total_bytes=None, use_percent=None, power_limit_w=None),
        SimulatedGpu(error=GPU_IS_LOST),
    ]
    write_gpus(gpus_file, [dataclasses.replace(gpu, energy_j=None) for gpu in gpus])  # the tool does not tell it
    program = write_nvidia_smi(tmp_path / "bin", gpus_file)
    tool_env = {"UGRO_NVML_LIBRARY": "/nonexistent", "PATH": f"{program.parent}:/usr/bin:/bin"}
    by_tool = start(tool_env).ask()
    by_library = start(pretend_env(libraries(), gpus_file)).ask()
    assert by_tool is not None
    assert by_library is not None
    assert (by_tool.pop("source"), by_library.pop("source")) == ("nvidia-smi", "nvml")
    assert by_tool == by_library


def test_the_pretend_nvidia_smi_is_as_blunt_as_the_real_one(gpus_file: Path, tmp_path: Path) -> None:
    program = write_nvidia_smi(tmp_path / "bin", gpus_file)

    def run(query: str) -> tuple[int, str]:
        argv = [str(program), query, "--format=csv,noheader,nounits"]
        result = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
        return result.returncode, result.stdout

    assert run("--query-gpu=index")[0] == 9
    write_gpus(gpus_file, [])
    assert run("--query-gpu=index") == (6, "No devices were found\n")
    write_gpus(gpus_file, [SimulatedGpu(power_w=None, uuid="GPU-a"), SimulatedGpu(error=GPU_IS_LOST)])
    assert run("--query-gpu=index,uuid,power.draw") == (
        0,
        "0, GPU-a, [N/A]\n1, [GPU is lost], [GPU is lost]\n",
    )
    assert run("--query-gpu=index,colour") == (2, 'Field "colour" is not a valid field to query.\n')


def test_without_a_compiler_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UgroError, match="C compiler") as caught:
        build_nvml_stub(tmp_path)
    assert caught.value.hint == "install gcc or clang"


def test_a_text_that_would_break_the_file_is_refused(gpus_file: Path) -> None:
    with pytest.raises(UgroError, match="line breaks"):
        write_gpus(gpus_file, [SimulatedGpu("two|names")])
    assert not gpus_file.exists()


@needs_compiler
def test_the_sampler_runs_on_the_oldest_python_a_node_may_have(
    start: Callable[..., SamplerProcess], libraries: Callable[..., Path], gpus_file: Path, tmp_path: Path
) -> None:
    python = oldest_python()
    if python is None:
        pytest.skip("no working Python 3.9 on this machine")
    write_gpus(gpus_file, [SimulatedGpu(uuid="GPU-a", processes=((os.getpid(), GIB),)), SimulatedGpu(error=15)])
    first, lost = start(pretend_env(libraries(), gpus_file), python).gpus()
    assert (first.uuid, first.processes[0].memory_bytes, lost.error) == ("GPU-a", GIB, LOST)
    program = write_nvidia_smi(tmp_path / "bin", gpus_file)
    env = {"UGRO_NVML_LIBRARY": "/nonexistent", "PATH": f"{program.parent}:/usr/bin:/bin"}
    answer = start(env, python).ask()
    assert answer is not None
    assert [gpu["error"] for gpu in answer["gpus"]] == [None, LOST]


def oldest_python() -> str | None:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which("python3.9"), *map(str, sorted(pyenv.glob("versions/3.9*/bin/python3.9")))]
    for candidate in filter(None, candidates):
        # A version manager's shim is there also when its version is not.
        argv = [candidate, "-c", "import ctypes, sys; print(sys.executable)"]
        check = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
        if check.returncode == 0:
            return check.stdout.strip()
    return None
