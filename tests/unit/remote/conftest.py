"""What an agent has on a node, and a run there that nobody has started."""

from __future__ import annotations

from pathlib import Path

import pytest

from ugro.node.runs.rundir import AgentDir, RunDir, new_envelope


@pytest.fixture
def agent(tmp_path: Path) -> AgentDir:
    folder = AgentDir(str(tmp_path), "a1", "n1@m1")
    folder.admit(1)
    return folder


@pytest.fixture
def run(agent: AgentDir) -> RunDir:
    made = agent.run("train", 1)
    made.make(new_envelope({"ranks": [{"rank": 0, "argv": ["true"]}]}, None, False))
    return made
