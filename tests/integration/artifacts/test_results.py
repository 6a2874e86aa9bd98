"""Outputs come home on real node programs: growing, rewritten, chosen by rule, cut short; and a node that lies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.conftest import in_loop, until
from tests.integration.nodes.test_link_fuzz import GREETING, fake
from tests.rig import disk
from tests.rig.checkpoints import LONG_AGO, contents
from tests.rig.disk import SmallDisk
from tests.rig.results import ResultRig, nothing, runs_and_home
from ugro.kernel.files.node_files import Wanted, outputs_of
from ugro.kernel.files.results import output_store
from ugro.kernel.files.results.file_store import SPARE_BYTES, DiskFull, FileTransfer
from ugro.kernel.files.results.output_store import OutputStore
from ugro.kernel.files.results.output_sync import OutputSync, Progress, Run
from ugro.kernel.jobs.model import Job, JobSpec, JobState, ResultRule
from ugro.kernel.support.errors import RemoteFailure
from ugro.node import wire
from ugro.node.files import transfer as resumable
from ugro.node.files.listing import RunFile

MIB = 1 << 20
RUN = Run(7, 1, "n1")
HEADER = struct.Struct(">IBQQQqQI")
TRAILER = struct.Struct(">BI")


@pytest.fixture
def rig() -> Iterator[ResultRig]:
    with runs_and_home() as rig:
        yield rig


def tree(folder: Path) -> dict[bytes, bytes]:
    root = os.fsencode(folder)
    found = {}
    for parent, _, names in os.walk(root):
        for name in names:
            path = os.path.join(parent, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, root)] = file.read()
    return found


def arrived(rig: ResultRig, node: str = "n1", *, is_first: bool = True) -> output_store.Arrived:
    found = OutputStore(rig.here(), node, is_first=is_first).arrived()
    assert found is not None
    return found


# --- the way home -----------------------------------------------------------------------------------------------


@in_loop
async def test_whatever_a_run_wrote_comes_home_with_its_names_and_modes(rig: ResultRig) -> None:
    output = rig.output("n1")
    (output / "a" / "b").mkdir(parents=True)
    weird = [b"plain", b"with space", b"new\nline", b"no utf8 \xff\xfe", b"-dash", "umlaut ä".encode(), b"a/b/deep"]
    for name in weird:
        Path(os.fsdecode(os.path.join(os.fsencode(output), name))).write_bytes(name * 3)
    (output / "empty").touch()
    (output / "run.sh").write_text("#!/bin/sh\n")
    (output / "run.sh").chmod(0o755)
    async with rig.agent("n1") as results:
        await results.fetch_all(RUN)
    assert tree(rig.here() / "output") == tree(output)
    assert (rig.here() / "output" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (rig.here() / "output" / "plain").stat().st_mtime_ns == (output / "plain").stat().st_mtime_ns
    assert arrived(rig).files == len(weird) + 2


@in_loop
async def test_links_pipes_and_devices_are_passed_over_and_told(rig: ResultRig) -> None:
    output = rig.output("n1")
    (output / "file").write_text("x")
    (output / "link").symlink_to("/etc/passwd")
    (output / "folder").symlink_to("/etc")
    os.mkfifo(output / "pipe")
    async with rig.agent("n1") as results:
        await results.fetch_all(RUN)
    assert tree(rig.here() / "output") == {b"file": b"x"}
    assert {one.name: one.reason for one in arrived(rig).unsendable} == {
        "link": "a symbolic link", "folder": "a symbolic link", "pipe": "not a regular file",
    }  # fmt: skip


@in_loop
async def test_patterns_bring_what_changed_in_the_working_directory_since_the_run_began(rig: ResultRig) -> None:
    run = rig.run("n1")
    rig.specify("n1", "results/*.csv", "logs/**/*.txt", "plots", workdir=False)
    (run / "state.json").write_text(json.dumps({"started_at": time.time()}))
    work = run / "work"
    for name in ("results/a.csv", "results/a.bin", "results/.hidden.csv", "logs/x/y/z.txt", "plots/p/1.png", "other"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(name)
    (work / "results" / "old.csv").write_text("the code's own")
    os.utime(work / "results" / "old.csv", (1000, 1000))
    (work / "logs" / "out").symlink_to("/etc")
    (run / "output" / "results").mkdir()
    (run / "output" / "results" / "a.csv").write_text("the output's own goes first")
    async with rig.agent("n1") as results:
        await results.fetch_all(RUN)
    home = tree(rig.here() / "output")
    assert set(home) == {b"results/a.csv", b"logs/x/y/z.txt", b"plots/p/1.png"}
    assert home[b"results/a.csv"] == b"the output's own goes first"


@pytest.mark.proof
@in_loop
async def test_a_growing_file_comes_as_it_grows_and_only_what_it_grew_by(rig: ResultRig) -> None:
    metrics, home = rig.output("n1") / "metrics.jsonl", rig.here() / "output" / "metrics.jsonl"
    metrics.write_bytes(b"1" * MIB)
    async with rig.agent("n1") as results:
        results.follow(RUN, nothing)
        await until(home.exists, 20, "the file to come home")
        inode = home.stat().st_ino
        for _ in range(2):
            with metrics.open("ab") as file:
                file.write(b"2" * 1000)
            await until(lambda: home.stat().st_size == metrics.stat().st_size, 20, "what was added to come home")
        assert home.stat().st_ino == inode, "it was added to, not written anew"
        assert (rig.home / "7" / "metrics.jsonl").read_bytes() == metrics.read_bytes(), "the job's folder shows it"
        await results.fetch_all(RUN)
    assert home.read_bytes() == metrics.read_bytes()


@pytest.mark.proof
@in_loop
async def test_a_change_in_the_middle_that_no_look_could_see_is_found_when_the_run_is_over(rig: ResultRig) -> None:
    file, home = rig.output("n1") / "weights", rig.here() / "output" / "weights"
    file.write_bytes(b"a" * MIB)
    async with rig.agent("n1") as results:
        results.follow(RUN, nothing)
        await until(lambda: home.exists() and home.stat().st_size == MIB, 20, "the file to come home")
        with file.open("r+b") as handle:
            handle.seek(MIB // 2)
            handle.write(b"changed")
            handle.seek(0, os.SEEK_END)
            handle.write(b"grown")
        await until(lambda: home.stat().st_size == file.stat().st_size, 20, "what was added to come home")
        await results.fetch_all(RUN)
    assert home.read_bytes() == file.read_bytes()


@in_loop
async def test_random_edits_arrive_identical_whatever_was_home_before(rig: ResultRig) -> None:
    chance = random.Random(7)
    output = rig.output("n1")
    async with rig.agent("n1") as results:
        there = results  # one agent, many looks: each look is what following does
        for _ in range(12):
            for _ in range(4):
                _edit(output, chance)
            home = OutputStore(rig.here(), "n1", is_first=True)
            await there._look(RUN, home)
        await results.fetch_all(RUN)
    made = tree(output)
    home_tree = tree(rig.here() / "output")
    assert {name: home_tree.get(name) for name in made} == made, "what was deleted there may still be here"


def _edit(output: Path, chance: random.Random) -> None:
    path = output / chance.choice(["a", "b", "c/d", "c/e"])
    path.parent.mkdir(exist_ok=True)
    size = chance.choice([0, 1, 100, resumable.BLOCK, 3 * resumable.BLOCK + 1])
    kind = chance.choice(["write", "append", "overwrite", "cut", "replace", "delete"])
    if kind == "write" or not path.exists():
        path.write_bytes(chance.randbytes(size))
    elif kind == "append":
        with path.open("ab") as file:
            file.write(chance.randbytes(size))
    elif kind == "overwrite":
        with path.open("r+b") as file:
            file.seek(chance.randrange(path.stat().st_size + 1))
            file.write(chance.randbytes(10))
    elif kind == "cut":
        os.truncate(path, chance.randrange(path.stat().st_size + 1))
    elif kind == "replace":
        fresh = path.with_name("fresh.tmp")
        fresh.write_bytes(chance.randbytes(size))
        fresh.rename(path)
    else:
        path.unlink()


@in_loop
async def test_a_transfer_that_was_cut_goes_on_where_it_was(rig: ResultRig) -> None:
    big = rig.output("n1") / "big"
    big.write_bytes(os.urandom(MIB) * 60)
    partial = rig.here() / ".mirror" / "n1.partial"
    async with rig.agent("n1") as results:
        bringing = asyncio.create_task(results.fetch_all(RUN))
        await until(lambda: _size(partial) > MIB, 30, "some of it to be here")
        rig.rig.kill_programs("n1")
        with suppress(Exception):
            await bringing
    so_far = _size(partial)
    assert 0 < so_far < 60 * MIB
    inode = next(partial.iterdir()).stat().st_ino
    async with rig.agent("n1") as results:
        await results.fetch_all(RUN)
    home = rig.here() / "output" / "big"
    assert home.stat().st_ino == inode, "what had come was used"
    assert home.read_bytes() == big.read_bytes()


def _size(folder: Path) -> int:
    with suppress(FileNotFoundError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0


@in_loop
async def test_a_file_that_became_a_folder_and_a_folder_that_became_a_file_come_home(rig: ResultRig) -> None:
    output = rig.output("n1")
    (output / "a").write_text("file")
    (output / "b").mkdir()
    (output / "b" / "c").write_text("in a folder")
    async with rig.agent("n1") as results:
        home = OutputStore(rig.here(), "n1", is_first=True)
        await results._look(RUN, home)
        (output / "a").unlink()
        (output / "a").mkdir()
        (output / "a" / "x").write_text("now in a folder")
        shutil.rmtree(output / "b")
        (output / "b").write_text("now a file")
        await results.fetch_all(RUN)
    assert tree(rig.here() / "output") == tree(output)


# --- what stays -------------------------------------------------------------------------------------------------


@in_loop
async def test_what_the_rule_leaves_stays_on_the_node_when_the_run_goes_and_is_told(rig: ResultRig) -> None:
    checkpoints = rig.output("n1") / "checkpoints"
    for step in (1, 2, 3):
        (checkpoints / f"step_{step}").mkdir(parents=True)
        (checkpoints / f"step_{step}" / "weights").write_text(str(step))
    run = Run(7, 1, "n1", rule=ResultRule("last 2"))
    async with rig.agent("n1") as results:
        await results.fetch_all(run)
        assert set(tree(rig.here() / "output")) == {b"checkpoints/step_2/weights", b"checkpoints/step_3/weights"}
        assert [one.name for one in arrived(rig).left] == ["checkpoints/step_1/weights"]
        shutil.rmtree(rig.run("n1"))
        assert contents(rig.kept("n1") / "7.1") == {"checkpoints/step_1/weights": b"1"}
        await results.drop_kept(7, "n1")
    assert not (rig.kept("n1") / "7.1").exists()


@in_loop
async def test_checkpoints_that_newer_ones_replaced_go_from_here_too(rig: ResultRig) -> None:
    checkpoints = rig.output("n1") / "checkpoints"
    checkpoints.mkdir()
    run = Run(7, 1, "n1", rule=ResultRule("last 1"))
    async with rig.agent("n1") as results:
        home = OutputStore(rig.here(), "n1", is_first=True)
        for step in (1, 2):
            (checkpoints / f"step_{step}").write_text(str(step))
            await results._look(run, home)
            (checkpoints / "step_1").unlink(missing_ok=True)  # as programs do
        await results.fetch_all(run)
    assert tree(rig.here() / "output") == {b"checkpoints/step_2": b"2"}
    assert arrived(rig).left_count == 0


@in_loop
@pytest.mark.parametrize("order", [("n1", "n2"), ("n2", "n1")])
async def test_other_nodes_files_are_kept_apart_unless_they_are_the_same(
    rig: ResultRig, order: tuple[str, str]
) -> None:
    for node in ("n1", "n2"):
        (rig.output(node) / "same").write_text("same")
        (rig.output(node) / "differs").write_text(node)
    (rig.output("n2") / "only").write_text("only here")
    async with rig.agent("n1", "n2") as results:
        for node in order:
            await results.fetch_all(Run(7, 1, node, is_first=node == "n1"))
    assert tree(rig.here() / "output") == {b"same": b"same", b"differs": b"n1"}
    assert tree(rig.here() / "nodes" / "n2") == {b"differs": b"n2", b"only": b"only here"}
    told = arrived(rig, "n2", is_first=False)
    assert (told.files, told.bytes, told.same) == (2, len("n2" + "only here"), 1)
    assert (rig.home / "7" / "nodes" / "n2" / "only").read_text() == "only here"


@in_loop
async def test_no_name_of_a_jobs_hides_what_is_ours_in_its_folder(rig: ResultRig) -> None:
    output = rig.output("n1")
    for name in ("config.json", "checkpoints", "attempt_1", ".mirror", "logs", "nodes", "fine"):
        (output / name).write_text("the job's")
    async with rig.agent("n1") as results:
        await results.fetch_all(RUN)
    shown = {path.name for path in (rig.home / "7").iterdir()}
    assert shown == {"attempt_1", "fine"}
    assert len(tree(rig.here() / "output")) == 7


@in_loop
@pytest.mark.parametrize("has_results", [True, False], ids=["with results", "with logs alone"])
async def test_results_of_an_older_attempt_that_come_late_do_not_take_the_newest_ones_place(
    rig: ResultRig, has_results: bool
) -> None:
    for attempt in (1, 10):
        (rig.here(attempt=attempt) / "logs").mkdir(parents=True)
        (rig.run("n1", attempt=attempt) / "output" / "model").write_text(f"of attempt {attempt}")
    async with rig.agent("n1") as results:
        if has_results:
            await results.fetch_all(Run(7, 10, "n1"))
        job = Job(7, JobSpec("late", ("true",)), "ann", JobState.SUCCEEDED, "", LONG_AGO, 10)
        results.describe(job, None)
        await results.fetch_all(RUN)
    folder = rig.home / "7"
    assert (rig.here() / "output" / "model").read_text() == "of attempt 1"
    assert os.readlink(folder / "logs") == "attempt_10/logs"
    shown = [(folder / "model").read_text()] if (folder / "model").exists() else []
    assert shown == (["of attempt 10"] if has_results else [])


# --- disks that are full, files that cannot be read ---------------------------------------------------------------


@pytest.mark.skipif(disk.available() is not None, reason=str(disk.available()))
@in_loop
async def test_while_the_disk_here_is_full_it_waits_on_the_node_and_goes_on_when_there_is_room(
    rig: ResultRig,
) -> None:
    small = SmallDisk(rig.home, SPARE_BYTES + 16 * MIB)
    small.mount()
    try:
        (rig.output("n1") / "weights").write_bytes(os.urandom(8 * MIB))
        async with rig.agent("n1") as results:
            small.fill()
            with pytest.raises(DiskFull, match="stay on the node"):
                await results.fetch_all(RUN)
            progress = results.known(RUN)
            assert isinstance(progress, Progress)
            assert "do not fit" in (progress.problem or "")
            small.free()
            await results.fetch_all(RUN)
        assert tree(rig.here() / "output") == tree(rig.output("n1"))
    finally:
        small.unmount()


@in_loop
async def test_a_file_that_goes_away_while_it_is_asked_for_is_told_and_the_others_come(rig: ResultRig) -> None:
    output = rig.output("n1")
    for name in ("a", "b"):
        (output / name).write_text(name)

    class Racing(FileTransfer):
        async def fetch(self, listed: Sequence[RunFile], wanted: Sequence[Wanted], *, is_final: bool) -> None:
            (output / "a").unlink(missing_ok=True)
            await super().fetch(listed, wanted, is_final=is_final)

    class RacingOutputs(OutputSync):
        def _transfer(self, run: Run, store: OutputStore) -> FileTransfer:
            return Racing(self._files(run.node), outputs_of(run.job, run.attempt), store)

    async with rig.agent("n1") as results:
        await RacingOutputs(rig.home, results._node, results._identity).fetch_all(RUN)
    assert tree(rig.here() / "output") == {b"b": b"b"}


@in_loop
async def test_what_cannot_be_read_stays_on_the_node_and_is_told(rig: ResultRig) -> None:
    said = [FINE, sent(resumable.send_problem(0, "permission denied"))]
    said += [listed(["a", 4, 1, 1, None, False], call=3), wire.message(wire.RESULT, 4, {})]
    place = rig.rig.root("far")
    place.mkdir()
    rig.rig.specs["n1"] = fake(place, GREETING, *said)
    async with rig.agent("n1") as results:
        await results.fetch_all(RUN)
    assert [(one.name, one.reason) for one in arrived(rig).left] == [("a", "permission denied")]


@in_loop
async def test_runs_that_have_written_nothing_are_asked_for_together_and_seldom(rig: ResultRig) -> None:
    for number in range(20):
        rig.run("n1", job=number)
    async with rig.agent("n1") as results:
        for number in range(20):
            results.follow(Run(number, 1, "n1"), nothing)
        (rig.run("n1", job=13) / "output" / "made").write_text("late")
        home = rig.here(13) / "output" / "made"
        await until(home.exists, 20, "what one of them wrote to come home")
        assert list(results._polling._tasks) == [(13, 1, "n1", False)]
        assert len(results._scouts) == 1
        for number in range(20):
            results.forget(Run(number, 1, "n1"))
        await until(lambda: not results._scouts, 20, "nobody to be asked for any more")


# --- a node that lies -------------------------------------------------------------------------------------------


def listed(*lines: object, unlisted: object = 0, call: int = 1) -> bytes:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return wire.frame(wire.OUT, call, content) + wire.message(wire.RESULT, call, {"unlisted": unlisted, "now_ns": 1})


def sent(content: bytes) -> bytes:
    return wire.frame(wire.OUT, 2, content) + wire.message(wire.RESULT, 2, {})


def header(size: int, number: int = 0, offset: int = 0) -> bytes:
    return HEADER.pack(number, 1, offset, size - offset, size, 1, 1, 0o777)


def file(content: bytes) -> bytes:
    whole = header(len(content)) + content
    return whole + TRAILER.pack(0, zlib.crc32(whole + b"\0"))


FINE = listed(["a", 4, 1, 1, None, False])


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ([listed(["../../../../evil", 4, 1, 1, None, False])], "invalid"),
        ([listed(["/tmp/evil", 4, 1, 1, None, False])], "invalid"),
        ([listed(["a/../../evil", 4, 1, 1, None, False])], "invalid"),
        ([listed(["a//evil", 4, 1, 1, None, False])], "invalid"),
        ([listed(["evil\0", 4, 1, 1, None, False])], "invalid"),
        ([listed(["\ud800", 4, 1, 1, None, False])], "invalid"),
        ([listed(["e" * 256, 4, 1, 1, None, False])], "invalid"),
        ([listed(["e/" * 200 + "e", 4, 1, 1, None, False])], "invalid"),
        ([listed(["a", -4, 1, 1, None, False])], "invalid"),
        ([listed(["a", 1 << 60, 1, 1, None, False])], "invalid"),
        ([listed(["a", True, 1, 1, None, False])], "invalid"),
        ([listed({"a": 1})], "invalid"),
        ([listed(["a", 4, 1, 1, None, False], unlisted="many")], "invalid"),
        ([FINE, sent(header(4, number=3) + b"evil\0")], "not asked for"),
        ([FINE, sent(header(4, offset=2) + b"il\0")], "invalid"),
        ([FINE, sent(file(b"evil") + header(4))], "not asked for"),
        ([FINE, sent(header(4) + b"evi")], "cut short"),
        ([FINE, sent(file(b"evil").replace(b"evil", b"live"))], "damaged"),
        ([FINE, wire.message(wire.RESULT, 2, {})], "cut short"),
    ],
)
@in_loop
async def test_a_node_that_lies_gets_nothing_out_of_its_jobs_folder(
    rig: ResultRig, said: list[bytes], problem: str
) -> None:
    liar = rig.rig.root("liar")
    liar.mkdir()
    rig.rig.specs["n1"] = fake(liar, GREETING, *said)
    async with rig.agent("n1") as results:
        with pytest.raises(RemoteFailure, match=problem):
            await results.fetch_all(RUN)
        progress = results.known(RUN)
        assert isinstance(progress, Progress)
        assert progress.problem
    assert {path.name for path in rig.rig.folder.iterdir()} <= {"liar", "n1", "jobs"}
    assert {path.name for path in rig.home.glob("*/*")} <= {"attempt_1"}
    assert {path.name for path in rig.here().glob("output/*")} <= {"a"}
    assert not [path for path in (rig.rig.folder.parent, Path("/tmp")) if list(path.glob("evil*"))]


@in_loop
async def test_an_announced_size_that_no_disk_has_room_for_is_refused_before_a_byte_is_written(rig: ResultRig) -> None:
    liar = rig.rig.root("liar")
    liar.mkdir()
    rig.rig.specs["n1"] = fake(liar, GREETING, FINE, sent(header(1 << 49) + b"evil"))
    async with rig.agent("n1") as results:
        with pytest.raises(DiskFull):
            await results.fetch_all(RUN)
    assert not tree(rig.home)
