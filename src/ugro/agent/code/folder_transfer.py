"""Sends folders to nodes: each once, straight into its files there. The node says what it lacks, again and again."""

from __future__ import annotations

import asyncio

from ugro.agent.code.transfer import IS_THERE, CodeTransfer, CodeTransfers
from ugro.core.errors import NotFound, RemoteFailure
from ugro.nodes.folders import NodeFolders
from ugro.remote import trees
from ugro.remote.folders.layout import Layout

_CONNECT_S = 3.0
_MOST_SAME = 4  # rounds in which nothing new arrives


class FolderTransfers(CodeTransfers):
    what = "folder"

    def contents(self, node: str) -> NodeFolders:
        return NodeFolders(self._node(node), self._identity, _CONNECT_S)

    async def ensure_all(self, node: str, roots: list[str]) -> int:
        """The bytes that had to be sent."""
        self.own.update(roots)  # none of it is code that another folder's may be like
        return sum([(await self.ensure(node, root)).sent_bytes for root in roots])

    async def _send(self, node: str, root: str, transfer: CodeTransfer) -> None:
        there = self.contents(node)
        if await there.has(root):
            transfer.why = IS_THERE
            return
        transfer.why = "new on this node"
        ids = await asyncio.to_thread(self._trees, root)
        async with self._slots:
            await self._send_rounds(there, root, ids, transfer)

    async def _send_rounds(self, there: NodeFolders, root: str, ids: list[bytes], transfer: CodeTransfer) -> None:
        """First the trees, then what the node says that it lacks of their contents."""
        same = 0
        while ids:
            await self._measure((there.name, root), ids, transfer)
            lacking = await there.send(root, ids, self._snapshots.store, 0, transfer.sent)
            same = same + 1 if lacking == ids else 0
            if same == _MOST_SAME:
                raise RemoteFailure("the folder was damaged in every transfer", subject=there.name, cause="damaged")
            ids = lacking

    def _trees(self, root: str) -> list[bytes]:
        store = self._snapshots.store
        with store.using():
            if not self._snapshots.has(root):
                hint = "submit the job again: ugro retry keeps the folder as it was, and that is gone"
                raise NotFound(f"the folder {root[:12]} is no longer kept here", hint=hint)
            return list(dict.fromkeys(Layout(trees.parse_id(root), store.entries).trees))
