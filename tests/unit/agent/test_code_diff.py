"""What differs between two trees of code, for people to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig.code import CodeRig
from ugro.kernel.files.code.diff import FileDiff, code_diff
from ugro.kernel.support.errors import NotFound


@pytest.fixture
def rig(tmp_path: Path) -> CodeRig:
    return CodeRig(tmp_path)


def test_files_that_came_went_and_changed_are_told_line_by_line(rig: CodeRig) -> None:
    source = rig.source
    (source / "pkg").mkdir()
    (source / "pkg/train.py").write_text("import torch\nlr = 1\nprint(lr)\n")
    (source / "same.py").write_text("same\n")
    (source / "gone.txt").write_text("old\n")
    (source / "weights.bin").write_bytes(b"\0\xff" * 100)
    old = rig.take().id
    (source / "pkg/train.py").write_text("import torch\nlr = 2\nprint(lr)\n")
    (source / "gone.txt").unlink()
    (source / "new <b>.txt").write_text("<script>\n")
    (source / "weights.bin").write_bytes(b"\0\xfe" * 100)
    (source / "same.py").chmod(0o755)
    new = rig.take().id
    found = code_diff(rig.home.store, old, new)
    by_name = {file.path: file for file in found.files}
    assert {name: file.change for name, file in by_name.items()} == {
        "gone.txt": "removed",
        "new <b>.txt": "added",
        "pkg/train.py": "changed",
        "same.py": "mode",
        "weights.bin": "changed",
    }
    lines = by_name["pkg/train.py"].lines
    assert [line for line in lines if line[0] in "+-"] == ["-lr = 1", "+lr = 2"]
    assert by_name["weights.bin"] == FileDiff("weights.bin", "changed", 200, 200, (), "too large, or not text")
    assert found.same == 0
    assert code_diff(rig.home.store, new, new).files == ()


def test_a_difference_of_any_size_stays_readable(rig: CodeRig) -> None:
    for number in range(400):
        (rig.source / f"{number:03}.txt").write_text("old\n" * 50)
    old = rig.take().id
    for number in range(400):
        (rig.source / f"{number:03}.txt").write_text("new\n" * 50)
    found = code_diff(rig.home.store, old, rig.take().id)
    assert (len(found.files), found.more) == (300, 100)
    assert sum(len(file.lines) for file in found.files) <= 4000
    assert found.files[-1].remark == "101 more lines"


def test_code_that_is_no_longer_kept_is_said(rig: CodeRig) -> None:
    (rig.source / "a").write_text("a")
    with pytest.raises(NotFound, match="no longer kept"):
        code_diff(rig.home.store, rig.take().id, "0" * 64)
