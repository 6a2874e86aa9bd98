"""What a node says about Python environments is not believed before it was checked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ugro.features.environments.model import EnvProgress, Made
from ugro.features.environments.service.node_envs import Outcome, checked
from ugro.kernel.support.errors import EnvFailed, error_from_wire
from ugro.node import wire

MADE = Made("e1", "/r/.ugro/environments/e1/bin/python", "3.11.2", 10, "2026-01-02T03:04:05Z", "", (("torch", "2.13"),))


def outcome(*lines: Any, said: list[EnvProgress] | None = None) -> Outcome:
    found = Outcome((said if said is not None else []).append)
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    for at in range(0, len(content), 7):
        found.feed(wire.OUT, content[at : at + 7])
    return found


def test_lines_in_any_pieces_are_progress_and_at_last_the_outcome() -> None:
    said: list[EnvProgress] = []
    progress = {"phase": "installing", "done": 3, "total": 2, "bytes": 5, "line": "\x1b[31m + torch", "later": 1}
    found = outcome(progress, {"made": {"name": "e1"}}, said=said)
    assert said == [EnvProgress("installing", 2, 2, 5, " [31m + torch")]
    assert (found.made, found.failed) == ({"name": "e1"}, None)
    failed = outcome({"failed": {"kind": "hash", "message": "no", "tail": ["a"]}}).failed
    assert failed is not None
    assert (failed.kind, failed.tail) == ("hash", ("a",))


@pytest.mark.parametrize(
    "line",
    [[], 3, {}, {"phase": "x"}, {"phase": "python", "bytes": -1}, {"phase": "python", "done": 1e3}, {"failed": "x"}],
)
def test_lines_that_say_nothing_sensible_are_refused(line: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        outcome(line)


def test_a_line_that_never_ends_is_refused() -> None:
    found = Outcome(lambda progress: None)
    for _ in range(wire.MAX_PAYLOAD // wire.CHUNK):
        found.feed(wire.OUT, bytes(wire.CHUNK))
    with pytest.raises(ValueError, match="does not end"):
        found.feed(wire.OUT, bytes(wire.CHUNK))


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "e2"}, {"python": "python"}, {"python": "/a\nb"}, {"version": "3"}, {"version": "3.11\x1b"},
        {"size": -1}, {"size": 1 << 60}, {"made_at": "yesterday"}, {"packages": (("torch\x1b]0;x\x07", "1"),)},
        {"torch_cuda": "a\rb"}, {"packages": (("a", "1"),) * 6000},
    ],
)  # fmt: skip
def test_an_environment_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    assert checked(MADE, "e1") == MADE
    with pytest.raises(ValueError, match=r"."):
        checked(replace(MADE, **wrong), "e1")


def test_a_failure_travels_to_the_client_with_its_last_lines() -> None:
    failed = EnvFailed("a package does not exist", subject="n1", cause="not-found", tail=("one", "two"))
    found = error_from_wire(json.loads(json.dumps(failed.to_wire())))
    assert isinstance(found, EnvFailed)
    assert (str(found), found.cause, found.tail) == ("n1: a package does not exist", "not-found", ("one", "two"))


def test_a_line_that_is_nested_without_end_is_invalid() -> None:
    with pytest.raises(ValueError, match="nested without end"):
        Outcome(lambda progress: None).feed(wire.OUT, b"[" * 200_000 + b"\n")
