"""Folders to work in: removed afterwards, also those that a killed agent left."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ugro.features.environments.service.tools import Workshop


def test_a_folder_is_removed_with_its_content_and_leftovers_before_the_first(tmp_path: Path) -> None:
    async def work() -> None:
        workshop = Workshop(tmp_path / "python")
        async with workshop.work() as folder, workshop.work() as other:
            (folder / "big").write_text("x")
            assert folder != other
            assert not left.exists()
        assert [path.name for path in (tmp_path / "python").iterdir()] == ["uv-1"]

    left = tmp_path / "python" / ".work-left"
    left.mkdir(parents=True)
    (tmp_path / "python" / "uv-1").mkdir()
    asyncio.run(work())
