"""The disk of the agent's state directory: keeps space for the state there, and says when the disk is full."""

from __future__ import annotations

from ugro.agent.artifacts.file_store import SPARE_BYTES
from ugro.core.finding import Finding
from ugro.core.support.state_dir import StateDir
from ugro.policy.nodes.diagnosis import DiskRoom, judge_disk
from ugro.store.reserve import LEAST_BYTES, PIECE_BYTES, PIECES, Reserve


class StateDisk:
    def __init__(self, home: StateDir) -> None:
        self._home = home
        self.reserve = Reserve(home.reserve)

    def take_and_look(self) -> Finding | None:
        """Keeps space for the state again if there is some; what is wrong. Blocks."""
        self.reserve.take()
        return self.look()

    def look(self) -> Finding | None:
        """What is wrong; None if there is room for all."""
        try:
            free = self.reserve.free_bytes
        except OSError:  # the folder is gone, which others notice
            return None
        left, whole = self.reserve.bytes_left, PIECES * PIECE_BYTES
        return judge_disk(DiskRoom(str(self._home.path), free, left, whole, LEAST_BYTES, SPARE_BYTES))
