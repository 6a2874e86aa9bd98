"""The API's routes for code: send it, remove old copies, show what was transferred."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from pydantic import Field

from ugro.agent.agent import Agent
from ugro.agent.api.responses import Body, LiveResponse, json_response, ndjson
from ugro.agent.support.caller import caller, expect_files
from ugro.agent.support.client_files import remote_client
from ugro.core.code import Snapshot
from ugro.core.login import node_of
from ugro.nodes.node import Node

_SIGN_OF_LIFE_S = 5.0


class SyncBody(Body):
    folder: str
    nodes: list[str] = Field(default_factory=list)
    dry_run: bool = False
    force: bool = False


class TidyBody(Body):
    nodes: list[str] = Field(default_factory=list)
    everything: bool = False


def add_code_routes(app: FastAPI, agent: Agent) -> None:
    @app.post("/v1/sync")
    async def sync(body: SyncBody) -> Response:
        """``{"reading"}`` while that takes its time, ``{"snapshot"}``, then ``{"node"}`` again and again.

        It ends when every node's state is done, failed or would.
        """
        nodes = [_through(agent, node) for node in agent.cluster.inventory.select(body.nodes)]
        if remote_client() is not None:  # asked for before the answer begins: one sync is one entry of the audit log
            await _taken(agent, body)
        else:
            expect_files(Path(body.folder))
        return LiveResponse(ndjson(_told(agent, body, nodes)), "application/x-ndjson")

    @app.get("/v1/sync")
    async def totals() -> Response:
        return json_response(agent.code.totals)

    @app.post("/v1/tidy")
    async def tidy(body: TidyBody) -> Response:
        nodes = [node.spec.name for node in agent.cluster.inventory.select(body.nodes)]
        return json_response({"tidied": await agent.code.tidy(nodes, everything=body.everything)})


def _through(agent: Agent, node: Node) -> str:
    """Where jobs run in the accounts of their users: there, where a job of the caller's looks for its code."""
    asks = caller()
    return node.spec.name if asks is None else agent.parts.engine.logins.opened_for(node, asks.user)


async def _taken(agent: Agent, body: SyncBody) -> Snapshot:
    return await agent.code.take(Path(body.folder), force=body.force, is_lasting=False)


async def _told(agent: Agent, body: SyncBody, nodes: Sequence[str]) -> AsyncGenerator[list[dict[str, Any]]]:
    taking = asyncio.ensure_future(_taken(agent, body))
    try:
        while not (await asyncio.wait([taking], timeout=_SIGN_OF_LIFE_S))[0]:
            yield [{"reading": body.folder}]
        snapshot = await taking
    finally:
        taking.cancel()
    yield [{"snapshot": snapshot}]
    async with contextlib.aclosing(agent.code.sync(snapshot, nodes, dry_run=body.dry_run)) as batches:
        async for reports in batches:
            yield [{"node": replace(report, node=node_of(report.node))} for report in reports]
