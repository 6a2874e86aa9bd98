"""How an installer's process is heard: its last lines, how far it is, why it failed, and what it leaves behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.rig.waiting import is_alive, wait_until
from ugro.features.environments.node.build import Installer
from ugro.features.environments.node.failures import MOST_LINES, Failed, Mask


def installer(folder: Path, *addresses: str) -> Installer:
    return Installer({"PATH": os.defpath}, str(folder), Mask(addresses))


def test_the_last_lines_are_kept_and_passwords_are_not_among_them(tmp_path: Path) -> None:
    said = installer(tmp_path, "http://ann:s3cret@x/").run(["sh", "-c", "seq 100; printf 'a\\rb s3cret'; pwd"])
    assert said[-2:] == ["a", f"b ****{tmp_path}"]
    assert len(said) == MOST_LINES


def test_it_is_asked_often_while_it_says_nothing(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []
    one = installer(tmp_path)
    go = tmp_path / "go"
    os.mkfifo(go)

    def tick(pid: int, line: str) -> None:
        seen.append((pid, line))
        if len(seen) == 3:
            go.write_text("go\n")

    one.tick = tick
    assert one.run(["sh", "-c", f"echo first; read line < {go}; echo $line"]) == ["first", "go"]
    assert seen[1][1] == "first"


def test_how_it_ended_is_said_in_words(tmp_path: Path) -> None:
    one = installer(tmp_path)
    with pytest.raises(Failed, match="sh ended with code 3: what") as failed:
        one.run(["sh", "-c", "echo what; exit 3"])
    assert (failed.value.kind, failed.value.tail) == ("crashed", ["what"])
    with pytest.raises(Failed, match="sh was ended by signal 9"):
        one.run(["sh", "-c", "kill -9 $$"])
    with pytest.raises(FileNotFoundError):
        one.run(["/no/such/installer"])


def test_what_it_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    said = installer(tmp_path).run(["sh", "-c", "sleep 1000 & echo $!"])
    assert is_alive(int(said[0]))
    os.kill(int(said[0]), 9)
    wait_until(lambda: not is_alive(int(said[0])), what="it to be gone")
