"""Many small runs that share supervisors, as a test starts them and finds them again."""

from __future__ import annotations

import json
from typing import Any

from tests.rig.ledger import Ledger
from tests.rig.nodeprogram import LocalNode
from tests.rig.waiting import wait_until
from tests.rig.watcher import Watcher
from ugro.kernel.links.link import Link
from ugro.node.clock import boot_id


def spec_of(ledger: Ledger, device: int, *words: Any, **more: Any) -> dict[str, Any]:
    """A run of rank 0 that holds a device of its own."""
    return {"ranks": [{**ledger.rank(device, *words), "rank": 0}], "grace_s": 1, **more}


def saying(text: str) -> dict[str, Any]:
    return {"ranks": [{"rank": 0, "argv": ["printf", "%s", text]}]}


def wanted(specs: dict[str, dict[str, Any]], attempt: int = 1) -> list[dict[str, Any]]:
    """Starts of runs that may share a supervisor."""
    return [{"job": job, "attempt": attempt, "spec": {**spec, "shared": True}} for job, spec in specs.items()]


def start(node: LocalNode, link: Link, specs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    answer = node.call(link, "start", runs=[{**run, "boot_id": boot_id()} for run in wanted(specs)])
    return list(answer["results"])


def statuses(node: LocalNode, link: Link) -> dict[str, str]:
    return {run["job"]: run["status"] for run in node.runs()}


def records(node: LocalNode, link: Link, timeout_s: float = 20) -> dict[str, dict[str, Any]]:
    """How each ended, once all have."""
    wait_until(lambda: set(statuses(node, link).values()) <= {"exited"}, timeout_s, "all runs to end")
    return {run["job"]: run["exit"] for run in node.runs()}


def end_as_reported(node: LocalNode, link: Link, specs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns when the node program has heard from the supervisor that all are over, with how they began."""

    async def until_all_ended() -> list[dict[str, Any]]:
        watcher = Watcher(node, link)
        answer = await node.acall(link, "start", runs=wanted(specs))
        await watcher.until(lambda: all(watcher.status(f"{job}.1") == "exited" for job in specs))
        watcher.stream.cancel()
        return list(answer["results"])

    return node.wait(until_all_ended())


def supervisor_of(result: dict[str, Any]) -> int:
    return int(result["run"]["state"]["pid"])


def leaving(ledger: Ledger, device: int, kind: str) -> dict[str, Any]:
    """A rank that ends well and leaves a child of that kind."""
    spec = spec_of(ledger, device, "hostile", kind)
    script = '"$@" & while ! grep -q "^ready" "$TEST_LEDGER"; do sleep 0.01; done; sleep 0.1; kill -9 $!'
    spec["ranks"][0]["argv"] = ["sh", "-c", script, "sh", *spec["ranks"][0]["argv"]]
    return spec


def record_of(node: LocalNode, job: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((node.run_dir(job, 1) / "exit.json").read_text())
    return record
