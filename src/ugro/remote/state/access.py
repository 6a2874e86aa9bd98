"""Which agent and which run a call is about. An agent that was replaced is refused."""

from __future__ import annotations

from typing import Any, Dict

from ugro.remote.program import Call
from ugro.remote.state.rundir import AgentDir, RunDir


def agent_of(call: Call, params: Dict[str, Any]) -> AgentDir:
    agent = AgentDir(call.program.root, str(params["agent"]), call.program.node_key)
    agent.admit(int(params["generation"]))
    return agent


def seen_agent_of(call: Call, params: Dict[str, Any]) -> AgentDir:
    """Also of an agent that was replaced: for calls that change nothing."""
    return AgentDir(call.program.root, str(params["agent"]), call.program.node_key)


def run_of(call: Call, params: Dict[str, Any]) -> RunDir:
    return agent_of(call, params).run(str(params["job"]), int(params["attempt"]))
