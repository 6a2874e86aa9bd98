"""Which files of a working directory the job made or changed, compared with the code that was put there."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ugro.node import trees
from ugro.node.clock import boot_id, clock_s
from ugro.node.files import contents
from ugro.node.files.outputs import Outputs
from ugro.node.files.packs import ContentStore, PackWriter
from ugro.node.files.workdir import WorkDir
from ugro.node.program import Refused
from ugro.node.runs.rundir import AgentDir, RunDir
from ugro.node.runs.runspec import RunSpec
from ugro.node.trees import TreeEntry

CODE = {"train.py": b"print(1)", "data/table.csv": b"a,b\n", "data/empty": b"", "pkg/__init__.py": b""}


def stored(store: ContentStore, files: dict[str, bytes]) -> bytes:
    """The tree of these files and of a link to the first."""
    with store.using():
        writer = PackWriter(store)

        def tree(folder: str) -> bytes:
            entries = [TreeEntry(b"link", trees.LINK, 0o777, 0, b"train.py")] if not folder else []
            inside = {name.removeprefix(folder) for name in files if name.startswith(folder)}
            for name in sorted({one.split("/")[0] for one in inside}):
                content = files.get(folder + name)
                if content is None:
                    entries.append(TreeEntry(name.encode(), trees.FOLDER, 0o755, 0, tree(f"{folder}{name}/")))
                    continue
                key = trees.identify(trees.CONTENT, content)
                writer.add(key, trees.CONTENT, content)
                entries.append(TreeEntry(name.encode(), trees.FILE, 0o644, len(content), key if content else b""))
            encoded = trees.encode(entries)
            writer.add(trees.identify(trees.TREE, encoded), trees.TREE, encoded)
            return trees.identify(trees.TREE, encoded)

        root = tree("")
        writer.finish()
        store.refresh()
        store.complete(root)
    return root


class Place:
    def __init__(self, root: Path) -> None:
        self.run: RunDir = AgentDir(str(root), "agent", "n1@machine").run("7", 1)
        self.store = contents.store_in(str(root))
        self.code = stored(self.store, CODE)
        for name in ("output", "logs"):
            os.makedirs(self.run.file(name))
        contents.check_out(self.run, self.code)
        self.work = Path(self.run.file("work"))
        self.specify()

    def specify(self, **more: object) -> None:
        spec = {"ranks": [{"rank": 0, "argv": ["x"]}], "code": self.code.hex(), **more}
        Path(self.run.file("spec.json")).write_text(json.dumps({"spec": spec}))

    def made(self) -> list[str]:
        return [os.fsdecode(file.name) for file in Outputs(self.run).files()]

    def has_any(self) -> bool:
        fields = (self.run.envelope() or {})["spec"]
        return WorkDir(self.run, RunSpec(fields)).has_any()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    contents.store_in.cache_clear()
    yield Place(tmp_path.resolve())
    contents.store_in.cache_clear()


def test_code_that_is_as_it_was_does_not_count_whatever_its_dates_say(place: Place) -> None:
    assert (place.made(), place.has_any()) == ([], False)
    (place.work / "train.py").touch()
    (place.work / "data" / "table.csv").chmod(0o600)
    (place.work / "pkg" / "__init__.py").write_bytes(b"")
    (place.work / "data" / "empty").unlink()
    assert (place.made(), place.has_any()) == ([], False)


def test_what_was_edited_replaced_or_made_counts_however_old_it_says_it_is(place: Place) -> None:
    (place.work / "train.py").write_bytes(b"print(2)")  # as long as before, and at once
    os.utime(place.work / "train.py", (0, 0))
    (place.work / "data" / "table.csv.new").write_bytes(b"b,a\n")
    os.utime(place.work / "data" / "table.csv.new", (0, 0))
    (place.work / "data" / "table.csv.new").rename(place.work / "data" / "table.csv")
    shutil.copy2(place.work / "data" / "table.csv", place.work / "copy.csv")
    (place.work / "data" / "deep" / "er").mkdir(parents=True)
    (place.work / "data" / "deep" / "er" / "x").touch()
    assert place.has_any()
    assert place.made() == ["copy.csv", "data/deep/er/x", "data/table.csv", "train.py"]


def test_code_of_which_something_is_gone_no_longer_counts_as_there_so_that_it_is_sent_again(place: Place) -> None:
    for pack in Path(place.store.packs).glob("*.pack"):
        pack.unlink()
    assert place.store.has_root(place.code)
    with pytest.raises(Refused, match="is not on this node"):
        contents.check_out(place.run, place.code, str(place.work.parent / "again"))
    assert not place.store.has_root(place.code)


def test_there_may_be_some_if_the_code_cannot_be_read_now(place: Place) -> None:
    lock = Path(place.run.agent.root, ".ugro", "contents", "lock")
    lock.unlink()
    lock.mkdir()
    assert place.has_any()


def test_a_clock_that_is_set_back_while_the_job_runs_hides_nothing_that_it_changed(place: Place) -> None:
    place.specify(outputs=["*.csv"])
    ahead_s = time.time() + 7200
    os.utime(place.run.file("spec.json"), (ahead_s, ahead_s))
    place.run.write_state({"boot_id": boot_id(), "clock_s": clock_s() - 10, "started_at": ahead_s})
    (place.work / "train.py").write_bytes(b"print(2)")
    (place.work / "new.csv").write_text("made")
    assert sorted(set(place.made())) == ["new.csv", "train.py"]
    began_ns = place.run.began_ns()
    assert began_ns is not None
    assert began_ns <= time.time_ns()


def test_a_folder_may_take_the_place_of_a_file_and_the_other_way_round(place: Place) -> None:
    (place.work / "train.py").unlink()
    (place.work / "train.py").mkdir()
    (place.work / "train.py" / "inside").touch()
    shutil.rmtree(place.work / "pkg")
    (place.work / "pkg").touch()
    assert place.made() == ["pkg", "train.py/inside"]


def test_caches_and_the_folder_of_the_checkpoints_do_not_count(place: Place) -> None:
    place.specify(checkpoint_dir="out/ckpt")
    for name in ("__pycache__/a.pyc", "pkg/__pycache__/b.pyc", "c.pyc", ".git/HEAD", "out/ckpt/step_1"):
        (place.work / name).parent.mkdir(parents=True, exist_ok=True)
        (place.work / name).touch()
    assert (place.made(), place.has_any()) == ([], False)
    (place.work / "out" / "ckpt.txt").touch()
    assert place.made() == ["out/ckpt.txt"]


def test_links_of_the_code_are_passed_over_and_new_ones_are_told(place: Place) -> None:
    (place.work / "new").symlink_to("/etc/passwd")
    [found] = Outputs(place.run).files()
    assert (found.name, found.problem) == (b"new", "a symbolic link")
    (place.work / "link").unlink()
    (place.work / "link").symlink_to("elsewhere")
    assert place.made() == ["link", "new"]


def test_without_the_code_on_the_node_the_times_of_change_decide(place: Place) -> None:
    before = os.stat(place.run.file("spec.json")).st_mtime_ns
    os.unlink(os.path.join(place.store.roots, place.code.hex()))
    (place.work / "made").touch()
    os.utime(place.run.file("spec.json"), ns=(before, os.stat(place.work / "made").st_ctime_ns))
    assert place.made() == ["made"]


def test_a_name_that_is_a_file_here_and_a_folder_there_is_told_and_not_sent(place: Place) -> None:
    os.makedirs(place.run.file("output", "x"))
    Path(place.run.file("output", "x", "y")).touch()
    (place.work / "x").touch()
    files = {file.name: file.problem for file in Outputs(place.run).files()}
    assert files[b"x/y"] is None
    assert "$UGRO_OUTPUT has a folder" in str(files[b"x"])


def test_patterns_with_many_stars_find_each_file_once_and_soon(place: Place) -> None:
    place.specify(outputs=["/".join(["**", "a"] * 8 + ["**", "*a" * 13 + "*b"]), "a/**/a*b"])
    deep = place.work / "/".join("a" * 40)
    deep.mkdir(parents=True)
    (deep / ("a" * 250)).touch()
    (deep / ("a" * 20 + "b")).touch()
    made = [name for name in place.made() if name.endswith("ab")]
    assert made == [f"{'a/' * 40}{'a' * 20}b"]
