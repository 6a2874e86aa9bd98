from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ugro.features.services.service.creation import ModelFolder, described, expect_complete
from ugro.kernel.access.caller import enter
from ugro.kernel.access.model import Caller, Role
from ugro.kernel.files.model import JobResults, LeftFile, NodeResults, ResultState
from ugro.kernel.support.errors import NotAllowed


def results(state: ResultState, *left: str) -> JobResults:
    files = tuple(LeftFile(name, 3, "over results.limit") for name in left)
    return JobResults(7, 1, "/jobs/7", state, 1, 2, (), (NodeResults("n1", state, left=files),), ())


def test_a_model_of_which_files_stayed_on_a_node_is_not_served() -> None:
    made = results(ResultState.HOME, "model/model.safetensors", "trace.json")
    with pytest.raises(NotAllowed, match=r"model/model.safetensors stayed on n1: over results\.limit") as caught:
        expect_complete(made, "model", is_final=True)
    assert caught.value.hint == "get it: ugro results 7 --fetch"
    expect_complete(made, "other", is_final=True)
    with pytest.raises(NotAllowed, match="and 1 more"):
        expect_complete(made, ".", is_final=True)


@pytest.mark.parametrize("state", [ResultState.COMING, ResultState.WAITING, ResultState.UNKNOWN])
def test_a_model_that_is_still_being_collected_is_not_served(state: ResultState) -> None:
    with pytest.raises(NotAllowed, match="not complete yet"):
        expect_complete(results(state), "model", is_final=True)


def test_a_folder_of_a_job_that_runs_is_served_as_it_is_if_somebody_names_it() -> None:
    expect_complete(results(ResultState.LIVE), "checkpoints", is_final=False)


def test_only_a_model_is_sent_to_nodes_as_the_base_of_an_adapter(tmp_path: Path) -> None:
    """Its folder comes from a node, which could name any other of this machine."""
    adapter, base, private = (tmp_path / name for name in ("adapter", "base", "private"))
    for folder in (adapter, base, private):
        folder.mkdir()
    (base / "config.json").write_text('{"model_type": "llama"}')
    (private / "config.json").write_text('{"auths": {"registry": "a password"}}')

    def found(path: Path) -> Path | None:
        about = {"kind": "lora", "base": "org/base", "base_path": str(path)}
        (adapter / "ugro.json").write_text(json.dumps(about))
        return described(adapter).base

    assert found(base) == base
    assert found(private) is found(tmp_path) is None
    assert described(adapter).base_name == "org/base"


def test_a_member_does_not_learn_from_an_adapter_which_files_there_are(tmp_path: Path) -> None:
    """They may have written its description themselves."""
    adapter, base, broken = (tmp_path / name for name in ("adapter", "base", "broken"))
    for folder in (adapter, base, broken):
        folder.mkdir()
    (base / "config.json").write_text('{"model_type": "llama"}')
    (broken / "config.json").write_text("no JSON")

    async def found(path: Path) -> ModelFolder:
        enter(Caller("ann", Role.ADMIN, "pid 1"))
        about = {"kind": "lora", "base": "org/base", "base_path": str(path)}
        (adapter / "ugro.json").write_text(json.dumps(about))
        return await asyncio.to_thread(described, adapter)

    answers = [asyncio.run(found(path)) for path in (base, broken, tmp_path / "none")]
    assert answers == [ModelFolder(adapter, base_name="org/base", is_adapter=True)] * 3
