"""How much room a node's disk must have for jobs: their code, logs and checkpoints are in ``remote_root``."""

from __future__ import annotations

from ugro.core.node import Disk
from ugro.core.support.quantity import format_size

LITTLE_SPACE_BYTES = 2**30
# A start needs its code, and leaves some room for what others write meanwhile.
NO_SPACE_BYTES = 100 * 2**20


def lack_of_room(disk: Disk | None) -> str | None:
    """Why jobs would fail there, as words after the node's name; None if there is room."""
    if disk is None or disk.free_bytes >= NO_SPACE_BYTES:
        return None
    return f"has no room: {format_size(disk.free_bytes)} left on the disk of {disk.mount}"
