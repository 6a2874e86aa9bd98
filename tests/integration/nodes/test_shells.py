"""Whatever a login shell is and prints, and whichever Python is there, a link opens or says why it cannot."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from tests.integration.conftest import Farms, RawProgram, in_loop, link_to, open_link, run_command, spec_of
from tests.rig.sshd import SshdNode
from tests.rig.waiting import wait_until
from ugro.kernel.links import transport as bootstrap
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.support.errors import Unreachable
from ugro.node import wire

SHELLS = [
    pytest.param(shell, marks=pytest.mark.skipif(not Path(shell).exists(), reason=f"not installed: {shell}"))
    for shell in ("/bin/bash", "/bin/dash", "/usr/bin/fish", "/usr/bin/tcsh", "/usr/bin/zsh")
]
BANNER = "Welcome!\nUGRO1 \x1b[1m this is not the greeting\nUGRO1 none\nno newline at the end, 100 % 'quoted' \"too\""


@functools.cache
def real_python(version: str) -> Path | None:
    """An interpreter of that version that really runs; a version manager's shim may not."""
    name = f"python{version}"
    code = "import sys; sys.stdout.write(sys.executable)"
    candidates = [Path(shutil.which(name) or "/none"), *Path.home().glob(f".pyenv/versions/{version}*/bin/{name}")]
    for candidate in filter(Path.exists, candidates):
        found = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False, timeout=20)
        if found.returncode == 0:
            return Path(found.stdout)
    return None


def needs(version: str) -> Path:
    if (python := real_python(version)) is None:
        pytest.skip(f"no Python {version} here")
    return python


def folder_of(directory: Path, **programs: Path) -> Path:
    """A directory for PATH with these names and nothing else."""
    directory.mkdir()
    for name, target in programs.items():
        (directory / name.replace("_", ".")).symlink_to(target)
    return directory


async def failure(spec: NodeSpec, farm: object) -> Unreachable:
    with pytest.raises(Unreachable) as caught:
        await open_link(spec, farm)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize("shell", SHELLS)
@in_loop
async def test_every_login_shell_will_do_whatever_its_rc_file_prints(farm_of: Farms, shell: str) -> None:
    farm = farm_of(1, shell=shell, banner=BANNER)
    async with link_to(farm, farm.nodes[0], env=(("NAME", "Jürgen's 🐍"),)) as link:
        facts = await link.call("probe", {"gpu_timeout_s": 1}, timeout_s=10)
        assert facts["memory_total_bytes"] > 0
        ended, output = await run_command(link, "sh", "-c", 'echo "$NAME"; tty; echo gone >&2; exit 3')
        assert ended == {"code": 3, "signal": None, "unkillable": []}
        assert sorted(output.decode().splitlines()) == ["Jürgen's 🐍", "gone", "not a tty"]


@pytest.mark.proof
@pytest.mark.parametrize("shell", SHELLS)
@in_loop
async def test_a_missing_python_is_named_by_every_shell(farm_of: Farms, shell: str) -> None:
    farm = farm_of(1, shell=shell, python=False)
    error = await failure(spec_of(farm.nodes[0]), farm)
    assert (error.cause, error.message) == ("python-missing", "python3 not found")


@in_loop
async def test_a_banner_just_under_the_limit_is_passed_over_and_one_over_it_is_refused(farm_of: Farms) -> None:
    farm = farm_of(1, banner="x" * 60_000)
    async with link_to(farm, farm.nodes[0]) as link:
        assert await link.call("echo", {"a": 1}, timeout_s=5) == {"a": 1}
    farm.nodes[0].configure(banner="x" * 80_000)
    error = await failure(spec_of(farm.nodes[0]), farm)
    assert error.cause == "protocol"
    assert "64 KiB" in error.message
    assert error.hint is not None
    assert "rc files" in error.hint


@pytest.mark.proof
@pytest.mark.parametrize("stream", ["stdout", "stderr", "stderr in the background"])
@in_loop
async def test_an_endless_banner_is_refused_with_little_memory_and_ends_there_too(farm_of: Farms, stream: str) -> None:
    node = (farm := farm_of(1)).nodes[0]
    line = {"stdout": "yes", "stderr": "yes >&2", "stderr in the background": "yes >&2 &"}[stream]
    (node.home / ".bashrc").write_text(f"{line}\n")
    tracemalloc.start()
    try:
        async with asyncio.timeout(15):  # far less than a connection may take: it is refused, not timed out
            error = await _failure_now_or_later(spec_of(node), farm)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert error.cause == "protocol"
    wait_until(lambda: not node.processes(), 10, "the endless banner to end")


async def _failure_now_or_later(spec: NodeSpec, farm: object) -> Unreachable:
    """What goes on in the background may let the link open first."""
    try:
        link = await open_link(spec, farm)  # type: ignore[arg-type]
    except Unreachable as error:
        return error
    reason = await link.lost
    await link.wait_closed()
    return reason


@in_loop
async def test_an_account_that_is_not_meant_for_commands_is_quoted(farm_of: Farms) -> None:
    node = (farm := farm_of(1)).nodes[0]
    (node.home / ".bashrc").write_text("echo This account is currently not available.\nexit 1\n")
    error = await failure(spec_of(node), farm)
    assert error.message == "the connection ended (exit code 1): This account is currently not available."


@pytest.mark.parametrize("version", ["2.7", "3.6"])
@in_loop
async def test_a_python_that_is_too_old_is_named_with_its_version(farm_of: Farms, tmp_path: Path, version: str) -> None:
    name = "python" if version == "2.7" else "python3"
    farm = farm_of(1, python_path=folder_of(tmp_path / "bin", **{name: needs(version)}))
    error = await failure(spec_of(farm.nodes[0]), farm)
    assert error.cause == "python-old"
    assert version in error.message


@pytest.mark.parametrize("version", ["3.9", "3.13", "3.14"])
@in_loop
async def test_the_node_program_runs_on_every_python_that_is_promised(
    farm_of: Farms, tmp_path: Path, version: str
) -> None:
    farm = farm_of(1, python_path=folder_of(tmp_path / "bin", python3=needs(version)))
    async with link_to(farm, farm.nodes[0], env=(("UGRO_NVML_LIBRARY", "/nowhere.so"),)) as link:
        assert link.machine is not None
        assert link.machine.python.startswith(f"{version}.")
        facts = await link.call("probe", {"gpu_timeout_s": 5}, timeout_s=15)
        assert facts["gpus"] == []
        assert facts["gpu_error"]  # the GPU reader ran, and found no driver
        ended, output = await run_command(link, "sh", "-c", "echo out; exit 4")
        assert (ended["code"], output) == (4, b"out\n")
        stream = link.stream("exec", {"argv": ["sh", "-c", "echo on; sleep 1000"], "marker": "m", "grace_s": 1})
        async for _ in stream:
            stream.ask_to_stop()
        assert (await stream.result())["signal"] == 15


@in_loop
async def test_a_newer_python_beside_an_old_one_is_found_and_no_secret_shows_in_a_command_line(
    farm_of: Farms, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "bin", python3=needs("3.6"), python3_9=needs("3.9"))
    farm = farm_of(1, python_path=folder)
    async with link_to(farm, farm.nodes[0], env=(("TOKEN", "s3cr3t"),)) as link:
        assert link.machine is not None
        assert link.machine.python.startswith("3.9.")
        assert (await run_command(link, "sh", "-c", "echo $TOKEN-$UGRO_STAGE-"))[1] == b"s3cr3t--\n"
        pids = [os.fsencode(f"/proc/{pid}/cmdline") for pid in farm.nodes[0].processes()]
        assert pids
        assert not any(b"s3cr3t" in Path(os.fsdecode(path)).read_bytes() for path in pids)


@in_loop
async def test_a_python_that_was_named_is_used_or_complained_about(farm_of: Farms, tmp_path: Path) -> None:
    node = (farm := farm_of(1)).nodes[0]
    (node.home / "pÿ").mkdir()
    (node.home / "pÿ" / "my python").symlink_to(needs("3.9"))
    (node.home / "broken").write_text("#!/no/such/interpreter\n")
    (node.home / "broken").chmod(0o755)
    async with link_to(farm, node, python="~/pÿ/my python") as link:
        assert link.machine is not None
        assert link.machine.python.startswith("3.9.")
    for named in ("~/missing", "~/broken", "python9"):
        error = await failure(spec_of(node, python=named), farm)
        assert error.cause == "python-missing", named
        assert named in error.message


def started(root: Path, spec: NodeSpec) -> subprocess.Popen[bytes]:
    """The first stage by hand, up to where it wants the program."""
    process = subprocess.Popen(bootstrap.LOCAL_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(bootstrap.first_lines(spec, "nonce", 30.0))
    assert process.stdout.readline() == b"UGRO1 nonce want\n"
    return process


def finish(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.wait(10)


def program_folder(node_root: Path) -> Path:
    return node_root / ".ugro" / "program"


def kept(node_root: Path) -> list[str]:
    return sorted(path.name for path in program_folder(node_root).glob("*"))


def test_a_node_that_dies_during_the_upload_keeps_no_half_program(tmp_path: Path) -> None:
    spec = NodeSpec("here", remote_root=str(tmp_path))
    program = bootstrap.node_program()
    process = started(tmp_path, spec)
    assert process.stdin is not None
    process.stdin.write(program.content[: len(program.content) // 2])
    process.kill()
    finish(process)
    assert kept(tmp_path) == []


def test_what_a_death_in_the_middle_left_is_not_used_and_is_removed_when_it_is_old(tmp_path: Path) -> None:
    spec = NodeSpec("here", remote_root=str(tmp_path))
    name = bootstrap.node_program().name
    (program_folder(tmp_path) / f"{name}.older-version" / "ugro").mkdir(parents=True)
    for suffix, age_s in ((".older-version", 3600), (".old", 3600), (".young", 0)):
        left = program_folder(tmp_path) / (name + suffix)
        if not left.exists():
            left.write_bytes(bootstrap.node_program().content[:1000])
        os.utime(left, (left.stat().st_mtime - age_s,) * 2)
    process = started(tmp_path, spec)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(bootstrap.node_program().content)
    assert process.stdout.readline() == b"UGRO1 nonce ready\n"
    finish(process)
    assert kept(tmp_path) == [name, f"{name}.young"]


def test_a_damaged_upload_is_refused(tmp_path: Path) -> None:
    process = started(tmp_path, NodeSpec("here", remote_root=str(tmp_path)))
    assert process.stdin is not None
    assert process.stdout is not None
    content = bytearray(bootstrap.node_program().content)
    content[100] ^= 1
    process.stdin.write(content)
    assert process.stdout.readline() == b"UGRO1 nonce damaged\n"
    finish(process)
    assert kept(tmp_path) == []


def test_a_program_that_runs_needs_no_file_any_more(tmp_path: Path) -> None:
    """A second link may replace it, a cleaner may delete it."""
    with RawProgram(tmp_path) as program:
        shutil.rmtree(program_folder(tmp_path))
        program.call(1, "exec", {"argv": ["true"], "marker": "test"})
        assert program.frame()[0] == wire.RESULT


@pytest.mark.proof
@in_loop
async def test_many_agents_that_come_to_a_fresh_node_at_once_all_get_in(farm_of: Farms) -> None:
    node: SshdNode = (farm := farm_of(1)).nodes[0]
    links = await asyncio.gather(*(open_link(spec_of(node), farm) for _ in range(6)))
    assert kept(node.home / "grid_workspace") == [bootstrap.node_program().name]
    for link in links:
        link.close()
    await asyncio.gather(*(link.wait_closed() for link in links))
