"""What a command sees of an agent that it starts."""

from __future__ import annotations

import fcntl
import json
import os
import resource

import pytest

from ugro.client.launcher import read_answer


def said(**message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def test_an_agent_that_takes_its_time_says_with_what() -> None:
    ready, theirs = os.pipe()
    shown: list[str] = []

    def on_wait(text: str) -> None:
        shown.append(text)
        os.write(theirs, said(state="ready", pid=7))

    os.write(theirs, said(state="starting", text="checking") + said(state="starting", text="checking state.db, 2 s"))
    try:
        assert read_answer(ready, on_wait) == {"state": "ready", "pid": 7}
    finally:
        os.close(ready)
        os.close(theirs)
    assert shown == ["starting the agent: checking state.db, 2 s"]


def test_an_agent_that_dies_while_it_checks_has_given_no_answer() -> None:
    ready, theirs = os.pipe()
    os.write(theirs, said(state="starting", text="checking"))
    os.close(theirs)
    try:
        assert read_answer(ready, None) == {}
    finally:
        os.close(ready)


_HIGH = 1100


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= _HIGH, reason="few descriptors")
def test_a_process_with_many_open_files_hears_the_agent() -> None:
    ready, theirs = os.pipe()
    high = fcntl.fcntl(ready, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.write(theirs, said(state="ready"))
    try:
        assert read_answer(high, None) == {"state": "ready"}
    finally:
        for one in (ready, theirs, high):
            os.close(one)
