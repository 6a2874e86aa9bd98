"""Trials are heard while they write their metrics: at once, from the byte where a cut link stopped, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from ugro.features.sweeps.service.listening import FILE, Listening
from ugro.kernel.jobs.engine.runs import Piece
from ugro.kernel.jobs.model import Job, JobSpec, JobState, Placement, Share
from ugro.kernel.support.errors import NotFound, UgroError, Unreachable

LIMIT_S = 60


@dataclass
class PretendNode:
    """What it sends for each call, in turn; an error ends a call."""

    calls: list[list[bytes | UgroError]]
    offsets: list[int] = field(default_factory=list)

    async def follow(
        self, run: tuple[int, int], file: str, offset: int, most_bytes: Callable[[], int], *, promptly: bool = False
    ) -> AsyncIterator[Piece]:
        assert (run, file, promptly) == ((7, 1), FILE, True)
        self.offsets.append(offset)
        for one in self.calls.pop(0):
            if isinstance(one, UgroError):
                raise one
            assert offset + len(one) <= most_bytes()
            yield Piece(offset, one)
            offset += len(one)


def job(state: JobState = JobState.RUNNING) -> Job:
    placement = Placement((Share("gpu1", (0,)),))
    return Job(7, JobSpec("trial", ("train.py",)), "ann", state, "", "2026-01-01T00:00:00.000+00:00", 1, placement)


def heard(node: PretendNode, one: Job, count: int) -> dict[tuple[int, int], list[tuple[int, float]]]:
    async def work() -> dict[tuple[int, int], list[tuple[int, float]]]:
        listening = Listening(lambda name: node, again_s=0.01)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            listening.begin(group)
            listening.follow(one, "loss")
            listening.follow(one, "loss")
            while sum(map(len, listening.heard(7).values())) < count:
                await listening.grown.wait(listening.grown.count, LIMIT_S)
            found = dict(listening.heard(7))
            listening.forget(7)
            assert listening.heard(7) == {}
            return found

    return asyncio.run(work())


def test_the_values_of_its_metric_are_heard_line_by_line() -> None:
    pieces: list[bytes | UgroError] = [b'{"step": 1, "loss": 0.5, "lr": 1}\n{"st', b'ep": 2, "loss": 0.25}\nnonsense\n']
    node = PretendNode([pieces])
    assert heard(node, job(), 2) == {(1, 0): [(1, 0.5), (2, 0.25)]}
    assert node.offsets == [0], "one call for each attempt"


def test_a_link_that_breaks_is_continued_at_the_same_byte() -> None:
    first, rest = b'{"step": 1, "loss": 0.5}\n{"step"', b': 2, "loss": 0.25}\n'
    node = PretendNode([[first, Unreachable("gpu1 is cut off")], [rest]])
    assert heard(node, job(), 2) == {(1, 0): [(1, 0.5), (2, 0.25)]}
    assert node.offsets == [0, len(first)]


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.STARTING])
def test_a_job_that_does_not_run_yet_is_not_followed(state: JobState) -> None:
    node = PretendNode([])
    assert heard(node, job(state), 0) == {}
    assert node.offsets == []


def test_a_node_that_is_gone_is_not_asked_again() -> None:
    node = PretendNode([[b'{"step": 1, "loss": 0.5}\n', NotFound("no node gpu1")]])
    assert heard(node, job(), 1) == {(1, 0): [(1, 0.5)]}
