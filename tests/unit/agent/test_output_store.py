"""Outputs and checkpoints of one node are fetched at the same time, into one folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from ugro.kernel.files.node_files import Wanted
from ugro.kernel.files.results.output_store import OutputStore
from ugro.kernel.files.rules import Choice
from ugro.node.files.listing import RunFile
from ugro.node.files.transfer import WHOLE, Head

NOTHING = Choice((), (), ())


@pytest.mark.parametrize("name", ["out.txt", "sub/out.txt"])
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_part_without_files_does_not_take_the_folder_from_the_other(
    tmp_path: Path, name: str, *, is_begun: bool
) -> None:
    outputs = OutputStore(tmp_path, "gpu2", is_first=False)
    checkpoints = OutputStore(tmp_path, "gpu2", is_first=False, part="checkpoints")
    file = RunFile(name.encode(), 5, 1, 1)
    writer = outputs.writer([Wanted(file)], is_final=True)
    head = Head(0, 0, 5, 5, 1, 1, 0o600)
    if is_begun:
        writer.begin(head)
    checkpoints.finish(NOTHING, is_kept=True)
    if not is_begun:
        writer.begin(head)
    writer.write(b"hello")
    writer.end(WHOLE)
    assert (tmp_path / "nodes" / "gpu2" / name).read_text() == "hello"
    assert outputs.finish(NOTHING, is_kept=True).files == 1


def test_what_a_pattern_names_is_of_the_working_directory(tmp_path: Path) -> None:
    outputs = OutputStore(tmp_path, "gpu2", is_first=True)
    names = [b"a.csv", b"results/a.csv", b"results/deep/b.csv", b"deep/x/y.pt", b"other"]
    outputs.note_work([RunFile(name, 5, 1, 1) for name in names], ["results", "*.csv", "deep/**"])
    assert outputs.work() == {b"a.csv", b"results/a.csv", b"results/deep/b.csv", b"deep/x/y.pt"}
    outputs = OutputStore(tmp_path / "other", "gpu2", is_first=True)
    outputs.note_work([RunFile(name, 5, 1, 1) for name in names], ["b.csv", "**/a.csv"])
    assert outputs.work() == {b"a.csv", b"results/a.csv"}, "as on the node, a pattern begins in the directory"
