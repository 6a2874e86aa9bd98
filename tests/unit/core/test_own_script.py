"""Where the script of a job is on this machine, and which folder goes with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ugro.kernel.jobs.script import (
    OwnScript,
    Words,
    expect_no_script_elsewhere,
    own_script,
    place_of,
    with_script,
    words_of,
)
from ugro.kernel.support.errors import ConfigError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "big").mkdir()
    folder = tmp_path / "project"
    (folder / "pkg").mkdir(parents=True)
    for name in ("bin.py", "run.sh", "data.csv", "pkg/__main__.py"):
        (folder / name).write_text("")
    return folder


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python3 x.py --a y.py", "x.py"),
        ("python3 -u -W ignore tool --a y.py", "tool"),
        ("/usr/bin/python3.12 -X dev /p/x.py", "/p/x.py"),
        ("python3 -c print(1) x.py", None),
        ("python3 -m http.server", None),
        ("python3 -u -m torch.distributed.run --nproc-per-node 2 x.py y.py", "x.py"),
        ("bash -e run.sh", "run.sh"),
        ("sh -c python3 x.py", None),
        ("/p/run.sh x.py", "/p/run.sh"),
        ("torchrun --standalone ../x.py", "../x.py"),
        ("env A=1 python3 x.py", "x.py"),
        ("ls -l", None),
        ("python3", None),
    ],
)
def test_the_script_of_a_command_is_found(command: str, script: str | None) -> None:
    words = command.split()
    at = place_of(words)
    assert (None if at is None else words[at]) == script


def test_a_script_elsewhere_is_sent_with_its_own_folder(project: Path) -> None:
    here = project.parent / "big"
    for named in (str(project / "bin.py"), "../project/bin.py", "../big/../project/bin.py"):
        assert own_script(str(here), Words((named,), is_command=False)) == OwnScript(str(project), "bin.py")
        found = own_script(str(here), Words(("python3", "-u", named, "--epochs=3"), is_command=True))
        assert found == OwnScript(str(project), "bin.py")
    found = own_script(str(here), Words((str(project / "run.sh"),), is_command=True))
    assert found == OwnScript(str(project), "./run.sh"), "a program without a slash would be looked for in the PATH"
    assert own_script(str(here), Words(("../project/pkg",), is_command=False)) == OwnScript(str(project), "pkg")


def test_a_program_that_another_one_starts_is_looked_for_in_the_folder(project: Path) -> None:
    here = project.parent / "big"
    for before in (["nice", "-n", "5"], ["env", "A=1"], ["A=1"]):
        found = own_script(str(here), Words((*before, "../project/run.sh"), is_command=True))
        assert found == OwnScript(str(project), "./run.sh")


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("python3 ../project/bin.py --epochs 3", "python3 bin.py --epochs 3"),
        ("A=1 python3 -u  ../project/bin.py", "A=1 python3 -u bin.py"),
        ("../project/run.sh ~/x", "./run.sh ~/x"),
        ("python3 ../project/bin.py\n", "python3 bin.py"),
    ],
)
def test_a_plain_text_for_a_shell_is_taken_as_its_words(project: Path, text: str, called: str) -> None:
    here, command = str(project.parent / "big"), ("sh", "-c", text)
    for shell in (["/bin/bash", "-lc"], ["bash", "-e", "-c"]):
        assert with_script((*shell, text), 0, "x") == (*shell, with_script(command, 0, "x")[2])
    words = Words(words_of(command), is_command=True)
    found = own_script(here, words)
    assert found is not None
    assert words.at is not None
    assert (found.folder, with_script(command, words.at, found.script)) == (str(project), ("sh", "-c", called))
    with_another_folder = with_script(words.argv, words.at, "x.py")
    assert with_another_folder[words.at] == "x.py"
    assert with_script(command, words.at, "my x.py")[2].split(" ", words.at)[words.at].startswith("'my x.py'")


def test_what_a_shell_has_to_understand_is_refused_if_no_node_can_have_its_script(project: Path) -> None:
    here = str(project.parent / "big")
    for text in ("python3 ../project/bin.py | tee log", "echo 1; python3 '../project/bin.py' --name 'a b'"):
        assert words_of(("bash", "-c", text)) == ("bash", "-c", text)
        with pytest.raises(ConfigError, match=r"^\.\./project/bin\.py is not in .*/big, the folder") as caught:
            expect_no_script_elsewhere(here, ("bash", "-c", text))
        assert f"--workdir {project.parent}," in (caught.value.hint or "")
    for text in (
        f"python3 {project}/bin.py | tee log",  # the nodes may have it
        "cd ../project && python3 ../project/bin.py",
        "python3 ../project/none.py | tee log",
        "python3 bin.py | tee ../log.py",
        "python3 ../project/bin.py",
    ):
        expect_no_script_elsewhere(here, ("sh", "-c", text))


def test_a_link_is_the_file_that_it_leads_to(project: Path) -> None:
    here = project.parent / "big"
    (here / "link.py").symlink_to("../project/bin.py")
    (here / "folder").symlink_to("../project")
    (here / "same.py").symlink_to("own.py")
    (here / "own.py").write_text("")
    for named in ("link.py", "folder/bin.py", str(here / "link.py")):
        assert own_script(str(here), Words((named,), is_command=False)) == OwnScript(str(project), "bin.py")
        assert own_script(str(here), Words(("link.py",), is_command=False, follows_links=True)) is None
    assert own_script(str(here), Words(("same.py",), is_command=False)) is None
    linked = project.parent / "linked"
    linked.symlink_to(here)
    named = str(linked / "own.py")
    assert own_script(str(here), Words((named,), is_command=False)) == OwnScript(str(here), "own.py")


def test_a_script_in_the_folder_is_called_by_its_place_there(project: Path) -> None:
    for is_command in (False, True):
        words = ("python3",) * is_command + (str(project / "pkg" / "__main__.py"),)
        found = own_script(str(project), Words(words, is_command=is_command))
        assert found == OwnScript(str(project), "pkg/__main__.py")
    assert own_script(str(project), Words(("bin.py", "../x"), is_command=False)) is None


def test_what_only_the_nodes_have_and_what_is_the_systems_is_left_alone(project: Path) -> None:
    for named in ("/data/on/nodes/train.py", "../none.py", "/usr/lib/python3/x.py", "/dev/null", str(project)):
        assert own_script(str(project.parent / "big"), Words((named,), is_command=False)) is None, named
    assert own_script("/", Words(("/bin/sh", "/etc/profile"), is_command=True)) is None


def test_what_cannot_be_sent_together_is_refused(project: Path) -> None:
    here = project.parent / "big"
    (here / "conf.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"is not in .*/big, the folder that is sent"):
        own_script(str(here), Words(("../project/bin.py",), is_command=False, is_workdir_given=True))
    for word in ("conf.yaml", "--config=conf.yaml", "./conf.yaml"):
        with pytest.raises(ConfigError, match=r"conf\.yaml would not be there"):
            own_script(str(here), Words(("../project/bin.py", word), is_command=False))
    with pytest.raises(ConfigError, match=r"^\.\./project/data\.csv would not be there"):
        own_script(str(here), Words(("../project/bin.py", "--data=../project/data.csv"), is_command=False))
    (project / "conf.yaml").write_text("")
    found = own_script(str(here), Words(("../project/bin.py", "conf.yaml", "big", "-x"), is_command=False))
    assert found == OwnScript(str(project), "bin.py")
