"""`files.*`: the files that runs wrote and that the agent fetches or brings to another node.

A call names its files by a run (``job``, ``attempt``) and by ``part``: its outputs, what it left here (``kept``), all
checkpoints of its job (``checkpoints``), or one of them (``checkpoint``). What it left of its outputs and of its
checkpoints is apart (``of``). All of them are listed, sent from any offset and compared in the same way.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

from ugro.remote import durable, worker
from ugro.remote.files import listing, resumable
from ugro.remote.files.checkpoint_dir import CheckpointDir, Checkpoints
from ugro.remote.files.checkpoint_names import PART
from ugro.remote.files.checkpoints import Checkpoint, Resume, fingerprint_in, name_in
from ugro.remote.files.outputs import Kept, Outputs, forget_kept
from ugro.remote.files.workdir import workdir_of
from ugro.remote.program import Call, Refused
from ugro.remote.state.access import agent_of, run_of

Answer = Dict[str, Any]
Source = Union[Outputs, Kept, Checkpoints, Checkpoint]


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
    found = {place for place, run in enumerate(runs) if run.has_written()}
    unsure = [place for place, run in enumerate(runs) if place not in found and run.has_work()]
    if not unsure:
        call.finish({"written": sorted(found)})
        return

    def look() -> Answer:
        made = {place for place in unsure if workdir_of(runs[place]).has_any()}
        return {"written": sorted(found | made), "cpu_s": time.process_time()}

    worker.do(call, look)


def keep(call: Call, params: Dict[str, Any]) -> None:
    """Files that are not fetched stay on this node when the run is removed."""
    names = [listing.name_of(name) for name in params["names"]]
    with_unlisted = params.get("with_unlisted") is True
    source: Union[CheckpointDir, Outputs] = Outputs(run_of(call, params))
    if params.get("part") == PART:
        source = CheckpointDir(agent_of(call, params), params)
    worker.do(call, lambda: source.keep(names, with_unlisted=with_unlisted))


def drop_kept(call: Call, params: Dict[str, Any]) -> None:
    """These files of an attempt; without names, those of all attempts at the job."""
    run = run_of(call, params)
    if params.get("names") is None:
        worker.do(call, lambda: forget_kept(run.agent, run.job))
    else:
        names = [listing.name_of(name) for name in params["names"]]
        worker.do(call, lambda: _kept(call, params).forget(names))


# --- checkpoints ------------------------------------------------------------------------------------------------


def prepare(call: Call, params: Dict[str, Any]) -> None:
    """Creates the folder for checkpoints; returns its path, and that of the checkpoint to resume from if it is here."""
    folder = CheckpointDir(agent_of(call, params), params)
    resume = _resume(folder, params) if params.get("checkpoint") else None
    if resume is None:
        folder.forget_resumed()

    def work() -> Dict[str, Any]:
        made, older = folder.make(), folder.older()
        return {"dir": made, "resume": resume.find() if resume else None, "older": older}

    worker.do(call, work)


def newest(call: Call, params: Dict[str, Any]) -> None:
    folder = CheckpointDir(agent_of(call, params), params)
    if folder.is_ours and not folder.has_any():  # most jobs have none, and are asked again and again
        call.finish({"found": []})
        return
    worker.do(call, lambda: {"found": folder.newest()})


def receive(call: Call, params: Dict[str, Any]) -> None:
    folder = CheckpointDir(agent_of(call, params), params)
    resume = _resume(folder, params)
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
    if params.get("part") == PART:
        return Checkpoints(CheckpointDir(agent_of(call, params), params))
    return _kept(call, params) if params.get("part") == "kept" else Outputs(run_of(call, params))


def _kept(call: Call, params: Dict[str, Any]) -> Kept:
    return Kept(run_of(call, params), PART if params.get("of") == PART else "")


def _resume(folder: CheckpointDir, params: Dict[str, Any]) -> Resume:
    kind = "file" if params.get("kind") == "file" else "folder"
    return Resume(folder, name_in(params), kind, fingerprint_in(params))


def _list(source: Source, into: int) -> Answer:
    files = source.files()
    for lines in listing.encoded(itertools.islice(files, listing.MOST_FILES)):
        durable.write_all(into, lines)
    unlisted = sum(1 for _ in files)
    return {"unlisted": unlisted, "now_ns": time.time_ns(), "cpu_s": time.process_time()}  # of this process alone


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
