"""The set-up of a node for a job: once for each content, by one of many who ask, and nothing left when given up."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rig.nodeprogram import LocalNode, agent_folder
from tests.rig.waiting import is_alive, processes_with_variable, signal_all, wait_until
from tests.rig.watcher import comes
from ugro.kernel.support.errors import RemoteFailure

COUNT = 'echo "$UGRO_JOB.$UGRO_ATTEMPT" >> "$COUNTER"\n'


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    (tmp_path / "root").mkdir()
    local = LocalNode(tmp_path / "root")
    try:
        yield local
    finally:
        local.close()


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    return tmp_path / "counter"


def params(counter: Path, script: str = COUNT, key: str = "k1", **more: Any) -> dict[str, Any]:
    env = {"COUNTER": str(counter), "TOKEN": "geheim"}
    return {"job": "17", "attempt": 2, "script": script, "key": key, "env": env, **more}


def place(node: LocalNode) -> Path:
    return agent_folder(node.root.resolve(), node.spec.name) / "setup"


def times(counter: Path) -> int:
    return len(counter.read_text().splitlines()) if counter.exists() else 0


def without_now(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key != "now"}


def test_a_script_runs_once_for_each_key(node: LocalNode, counter: Path) -> None:
    link = node.link()
    assert without_now(node.call(link, "setup", **params(counter))) == {"is_new": True, "code": 0}
    assert without_now(node.call(link, "setup", **params(counter))) == {"is_new": False, "code": 0}
    assert without_now(node.call(node.link(), "setup", **params(counter, key="k2"))) == {"is_new": True, "code": 0}
    assert counter.read_text().splitlines() == ["17.2", "17.2"]


def test_a_script_runs_in_its_own_folder_or_where_it_is_told(node: LocalNode, counter: Path, tmp_path: Path) -> None:
    link = node.link()
    where = 'pwd -P >> "$COUNTER"'
    node.call(link, "setup", **params(counter, where))
    node.call(link, "setup", **params(counter, where, key="k2", cwd=str(tmp_path)))
    node.call(link, "setup", **params(counter, where, key="k3", cwd="~/.ugro"))
    assert counter.read_text().splitlines() == [str(place(node) / "k1"), str(tmp_path), str(node.root / ".ugro")]
    assert (place(node) / "k1.sh").stat().st_mode & 0o777 == 0o600
    assert not any(b"geheim" in path.read_bytes() for path in place(node).glob("*") if path.is_file())


def test_a_script_that_fails_says_its_code_and_last_lines_and_may_be_tried_again(
    node: LocalNode, counter: Path
) -> None:
    link = node.link()
    script = COUNT + "i=0\nwhile [ $i -lt 80 ]; do i=$((i+1)); echo line $i; done\nfalse\necho not reached"
    for _ in range(2):
        answer = without_now(node.call(link, "setup", **params(counter, script)))
        assert answer == {"is_new": True, "code": 1, "tail": [f"line {number}" for number in range(31, 81)]}
    assert times(counter) == 2
    unset = node.call(link, "setup", **params(counter, "echo $NO_SUCH_VARIABLE"))
    assert unset["code"] != 0
    assert "NO_SUCH_VARIABLE" in unset["tail"][-1]
    assert node.call(link, "setup", **params(counter, "kill -9 $$"))["code"] == 128 + 9
    assert node.call(link, "setup", **params(counter))["is_new"]


def test_a_folder_that_is_not_there_is_a_failure_in_words(node: LocalNode, counter: Path) -> None:
    answer = node.call(node.link(), "setup", **params(counter, cwd="/no/such/folder"))
    assert (answer["code"], answer["tail"]) == (127, ["/no/such/folder: No such file or directory"])
    assert times(counter) == 0


@pytest.mark.parametrize(
    "bad", [{"key": "../x"}, {"key": ""}, {"script": 3}, {"cwd": "relative"}, {"env": {"A=": "b"}}]
)
def test_what_makes_no_sense_is_refused(node: LocalNode, counter: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(RemoteFailure, match="bad parameters"):
        node.call(node.link(), "setup", **{**params(counter), **bad})


def test_of_many_who_ask_at_once_one_runs_it_and_the_others_wait(
    node: LocalNode, counter: Path, tmp_path: Path
) -> None:
    links = [node.link(), node.link()]
    script = COUNT + f'while [ ! -e "{tmp_path}/go" ]; do sleep 0.02; done'

    async def many() -> list[bool]:
        asked = [asyncio.create_task(node.acall(link, "setup", **params(counter, script))) for link in links * 3]
        await asyncio.wait(asked, timeout=0.5)
        assert not any(task.done() for task in asked)
        assert [(await link.call("echo", {}, timeout_s=5)) for link in links] == [{}, {}]
        (tmp_path / "go").touch()
        return [answer["is_new"] for answer in await asyncio.gather(*asked)]

    assert sorted(node.wait(many())) == [False] * 5 + [True]
    assert times(counter) == 1


def test_one_who_waits_runs_it_when_the_first_failed(node: LocalNode, counter: Path, tmp_path: Path) -> None:
    link = node.link()
    script = COUNT + f'while [ ! -e "{tmp_path}/go" ]; do sleep 0.02; done; [ $(wc -l < "$COUNTER") = 2 ]'

    async def both() -> list[dict[str, Any]]:
        asked = [asyncio.create_task(node.acall(link, "setup", **params(counter, script))) for _ in range(2)]
        await asyncio.wait(asked, timeout=0.3)
        (tmp_path / "go").touch()
        return list(await asyncio.gather(*asked))

    assert sorted(answer["code"] for answer in node.wait(both())) == [0, 1]


HOSTILE = """echo $$ >> "$COUNTER"
trap '' TERM
setsid sh -c 'trap "" TERM; echo $$ >> "$COUNTER"; while :; do sleep 0.1; done' &
while :; do sleep 0.1; done
"""


@pytest.mark.proof
@pytest.mark.parametrize("how", ["cancelled", "link gone", "node program killed"])
def test_a_script_that_is_given_up_leaves_nothing_and_is_not_done(node: LocalNode, counter: Path, how: str) -> None:
    link = node.link()

    async def give_up() -> list[int]:
        task = asyncio.create_task(node.acall(link, "setup", **params(counter, HOSTILE)))
        await asyncio.wait([task], timeout=0.2)
        wait_until(lambda: times(counter) == 2)
        pids = [int(pid) for pid in counter.read_text().split()]
        assert all(is_alive(pid) for pid in pids)
        if how == "cancelled":
            task.cancel()
        elif how == "link gone":
            link.close()
        else:
            signal_all(signal.SIGKILL, [pid for pid in node.pids() if os.getsid(pid) != pid])  # not the guard
        await asyncio.wait([task], timeout=1)
        return pids

    pids = node.wait(give_up())
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 15, "the script to end")
    wait_until(lambda: not processes_with_variable("COUNTER", [str(counter)]))
    counter.unlink()
    # Nobody holds the lock any more, and it is not taken for done.
    answer = node.call(node.link(), "setup", 20, **params(counter))
    assert (answer["is_new"], answer["code"]) == (True, 0)


def test_one_who_waits_can_be_given_up_without_disturbing_the_first(
    node: LocalNode, counter: Path, tmp_path: Path
) -> None:
    link = node.link()
    script = COUNT + f'while [ ! -e "{tmp_path}/go" ]; do sleep 0.02; done'

    async def both() -> dict[str, Any]:
        first = asyncio.create_task(node.acall(link, "setup", **params(counter, script)))
        await comes(lambda: times(counter) == 1)
        second = asyncio.create_task(node.acall(link, "setup", **params(counter, script)))
        await asyncio.wait([second], timeout=0.3)
        second.cancel()
        await asyncio.wait([second], timeout=5)
        assert not first.done()
        (tmp_path / "go").touch()
        return await first

    assert node.wait(both())["code"] == 0
    assert times(counter) == 1
