"""Parts of an agent for models in which there is nothing for them to do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ugro.kernel.jobs.model import Job


class ModelResults:
    """Of jobs that write none."""

    def follow(self, run: Any, describe: Any) -> None:
        return

    async def fetch_all(self, run: Any, seeds: Any = None) -> None:
        await asyncio.sleep(0)

    def describe(self, job: Job, plan: Any) -> None:
        return

    def forget(self, run: Any) -> None:
        return

    def attempt_folder(self, job: int, attempt: int) -> Path:
        return Path("/proc/self/nothing")

    async def close(self) -> None:
        return


class NoFolders:
    """Of jobs that have no folders."""

    async def bring(self, folders: Any, nodes: Any) -> None:
        return


class NoCode:
    """Of jobs that take no code along."""

    folders = NoFolders()

    async def bring(self, snapshot: str | None, nodes: Any) -> None:
        return

    def forget(self, snapshot: str | None, node: str) -> None:
        return

    def moved_at(self, job: Job) -> float:
        return 0.0
