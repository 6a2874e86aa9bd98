"""The agent's key: random bytes beside the state, made once. With it the agent seals what it leaves on nodes."""

from __future__ import annotations

import contextlib
import logging
import secrets
from pathlib import Path

from ugro.core.support.seal import KEY_BYTES
from ugro.store.backup import write_whole

log = logging.getLogger(__name__)


def agent_key(path: Path) -> bytes:
    """Without the file a new key is made: marks and tickets that the old one sealed are then not believed. Blocks."""
    with contextlib.suppress(FileNotFoundError):
        key = path.read_bytes()
        if len(key) == KEY_BYTES:
            return key
        log.error("%s is damaged; a new key is made, and what the old one sealed is not believed any more", path)
    key = secrets.token_bytes(KEY_BYTES)
    write_whole(path, key)
    return key
