"""Environments resolved on this machine: with the real uv, and an index of the test's own."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.integration.conftest import in_loop
from tests.rig.waiting import wait_until
from tests.rig.wheels import Index, Wheel, index, source, wheel
from ugro.features.environments.model import EnvRequest, Platform, Whose
from ugro.features.environments.rules.requirements import HINT
from ugro.features.environments.service.making import Files
from ugro.features.environments.service.service import Resolver
from ugro.features.environments.service.tools import Tools, Workshop
from ugro.features.environments.store import Resolution
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import EnvFailed

HERE = Platform(os.uname().machine, "glibc", (2, 28), "3.11")
LOGIN = "ann:hunter2"


@asynccontextmanager
async def resolver(folder: Path, uv_home: Path) -> AsyncIterator[Resolver]:
    """As an agent has it; a second one in the same folder is the next agent."""
    store = Store(folder / "state.db")
    await store.open()
    made = Resolver(Workshop(folder / "python"), store.python_envs, Tools(Workshop(uv_home)))
    try:
        yield made
    finally:
        await made.close()
        await store.close()


def of(served: Index, *packages: str) -> EnvRequest:
    return EnvRequest(requirements=packages, index_url=served.url)


@in_loop
async def test_a_request_is_resolved_to_every_package_with_hashes(
    tmp_path: Path, uv_home: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    with index(*wheels) as served:
        async with resolver(tmp_path, uv_home) as here:
            found = await here.resolve(of(served, "tiny"), HERE)
            other = await here.resolve(of(served, "tiny"), replace(HERE, python="3.12"))
    lines = found.requirements.replace("\\\n", "").splitlines()
    assert [line.split()[0] for line in lines] == ["small-thing==1.0", "tiny==1.2"]
    assert f"--hash=sha256:{wheels[0].sha256}" in found.requirements
    assert other.name != found.name


@in_loop
async def test_an_environment_does_not_change_because_a_new_version_appeared(
    tmp_path: Path, uv_home: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    with index(*wheels) as served:
        async with resolver(tmp_path, uv_home) as here:
            first = await here.resolve(of(served, "tiny"), HERE)
        served.wheels.append(wheel(tmp_path / "new", "tiny", "1.3"))
        async with resolver(tmp_path, uv_home) as here:  # also after a restart of the agent
            again = await here.resolve(of(served, "tiny"), HERE)
            newer = await here.resolve(of(served, "tiny"), HERE, upgrade=True)
            later = await here.resolve(of(served, "tiny"), HERE)
    assert (again.name, again.requirements) == (first.name, first.requirements)
    assert "tiny==1.3" in newer.requirements
    assert newer.name != first.name
    assert later.name == newer.name


@pytest.mark.proof
@in_loop
async def test_two_who_ask_at_once_are_resolved_once(
    tmp_path: Path, uv_home: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    with index(*wheels) as served:
        async with resolver(tmp_path, uv_home) as here:
            found = await asyncio.gather(*(here.resolve(of(served, "tiny"), HERE) for _ in range(3)))
        asked = [path for path in served.asked if path.startswith("/simple/tiny")]
    assert len({one.name for one in found}) == 1
    assert list((tmp_path / "python").iterdir()) == [], "nothing is left of the work"
    assert len(asked) == 1


@in_loop
async def test_a_package_that_does_not_exist_is_one_error_with_uvs_last_lines(
    tmp_path: Path, uv_home: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    with index(*wheels) as served:
        async with resolver(tmp_path, uv_home) as here:
            with pytest.raises(EnvFailed) as caught:
                await here.resolve(of(served, "nosuch"), HERE)
    assert caught.value.cause == "not-found"
    assert "nosuch" in caught.value.message
    assert any("nosuch" in line for line in caught.value.tail)


@in_loop
async def test_a_password_is_in_no_argument_and_no_message(
    tmp_path: Path, uv_home: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    hold = threading.Event()
    with index(*wheels, login=LOGIN, hold=hold) as served:
        async with resolver(tmp_path, uv_home) as here:
            resolving = asyncio.create_task(here.resolve(of(served, "tiny"), HERE))
            await asyncio.to_thread(wait_until, lambda: bool(served.files()), 30, "uv to wait for a wheel")
            arguments = _arguments()
            hold.set()
            await resolving
            wrong = served.url.replace("hunter2", "hunter3")
            with pytest.raises(EnvFailed) as caught:
                await here.resolve(EnvRequest(requirements=("tiny",), index_url=wrong), replace(HERE, python="3.12"))
    assert any("pip\0compile" in text for text in arguments)
    assert not any("hunter2" in text for text in arguments)
    said = [caught.value.message, *caught.value.tail]
    assert not any("hunter3" in line for line in said)


@pytest.mark.proof
@in_loop
async def test_a_lock_of_uv_decides_versions_and_hashes(
    tmp_path: Path, uv_home: Path, uv: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    project = '[project]\nname = "x"\nversion = "0"\nrequires-python = ">=3.11"\ndependencies = ["tiny"]\n'
    with index(*wheels) as served:
        project += f'[[tool.uv.index]]\nurl = "{served.url}"\ndefault = true\n'
        (tmp_path / "pyproject.toml").write_text(project)
        locking = [str(uv), "lock", "--quiet", "--no-cache", "--directory", str(tmp_path)]
        run = partial(subprocess.run, check=True, env={**os.environ, "HOME": str(tmp_path)})
        await asyncio.to_thread(run, locking)
        lock = (tmp_path / "uv.lock").read_text()
        served.wheels.append(wheel(tmp_path / "new", "tiny", "1.3"))
        async with resolver(tmp_path, uv_home) as here:
            request = EnvRequest(lock=lock, lock_name="uv.lock", project=project, index_url=served.url)
            found = await here.resolve(request, HERE)
    assert "tiny==1.2" in found.requirements
    assert f"--hash=sha256:{wheels[0].sha256}" in found.requirements


@pytest.mark.proof
@in_loop
async def test_a_package_of_a_lock_is_found_in_the_second_index_although_the_first_has_another_version(
    tmp_path: Path, uv_home: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    older = wheel(tmp_path / "older", "tiny", "1.1")
    lines = tuple(f"{one.name}=={one.version} --hash=sha256:{one.sha256}" for one in wheels)
    with index(older) as first, index(*wheels) as second:
        request = EnvRequest(requirements=lines, index_url=second.url, extra_index_url=(first.url,))
        async with resolver(tmp_path, uv_home) as here:
            for asked in (request, _members(request)):
                assert "tiny==1.2" in (await here.resolve(asked, HERE)).requirements


def _members(request: EnvRequest) -> EnvRequest:
    return replace(request, whose=Whose.OTHER)


@in_loop
async def test_a_package_without_a_wheel_is_built_for_the_owner_and_for_nobody_else(
    tmp_path: Path, uv_home: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    trace = tmp_path / "trace"
    with index(*wheels, source(tmp_path, "thing", trace)) as served:
        async with resolver(tmp_path, uv_home) as here:
            with pytest.raises(EnvFailed, match="thing has no wheel") as caught:
                await here.resolve(_members(of(served, "tiny", "thing")), HERE)
            assert not trace.exists(), "its code ran"
            assert (caught.value.cause, caught.value.hint) == ("not-found", HINT)
            assert "tiny==1.2" in (await here.resolve(_members(of(served, "tiny")), HERE)).requirements
            found = await here.resolve(of(served, "thing"), HERE)
    assert "thing==1.0" in found.requirements
    assert trace.exists()


@in_loop
async def test_an_archive_at_an_address_is_not_built_for_a_member(tmp_path: Path, uv_home: Path) -> None:
    trace = tmp_path / "trace"
    said_by_itself = source(tmp_path, "plain", trace, metadata="2.2")
    with index(source(tmp_path, "thing", trace), said_by_itself) as served:
        async with resolver(tmp_path, uv_home) as here:
            for name in ("thing", "plain"):
                address = f"http://127.0.0.1:{served.port}/files/{name}-1.0.tar.gz"
                with pytest.raises(EnvFailed, match=f"{name} has no wheel"):
                    await here.resolve(_members(of(served, f"{name} @ {address}")), HERE)
            assert served.asked == []
    assert not trace.exists()


@in_loop
async def test_what_a_members_wheel_needs_is_not_taken_from_the_agents_disk(tmp_path: Path, uv_home: Path) -> None:
    trace = tmp_path / "trace"
    private, archive = wheel(tmp_path / "private", "private"), source(tmp_path / "private", "thing", trace)
    for kept in (private, archive):
        needs = wheel(tmp_path / kept.name, "needy", requires=[f"{kept.name} @ file://{kept.path}"])
        with index(needs) as served:
            address = f"http://127.0.0.1:{served.port}/files/{needs.path.name}"
            async with resolver(tmp_path, uv_home) as here:
                with pytest.raises(EnvFailed):
                    await here.resolve(_members(of(served, f"needy @ {address}")), HERE)
    assert not trace.exists()


@in_loop
async def test_an_index_of_a_member_refers_to_no_wheel_of_the_agents_disk(tmp_path: Path, uv_home: Path) -> None:
    private = wheel(tmp_path / "private", "private")
    with index() as served:
        served.pages["private"] = f'<a href="file://{private.path}">{private.path.name}</a>'
        async with resolver(tmp_path, uv_home) as here:
            with pytest.raises(EnvFailed, match="private is a file of the agent's machine"):
                await here.resolve(_members(of(served, "private")), HERE)
            allowed = replace(of(served, "private"), find_links=(str(private.path.parent),))
            assert private.sha256 in (await here.resolve(_members(allowed), HERE)).requirements, "by the cluster file"


@in_loop
async def test_a_package_learns_no_password_from_what_it_needs(
    tmp_path: Path, uv_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setenv("HTTPS_PROXY", "http://ann:hush@proxy:3128")
    for variable in ("HF_TOKEN", "HTTPS_PROXY", "https_proxy"):
        with index() as served:
            place = f"http://127.0.0.1:{served.port}/files"
            address = f"{place}/${{{variable}}}/x-1.0-py3-none-any.whl"
            needs = wheel(tmp_path / variable, "needy", requires=[f"other @ {address}"])
            served.wheels.append(needs)
            async with resolver(tmp_path, uv_home) as here:
                for package in ("needy", f"needy @ {place}/{needs.path.name}"):
                    with pytest.raises(EnvFailed) as caught:
                        await here.resolve(_members(of(served, package)), HERE)
                    assert not any("hush" in text for text in (caught.value.message, *caught.value.tail))
            assert served.files()
            assert not any("hush" in path for path in served.asked)


@in_loop
async def test_a_login_in_netrc_is_the_owners(
    tmp_path: Path, uv_home: Path, wheels: tuple[Wheel, Wheel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login ann password hunter2\n")
    (tmp_path / ".netrc").chmod(0o600)
    with index(*wheels, login=LOGIN) as served:
        bare = EnvRequest(requirements=("tiny",), index_url=served.url.replace(f"{LOGIN}@", ""))
        async with resolver(tmp_path, uv_home) as here:
            with pytest.raises(EnvFailed) as caught:
                await here.resolve(_members(bare), HERE)
            assert served.asked == []
            assert "tiny==1.2" in (await here.resolve(bare, HERE)).requirements
            own = _members(of(served, "tiny", "small-thing"))
            assert "tiny==1.2" in (await here.resolve(own, HERE)).requirements, "a password of their own"
    assert caught.value.cause == "no-access"


_LOCK = """\
version = 1
requires-python = ">=3.11"
[[package]]
name = "x"
version = "0"
source = {{ virtual = "." }}
dependencies = [{{ name = "thing" }}]
[[package]]
name = "thing"
version = "1.0"
source = {source}
"""
_PROJECT = '[project]\nname = "x"\nversion = "0"\nrequires-python = ">=3.11"\ndependencies = ["thing"]\n'


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        ('{ git = "https://127.0.0.1:9/x?rev=abc#0123456789012345678901234567890123456789" }', "from a repository"),
        ('{ directory = "/opt/thing" }', "a path of this machine"),
        ('{ editable = "/opt/thing" }', "a path of this machine"),
        ('{ path = "/opt/thing-1.0-py3-none-any.whl" }', "a path of this machine"),
    ],
)
@in_loop
async def test_a_lock_takes_nothing_from_repositories_and_folders(
    tmp_path: Path, uv_home: Path, origin: str, message: str
) -> None:
    lock = _LOCK.format(source=origin)
    async with resolver(tmp_path, uv_home) as here:
        for whose in (Whose.OWNER, Whose.OTHER):
            request = EnvRequest(lock=lock, lock_name="uv.lock", project=_PROJECT, whose=whose)
            with pytest.raises(EnvFailed, match=message):
                await here.resolve(request, HERE)


@in_loop
async def test_an_index_learns_no_variable_of_the_agent_from_a_lock(
    tmp_path: Path, uv_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush")
    with index() as served:
        place = f"http://127.0.0.1:{served.port}/files"
        lock = _LOCK.format(source=f'{{ url = "{place}/${{HF_TOKEN}}/thing-1.0-py3-none-any.whl" }}')
        async with resolver(tmp_path, uv_home) as here:
            for whose in (Whose.OWNER, Whose.OTHER):
                request = EnvRequest(lock=lock, lock_name="uv.lock", project=_PROJECT, whose=whose)
                with pytest.raises(EnvFailed):
                    await here.resolve(request, HERE)
        assert [path for path in served.asked if "HF_TOKEN" in path], "as it stands"
        assert not any("hush" in path for path in served.asked)


@pytest.mark.proof
@in_loop
async def test_wheels_for_a_node_without_internet_are_downloaded_once(
    tmp_path: Path, uv_home: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    taken = _Taken()
    store = Store(tmp_path / "state.db")
    await store.open()
    tools, workshop = Tools(Workshop(uv_home)), Workshop(tmp_path / "python")
    with index(*wheels) as served:
        here = Resolver(workshop, store.python_envs, tools)
        request = of(served, "tiny")
        resolution = await here.resolve(request, HERE)
        files = Files(workshop, store.python_envs, tools, taken)  # type: ignore[arg-type]
        found = await files.everything(request, resolution, HERE, lambda size: None)
        asked = len(served.asked)
        assert await files.everything(request, resolution, HERE, lambda size: None) == found
        assert len(served.asked) == asked
        pinned = re.sub("sha256:[0-9a-f]{64}", f"sha256:{64 * '0'}", resolution.requirements)
        with pytest.raises(EnvFailed) as changed:
            await files.everything(request, Resolution("other", pinned), HERE, lambda size: None)
        assert (changed.value.cause, changed.value.hint) == ("hash", None), "a wheel is there: that is no hint"
    await store.close()
    assert [blob.name for blob in found.wheels] == sorted(one.path.name for one in wheels)
    assert {blob.content for blob in found.wheels} == {one.sha256 for one in wheels}
    assert taken.names == [sorted([*(one.path.name for one in wheels), "uv"])]


@pytest.mark.proof
@in_loop
async def test_a_folder_of_packages_may_have_a_space_and_a_comma_in_its_name(tmp_path: Path, uv_home: Path) -> None:
    mine = wheel(tmp_path / "my wheels, old", "mine")
    store = Store(tmp_path / "state.db")
    await store.open()
    tools, workshop = Tools(Workshop(uv_home)), Workshop(tmp_path / "python")
    request = EnvRequest(requirements=("mine",), find_links=(str(mine.path.parent),), no_index=True)
    resolution = await Resolver(workshop, store.python_envs, tools).resolve(request, HERE)
    files = Files(workshop, store.python_envs, tools, _Taken())  # type: ignore[arg-type]
    found = await files.everything(request, resolution, HERE, lambda size: None)
    await store.close()
    assert [blob.content for blob in found.wheels] == [mine.sha256]


@pytest.mark.proof
@in_loop
async def test_a_members_private_packages_are_sent_for_nobody_else(
    tmp_path: Path, uv_home: Path, wheels: tuple[Wheel, Wheel]
) -> None:
    store = Store(tmp_path / "state.db")
    await store.open()
    tools, workshop = Tools(Workshop(uv_home)), Workshop(tmp_path / "python")
    here = Resolver(workshop, store.python_envs, tools)
    files = Files(workshop, store.python_envs, tools, _Taken())  # type: ignore[arg-type]

    async def sent(request: EnvRequest, resolution: Resolution | None = None) -> list[str]:
        resolution = resolution or await here.resolve(request, HERE)
        found = await files.everything(request, resolution, HERE, lambda size: None)
        return [blob.content for blob in found.wheels]

    with index(*wheels, login=LOGIN) as private, index() as liar:
        ann = replace(_members(of(private, "tiny")), user="ann")
        known = await here.resolve(ann, HERE)
        theirs = await sent(ann)
        bare = private.url.replace(f"{LOGIN}@", "")
        for url in (bare, private.url.replace("hunter2", "hunter3")):
            with pytest.raises(EnvFailed) as caught:
                await sent(replace(ann, user="bob", index_url=url))
            assert caught.value.cause == "no-access"
        # As an index of Bob's can have it resolved that says it has files with these hashes.
        with pytest.raises(EnvFailed):
            await sent(replace(ann, user="bob", index_url=liar.url), known)
        assert await sent(replace(ann, user="bob")) == theirs, "with a password of his own"
    await store.close()


class _Taken:
    """The part of ``Code`` that keeps files."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []

    async def keep_files(self, folder: Path) -> str:
        self.names.append(sorted(path.name for path in folder.iterdir()))
        return "0" * 64

    def has(self, tree: str) -> bool:
        return bool(self.names)


def _arguments() -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append((folder / "cmdline").read_text(errors="replace"))
        except OSError:
            continue
    return found
