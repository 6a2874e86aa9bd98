"""What somebody else wrote is read within bounds: bytes, lines and depth."""

from __future__ import annotations

import io
import json
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.telemetry.model import read_totals
from ugro.kernel.telemetry.records import MAX_LINE
from ugro.node import durable, foreign
from ugro.node.runs.ranks import read_members
from ugro.node.runs.rundir import AgentDir

ENDLESS = "[" * 100_000
DEEP = "[" * 200 + "]" * 200
STEP = b'{"kind":"checkpoint","path":"step_7.pt","step":7}\n'


@pytest.mark.parametrize("text", [ENDLESS, DEEP, '{"a":' * 101 + "1" + "}" * 101, "{", "", "nonsense", " " * 2000])
def test_what_is_no_json_too_deep_or_too_long_is_one_error(text: str) -> None:
    for one in (text, text.encode()):
        with pytest.raises(foreign.Malformed):
            foreign.parsed(one, most_bytes=1000 if text.startswith(" ") else 1 << 20)


@pytest.mark.parametrize("value", [[[1], {"a": [2]}] * 100, "[" * 500, {"a" * 200: "{" * 200}, None])
def test_all_other_documents_are_read(value: object) -> None:
    assert foreign.parsed(json.dumps(value)) == value


@given(st.lists(st.binary(max_size=12).map(lambda one: one.replace(b"\n", b"-")), max_size=8))
def test_lines_are_those_that_are_not_too_long(lines: list[bytes]) -> None:
    found = list(foreign.lines(io.BytesIO(b"\n".join(lines)), longest=6))
    assert found == [line for line in lines if len(line) <= 6][: len(found)]
    assert len(found) >= sum(0 < len(line) <= 6 for line in lines[:-1])


def test_an_endless_line_in_a_file_of_metrics_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.write(STEP)
        file.truncate(200 << 20)  # nothing on the disk, and one line without an end
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + STEP.replace(b"7", b"8"))
    tracemalloc.start()
    try:
        with path.open("rb") as file:
            totals = read_totals(foreign.lines(file, longest=MAX_LINE))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert totals is not None
    assert totals.checkpoint_step == 8
    assert peak < 20 << 20


def test_records_that_a_job_replaced_by_something_else_are_none(tmp_path: Path) -> None:
    large, deep, pipe = (str(tmp_path / name) for name in ("large", "deep", "pipe"))
    with open(large, "wb") as file:
        file.truncate(1 << 40)
    Path(deep).write_text(ENDLESS)
    os.mkfifo(pipe)
    assert [durable.read_json(path) for path in (large, deep, pipe, str(tmp_path))] == [None] * 4
    run = AgentDir(str(tmp_path), "agent", "n1@machine").run("7", 1)
    os.makedirs(run.path)
    Path(run.file("members.json")).write_text(ENDLESS)
    assert read_members(run) is None
