"""The file of results: whatever cut it, resuming loses no result, writes none twice, and touches no other file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ugro.features.batches.mapping import Items, ResultFile
from ugro.features.batches.model import ItemFailed
from ugro.kernel.support.errors import UgroError, UsageError

SOURCE = "def score(item): return item\n"


def written(path: Path, numbers: list[int], *, failed: int | None = None, resumes: bool = False) -> None:
    with ResultFile(str(path), resumes=resumes) as results:
        for number in numbers:
            if number == failed:
                results.add(number, ItemFailed(number, "x", "no", cause_kind="ValueError"))
            else:
                results.add(number, json.dumps({"of": number}))
        results.finish()


def indices(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


def resumed(path: Path) -> set[int]:
    """What is not run again."""
    with ResultFile(str(path), resumes=True) as results:
        return {number for number, is_done in enumerate(results.done) if is_done}


# In the first line and at both its ends, in the failure, and behind everything.
@pytest.mark.parametrize(
    ("cut", "end"), [(0, b"\0\0"), (1, b""), (1, b"\0\n"), (25, b""), (26, b"\0"), (110, b""), (999, b"")]
)
def test_wherever_it_was_cut_every_item_has_one_result_in_the_end(cut: int, end: bytes, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written(path, list(range(10)), failed=3)
    path.write_bytes(path.read_bytes()[:cut] + end)
    written(path, [number for number in range(10) if number not in resumed(path)], resumes=True)
    assert sorted(indices(path)) == list(range(10))
    assert resumed(path) == set(range(10))
    assert [one.name for one in path.parent.iterdir()] == ["out.jsonl"]


def test_a_result_that_is_there_twice_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written(path, [0, 1, 1, 0])
    assert resumed(path) == {0, 1}
    assert indices(path) == [0, 1]


@pytest.mark.parametrize("line", ['{"x": 1}\n', "3\n", "some text\n", "a last line"])
def test_a_file_of_something_else_is_left_as_it_is(line: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written(path, [0])
    path.write_text(path.read_text() + line)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"line 2 of .* is not a result of ugro map"):
        ResultFile(str(path), resumes=True)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("failed", [None, 1])
def test_two_maps_do_not_write_one_file(failed: int | None, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written(path, [0, 1], failed=failed)
    with ResultFile(str(path), resumes=True), pytest.raises(UsageError, match="another map is writing"):
        ResultFile(str(path), resumes=True)
    assert resumed(path) == {0, 1} - {failed}


def begun(folder: Path, content: str, *, function: str = "score", source: str = SOURCE) -> bool:
    (folder / "items.jsonl").write_text(content)
    with ResultFile(str(folder / "out.jsonl"), resumes=True) as results:
        is_changed = results.belongs_to(Items(str(folder / "items.jsonl")), function, source)
        if not any(results.done):
            results.add(0, "1")
    return is_changed


def test_an_input_that_differs_anywhere_is_another_one(tmp_path: Path) -> None:
    large = "1\n" * 1_000_000
    assert not begun(tmp_path, large)
    assert not begun(tmp_path, large + "2\n")  # it has grown
    for other in (large, large[:-2] + "3\n2\n", "2\n" + large):
        with pytest.raises(UsageError, match="another input"):
            begun(tmp_path, other)


def test_another_function_is_refused_and_a_changed_script_is_noticed(tmp_path: Path) -> None:
    assert not begun(tmp_path, "1\n")
    with pytest.raises(UsageError, match="has results of the function score"):
        begun(tmp_path, "1\n", function="other")
    assert begun(tmp_path, "1\n", source=SOURCE + "# mended\n")


@pytest.mark.parametrize("left", ["", '{"size": 2, "sh', "[]"])
def test_a_note_of_the_input_that_was_cut_is_no_obstacle(left: str, tmp_path: Path) -> None:
    begun(tmp_path, "1\n")
    (tmp_path / ".out.jsonl.input").write_text(left)
    assert not begun(tmp_path, "1\n")


@pytest.mark.parametrize("is_large", [False, True])
def test_a_full_disk_is_one_clear_error(is_large: bool) -> None:
    """Also when the buffer is written by the last step alone."""

    def write() -> None:
        with ResultFile("/dev/full", resumes=False) as results:
            for number in range(10_000 if is_large else 1):
                results.add(number, "1")
            results.finish()

    with pytest.raises(UgroError, match="/dev/full cannot be written: no space left"):
        write()
