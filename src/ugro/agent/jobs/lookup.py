"""Which job a word means: among those that the caller may see."""

from __future__ import annotations

from collections.abc import Collection

from ugro.agent.support.caller import expect_visible, viewer
from ugro.core.job import Job
from ugro.core.support.quantity import is_number
from ugro.store.database import Store


class VisibleJobs:
    def __init__(self, store: Store) -> None:
        self._jobs = store.jobs
        self._visibility = store.visibility

    async def find(self, word: str, without: Collection[int] = ()) -> Job:
        """By number, by name (the newest of that name), or ``last``. Raises NotFound."""
        if (who := viewer()) is None:
            return await self._jobs.find(word, without)
        if is_number(word):
            return expect_visible(await self._jobs.find(word), word)
        return await self._visibility.find(word, who, without)
