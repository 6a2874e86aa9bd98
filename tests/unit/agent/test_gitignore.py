"""What stays at home is what git would ignore: the same patterns, asked of git itself."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rig.code import CodeRig
from ugro.kernel.files.code.scanner import Choices, scan
from ugro.kernel.files.code.service import ResultRules
from ugro.kernel.support.errors import UgroError

PARTS = ("a", "b", "a.py", "b.log", "data", "x y", "#h", "!n", "ab", "[a]", "d.d")
PATHS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map("/".join)
PLAIN = ["a", "b", "*.py", "*.log", "data", "data/", "/a", "/a/b", "a/b", "**/b", "a/**", "a/**/b", "*", "?", "[ab]"]
ODD = ["[!a]*", "[a-c].py", "\\#h", "\\!n", "x y", "x\\ y", "#h", "d.*", "a/*", "**", "/*", "a*", "*a*", "[a", "a?"]
STARS = ["*a*b*", "**/*a*", "a/**/**/b", "*[!a]*", "[a-b]*", "[ab].?*", "**/a/**/b", "**/a*/*", "d*[a-d]?*", "?[b-]"]
WORDS = st.sampled_from([*PLAIN, *ODD, *STARS, "\\[a\\]"])
LINES = st.lists(st.builds(lambda sign, word: sign + word, st.sampled_from(["", "", "!"]), WORDS), max_size=5)


@given(st.sets(PATHS, min_size=1, max_size=12), LINES, LINES)
def test_the_files_that_go_along_are_those_that_git_would_add(
    paths: set[str], rules: list[str], inner: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for path in sorted(paths):
            try:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).touch()
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                continue
        (root / ".gitignore").write_text("\n".join(rules))
        if (root / "a").is_dir():
            (root / "a" / ".gitignore").write_text("\n".join(inner))
        git = ["git", "-C", folder, "-c", "core.excludesFile=/dev/null"]
        subprocess.run([*git, "init", "-q"], check=True, capture_output=True, timeout=20)
        told = subprocess.run(
            [*git, "ls-files", "-z", "--others", "--exclude-standard"], check=True, capture_output=True, timeout=20
        ).stdout
        wanted = set(told.split(b"\0")) - {b""}
        found = scan(folder, Choices(exclude=(".git",)))
        assert {file.path for file in found.root.all_files()} == wanted, (rules, inner)


def files(rig: CodeRig, folder: Path, **choices: object) -> list[str]:
    found = scan(str(folder), Choices(**choices))  # type: ignore[arg-type]
    return sorted(os.fsdecode(file.path) for file in found.root.all_files())


@pytest.fixture
def rig(tmp_path: Path) -> CodeRig:
    return CodeRig(tmp_path)


def test_the_rules_of_the_repository_hold_in_a_folder_of_it(rig: CodeRig) -> None:
    (rig.source / ".git").mkdir()
    (rig.source / ".gitignore").write_text("*.ckpt\n/train/data/\n")
    (rig.source / "train" / "data").mkdir(parents=True)
    for name in ("data/x", "a.py", "b.ckpt"):
        (rig.source / "train" / name).touch()
    assert files(rig, rig.source / "train") == ["a.py"]


def test_ugroignore_goes_over_gitignore_and_both_over_the_configuration(rig: CodeRig) -> None:
    (rig.source / ".gitignore").write_text("*.bin\n")
    (rig.source / ".ugroignore").write_text("!small.bin\nnotes\n!.env\n")
    for name in ("small.bin", "large.bin", "notes", ".env", "a.pyc"):
        (rig.source / name).touch()
    found = files(rig, rig.source, exclude=(".env", "*.pyc"))
    assert found == [".env", ".gitignore", ".ugroignore", "small.bin"]


def test_rules_that_are_no_text_or_cannot_be_read_do_no_harm(rig: CodeRig) -> None:
    (rig.source / ".gitignore").write_bytes(b"\xff*\n\\\n[\n!\n/\n\n   \n**[\n")
    (rig.source / ".ugroignore").symlink_to("/dev/zero")
    (rig.source / "a").touch()
    assert files(rig, rig.source) == [".gitignore", "a"]


def test_rules_and_names_that_were_made_to_take_years_take_no_time(rig: CodeRig) -> None:
    cruel = "*a" * 13 + "*b"
    (rig.source / ".gitignore").write_text("\n".join([cruel, f"x/{cruel}", "**/a/" * 20 + cruel, f"{cruel}/"]))
    (rig.source / "x").mkdir()
    for name in ("a" * 250, f"x/{'a' * 250}"):
        (rig.source / name).touch()
    assert len(files(rig, rig.source)) == 3
    rules = ResultRules(rig.home, rig.take().id, [cruel])
    assert rules.named_by(b"a" * 250) is None


def test_a_file_with_too_many_patterns_is_named(rig: CodeRig) -> None:
    (rig.source / ".gitignore").write_text("".join(f"a*{number}*b\n" for number in range(2001)))
    with pytest.raises(UgroError) as refused:
        files(rig, rig.source)
    assert refused.value.message == ".gitignore cannot be read: more than 2,000 of its patterns have a *, ? or ["
    assert refused.value.hint == "shorten it: its rules decide what is sent"


def test_rules_that_were_edited_hold_at_once(rig: CodeRig) -> None:
    (rig.source / "a.log").touch()
    (rig.source / "b").touch()
    assert rig.take().files == 2
    (rig.source / ".gitignore").write_text("*.log\n")
    assert rig.take().files == 2, "b, and the rules themselves"


def test_files_that_a_job_makes_are_named_by_the_ignore_files_of_its_code(tmp_path: Path) -> None:
    rig = CodeRig(tmp_path)
    rules_of_git = "*.log\n/checkpoints/\n!kept.log\n"
    for name, text in {".gitignore": rules_of_git, "sub/.ugroignore": "raw\n", "sub/a.py": ""}.items():
        (rig.source / name).parent.mkdir(exist_ok=True)
        (rig.source / name).write_text(text)
    code = rig.take()
    rules = ResultRules(rig.home, code.id, ["*.pyc", ".env"])
    (rig.source / ".gitignore").write_text("")  # an edit after the submission has no say
    named = {
        b"out.log": ".gitignore",
        b"deep/er/out.log": ".gitignore",
        b"kept.log": None,
        b"checkpoints/step_1/part.pt": ".gitignore",
        b"sub/checkpoints/step_1": None,
        b"sub/raw/1": ".ugroignore",
        b"raw/1": None,
        b".env": "sync.exclude_patterns",
        b"results.csv": None,
    }
    assert {name: rules.named_by(name) for name in named} == named
    gone = ResultRules(rig.home, "0" * 64, ["*.pyc"])
    assert (gone.named_by(b"out.log"), gone.named_by(b"a.pyc")) == (None, "sync.exclude_patterns")
    assert ResultRules(rig.home, None, []).named_by(b"out.log") is None
