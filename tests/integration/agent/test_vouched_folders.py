"""Folders of the agent's machine that the agent itself has chosen: read there, for a client that is elsewhere too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.rig.identity import MEMBER, person, running_agent
from ugro.kernel.access.caller import enter, vouch
from ugro.kernel.access.model import Role
from ugro.kernel.files.client_files import Offer, serving
from ugro.kernel.support.errors import NotAllowed, Wanted


def test_a_chosen_folder_is_read_here_and_any_other_is_asked_of_the_client(tmp_path: Path) -> None:
    chosen, other = tmp_path / "model", tmp_path / "other"
    for folder in (chosen, other):
        folder.mkdir()
        (folder / "weights").write_text("1 2 3")

    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, _):
            enter(person(MEMBER, Role.USER))
            take = agent.code.folders.take
            with pytest.raises(NotAllowed, match="does not read files for you"):
                await take("model", chosen)
            with serving(Offer("key", "laptop")):
                with pytest.raises(Wanted):
                    await take("model", chosen)
                vouch(chosen)
                assert (await take("model", chosen)).files == 1
                with pytest.raises(Wanted):
                    await take("other", other)
            assert (await take("model", chosen)).files == 1
            with pytest.raises(NotAllowed, match="does not read files for you"):
                await take("other", other)

    asyncio.run(scenario())
