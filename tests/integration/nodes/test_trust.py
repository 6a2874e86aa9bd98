"""Others on a node cannot make their code run as us: not by what they plant, nor by what they change."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Farms, Ugro, in_loop, open_link
from tests.rig.nodeprogram import LocalNode
from tests.rig.waiting import wait_until
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.transport import node_program
from ugro.kernel.support.errors import Unreachable
from ugro.node.home import private_gid

NOBODY = 65534
USER = 4321
PLANTED = "import os\nopen({marker!r}, 'w').close()\n"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of other users need root")


def plant(root: Path, marker: Path) -> None:
    """What another user would put there: a program, as this version and as earlier ones kept it, and modules."""
    program = root / ".ugro" / "program"
    text = PLANTED.format(marker=str(marker))
    names = ["main", "home", "trust", "__init__", "../__init__", "../../sitecustomize", "../../json"]
    package = program / node_program().digest[:16] / "ugro" / "remote"
    for folder in (package, program / "ugro" / "remote", root / "ugro" / "remote"):
        folder.mkdir(parents=True)
        for name in names:
            (folder / f"{name}.py").write_text(text)
    (program / node_program().name).write_text(f"[]\n{text}")


async def refusal(spec: NodeSpec) -> Unreachable:
    with pytest.raises(Unreachable) as caught:
        await open_link(spec)
    return caught.value


async def opens(spec: NodeSpec) -> bool:
    link = await open_link(spec)
    try:
        return await link.call("echo", {"a": 1}, timeout_s=10) == {"a": 1}
    finally:
        link.close()
        await link.wait_closed()


@pytest.mark.proof
@needs_root
def test_a_planted_program_below_a_folder_that_all_may_write_never_runs_and_the_remedy_is_said(
    farm_of: Farms, ugro: Ugro, tmp_path: Path
) -> None:
    farm = farm_of(1)
    root, marker = farm["n001"].home / "shared", tmp_path / "executed"
    plant(root, marker)
    root.chmod(0o777)
    ugro.cluster = farm.cluster_yaml(nodes={"n001": {"remote_root": str(root)}})
    answer = ugro("health", "--json")
    [document] = json.loads(answer.stdout)["nodes"]
    assert document["cause"] == "unsafe-folder"
    assert document["error"] == f"others can write to {root} (mode 0777): they could replace what runs there as you"
    assert document["hint"].startswith(f"on that node: chmod go-w {root}, or set remote_root")
    assert "chmod go-w" in ugro("doctor").stdout
    ugro("run", "-d", "--no-sync", "true")
    assert f"n001 is unreachable: {document['error']}" in ugro("why", "last").stdout
    assert not marker.exists()


def _world_writable(root: Path) -> Path:
    root.chmod(0o777)
    return root


def _world_writable_above(root: Path) -> Path:
    root.parent.chmod(0o777)
    return root.parent


def _foreign_above(root: Path) -> Path:
    os.chown(root.parent, NOBODY, NOBODY)
    return root.parent


def _foreign(root: Path) -> Path:
    os.chown(root / ".ugro", NOBODY, NOBODY)
    return root / ".ugro"


def _foreign_entry(root: Path) -> Path:
    path = root / ".ugro" / "program" / "sitecustomize.py"
    path.write_text("")
    os.chown(path, NOBODY, NOBODY)
    return path


def _foreign_agent(root: Path) -> Path:
    path = root / ".ugro" / "agents" / "agent-1@here@x" / "runs"
    path.mkdir(parents=True)
    os.chown(path, NOBODY, NOBODY)
    return path


def _linked(root: Path) -> Path:
    (root / ".ugro").rename(root / "elsewhere")
    (root / ".ugro").symlink_to(root / "elsewhere")
    return root / ".ugro"


def _linked_program(root: Path) -> Path:
    (root / ".ugro" / "program").rename(root / "elsewhere")
    (root / ".ugro" / "program").symlink_to(root / "elsewhere")
    return root / ".ugro" / "program"


def _foreign_link_above(root: Path) -> Path:
    root.rename(root.parent / "elsewhere")
    root.symlink_to(root.parent / "elsewhere")
    os.chown(root, NOBODY, NOBODY, follow_symlinks=False)
    return root


@needs_root
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_world_writable, "others can write to"),
        (_world_writable_above, "others can write to"),
        (_foreign_above, "belongs to nobody"),
        (_foreign, "belongs to nobody"),
        (_foreign_entry, "belongs to nobody"),
        (_foreign_agent, "belongs to nobody"),
        (_linked, "is a link"),
        (_linked_program, "is a link"),
        (_foreign_link_above, "belongs to nobody"),
    ],
)
@in_loop
async def test_a_folder_that_others_can_change_is_refused_and_named(
    tmp_path: Path, spoil: Callable[[Path], Path], words: str
) -> None:
    root = tmp_path / "parent" / "root"
    root.mkdir(parents=True)
    spec = NodeSpec("here", remote_root=str(root), transport="local")
    assert await opens(spec)
    culprit = spoil(root)
    error = await refusal(spec)
    assert error.cause == "unsafe-folder"
    assert words in error.message
    assert str(culprit) in error.message
    assert error.hint
    assert "set remote_root" in error.hint


@needs_root
@in_loop
async def test_a_user_who_is_not_root_refuses_a_program_that_is_not_its_own() -> None:
    # Not pytest's folder, into which other users cannot look.
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.chown(root, USER, USER)
        as_user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
        spec = NodeSpec("here", remote_root=folder, transport=as_user, python="/usr/bin/python3")
        assert await opens(spec)
        [program] = (root / ".ugro" / "program").iterdir()
        assert program.stat().st_uid == USER
        os.chown(program, NOBODY, NOBODY)
        assert "belongs to nobody" in (await refusal(spec)).message
        os.chown(program, USER, USER)
        os.chown(root / ".ugro", 0, 0)
        assert "belongs to root" in (await refusal(spec)).message
        root.chmod(0o755)
        os.chown(root, 0, 0)
        os.chown(root / ".ugro", USER, USER)
        assert await opens(spec)


@in_loop
async def test_a_damaged_program_is_sent_again_and_what_lies_beside_it_is_not_loaded(tmp_path: Path) -> None:
    root, marker = tmp_path / "root", tmp_path / "executed"
    plant(root, marker)
    spec = NodeSpec("here", remote_root=str(root), transport="local")
    file = root / ".ugro" / "program" / node_program().name
    assert await opens(spec)
    for damaged in (b"", node_program().content[:-1], b"\0" * len(node_program().content)):
        file.write_bytes(damaged)
        assert await opens(spec)
        assert file.read_bytes() == node_program().content
    assert not marker.exists()


@in_loop
async def test_what_is_missing_is_made_for_its_owner_alone_and_sticky_folders_will_do(tmp_path: Path) -> None:
    sticky = tmp_path / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    (tmp_path / "link").symlink_to(sticky)
    umask = os.umask(0)
    try:
        assert await opens(NodeSpec("here", remote_root=str(tmp_path / "link" / "a" / "b"), transport="local"))
    finally:
        os.umask(umask)
    made = [sticky / "a", sticky / "a" / "b", sticky / "a" / "b" / ".ugro", sticky / "a" / "b" / ".ugro" / "program"]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 4


@pytest.mark.skipif(private_gid(os.geteuid()) is None, reason="this account has no private group")
@in_loop
async def test_a_private_group_is_accepted_and_our_own_folder_is_closed_to_it(tmp_path: Path) -> None:
    root = tmp_path / "home"
    for folder in (root, root / ".ugro", root / ".ugro" / "agents"):
        folder.mkdir()
        os.chown(folder, os.geteuid(), private_gid(os.geteuid()) or 0)
        folder.chmod(0o775)
    assert await opens(NodeSpec("here", remote_root=str(root), transport="local"))
    assert (root / ".ugro").stat().st_mode & 0o777 == 0o700
    assert root.stat().st_mode & 0o777 == 0o775


def test_what_runs_leave_in_the_folder_is_safe_whatever_the_umask(node: LocalNode) -> None:
    """Else the next link would be refused because of our own files."""
    umask = os.umask(0)
    try:
        link = node.link()
    finally:
        os.umask(umask)
    spec = {"ranks": [{"rank": 0, "argv": ["true"]}], "checkpoint_dir": "checkpoints", "cpus": 1}
    for job, more in (("alone", {}), ("together", {"shared": True})):
        node.call(link, "start", job=job, attempt=1, spec={**spec, **more})
        node.call(link, "setup", job=job, attempt=1, key=f"key-{job}", script="true")
        wait_until((node.run_dir(job, 1) / "exit.json").exists, 20, "its end")
    assert node.call(node.link(), "remove", job="alone", attempt=1)["now"]
