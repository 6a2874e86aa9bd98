"""The folders of jobs on one node, over its link: whether one is there, sending it, cleaning up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ugro.core.code import Tidied
from ugro.core.errors import RemoteFailure
from ugro.nodes.contents import TIDY_S, NodeContents, Sent, decoded
from ugro.remote.cas.packs import ContentStore

_HAS_S = 120.0  # it looks at every file


class NodeFolders(NodeContents):
    prefix = "folders."
    what = "the folder"
    has_s = _HAS_S

    async def send(
        self, root: str, ids: Sequence[bytes], store: ContentStore, limit_bytes: int, sent: Sent
    ) -> list[bytes]:
        """Returns what the node still lacks afterwards; some of it, if that is very much."""
        return await self._send_stream(root, ids, store, limit_bytes, sent)

    async def tidy_folders(self, limit_bytes: int, keep: Sequence[str]) -> Tidied:
        """``keep``: the trees that stay regardless of the limit, besides those that runs use."""
        answer = await self._call("tidy", TIDY_S, limit_bytes=limit_bytes, keep=list(keep))
        return decoded(Tidied, {"node": self.name, **answer})

    async def cached(self, repos: Sequence[tuple[str, str]], env: Mapping[str, str]) -> list[str | None]:
        """For each repository of Hugging Face, by kind and name: the folder in the node's cache, if it is there."""
        answer = await self._call("cached", _HAS_S, repos=[list(one) for one in repos], env=dict(env))
        found = decoded(_Cached, answer).folders
        if len(found) != len(repos):
            raise RemoteFailure("invalid answer about its cache", subject=self.name, cause="damaged")
        return list(found)


@dataclass(frozen=True, slots=True)
class _Cached:
    folders: tuple[str | None, ...]
