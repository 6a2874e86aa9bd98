"""The journal: for every job its newest attempt and how it ended, in a file beside the state.

Written after each durable change and before anybody acts on it, so it is never ahead of the state, unless an older
state was put back. A slot of fixed size per job: what a change costs is one small write, without a sync.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from ugro.core.job import Ending, Job, JobState
from ugro.policy.lifecycle.newer_state import Entry
from ugro.store.backup import write_whole

log = logging.getLogger(__name__)

_SLOT = struct.Struct("<IIBBH")
_SUM = struct.Struct("<I")
_BYTES = _SLOT.size + _SUM.size
_MOST = 10**8  # as on nodes: an id beyond it has no slot
_READ_SLOTS = 65536
# In the file by their place here: only ever extended at the end.
_STATES = tuple(JobState(word) for word in (
    "queued", "starting", "running", "unreachable", "stopping", "recovering", "succeeded", "failed", "cancelled",
))  # fmt: skip
_ENDINGS = (None, *(Ending(word) for word in (
    "done", "failed", "cancelled", "time_limit", "preempted", "owner_is_back",
)))  # fmt: skip
_STATE_NUMBERS = {state: number for number, state in enumerate(_STATES)}
_ENDING_NUMBERS = {ending: number for number, ending in enumerate(_ENDINGS)}


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def open(self, agent: str) -> bool:
        """False: there is none of this agent. Blocks."""
        with contextlib.suppress(FileNotFoundError):
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC, 0o600)
            if os.pread(self._descriptor, _BYTES, 0) == _owner(agent):
                return True
            self.close()
        return False

    def create(self, agent: str) -> None:
        """If there is none of this agent; another's is set aside. Blocks."""
        if self._descriptor is not None:
            return
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(self._path.with_name(f"{self._path.name}.{time.time():.0f}"))
        # After a power cut, too, it is known whose it is: without that, the state could not be told from an older one.
        write_whole(self._path, _owner(agent))
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def note(self, job: Job) -> None:
        """If that fails, an older state may not be recognized; the state itself is as it should be."""
        if self._descriptor is None or job.id >= _MOST:
            return
        slot = _SLOT.pack(job.id, job.attempt, _STATE_NUMBERS[job.state], _ENDING_NUMBERS[job.ending], 0)
        try:
            os.pwrite(self._descriptor, slot + _SUM.pack(zlib.crc32(slot)), job.id * _BYTES)
        except OSError as error:
            log.warning("the journal cannot be written: %s", error, extra={"job": job.id})

    @property
    def highest(self) -> int:
        """No job with a higher id was noted."""
        return 0 if self._descriptor is None else max(0, os.fstat(self._descriptor).st_size // _BYTES - 1)

    def get(self, job: int) -> Entry | None:
        if self._descriptor is None or not 0 < job < _MOST:
            return None
        return _entry(os.pread(self._descriptor, _BYTES, job * _BYTES), job)

    def after(self, job: int) -> Iterator[tuple[int, Entry]]:
        """Those with a higher id. Blocks."""
        first = job + 1
        while self._descriptor is not None and (
            content := os.pread(self._descriptor, _READ_SLOTS * _BYTES, first * _BYTES)
        ):
            for place in range(0, len(content), _BYTES):
                number = first + place // _BYTES
                if (entry := _entry(content[place : place + _BYTES], number)) is not None:
                    yield number, entry
            first += _READ_SLOTS


def _owner(agent: str) -> bytes:
    """In the first slot: no job has the id 0."""
    return agent.encode()[:_BYTES].ljust(_BYTES, b"-")


def _entry(slot: bytes, job: int) -> Entry | None:
    """None for a slot that was never written, or of which a power cut left a part."""
    if len(slot) < _BYTES or _SUM.unpack_from(slot, _SLOT.size)[0] != zlib.crc32(slot[: _SLOT.size]):
        return None
    number, attempt, state, ending, _ = _SLOT.unpack_from(slot)
    if number != job or state >= len(_STATES) or ending >= len(_ENDINGS):
        return None
    return Entry(attempt, _STATES[state], _ENDINGS[ending])
