"""An environment is made on a node by the real uv: once, whole or not at all, inside the node's folder."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.conftest import in_loop, until
from tests.rig.python_envs import MARK, MINOR, put, python_envs, recipe
from tests.rig.waiting import descendants, processes_with, processes_with_variable, signal_all
from tests.rig.wheels import Wheel, index, wheel
from ugro.features.environments.model import Blob, EnvProgress, Recipe
from ugro.features.environments.node.making import POINTS
from ugro.features.environments.service.node_envs import PythonEnvs
from ugro.kernel.support.errors import EnvFailed

Wheels = tuple[Wheel, Wheel]
SECRET = "s3cret-word"
SOON_S = 20


def nothing(progress: EnvProgress) -> None:
    pass


def output(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env={"PATH": os.defpath}, check=True)
    return done.stdout.strip()


def half(root: Path) -> list[str]:
    return [path.name for path in (root / ".ugro" / "environments").glob("[!.]*.*")]


def named(root: Path) -> list[str]:
    return [path.name for path in (root / ".ugro" / "environments").glob("[!.]*") if "." not in path.name]


async def failure(envs: PythonEnvs, wanted: Recipe) -> EnvFailed:
    with pytest.raises(EnvFailed) as failed:
        await envs.make(wanted, nothing)
    assert await envs.ready(wanted.name) is None
    return failed.value


@in_loop
async def test_an_environment_is_made_once_and_runs_the_packages_that_were_sent(
    root: Path, uv: Path, wheels: Wheels
) -> None:
    said: list[EnvProgress] = []
    async with python_envs(root) as envs:
        assert await envs.ready("e1") is None
        wanted = recipe(root, uv, wheels)
        made = await envs.make(wanted, said.append)
        folder = root / ".ugro" / "environments" / "e1"
        assert made.python == str(folder / "bin" / "python")
        assert dict(made.packages) == {"tiny": "1.2", "small-thing": "1.0"}
        assert made.version.startswith(f"{MINOR}.")
        assert made.is_made
        assert output(made.python, "-c", "import tiny, sys; print(tiny.__version__, sys.prefix)") == f"1.2 {folder}"
        # Commands of packages start the interpreter at its final place.
        assert output(str(folder / "bin" / "tiny-say")) == "tiny 1.2"
        phases = [progress.phase for progress in said]
        assert list(dict.fromkeys(phases)) == ["unpacking", "python", "installing", "checking"]
        assert said[-1].total == 2
        # The second time, nothing is made, whatever the recipe would bring.
        inode = folder.stat().st_ino
        again = await envs.make(replace(wanted, tree=64 * "0"), said.append)
        assert replace(again, used_at="") == replace(made, used_at="")
        assert folder.stat().st_ino == inode
        assert (await envs.ready("e1")) is not None
        assert half(root) == []
        # Nothing was written outside of the node's folder.
        assert sorted(path.name for path in root.parent.iterdir()) == ["root"]
        [listed] = await envs.list()
        assert (listed.name, listed.in_use, listed.made.size) == ("e1", 0, made.size)
        [removed] = (await envs.remove(["e1"])).removed
        assert removed.problem is None
        assert await envs.list() == ()
        assert [one.problem for one in (await envs.remove(["e1"])).removed] == ["not-found"]


@pytest.mark.proof
@in_loop
async def test_a_node_downloads_from_an_index_and_its_password_is_nowhere_to_be_seen(
    root: Path, uv: Path, wheels: Wheels
) -> None:
    said: list[EnvProgress] = []
    hold = threading.Event()
    with index(*wheels, login=f"ann:{SECRET}", hold=hold) as packages:
        async with python_envs(root) as envs:
            wanted = recipe(root, uv, wheels, url=packages.url)
            making = asyncio.create_task(envs.make(wanted, said.append))
            await until(packages.files, SOON_S, "a download to begin")
            everyone = processes_with_variable(MARK, [str(root)])
            words = [_cmdline(pid) for pid in {*everyone, *descendants(everyone)}]
            assert any("pip" in line and "install" in line for line in words)
            assert not any(SECRET in line for line in words)
            hold.set()
            made = await making
            assert len(made.packages) == 2
            assert sorted(packages.files()) == sorted(f"/files/{one.path.name}" for one in wheels)
            wrong = replace(wanted, name="e2", index_url=packages.url.replace(SECRET, "wr0ng-word"))
            await envs.gc(0)  # the downloads, too
            refused = await failure(envs, wrong)
    assert refused.cause == "no-access", refused.tail
    assert not any("0ng-word" in text or SECRET in text for text in (refused.message, *refused.tail))
    assert not any(SECRET in progress.line for progress in said)
    assert not _files_with(root, SECRET)


def _cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _files_with(root: Path, text: str) -> list[Path]:
    files = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in files if text.encode() in path.read_bytes()]


@pytest.mark.proof
@in_loop
async def test_two_agents_that_want_the_same_one_at_once_make_it_once(root: Path, uv: Path, wheels: Wheels) -> None:
    said: list[EnvProgress] = []
    hold = threading.Event()
    with index(*wheels, hold=hold) as packages:
        async with python_envs(root) as first, python_envs(root, agent="agent-2") as second:
            wanted = recipe(root, uv, wheels, url=packages.url)
            one = asyncio.create_task(first.make(wanted, nothing))
            await until(packages.files, SOON_S, "a download to begin")
            other = asyncio.create_task(second.make(wanted, said.append))
            await until(lambda: said, SOON_S, "the second to say something")
            assert said[0].phase == "waiting"
            assert len(half(root)) == 1
            # It is not there for anybody before it is whole.
            assert await second.ready("e1") is None
            hold.set()
            made = await one
            inode = (root / ".ugro" / "environments" / "e1").stat().st_ino
            assert replace(await other, used_at="") == replace(made, used_at="")
            assert {progress.phase for progress in said} == {"waiting"}
            assert (root / ".ugro" / "environments" / "e1").stat().st_ino == inode
            assert half(root) == []


@pytest.mark.proof
@pytest.mark.parametrize("point", POINTS)
@in_loop
async def test_a_maker_that_is_killed_leaves_no_half_environment_and_the_next_one_makes_it(
    root: Path, uv: Path, wheels: Wheels, point: str
) -> None:
    wanted = recipe(root, uv, wheels)
    async with python_envs(root, crash=point) as envs:
        with pytest.raises(EnvFailed) as failed:
            await envs.make(wanted, nothing)
        assert (failed.value.cause, failed.value.message) == ("killed", "the installer was killed")
        is_there = await envs.ready("e1") is not None
        assert is_there == (point == "env.renamed")
        assert half(root) == []
    async with python_envs(root) as envs:
        made = await envs.make(wanted, nothing)
        assert output(made.python, "-c", "import tiny; print(tiny.__version__)") == "1.2"


@pytest.mark.proof
@pytest.mark.parametrize("point", ["env.created", "env.recorded"])
@in_loop
async def test_what_is_left_when_all_are_killed_at_once_is_cleaned_up_by_the_next(
    root: Path, uv: Path, wheels: Wheels, point: str
) -> None:
    wanted = recipe(root, uv, wheels)
    async with python_envs(root, crash=f"{point}:pause") as envs:
        making = asyncio.create_task(envs.make(wanted, nothing))
        await until(lambda: _stopped(root), SOON_S, "the maker to stop")
        everyone = processes_with_variable(MARK, [str(root)])
        doomed = {*everyone, *descendants(everyone)}
        signal_all(signal.SIGSTOP, doomed)
        signal_all(signal.SIGKILL, doomed)
        await asyncio.wait([making])
        assert making.exception() is not None
    assert len(half(root)) == 1
    assert named(root) == []
    # Another machine that has the same folder may be at work.
    foreign = root / ".ugro" / "environments" / "e1.elsewhere.00.making"
    foreign.mkdir()
    async with python_envs(root) as envs:
        assert await envs.list() == ()
        assert len((await envs.make(wanted, nothing)).packages) == 2
        assert half(root) == [foreign.name]


def _stopped(root: Path) -> list[int]:
    everyone = processes_with_variable(MARK, [str(root)])
    return [pid for pid in {*everyone, *descendants(everyone)} if _state(pid) == "T"]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "X"


@pytest.mark.proof
@pytest.mark.parametrize("how", ["cancelled", "link", "program"])
@in_loop
async def test_the_installer_ends_with_the_call_and_what_it_has_downloaded_is_kept(
    root: Path, uv: Path, wheels: Wheels, how: str
) -> None:
    hold = threading.Event()
    with index(*wheels, hold=hold) as packages:
        wanted = recipe(root, uv, wheels, url=packages.url)
        async with python_envs(root) as envs:
            making = asyncio.create_task(envs.make(wanted, nothing))
            await until(packages.files, SOON_S, "a download to begin")
            installers, first = processes_with(b"requirements.txt"), envs.node.link
            if how == "cancelled":
                making.cancel()
            elif how == "link":
                assert envs.node.link is not None
                envs.node.link.close()
            else:
                programs = [pid for pid in processes_with_variable(MARK, [str(root)]) if "-E -s -S" in _cmdline(pid)]
                os.kill(min(programs), signal.SIGKILL)  # not its guards, which are forked from it
            await asyncio.wait([making])
            await until(lambda: not half(root), SOON_S, "the half environment to go")
            ours = [pid for pid in installers if f"/{root.parent.name}/" in _cmdline(pid)]
            await until(lambda: not ours or not any(map(_cmdline, ours)), SOON_S, "the installer to end")
            hold.set()
            if how != "cancelled":
                await until(lambda: envs.node.link not in (None, first), SOON_S, "the node to be reached again")
            assert await envs.ready("e1") is None
            assert len((await envs.make(wanted, nothing)).packages) == 2


# --- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.proof
@in_loop
async def test_a_package_that_does_not_exist_or_has_another_hash_is_said_with_the_last_lines(
    root: Path, uv: Path, wheels: Wheels, tmp_path: Path
) -> None:
    tiny, small = wheels
    with index(tiny, small) as packages:
        async with python_envs(root) as envs:
            wanted = recipe(root, uv, wheels, url=packages.url)
            absent = wheel(tmp_path / "absent", "no-such-thing")
            gone = await failure(envs, replace(wanted, requirements=tiny.requirement + absent.requirement))
            assert gone.cause == "not-found"
            assert "no-such-thing" in gone.message
            assert gone.tail
            newer = wheel(tmp_path / "newer", "tiny", "9.9")
            old = await failure(envs, replace(wanted, requirements=newer.requirement))
            assert (old.cause, "9.9" in old.message) == ("not-found", True)
            other = tiny.requirement.replace(tiny.sha256, 64 * "0")
            damaged = await failure(envs, replace(wanted, requirements=other + small.requirement))
            assert (damaged.cause, "tiny" in damaged.message) == ("hash", True)
            assert half(root) == []
            # Sent wheels are checked in the same way.
            sent = recipe(root, uv, wheels, name="e2")
            assert (await failure(envs, replace(sent, requirements=other + small.requirement))).cause == "hash"
        port = packages.port
    async with python_envs(root) as envs:
        away = replace(wanted, index_url=f"http://127.0.0.1:{port}/simple", requirements=absent.requirement)
        assert (await failure(envs, away)).cause == "no-network"
        assert named(root) == []


@pytest.mark.proof
@pytest.mark.parametrize("fault", ["503", "429", "reset", "cut"])
@in_loop
async def test_an_index_that_fails_for_the_moment_is_no_lasting_failure(
    root: Path, uv: Path, wheels: Wheels, fault: str
) -> None:
    with index(*wheels) as packages:
        packages.fault = fault
        async with python_envs(root) as envs:
            refused = await failure(envs, recipe(root, uv, wheels, url=packages.url))
            assert refused.cause == "server-failed", refused.tail
            packages.fault = ""
            assert (await envs.make(recipe(root, uv, wheels, url=packages.url), nothing)).name == "e1"


@pytest.mark.proof
@in_loop
async def test_an_installer_without_the_expected_hash_is_never_started(root: Path, uv: Path) -> None:
    trace = root.parent / "started"
    script = f"#!/bin/sh\ntouch {trace}\n".encode()
    async with python_envs(root) as envs:
        forged = Blob("uv", 64 * "a", len(script))
        wanted = replace(recipe(root, uv, ()), installer=forged, tree=put(root, {"uv": script}))
        refused = await failure(envs, wanted)
        assert refused.cause == "hash"
        assert not list((root / ".ugro" / "tools").iterdir())
        # One that is there is looked at each time.
        tool = root / ".ugro" / "tools" / f"uv-{forged.content[:32]}"
        tool.write_bytes(script)
        tool.chmod(0o700)
        assert (await failure(envs, wanted)).cause == "hash"
        assert not trace.exists()
        missing = replace(wanted, tree=64 * "0")
        assert (await failure(envs, missing)).cause == "no-contents"


@pytest.mark.proof
@in_loop
async def test_an_installer_that_leaves_something_out_makes_no_environment(
    root: Path, wheels: Wheels, tmp_path: Path
) -> None:
    lazy = tmp_path / "lazy"
    create = f'for last; do :; done; exec {_python()} -m venv --without-pip "$last"'
    lazy.write_text(f'#!/bin/sh\nif [ "$1" = venv ]; then {create}; fi\n')
    async with python_envs(root) as envs:
        refused = await failure(envs, recipe(root, lazy, wheels))
        assert (refused.cause, "tiny" in refused.message) == ("crashed", True)
        assert (half(root), named(root)) == ([], [])


def _python() -> str:
    return str(getattr(sys, "_base_executable", sys.executable))


@pytest.mark.proof
@in_loop
async def test_an_installer_that_does_not_start_is_named_with_what_it_said(
    root: Path, wheels: Wheels, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho cannot execute: wrong libc >&2\nexit 126\n")
    async with python_envs(root) as envs:
        refused = await failure(envs, recipe(root, broken, wheels))
        assert refused.message.startswith("uv does not start on this node")
        assert refused.tail == ("cannot execute: wrong libc",)
        assert named(root) == []


@pytest.mark.proof
@in_loop
async def test_a_python_that_the_node_does_not_have_is_named_with_those_that_it_has(
    root: Path, uv: Path, wheels: Wheels
) -> None:
    async with python_envs(root) as envs:
        wanted = recipe(root, uv, wheels)
        refused = await failure(envs, replace(wanted, platform=replace(wanted.platform, python="3.4")))
        assert refused.cause == "python-missing"
        assert f"it has {MINOR}" in refused.message


@pytest.mark.proof
@in_loop
async def test_a_folder_that_others_can_change_is_not_installed_into(root: Path, uv: Path, wheels: Wheels) -> None:
    async with python_envs(root) as envs:
        wanted = recipe(root, uv, wheels)
        assert await envs.ready("e1") is None
        (root / ".ugro" / "environments").mkdir(mode=0o777)
        (root / ".ugro" / "environments").chmod(0o777)
        refused = await failure(envs, wanted)
        assert (refused.cause, str(root) in refused.message) == ("unsafe-folder", True)
        assert (root / ".ugro" / "environments").stat().st_mode & 0o777 == 0o777  # whoever made it so decides


@pytest.mark.proof
@in_loop
async def test_an_environment_that_lost_its_interpreter_is_made_again(root: Path, uv: Path, wheels: Wheels) -> None:
    async with python_envs(root) as envs:
        wanted = recipe(root, uv, wheels)
        made = await envs.make(wanted, nothing)
        Path(made.python).unlink()
        assert await envs.ready("e1") is None
        assert await envs.list() == ()
        await envs.make(wanted, nothing)
        assert output(made.python, "-c", "import tiny; print(tiny.__version__)") == "1.2"
