"""A link that breaks in the middle: nothing is lost, nothing comes twice, and it says so."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.rig.machines import Machines, Running
from tests.rig.waiting import wait_until

pytestmark = pytest.mark.proof
LINES = 3000
# Prints numbered lines until somebody makes the file that it is told of; then it ends.
COUNTING = """
import pathlib, sys, time
for number in range({lines}):
    print(f"line {{number}}", flush=True)
    if number % 100 == 99:
        while not pathlib.Path({gate!r} + str(number)).exists():
            time.sleep(0.02)
"""
ALL_LINES = [f"line {number}\n" for number in range(LINES)]
WAIT_S = 90
SIZES = (40_000_000, 120_000_000, 360_000_000)  # the next one is used if the one before was too fast
MOST_UNDER_WAY = 8_000_000  # bytes that may still arrive from a client that stands still


class Gates:
    """Lets the counting job go on for a hundred lines at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.prefix = str(folder / "gate")

    def open(self, number: int) -> None:
        Path(f"{self.prefix}{number * 100 - 1}").touch()

    def open_all(self) -> None:
        for number in range(1, LINES // 100 + 1):
            self.open(number)


def counting(pair: Machines, tmp_path: Path) -> Gates:
    gates = Gates(tmp_path / "gates")
    (pair.files / "count.py").write_text(COUNTING.format(lines=LINES, gate=gates.prefix))
    return gates


def submitted(pair: Machines) -> int:
    done = pair.ugro("--master", "n001", "--json", "launch", "count.py", "-d")
    number: int = json.loads(done.stdout)["job"]["id"]
    return number


def let_print(running: Running, gates: Gates, hundreds: int) -> None:
    """So many hundred lines, and one more hundred, which it prints before it waits."""
    for number in range(1, hundreds + 1):
        gates.open(number)
        wait_until(lambda: len(running.out) >= 100 * number, WAIT_S, f"{100 * number} lines")  # noqa: B023


def test_an_attached_launch_goes_on_after_its_link_broke_without_a_lost_or_doubled_line(
    pair: Machines, tmp_path: Path
) -> None:
    gates = counting(pair, tmp_path)
    with pair.running("--master", "n001", "launch", "count.py") as running:
        let_print(running, gates, 3)
        pair.cut()
        gates.open_all()
        assert running.end() == 0, running.err
    assert running.out == ALL_LINES
    assert re.search(r"the link to n001 broke .*trying again", "".join(running.err)), running.err
    assert running.says("the link to n001 is back")


def test_following_a_log_survives_a_server_that_is_away_for_a_while(pair: Machines, tmp_path: Path) -> None:
    gates = counting(pair, tmp_path)
    with pair.running("--master", "n001", "logs", str(submitted(pair)), "-f") as running:
        let_print(running, gates, 2)
        pair.cut()
        pair.master.stop()
        wait_until(lambda: running.says("not back yet"), WAIT_S, "a word about it")
        gates.open_all()
        pair.master.start()
        assert running.end() == 0, running.err
    assert running.out == ALL_LINES


def test_waiting_survives_a_broken_link(pair: Machines, tmp_path: Path) -> None:
    gates = counting(pair, tmp_path)
    number = submitted(pair)
    with pair.running("--master", "n001", "wait", str(number)) as running:
        wait_until(lambda: any(sockets(pid) >= 4 for pid in relays(pair)), WAIT_S, "its second connection")
        pair.cut()
        wait_until(lambda: running.says("is back"), WAIT_S, "the link to be back")
        gates.open_all()
        assert running.end() == 0, running.err


def test_an_upload_that_is_cut_goes_on_and_its_job_is_submitted_once(pair: Machines) -> None:
    packs = pair.master.home / ".ugro" / "contents" / "packs"
    words = ("--json", "run", "-d", "--name", "cut", "--", "wc", "-c", "large.bin")
    try:
        for size in SIZES:
            (pair.files / "large.bin").write_bytes(os.urandom(size))
            before = len(jobs(pair))
            with pair.running("--master", "n001", *words) as running:
                was_cut = cut_midway(pair, running, lambda: arriving(packs), size)
                assert running.end() == 0, running.err
            job = json.loads("".join(running.out))["job"]
            assert pair.ugro("--master", "n001", "wait", str(job["id"])).returncode == 0
            assert f"{size} large.bin" in pair.ugro("--master", "n001", "logs", str(job["id"])).stdout
            assert len(jobs(pair)) == before + 1
            if was_cut:
                break
    finally:
        (pair.files / "large.bin").unlink()
    assert was_cut, "it was always faster than we look"
    assert running.says("the link to n001 broke")


def test_a_pull_that_is_cut_goes_on_at_the_byte(pair: Machines, tmp_path: Path) -> None:
    for size in SIZES:
        code = f"import os; open('large.bin', 'wb').write(os.urandom({size}))"
        made = pair.ugro("--master", "n001", "run", "--no-sync", "--", "python3", "-c", code)
        assert made.returncode == 0, made.stderr
        got = tmp_path / f"got-{size}"
        with pair.running("--master", "n001", "results", "last", "--pull", str(got)) as running:
            was_cut = cut_midway(pair, running, lambda: arrived(got), size)  # noqa: B023
            assert running.end() == 0, running.err
        folder = json.loads(pair.on_master("--json", "results", "last").stdout)["job"]["results"]["folder"]
        source = next(Path(folder).rglob("large.bin"))
        assert hashlib.sha256((got / "large.bin").read_bytes()).digest() == hashlib.sha256(source.read_bytes()).digest()
        assert not list(got.glob(".ugro-*"))
        if was_cut:
            break
    assert was_cut, "it was always faster than we look"
    assert running.says("the link to n001 broke")


def test_a_forwarded_dashboard_answers_again_after_its_link_broke(pair: Machines) -> None:
    def is_shown(url: str) -> bool:
        with suppress(OSError), urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            return b"UGRO</title>" in answer.read()
        return False

    with pair.running("--master", "n001", "dashboard", "--no-open") as running:
        wait_until(lambda: running.says("until Ctrl-C"), WAIT_S, "the port")
        url = running.out[0].strip()
        assert is_shown(url)
        pair.cut()
        wait_until(lambda: is_shown(url), WAIT_S, "the dashboard")
        assert running.says("the link to n001 is back")
        os.kill(running.process.pid, signal.SIGINT)
        assert running.end() == 130


def test_an_agent_that_is_killed_is_started_again_by_the_relay(pair: Machines, tmp_path: Path) -> None:
    gates = counting(pair, tmp_path)
    with pair.running("--master", "n001", "logs", str(submitted(pair)), "-f") as running:
        let_print(running, gates, 2)
        os.kill(json.loads(pair.on_master("--json", "agent", "status").stdout)["agent"]["pid"], signal.SIGKILL)
        gates.open_all()
        assert running.end() == 0, running.err
    assert running.out == ALL_LINES


def test_ctrl_c_detaches_and_the_job_goes_on(pair: Machines, tmp_path: Path) -> None:
    gates = counting(pair, tmp_path)
    with pair.running("--master", "n001", "launch", "count.py", "--name", "detached") as running:
        let_print(running, gates, 1)
        # As a terminal does, to the foreground; its ssh has a session of its own.
        os.kill(running.process.pid, signal.SIGINT)
        assert running.end() == 130, running.err
    assert running.says("detached: job")
    gates.open_all()
    assert pair.ugro("--master", "n001", "wait", "last").returncode == 0
    assert pair.ugro("--master", "n001", "logs", "last").stdout.splitlines()[-1].endswith(f"line {LINES - 1}")


def cut_midway(pair: Machines, running: Running, count: Callable[[], int], size: int) -> bool:
    """Whether much was missing when all connections broke: the client stands still meanwhile."""
    wait_until(lambda: count() > 1_000_000 or running.has_ended, WAIT_S, "a part of it")
    if running.has_ended:
        return False
    os.kill(running.process.pid, signal.SIGSTOP)
    try:
        was_cut = 0 < count() < size - MOST_UNDER_WAY
        pair.cut()
    finally:
        os.kill(running.process.pid, signal.SIGCONT)
    return was_cut


def arrived(folder: Path) -> int:
    """Bytes of files that are not complete yet."""
    return _bytes(folder.glob(".ugro-*"))


def arriving(packs: Path) -> int:
    return _bytes(packs.glob("*.arriving"))


def _bytes(files: Iterable[Path]) -> int:
    total = 0
    for file in files:
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def relays(pair: Machines) -> list[int]:
    found = []
    for pid in pair.master.sessions():
        try:
            found += [pid] if b"relay" in Path(f"/proc/{pid}/cmdline").read_bytes() else []
        except OSError:
            continue
    return found


def sockets(pid: int) -> int:
    """How many it has open. A relay has two of its own, and one for each connection."""
    count = 0
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                count += os.readlink(entry).startswith("socket:")
    return count


def jobs(pair: Machines) -> list[object]:
    found: list[object] = json.loads(pair.on_master("--json", "status", "--all").stdout)["jobs"]
    return found
