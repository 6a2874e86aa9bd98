"""What a person sees: the commands in a real terminal, drawn by tmux, with keys that are really pressed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.sshd import SshdFarm
from tests.rig.terminal import PROMPT, Screen, written
from tests.rig.waiting import wait_until

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux draws the terminal, and is not installed")

@pytest.fixture(scope="module")
def farm() -> Iterator[SshdFarm]:
    with ExitStack() as stack:
        yield Farms(stack)(3)


@pytest.fixture(scope="module")
def ugro(farm: SshdFarm) -> Iterator[Ugro]:
    with commands(farm.cluster_yaml(health_check={"timeout": 2})) as ugro:
        assert ugro("health").returncode == 0
        yield ugro


@pytest.fixture
def screen(ugro: Ugro, tmp_path: Path) -> Iterator[Screen]:
    screen = Screen(ugro, tmp_path, 100, 20)
    yield screen
    screen.close()


def test_health_is_a_table_with_a_sign_a_word_and_a_colour(screen: Screen) -> None:
    # How busy a CPU is takes two looks at it: a node that was connected a moment ago cannot say yet.
    warm_up = "while ugro health --json | grep -q 'cpu_use_ratio\":null'; do :; done"
    screen.type(f"{warm_up}; clear; ugro health; echo code=$?")
    screen.wait_for("^code=0")
    header, *rows = screen.rows()[:4]
    table, note, _ = header.partition("  NOTE")  # of a machine that is so busy that it answers late
    assert table.split() == ["NODE", "STATUS", "SCORE", "RTT", "LOAD", "CPU", "MEM", "DISK"]
    for row, name in zip(rows, ("n001", "n002", "n003"), strict=True):
        late = r"(  network latency is .*)?" if note else ""
        score = r"\d+" if note else "100"
        assert re.fullmatch(rf"✓  {name}  healthy +{score} +[\d.]+ ms +[\d.]+( +\d+%)+{late}", row)
        assert row.index("healthy") == header.index("STATUS")
        assert len(row.partition("  network")[0]) == len(table), "numbers end where their header ends"
    assert re.search(r"^3 healthy   checked 3 in ", screen.text(), re.MULTILINE)
    assert re.search(r"\x1b\[32m✓\x1b\[3?[90]", screen.text("-e"))


def test_no_colour_where_none_is_wanted(screen: Screen) -> None:
    screen.type("clear; NO_COLOR=1 ugro health; echo code=$?")
    screen.wait_for("^code=0")
    assert "\x1b[" not in screen.text("-e")


def test_a_channel_that_was_tried_is_told_of_in_plain_words(screen: Screen) -> None:
    screen.type("clear; ugro alerts test; echo code=$?")
    screen.wait_for("^code=0")
    assert screen.rows()[0] == "log: sent"


def test_a_narrow_terminal_gets_whole_rows_and_fewer_columns(screen: Screen, farm: SshdFarm) -> None:
    screen.resize(44, 20)
    screen.type("clear; ugro health; echo code=$?")
    screen.wait_for("^code=0")
    assert [row[:14] for row in screen.rows()[:4]] == ["   NODE  STATU", *(f"✓  n00{n}  healt" for n in (1, 2, 3))]


def test_watching_draws_in_place_follows_the_size_and_ends_with_ctrl_c(screen: Screen) -> None:
    screen.type("clear; ugro health --watch --interval 0.2; echo code=$?")
    first = screen.wait_for(r"checked 3 in .*Ctrl-C ends")
    wait_until(lambda: screen.text() != first, 10, "another look")
    for _ in range(5):
        assert sum("STATUS" in row for row in screen.rows()) == 1
        assert sum("n002" in row for row in screen.rows()) == 1
    screen.resize(40, 4)
    screen.wait_for(r"… \d more lines")
    assert len(screen.rows()) <= 4
    screen.resize(100, 20)
    wait_until(lambda: len(screen.rows()) == 5 and screen.rows()[3].startswith("✓  n003"), 10, "the whole table")
    screen.press("C-c")
    screen.wait_for("^code=0")
    assert len(screen.rows()) == 8, "the table, its footer, ^C, the exit code and the prompt"


def test_what_is_waited_for_is_shown_and_gone_afterwards(screen: Screen, farm: SshdFarm) -> None:
    farm["n003"].freeze()
    try:
        screen.type("clear; ugro health; echo code=$?")
        screen.wait_for("2 of 3 nodes have answered")
        shown = screen.wait_for("^code=[05]")
    finally:
        farm["n003"].thaw()
    assert "have answered" not in shown
    assert "probing the nodes" not in shown
    assert re.search(r"^\?  n003  unreachable ", shown, re.MULTILINE)


def test_ctrl_c_while_waiting_for_nodes_ends_the_wait(screen: Screen, farm: SshdFarm) -> None:
    farm["n003"].freeze()
    try:
        screen.type("clear; ugro health; echo code=$?")
        screen.wait_for("2 of 3 nodes have answered|probing the nodes")
        screen.press("C-c")
        shown = screen.wait_for("^code=130")
    finally:
        farm["n003"].thaw()
    assert "Traceback" not in shown
    assert screen.rows()[-1] == PROMPT


def test_ctrl_c_on_a_running_command_ends_it_and_says_so(screen: Screen, farm: SshdFarm) -> None:
    screen.type("clear; ugro exec n001 n002 -- sh -c 'echo begun; exec sleep 1000'; echo code=$?")
    screen.wait_for(r"(?s)n00[12] \| begun.*n00[12] \| begun")
    screen.press("C-c")
    shown = screen.wait_for("^code=130")
    assert "stopping it on the nodes (Ctrl-C again exits at once)" in shown
    assert "n001 ended by SIGTERM · n002 ended by SIGTERM" in shown
    assert screen.rows()[-1] == PROMPT


def test_an_error_stands_on_a_line_of_its_own_after_what_was_waited_for(screen: Screen, tmp_path: Path) -> None:
    home = tmp_path / "fresh"
    (tmp_path / "broken.yaml").write_text("nodes: 7\n")
    screen.type(f"clear; UGRO_HOME={home} UGRO_CLUSTER={tmp_path}/broken.yaml ugro health; echo code=$?")
    shown = screen.wait_for("^code=2")
    assert re.search(r"^error: ", shown, re.MULTILINE)
    assert "starting the agent" not in shown


@pytest.mark.proof
def test_a_dumb_terminal_gets_no_escape_codes(ugro: Ugro) -> None:
    for command in (["health"], ["top"], ["run", "--", "sh", "-c", r"printf '\033[31mred\033[0m\n'"], ["status"]):
        code, content = written(ugro, *command, kind="dumb")
        assert (code, b"\x1b" in content) == (0, False), content


def test_what_a_job_writes_does_not_steer_the_terminal(ugro: Ugro) -> None:
    evil = r"printf '\033[32mgreen\033[0m \033[2J\033]0;owned\007\033[5A gone\n'; exit 3"
    assert ugro("run", "--", "sh", "-c", evil).returncode == 3
    harmless = re.compile(rb"(\x1b\[[0-9;]*m|\r?\x1b\[K|[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f])*")
    for command, shows_it in {"logs": False, "why": True, "status": True, "events": False}.items():
        _, content = written(ugro, command, "last", kind="xterm-256color")
        assert harmless.fullmatch(content), content
        assert (b"owned" in content) == shows_it, content
    assert "\x1b[2J" in ugro("logs", "last").stdout, "a pipe gets what was written"


# --- ugro top ------------------------------------------------------------------------------------------------------


def test_top_shows_nodes_and_jobs_live_and_gives_the_screen_back(screen: Screen, ugro: Ugro) -> None:
    screen.type("echo before; ugro top --interval 0.2; echo code=$?")
    shown = screen.wait_for("no running or waiting jobs")
    assert re.search(r"3 of 3 nodes +0 running, 0 waiting", shown)
    assert [row.split()[1] for row in screen.rows() if row.startswith("✓")] == ["n001", "n002", "n003"]
    assert "before" not in shown, "it has the screen to itself"

    job = ugro("--json", "run", "-d", "--name", "sleepy", "--", "sleep", "600")
    assert job.returncode == 0, job.stderr
    shown = screen.wait_for(r"● +\d+  sleepy  running")
    node = next(row for row in screen.rows() if row.endswith("sleepy"))
    assert re.match(r"✓  n00\d", node), "its node says so, too"

    screen.press("s")
    screen.wait_for("s sort: use")
    screen.press("Space")
    screen.wait_for("space continue")
    assert ugro("cancel", "last").returncode == 0
    screen.press("Space")
    screen.wait_for("no running or waiting jobs")
    screen.press("q")
    assert "before" in screen.wait_for("^code=0")


def test_top_cancels_a_job_drains_a_node_and_shows_logs_by_keys(screen: Screen, ugro: Ugro) -> None:
    words = ["sh", "-c", r"printf '\033[2Jhello from the job\n'; exec sleep 600"]
    assert ugro("run", "-d", "--name", "chatty", "--", *words).returncode == 0
    screen.type("ugro top --interval 0.2; echo code=$?")
    screen.wait_for("chatty  running")
    screen.press("Tab")
    screen.wait_for(r"^job \d+: c cancel  l logs")
    reverse = re.compile(r"\x1b\[[0-9;]*7m[^\n]*chatty")
    wait_until(lambda: reverse.search(screen.text("-e")), 10, "what is selected to be seen")
    screen.press("l")
    screen.wait_for("^hello from the job")
    screen.press("q")
    screen.press("c")
    screen.wait_for(r"^cancel job \d+ chatty of \S+, running on n00\d\? y/N")
    screen.press("n")
    screen.wait_for("nothing was done")
    screen.press("Tab")
    screen.press("d")
    screen.wait_for(r"^drain n001\? No new job starts there")
    screen.press("y")
    screen.wait_for("^ +drained")
    screen.press("r")
    screen.wait_for("n001 takes jobs again")
    assert "chatty" in screen.text(), "it goes on"
    for key in ("Tab", "c", "y"):
        screen.press(key)
    screen.wait_for("no running or waiting jobs")
    screen.press("q")
    screen.wait_for("^code=0")


def test_top_scrolls_what_does_not_fit_and_ends_by_ctrl_c(screen: Screen) -> None:
    screen.resize(60, 6)
    screen.type("ugro top --interval 30; echo code=$?")
    screen.wait_for("more lines")
    assert "n003" not in screen.text()
    for _ in range(3):
        screen.press("Down")
    screen.wait_for("n003")
    screen.press("C-c")
    screen.wait_for("^code=0")
    screen.resize(100, 20)


def test_ctrl_c_while_it_is_still_loading_ends_without_a_traceback(ugro: Ugro, tmp_path: Path) -> None:
    # Found before the real one, and interrupted in the middle of it.
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = Ugro(ugro.home)("--version", env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_top_without_a_terminal_prints_once(ugro: Ugro) -> None:
    shown = ugro("top")
    assert shown.returncode == 0
    assert re.search(r"3 of 3 nodes +0 running, 0 waiting", shown.stdout)
    assert "\x1b" not in shown.stdout
    seen = json.loads(ugro("top", "--json").stdout)
    assert [node["name"] for node in seen["nodes"]] == ["n001", "n002", "n003"]
    assert (seen["jobs"], seen["alerts"]) == ([], [])
    refused = ugro("top", "--interval", "nan")
    assert refused.returncode == 2
    assert "hint:" in refused.stderr


def test_a_log_does_not_steer_the_terminal_unless_it_is_asked_to(ugro: Ugro, screen: Screen) -> None:
    steers = r"before\033]0;owned\007\033[2J\033]52;c;ZXZpbA==\007 \033]0;no end\nafter\n"
    assert ugro("run", "--name", "steering", "--", "printf", steers).returncode == 0
    title = screen.title()
    screen.type("clear; ugro logs steering; echo code=$?")
    assert "before �]0;no end\nafter\ncode=0" in screen.wait_for("^code=0")
    assert screen.title() == title
    screen.type("ugro logs --raw steering")
    wait_until(lambda: screen.title() != title, 20, "the title of the terminal to change")
