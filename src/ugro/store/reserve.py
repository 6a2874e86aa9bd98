"""Space on the agent's disk that is kept for the state: taken while there is enough, given back when the disk is full.

It does not keep a disk from filling up. What writes files that can wait, such as collected ones, asks ``is_short``.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from ugro.remote import durable
from ugro.remote.disk import free_bytes

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
PIECES = 16  # one gives room for some hundred changes of the state
LEAST_BYTES = 32 << 20  # with less that is free, only the state is written


def is_short(folder: Path) -> bool:
    """Whether what can wait must not be written there. Blocks."""
    try:
        return free_bytes(str(folder)) < LEAST_BYTES
    except OSError:  # it is not there yet
        return False


class Reserve:
    """Files of one piece each. Used by several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._changing = threading.Lock()

    @property
    def bytes_left(self) -> int:
        return sum(self._piece(number).exists() for number in range(PIECES)) * PIECE_BYTES

    @property
    def free_bytes(self) -> int:
        """What is free on its disk besides."""
        return free_bytes(str(self.folder.parent))

    def take(self) -> None:
        """Takes what is missing, as long as that leaves enough to others. Blocks."""
        with self._changing:
            try:
                self.folder.mkdir(mode=0o700, exist_ok=True)
                missing = [piece for piece in map(self._piece, range(PIECES)) if not piece.exists()]
                for piece in missing:
                    if self.free_bytes < LEAST_BYTES + PIECE_BYTES:
                        return
                    part = piece.with_suffix(".part")
                    durable.take_space(str(part), PIECE_BYTES)
                    part.rename(piece)
            except OSError as error:
                log.warning("no space can be kept for the state: %s", error)

    def give(self) -> bool:
        """Frees one piece, because the state could not be written; False if none is left. Blocks."""
        with self._changing:
            for number in reversed(range(PIECES)):
                try:
                    self._piece(number).unlink()
                except OSError:
                    continue
                log.warning("the disk of %s is full: the state uses the space kept for it", self.folder.parent)
                return True
            return False

    def _piece(self, number: int) -> Path:
        return self.folder / f"{number:02}"
