"""The GPU sampler: a process that answers each line on one pipe with one line of JSON on another.

The node program never touches a GPU driver: if a driver hangs or crashes, it gets no answer or the end of the pipe.
``node.hardware.sampler`` starts this process.
"""

from __future__ import annotations

import json
import os
from typing import Callable, List, Optional, Protocol, Sequence, Tuple, TypedDict

from ugro.node.hardware.gpu_claims import ClaimTable, Record
from ugro.node.hardware.gpu_facts import Gpu, Reading, SourceAbsentError, SourceError, is_hidden
from ugro.node.hardware.gpu_locks import Holders
from ugro.node.hardware.gpu_tools import AmdSmi, NvidiaSmi, RocmSmi
from ugro.node.hardware.nvml import Nvml


class Source(Protocol):
    @property
    def name(self) -> str: ...

    def read(self) -> Reading:
        """Raises ``SourceError``."""


class Answer(TypedDict):
    gpus: List[Gpu]
    source: Optional[str]
    driver: Optional[str]
    error: Optional[str]


def serve(stdin_fd: int, stdout_fd: int, root: str) -> None:
    """One answer per line read, until the end of input. ``root`` is UGRO's folder on this node."""
    claims = ClaimTable()
    holders, sample = Holders(root, claims), sampling(claims)
    while True:
        requests = os.read(stdin_fd, 4096)
        if not requests:
            return
        for _ in range(requests.count(b"\n")):
            answer = sample()
            for gpu in answer["gpus"]:
                gpu["holder"] = holders.of(gpu["uuid"])
            if not _write(stdout_fd, json.dumps(answer).encode() + b"\n"):
                return


def sampling(claims: ClaimTable) -> Callable[[], Answer]:
    """Readings that know processes of jobs in other accounts by the claims, whose environment cannot be read."""
    found = sources()

    def sample() -> Answer:
        answer = found.sample()
        if answer["gpus"]:
            claims.look()
        for gpu in answer["gpus"]:
            for process in [one for one in gpu["processes"] if not one["is_ours"]]:
                run = run_of(process["pid"], gpu["uuid"], claims)
                if run is not None:
                    process["is_ours"], process["job"] = True, run["job"] or None
        return answer

    return sample


def run_of(pid: int, uuid: str, claims: ClaimTable) -> Optional[Record]:
    """A process that this account may not look at (``hidepid``) belongs to the run that has claimed its GPU."""
    if not is_hidden(pid):
        return claims.run_above(pid)
    holder = claims.holder(uuid)
    return holder if holder is not None and holder["job"] else None


def sources() -> Sources:
    return Sources([Nvml(), NvidiaSmi(), AmdSmi(), RocmSmi()])


class Sources:
    """Uses the first source that works; when it fails, tries all of them again."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._kept: Optional[Source] = None

    def sample(self) -> Answer:
        if self._kept is not None:
            try:
                return _answer(self._kept, self._kept.read())
            except SourceError:
                self._kept = None
        return self._search()

    def _search(self) -> Answer:
        """The first source that finds a GPU; otherwise the first that works and finds none."""
        faults: List[str] = []
        empty: Optional[Tuple[Source, Reading]] = None
        for source in self._sources:
            try:
                reading = source.read()
            except SourceAbsentError:
                continue
            except SourceError as error:
                faults.append("%s: %s" % (source.name, error))
                continue
            if reading.gpus:
                self._kept = source
                return _answer(source, reading)
            empty = empty or (source, reading)
        return self._nothing_found(empty, faults)

    def _nothing_found(self, empty: Optional[Tuple[Source, Reading]], faults: List[str]) -> Answer:
        """"No GPU" is believed only if no other source is broken."""
        if empty is not None and not faults:
            self._kept = empty[0]
            return _answer(*empty)
        error = "; ".join(faults) or "found neither libnvidia-ml.so.1 nor nvidia-smi, amd-smi or rocm-smi"
        return {"gpus": [], "source": None, "driver": None, "error": error}


def _answer(source: Source, reading: Reading) -> Answer:
    return {"gpus": reading.gpus, "source": source.name, "driver": reading.driver, "error": None}


def _write(fd: int, line: bytes) -> bool:
    """False if the pipe is closed."""
    while line:
        try:
            line = line[os.write(fd, line) :]
        except BrokenPipeError:
            return False
    return True
