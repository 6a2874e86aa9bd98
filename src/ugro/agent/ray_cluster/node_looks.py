"""Asks nodes what is to be known before Ray starts on them, and has them remove what killed ranks have left.

Both are short runs of the program that the ranks of a cluster run (``workloads.ray_node``), over the nodes' links.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ugro.agent.support.aio import together
from ugro.core.errors import RemoteFailure, TimedOut
from ugro.core.support.codec import DecodeError, decode
from ugro.nodes.link import Link
from ugro.policy.ray.agreement import Look
from ugro.remote import foreign, wire
from ugro.workloads.ray_jobs import rank_argv, rank_env

_LOOK_S = 30.0
_MOST_BYTES = 64 * 1024


async def look_at(
    links: Mapping[str, Link], pythons: Mapping[str, str], ports: Sequence[int], reach: tuple[str, int] | None = None
) -> dict[str, Look]:
    """By node, all at once.

    ``ports``: those that may be taken; ``reach``: an address and a port where something listens.
    """
    settings = {"role": "look", "ports": list(ports), "reach": reach}
    answers = await together(_ask(link, pythons[node], settings) for node, link in links.items())
    return {node: _look(links[node], answer) for node, answer in zip(links, answers, strict=True)}


async def clean(link: Link, python: str, key: str, state_folder: str | None) -> None:
    await _ask(link, python, {"role": "clean", "id": key, "state": state_folder})


def _look(link: Link, answer: object) -> Look:
    try:
        return decode(Look, answer)
    except DecodeError as error:
        raise RemoteFailure(f"invalid answer: {error}", subject=link.spec.name) from error


async def _ask(link: Link, python: str, settings: Mapping[str, Any]) -> object:
    params = {
        "argv": rank_argv(python, str(settings["role"])),
        "cwd": None,
        "env": rank_env(settings),
        "grace_s": 5.0,
        "marker": f"{link.spec.name}.{secrets.token_hex(6)}",
    }
    try:
        async with asyncio.timeout(_LOOK_S):
            said, code = await _run(link, params)
    except TimeoutError as error:
        raise TimedOut(f"did not answer within {_LOOK_S:g} s", subject=link.spec.name) from error
    try:
        return foreign.parsed(said[wire.OUT].rpartition(b"\n")[0].rpartition(b"\n")[2])
    except ValueError as error:
        lines = (said[wire.ERR] or said[wire.OUT]).decode("utf-8", "replace").strip().splitlines()
        complaint = lines[-1][:300] if lines else f"exit code {code}"
        raise RemoteFailure(f"{python} cannot say what it has: {complaint}", subject=link.spec.name) from error


async def _run(link: Link, params: dict[str, Any]) -> tuple[dict[int, bytes], object]:
    stream = link.stream("exec", params)
    said = {wire.OUT: b"", wire.ERR: b""}
    try:
        async for kind, payload in stream:
            said[kind] = (said[kind] + payload)[-_MOST_BYTES:]
        return said, (await stream.result()).get("code")
    finally:
        stream.cancel()
