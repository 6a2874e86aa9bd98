"""What of an earlier job is compared, before its result stands for another one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.policy.serving.places import job
from ugro.kernel.jobs.result_cache import ResultCache


class Recorded:
    """The environments of jobs: of this one nothing is known."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def of(self, first: Any) -> dict[str, object]:
        self.asked.append(first.id)
        return {}


@pytest.mark.parametrize(
    ("node", "user", "is_asked"), [("ann@n1", "bob", False), ("ann@n1", "ann", True), ("n1", "bob", True)]
)
def test_nothing_is_asked_about_a_job_in_the_account_of_another_person(node: str, user: str, is_asked: bool) -> None:
    environments: Any = Recorded()
    jobs: Any = None
    first = replace(job(5, node=node), user="ann")
    found = asyncio.run(ResultCache(jobs, environments).changed_since(first, user))
    assert found == ("its environment was not recorded" if is_asked else "it ran in the account of ann")
    assert environments.asked == ([first.id] if is_asked else [])
