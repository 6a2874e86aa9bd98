"""``client.folders``: reads the folders of a job before it is submitted, so that one can see how far it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ugro.client.http import lines
from ugro.client.jobs import Ask, body_of
from ugro.core.folder import Folder
from ugro.core.support.codec import decode


@dataclass(frozen=True, slots=True)
class FolderReading:
    """How much of a folder was read; of what was read before, nothing is read again."""

    path: str
    bytes: int
    total: int


class Folders:
    """Created by ``Client``."""

    def __init__(self, stream: Ask) -> None:
        self._stream = stream

    def read(
        self, file: Path | None = None, *, fields: Mapping[str, Any] | None = None
    ) -> Iterator[FolderReading | Folder]:
        """The folders of such a job, stored as they are now; a job that is submitted next finds them read."""
        for document in lines(self._stream("POST", "/v1/folders", body_of(file, fields, None))):
            if "folder" in document:
                yield decode(Folder, document["folder"])
            else:
                yield FolderReading(document["reading"], document["bytes"], document["total"])
