"""A folder becomes a tree and a folder again: the same, however odd its names, and only what changed is read."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.rig.code import CHUNK, TREES, CodeRig, make, seen
from ugro.kernel.files.code.scanner import Choices, Links
from ugro.kernel.files.code.snapshot_store import SnapshotRequest
from ugro.kernel.files.code.transfer import FileCount
from ugro.kernel.support.errors import UgroError, UsageError
from ugro.node import trees
from ugro.node.files import gc
from ugro.node.files.checkout import check_out
from ugro.node.files.packs import ContentStore, Lacking, PackWriter

FEW = settings(max_examples=settings().max_examples // 2)


@pytest.fixture
def rig(tmp_path: Path) -> CodeRig:
    return CodeRig(tmp_path)


def out(rig: CodeRig, tree: str) -> dict[bytes, object]:
    folder = rig.folder / "out"
    with rig.home.store.using():
        check_out(rig.home.store, trees.parse_id(tree), str(folder))
    found = seen(os.fsencode(folder))
    shutil.rmtree(folder)
    return found


def age(rig: CodeRig) -> None:
    """As if all had been written some time ago: what is as new as the look at it is not believed."""
    time.sleep(0.03)


@FEW
@given(TREES, TREES)
def test_a_tree_comes_out_as_it_went_in_and_again_after_any_edit(first: object, second: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rig = CodeRig(Path(folder))
        for tree in (first, second, first):
            make(tree, os.fsencode(rig.source))
            wanted = seen(os.fsencode(rig.source))
            taken = rig.take()
            assert out(rig, taken.id) == wanted
            assert rig.take().id == taken.id


def test_an_unchanged_tree_is_not_read_again_also_by_the_next_agent(rig: CodeRig) -> None:
    for name in ("a", "b", "c"):
        (rig.source / name).write_text(name)
    age(rig)
    first = rig.take()
    assert (first.files, first.new_files) == (3, 3)
    again = CodeRig(rig.folder).take()
    assert (again.id, again.new_files, again.new_bytes) == (first.id, 0, 0)
    (rig.source / "b").write_text("B")
    assert rig.take().new_files == 1


def test_a_change_that_leaves_size_and_time_of_writing_alone_is_seen(rig: CodeRig) -> None:
    file = rig.source / "config"
    file.write_text("lr=1")
    age(rig)
    before = file.stat()
    first, known = rig.take(), rig.take()
    assert known.new_files == 0
    file.write_text("lr=2")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert rig.take().id != first.id
    trusting = SnapshotRequest(str(rig.source), Choices(), 1 << 40, trusts_times=True)
    file.write_text("lr=3")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert rig.home.take(trusting).new_files == 0, "who trusts times alone sees nothing"


def test_a_file_that_is_as_new_as_the_look_at_it_is_read_again(rig: CodeRig) -> None:
    (rig.source / "a").write_text("1")
    soon_ns = time.time_ns() + 60_000_000_000  # however long the look takes
    os.utime(rig.source / "a", ns=(soon_ns, soon_ns))
    rig.take()
    assert rig.take().new_files == 1


def test_of_a_large_file_only_the_end_that_was_appended_is_new(rig: CodeRig) -> None:
    with (rig.source / "data").open("wb") as file:
        for number in range(3):
            file.write(bytes([number]) * CHUNK)
    rig.take()
    with (rig.source / "data").open("ab") as file:
        file.write(b"end")
    assert rig.take().new_bytes < 4096


def test_a_file_that_changes_while_it_is_read_is_read_again_or_named(rig: CodeRig) -> None:
    file = rig.source / "busy.log"
    file.write_bytes(bytes(64 << 20))
    stop = threading.Event()

    def write() -> None:
        with file.open("r+b") as busy:
            while not stop.is_set():
                busy.seek(0)
                busy.write(os.urandom(8))
                busy.flush()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(UgroError, match=r"changes faster than it can be read: busy\.log") as raised:
            rig.take()
    finally:
        stop.set()
        writer.join()
    assert raised.value.hint is not None
    assert ".ugroignore" in raised.value.hint
    assert rig.take().files == 1


def test_what_is_too_large_is_not_taken_and_the_largest_are_named(rig: CodeRig) -> None:
    for folder, size in (("data/raw", 3000), (".venv/lib", 2000), ("src", 10)):
        (rig.source / folder).mkdir(parents=True)
        for number in range(3):
            (rig.source / folder / f"f{number}").write_bytes(bytes(size))
    wish = SnapshotRequest(str(rig.source), Choices(), 1000)
    with pytest.raises(UsageError) as raised:
        rig.home.take(wish)
    lines = raised.value.message.splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["data/raw/", ".venv/lib/", "src/"]
    assert "echo '/data/raw/' >>" in str(raised.value.hint)
    assert "--force" in str(raised.value.hint)
    (rig.source / ".ugroignore").write_text("/data/\n.venv\n")
    assert rig.home.take(wish).files == 4
    (rig.source / ".ugroignore").unlink()
    assert rig.home.take(SnapshotRequest(str(rig.source), Choices(), 1000, is_forced=True)).files == 9


def test_links_go_along_as_their_policy_says(rig: CodeRig) -> None:
    outside = rig.folder / "outside"
    outside.mkdir()
    (outside / "big").write_text("big")
    (rig.source / "code.py").write_text("x")
    (rig.source / "inside").symlink_to(rig.source / "code.py")
    (rig.source / "data").symlink_to(outside)
    kept = out(rig, rig.take().id)
    assert kept[b"inside"] == ("link", b"code.py"), "it leads to the copy's own file"
    assert kept[b"data"] == ("link", os.fsencode(outside))
    followed = out(rig, rig.take(links_out=Links.FOLLOW).id)
    assert followed[b"data/big"] == ("file", 0o644, b"big")
    assert followed[b"inside"] == ("link", b"code.py")
    assert out(rig, rig.take(follows_links=True).id)[b"inside"] == ("file", 0o644, b"x")
    skipped = rig.take(links_out=Links.SKIP)
    assert b"data" not in out(rig, skipped.id)
    assert skipped.skipped == ("data leads out of the folder",)
    with pytest.raises(UsageError, match="data leads out of the folder"):
        rig.take(links_out=Links.ERROR)
    (outside / "back").symlink_to(outside)
    with pytest.raises(UsageError, match="leads back to itself"):
        rig.take(links_out=Links.FOLLOW)


def test_what_is_no_file_stays_at_home_and_is_named(rig: CodeRig) -> None:
    os.mkfifo(rig.source / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(rig.source / "sock"))
        for _ in range(2):
            assert sorted(rig.take().skipped) == [f"{name} is neither a file nor a folder" for name in ("pipe", "sock")]


def test_our_own_folders_never_go_along(rig: CodeRig) -> None:
    (rig.source / ".ugro" / "program").mkdir(parents=True)
    state = rig.source / "state"
    state.mkdir()
    (state / "state.db").write_text("x")
    about = state.stat()
    assert rig.take(skip=frozenset({(about.st_dev, about.st_ino)})).files == 0


def test_a_file_is_counted_once_all_its_chunks_are_sent(rig: CodeRig) -> None:
    (rig.source / "sub").mkdir()
    (rig.source / "large").write_bytes(os.urandom(2 * CHUNK + 1))
    for path in ("sub/a", "b"):
        (rig.source / path).write_bytes(b"equal")
    root = trees.parse_id(rig.take().id)
    store = rig.home.store
    lacking = list(store.reach(root))
    contents = [key for key in lacking if store.locate(key).kind == trees.CONTENT]
    assert len(contents) == 4
    count = FileCount(store, root, lacking)
    assert count.files == 3
    assert sum(count.completed_by([key]) for key in [*lacking, *lacking]) == 3
    # The trees arrived before the link was cut: what is lacking is still counted.
    assert FileCount(store, root, contents).files == 3
    assert FileCount(store, root, []).files == 0


# --- the store ------------------------------------------------------------------------------------------------


def filled(store: ContentStore, *contents: bytes) -> list[bytes]:
    writer = PackWriter(store)
    keys = [trees.identify(trees.CONTENT, content) for content in contents]
    for key, content in zip(keys, contents, strict=True):
        writer.add(key, trees.CONTENT, content)
    writer.finish()
    return keys


def test_a_content_in_two_packs_is_still_found_when_another_process_deletes_the_one_it_was_read_from(
    tmp_path: Path,
) -> None:
    others = [ContentStore(str(tmp_path)) for _ in range(2)]
    [key] = {filled(one, b"the same")[0] for one in others}  # neither has seen the pack of the other
    mine = ContentStore(str(tmp_path))
    mine.refresh()
    os.unlink(Path(mine.packs, mine.locate(key).pack))
    mine.refresh()
    assert mine.read(key) == b"the same"
    for store in (mine, *others):
        store.close()


@FEW
@given(TREES)
def test_whatever_a_killed_writer_left_the_store_has_only_whole_contents(tree: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rig = CodeRig(Path(folder))
        make(tree, os.fsencode(rig.source))
        taken = rig.take()
        for pack in Path(rig.home.store.packs).iterdir():
            whole = pack.read_bytes()
            for cut in {0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
                store = ContentStore(f"{folder}/cut{cut}")
                with store.using():
                    Path(store.packs, "x.arriving").write_bytes(whole[:cut] + b"\0" * 50)
                    store.salvage()
                    for key in rig.home.store.reach(trees.parse_id(taken.id)):
                        if key in store:
                            assert store.read(key) == rig.home.store.read(key)
                store.close()


def test_what_was_not_used_for_longest_goes_first_and_what_is_kept_stays_whole(rig: CodeRig) -> None:
    roots = []
    for number in range(5):
        (rig.source / "common").write_bytes(b"c" * 10_000)
        (rig.source / "own").write_bytes(os.urandom(50_000))
        roots.append(trees.parse_id(rig.take().id))
        os.utime(Path(rig.home.store.roots, roots[-1].hex()), (number, number))
    done = gc.tidy(rig.home.store, 130_000, [roots[0]])
    left = [root for root in roots if rig.home.store.has_root(root)]
    assert left == [roots[0], roots[4]]
    assert done.freed_bytes > 100_000
    for root in left:
        assert out(rig, root.hex())[b"common"] == ("file", 0o644, b"c" * 10_000)
    assert {path.name for path in Path(rig.home.store.roots).iterdir()} == {root.hex() for root in left}


def test_many_small_packs_become_few(rig: CodeRig) -> None:
    for number in range(100):
        (rig.source / f"f{number}").write_text(str(number))
        last = rig.take()
    gc.tidy(rig.home.store, 1 << 30)
    assert len(list(Path(rig.home.store.packs).iterdir())) <= 41
    assert len(out(rig, last.id)) == 100


def test_a_tree_of_which_something_is_missing_is_not_taken_for_whole(rig: CodeRig) -> None:
    store = rig.home.store
    content = trees.identify(trees.CONTENT, b"never sent")
    tree = trees.encode([trees.TreeEntry(b"file", trees.FILE, 0o644, 10, content)])
    root = trees.identify(trees.TREE, tree)
    with store.using():
        writer = PackWriter(store)
        writer.add(root, trees.TREE, tree)
        writer.finish()
        with pytest.raises(Lacking):
            store.complete(root)
        assert not store.has_root(root)
        filled(store, b"never sent")
        store.complete(root)
        assert store.has_root(root)


@pytest.mark.parametrize(
    "entry",
    [
        trees.TreeEntry(b"..", trees.FOLDER, 0o755, 0, bytes(32)),
        trees.TreeEntry(b"a/b", trees.FILE, 0o644, 0, b""),
        trees.TreeEntry(b"", trees.FILE, 0o644, 0, b""),
        trees.TreeEntry(b"a\0", trees.FILE, 0o644, 0, b""),
        trees.TreeEntry(b"x", trees.FILE, 0o4755, 0, b""),
        trees.TreeEntry(b"x", trees.FILE, 0o644, 5, b""),
        trees.TreeEntry(b"x", 7, 0o644, 0, b""),
    ],
)
def test_a_tree_that_leads_elsewhere_is_none(entry: trees.TreeEntry) -> None:
    with pytest.raises(trees.BadTree):
        trees.decode(trees.encode([entry]))


def test_two_entries_of_one_name_are_no_tree() -> None:
    link = trees.TreeEntry(b"x", trees.LINK, 0, 0, b"/etc")
    entries = [link, trees.TreeEntry(b"x", trees.FOLDER, 0o755, 0, bytes(32))]
    with pytest.raises(trees.BadTree):
        trees.decode(trees.encode(entries))


def test_what_a_power_cut_may_have_taken_is_looked_at_again(rig: CodeRig) -> None:
    (rig.source / "a").write_bytes(b"a" * 5000)
    (rig.source / "b").write_bytes(b"b" * 5000)
    taken = rig.take()
    packs = Path(rig.home.store.packs)
    [pack] = packs.glob("*.pack")
    [mark] = packs.glob("*.fresh")
    mark.write_text("another boot")
    content = bytearray(pack.read_bytes())
    content[-3000:] = bytes(3000)  # never came to the disk
    pack.chmod(0o600)
    pack.write_bytes(content)
    again = CodeRig(rig.folder)
    with again.home.store.using():
        assert not again.home.has(taken.id), "a tree of which something is gone is none"
    assert again.take().id == taken.id
    assert out(again, taken.id) == seen(os.fsencode(rig.source))
    again.home.settle()
    assert list(packs.glob("*.fresh")) == []
    assert CodeRig(rig.folder).home.has(taken.id)


def test_code_is_stored_while_gigabytes_of_our_own_are(rig: CodeRig, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "a.whl").write_bytes(os.urandom(CHUNK + 7))
    os.mkfifo(wheels / "b.whl", 0o600)  # read as slowly as the test wants
    (rig.source / "train.py").write_text("print(1)")
    with ThreadPoolExecutor(2) as threads:
        storing = threads.submit(rig.home.keep_files, wheels)
        with (wheels / "b.whl").open("wb", buffering=0) as slow:  # it waits for more from now on
            try:
                taken = threads.submit(rig.take).result(20)
                assert not storing.done()
            finally:
                slow.write(b"the rest")
        root = storing.result(20)
    assert out(rig, taken.id)[b"train.py"] == ("file", 0o644, b"print(1)")
    (wheels / "b.whl").unlink()
    (wheels / "b.whl").write_bytes(b"the rest")
    (wheels / "b.whl").chmod(0o600)
    assert out(rig, root) == seen(os.fsencode(wheels))
    assert rig.home.keep_files(wheels) == root
    assert rig.home.take(SnapshotRequest(str(wheels), Choices(), 1 << 40)).id == root, "as if it were code"


def test_our_own_files_that_could_not_be_stored_leave_nothing(rig: CodeRig, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    (wheels / "a folder").mkdir(parents=True)
    (wheels / "a.whl").write_bytes(b"x" * CHUNK)
    with pytest.raises(UgroError, match="cannot be stored"):
        rig.home.keep_files(wheels)
    assert os.listdir(rig.home.store.packs) == []
