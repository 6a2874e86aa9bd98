"""`files.*`: the files that runs wrote and that the agent fetches or brings to another node.

A call names its files either by a run (``job``, ``attempt``: its outputs) or by a checkpoint of a job (``checkpoint``).
Both are listed, sent from any offset and compared in the same way.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

from ugro.remote import durable, worker
from ugro.remote.files import listing, resumable
from ugro.remote.files.checkpoints import Checkpoint, CheckpointDir, Resume, fingerprint_in, name_in
from ugro.remote.files.outputs import Outputs, forget_kept
from ugro.remote.program import Call, Refused
from ugro.remote.state.access import agent_of, run_of

Answer = Dict[str, Any]
Source = Union[Outputs, Checkpoint]


# --- any files --------------------------------------------------------------------------------------------------


def list_(call: Call, params: Dict[str, Any]) -> None:
    source = _source(call, params)
    if not source.has_any():  # most runs write none, and are asked again and again
        call.finish({"unlisted": 0, "now_ns": time.time_ns()})
        return
    worker.send(call, lambda into: _list(source, into))


def send(call: Call, params: Dict[str, Any]) -> None:
    source = _source(call, params)
    wanted = [(listing.name_of(name), int(offset), str(check)) for name, offset, check in params["files"]]
    worker.send(call, lambda into: _send(source, wanted, into))


def hashes(call: Call, params: Dict[str, Any]) -> None:
    source = _source(call, params)
    names = [listing.name_of(name) for name in params["names"]]
    worker.do(call, lambda: {"hashes": [_content_hash(source, name) for name in names]})


# --- outputs ----------------------------------------------------------------------------------------------------


def written(call: Call, params: Dict[str, Any]) -> None:
    """Which of many runs have written anything, as positions in the list: one call instead of many."""
    agent = agent_of(call, params)
    runs = [agent.run(str(job), int(attempt)) for job, attempt in params["runs"]]
    call.finish({"written": [place for place, run in enumerate(runs) if run.has_written()]})


def keep(call: Call, params: Dict[str, Any]) -> None:
    """Files that are not fetched stay on this node when the run is removed."""
    outputs = Outputs(run_of(call, params))
    names = [listing.name_of(name) for name in params["names"]]
    worker.do(call, lambda: {"kept": outputs.keep(names)})


def drop_kept(call: Call, params: Dict[str, Any]) -> None:
    run = run_of(call, params)
    worker.do(call, lambda: forget_kept(run.agent, run.job))


# --- checkpoints ------------------------------------------------------------------------------------------------


def prepare(call: Call, params: Dict[str, Any]) -> None:
    """Creates the folder for checkpoints; returns its path, and that of the checkpoint to resume from if it is here."""
    folder = CheckpointDir(agent_of(call, params), params)
    resume = Resume(folder, name_in(params), fingerprint_in(params)) if params.get("checkpoint") else None
    worker.do(call, lambda: {"dir": folder.make(), "resume": resume.find() if resume else None})


def newest(call: Call, params: Dict[str, Any]) -> None:
    folder = CheckpointDir(agent_of(call, params), params)
    if folder.is_ours and not folder.has_any():  # most jobs have none, and are asked again and again
        call.finish({"found": []})
        return
    worker.do(call, lambda: {"found": folder.newest()})


def receive(call: Call, params: Dict[str, Any]) -> None:
    folder = CheckpointDir(agent_of(call, params), params)
    resume = Resume(folder, name_in(params), fingerprint_in(params))
    size = int(params["bytes"])
    worker.receive(call, lambda out, took: {"dir": folder.path, "resume": resume.receive(size, out, took)})


def drop_checkpoints(call: Call, params: Dict[str, Any]) -> None:
    folder = CheckpointDir(agent_of(call, params), params)
    worker.do(call, folder.drop)


METHODS: Dict[str, Callable[[Call, Dict[str, Any]], None]] = {
    "list": list_,
    "send": send,
    "hashes": hashes,
    "written": written,
    "keep": keep,
    "drop_kept": drop_kept,
    "prepare": prepare,
    "newest": newest,
    "receive": receive,
    "drop_checkpoints": drop_checkpoints,
}


def _source(call: Call, params: Dict[str, Any]) -> Source:
    if params.get("checkpoint"):
        return Checkpoint(CheckpointDir(agent_of(call, params), params), name_in(params))
    return Outputs(run_of(call, params))


def _list(source: Source, into: int) -> Answer:
    files = source.files()
    for lines in listing.encoded(itertools.islice(files, listing.MOST_FILES)):
        durable.write_all(into, lines)
    return {"unlisted": sum(1 for _ in files), "now_ns": time.time_ns()}


def _send(source: Source, wanted: List[Tuple[bytes, int, str]], into: int) -> Answer:
    for number, (name, offset, check) in enumerate(wanted):
        fd, problem = _opened(source, name)
        if fd is None:
            durable.write_all(into, resumable.send_problem(number, problem))
            continue
        try:
            for piece in resumable.send(number, fd, offset, check):
                durable.write_all(into, piece)
        finally:
            os.close(fd)
    return {}


def _content_hash(source: Source, name: bytes) -> Optional[str]:
    fd, _ = _opened(source, name)
    if fd is None:
        return None
    try:
        return resumable.content_hash(fd)
    finally:
        os.close(fd)


def _opened(source: Source, name: bytes) -> Tuple[Optional[int], str]:
    try:
        return source.open(name), "it is no longer there"
    except (OSError, Refused) as error:
        return None, str(error)
