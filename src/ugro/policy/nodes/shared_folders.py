"""Nodes that keep their files in one folder: home folders on a file server, or two names for one machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ugro.core.finding import Finding, Grade
from ugro.policy.nodes.examination import Examination
from ugro.policy.wording import names
from ugro.remote.messages import Root

_CHECK = "shared folder"


def judge_folders(found: Sequence[Examination]) -> Iterator[Finding]:
    by_folder: dict[str, list[Examination]] = {}
    for one in found:
        if isinstance(one.root, Root) and one.root.folder_id:
            by_folder.setdefault(one.root.folder_id, []).append(one)
    for nodes in by_folder.values():
        if len(nodes) > 1:
            yield _judge(nodes)


def _judge(nodes: Sequence[Examination]) -> Finding:
    together = names([one.name for one in nodes])
    if len({one.machine.boot_id for one in nodes}) < len(nodes):
        text = f"{together} share one folder, and some of these names lead to the same machine"
        remedy = "remove the names you do not need: ugro node rm NAME; UGRO counts each name as a machine of its own"
        return Finding("cluster", _CHECK, Grade.WARNING, text, remedy)
    text = (
        f"{together} share one folder: code is stored once for all of them, each node keeps its runs apart, "
        "and a full disk stops all of them"
    )
    return Finding("cluster", _CHECK, Grade.OK, text)
