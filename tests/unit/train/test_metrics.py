"""What a run logs is never dropped, never waits and never fails, whatever is logged and whatever the disk does."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rig.waiting import wait_until
from ugro.train.reporting import Metrics, plain

_WRITER = """
import sys
from pathlib import Path
from ugro.train.reporting import Metrics
metrics = Metrics(Path(sys.argv[1]), {"attempt": int(sys.argv[2])})
for number in range(int(sys.argv[3])):
    metrics.put({"kind": "log", "step": number, "values": {"loss": number / 7}})
"""


def _records(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_has_the_time_the_attempt_and_its_values(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "deep" / "metrics.jsonl", {"attempt": 3, "rank": 1})
    metrics.put({"kind": "log", "step": 5, "values": {"loss": 0.5, "name": "x", "is_on": True, "none": None}})
    metrics.close()
    (record,) = _records(metrics.path)
    assert record.pop("time") > 0
    values = {"loss": 0.5, "name": "x", "is_on": True, "none": None}
    assert record == {"attempt": 3, "rank": 1, "kind": "log", "step": 5, "values": values}


def test_many_threads_lose_nothing_and_each_keeps_its_order(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", {})

    def write(thread: int) -> None:
        for number in range(2000):
            metrics.put({"thread": thread, "number": number})

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    metrics.close()
    records = _records(metrics.path)
    for writer in range(4):
        assert [one["number"] for one in records if one["thread"] == writer] == list(range(2000))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_in_json_is_kept_as_a_text_that_float_reads(value: float) -> None:
    text = json.loads(json.dumps(plain(value), allow_nan=False))
    assert str(float(text)) == str(value)


class _Broken:
    ndim = 0

    def __float__(self) -> float:
        raise ValueError("no")


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
    | st.builds(_Broken) | st.builds(object) | st.dates(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner),
))  # fmt: skip
def test_anything_can_be_logged(value: Any) -> None:
    json.loads(json.dumps(plain(value), allow_nan=False).encode("utf-8", "replace"))


def test_texts_that_utf8_does_not_have_are_kept_as_well_as_can_be(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", {})
    metrics.put({"name": "bad \udcff\nname"})
    metrics.put({"name": "next"})
    metrics.close()
    assert [record["name"] for record in _records(metrics.path)] == ["bad ?\nname", "next"]


def test_a_script_that_just_ends_has_written_everything(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    subprocess.run([sys.executable, "-c", _WRITER, path, "1", "5000"], check=True, timeout=60)
    assert [record["step"] for record in _records(path)] == list(range(5000))


def test_after_a_kill_only_the_last_line_may_be_torn_and_the_next_attempt_begins_on_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    killed = subprocess.Popen([sys.executable, "-c", _WRITER, path, "1", "100000000"])
    wait_until(lambda: path.exists() and path.stat().st_size > 200_000, 60, "some records")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    with path.open("ab") as file:
        file.write(b'{"torn": ')  # as the worst case would leave it
    before = path.read_bytes()
    subprocess.run([sys.executable, "-c", _WRITER, path, "2", "10"], check=True, timeout=60)
    whole = path.read_bytes()
    assert whole.startswith(before)
    lines = whole.splitlines()
    torn = [line for line in lines if not _is_json(line)]
    assert len(torn) == 1
    attempts = [json.loads(line)["attempt"] for line in lines if _is_json(line)]
    assert attempts[-10:] == [2] * 10
    steps = [json.loads(line)["step"] for line in lines if _is_json(line)][:-10]
    assert steps == list(range(len(steps)))


def test_a_disk_that_cannot_be_written_to_is_waited_for(tmp_path: Path) -> None:
    in_the_way = tmp_path / "output"
    in_the_way.write_text("not a folder")
    metrics = Metrics(in_the_way / "metrics.jsonl", {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is said once
        for number in range(100):
            metrics.put({"number": number})
        wait_until(lambda: metrics._has_warned, 30, "the first try")
        in_the_way.unlink()
        wait_until(lambda: metrics.path.exists() and len(_records(metrics.path)) == 100, 30, "all records")
    metrics.close()
    assert [record["number"] for record in _records(metrics.path)] == list(range(100))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
