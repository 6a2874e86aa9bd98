"""``ugro map`` and ``ugro estimate``: results on disk, continued after any interruption, clear errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ugro
from tests.rig.sshd import SshdFarm
from tests.rig.terminal import written
from tests.rig.tiers import sample
from tests.rig.waiting import wait_until

pytest.importorskip("cloudpickle")
Completed = subprocess.CompletedProcess[str]
Run = Callable[..., Completed]
UGRO = [str(Path(sys.executable).with_name("ugro"))]

SCRIPT = """
import functools, os, time
from pathlib import Path

import neighbour

@functools.cache
def model():
    return 10

def score(item, table=None):
    if item == "bad" and not Path("mended").exists():
        raise ValueError("a bad item")
    if item == "dies":
        os._exit(3)
    return {"score": model() * len(item) + (table or {}).get(item, 0)}

def slow(item):
    if item == 1:
        print("a line of the function")
    time.sleep(0.01)
    return item

def odd(item):
    return {1, 2}

def stay(item):
    time.sleep(0.01)
    while item >= 100 and not Path("go").exists():
        time.sleep(0.01)
    return item
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "score.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("")
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Run:
    def run(*arguments: str, **options: Any) -> Completed:
        env = {**os.environ, "UGRO_HOME": str(folder / "home")}
        command = [*UGRO, *arguments]
        given: Any = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": 60, **options}
        return subprocess.run(command, check=False, **given)

    return run


def write(folder: Path, *items: Any) -> None:
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def map_arguments(function: str, *more: str) -> list[str]:
    return ["map", f"score.py:{function}", "--input", "items.jsonl", "--output", "out.jsonl", *more]


def test_results_failures_and_another_try(folder: Path, run: Run) -> None:
    write(folder, "a", "bad", "ccc", "dies")
    (folder / "table.json").write_text('{"a": 5}')
    first = run(*map_arguments("score", "--shared", "table=table.json", "--retries", "0"))
    assert first.returncode == 1
    assert first.stdout.startswith("4 items in ")
    assert "2 items have no result; item 1: ValueError: a bad item" in first.stderr
    found = results(folder)
    assert [one["index"] for one in found] == [0, 1, 2, 3]
    assert [one["result"]["score"] for one in found if "result" in one] == [15, 30]
    assert found[1]["error"]["kind"] == "ValueError"
    assert "in score" in found[1]["error"]["traceback"]
    assert found[1]["error"]["input"] == '"bad"'
    assert "exit code 3" in found[3]["error"]["message"]

    again = run(*map_arguments("score"))
    assert again.returncode == 2
    assert "has results already" in again.stderr
    assert "--resume" in again.stderr

    (folder / "mended").touch()
    resumed = run("--json", *map_arguments("score", "--resume"))
    document = json.loads(resumed.stdout)["map"]
    assert (document["items"], document["failed"], document["resumed"]) == (2, 1, 2)
    assert sorted(one["index"] for one in results(folder) if "result" in one) == [0, 1, 2]


@pytest.mark.parametrize("name", sample(["SIGINT", "SIGKILL"], "SIGKILL"))
def test_a_map_that_was_interrupted_goes_on(folder: Path, run: Run, name: str) -> None:
    by = signal.Signals[name]
    write(folder, *range(150))
    output = folder / "out.jsonl"
    command = [*UGRO, *map_arguments("stay", "--workers", "2")]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: output.exists() and output.stat().st_size > 0, 30, "the first results")
            process.send_signal(by)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    before = len(output.read_text().splitlines())
    assert 0 < before <= 100
    if by == signal.SIGINT:
        assert process.returncode == 130
        assert f"interrupted; {before} results are in out.jsonl" in errors
        assert "continue with the same command and --resume" in errors
    with output.open("a") as file:
        file.write('{"index": 149, "resu')  # as a write that was cut
    (folder / "go").touch()
    resumed = run(*map_arguments("stay", "--resume", "--json"))
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["map"]["resumed"] == before
    assert sorted((one["index"], one["result"]) for one in results(folder)) == [(n, n) for n in range(150)]


def test_a_terminal_shows_how_far_it_is(folder: Path) -> None:
    class Command:
        def argv(self, *args: str) -> list[str]:
            return [*UGRO, *args]

        def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
            return {**os.environ, "UGRO_HOME": str(folder / "home"), **(extra or {})}

    write(folder, *range(100))
    files = ["--input", str(folder / "items.jsonl"), "--output", str(folder / "out.jsonl")]
    # By two: on many cores it would be over before there is something to show.
    code, content = written(Command(), "map", f"{folder / 'score.py'}:slow", *files, "--workers", "2", kind="xterm")
    assert code == 0
    assert re.search(rb"\d+ of 100 items, [\d.]+/s, .* left", content), content
    assert b"100 items in" in content


def test_results_of_another_input_are_not_mixed(folder: Path, run: Run) -> None:
    write(folder, 1, 2)
    assert run(*map_arguments("slow")).returncode == 0
    write(folder, 1, 2, 3)  # it has grown
    assert run(*map_arguments("slow", "--resume", "--unordered")).returncode == 0
    assert len(results(folder)) == 3
    write(folder, 9, 2, 3)
    other = run(*map_arguments("slow", "--resume"))
    assert other.returncode == 2
    assert "another input" in other.stderr


def test_items_from_a_pipe(folder: Path, run: Run) -> None:
    arguments = ["map", "score.py:slow", "--input", "-", "--output", "out.jsonl"]
    done = run(*arguments, input="1\n\n2\nnot json\n")
    assert done.returncode == 1
    found = results(folder)
    assert [one.get("result") for one in found] == [1, 2, None]
    failure = found[2]["error"]
    assert (failure["kind"], failure["traceback"]) == ("NotJson", ""), "none of the user's code has failed"
    assert failure["message"] == "the line of the input is not JSON: Expecting value: line 1 column 1 (char 0)"
    assert "item 2: the line of the input is not JSON" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["score.py", "--input", "items.jsonl"], 2, "names no function"),
        (["gone.py:f", "--input", "items.jsonl"], 4, "no such file"),
        (["table.json:f", "--input", "items.jsonl"], 2, "not a Python script"),
        (["score.py:nothing", "--input", "items.jsonl"], 1, "has no function 'nothing'; it has: score, slow, "),
        (["score.py:slow", "--input", "gone.jsonl"], 4, "there is no file gone.jsonl"),
        (["score.py:slow", "--input", "items.jsonl", "--shared", "x"], 2, "expected NAME=FILE"),
        (["score.py:slow", "--input", "items.jsonl", "--timeout", "soon"], 2, "--timeout: expected a duration"),
        (["score.py:odd", "--input", "items.jsonl"], 1, "its result of type set is not JSON: Object of type set"),
    ],
)
def test_mistakes_are_one_clear_error(folder: Path, run: Run, arguments: list[str], code: int, text: str) -> None:
    write(folder, 1)
    (folder / "table.json").write_text("{ broken")
    done = run("map", *arguments, "--output", "out.jsonl")
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert text in done.stderr


def test_an_estimate_says_where_to_run_it(folder: Path, run: Run) -> None:
    write(folder, *range(30), "bad")
    done = run("estimate", "score.py:slow", "--input", "items.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["estimate"]  # without what the function prints
    assert [one["place"] for one in found["places"]] == ["one core", "this machine"]
    assert found["places"][0]["seconds"] >= 0.3
    assert found["recommended"] == "one core"
    assert "of work in 31 items: do it here" in found["reason"]


def test_an_estimate_of_nothing_is_one_clear_error(folder: Path, run: Run) -> None:
    write(folder)
    assert "has no items" in run("estimate", "score.py:slow", "--input", "items.jsonl").stderr
    write(folder, "bad")
    assert "ValueError: a bad item" in run("estimate", "score.py:score", "--input", "items.jsonl").stderr


@pytest.mark.proof
def test_an_estimate_counts_the_nodes_of_the_cluster(folder: Path, cluster: SshdFarm, ugro: Ugro) -> None:
    write(folder, *range(30))
    assert ugro("health").returncode == 0
    done = ugro("estimate", "score.py:slow", "--input", "items.jsonl", "--json", cwd=folder)
    places = [one["place"] for one in json.loads(done.stdout)["estimate"]["places"]]
    assert places[:2] == ["one core", "this machine"]
    assert len(places) == 3
    assert places[2].endswith("node") or places[2].endswith("nodes")
