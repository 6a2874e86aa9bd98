"""A worker of ``ugro sweep --study``: runs a script whose Optuna studies are kept by UGRO's agent.

``python -m ugro.features.sweeps.study_worker SCRIPT [ARGS]`` replaces the storage of ``optuna.create_study`` and
``load_study``; the script stays as it is. The storage is Optuna's ``JournalStorage``; its journal is on the agent's
machine. Nodes are
only ever dialled: the worker listens on a socket in its run directory, the agent connects, and the worker asks over
that connection. A request that was cut off is sent again under the same number, and the agent answers it once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import runpy
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MODULE = "ugro.features.sweeps.study_worker"
FOLDER, NAME = "study", "storage"
SOCKET = f"{FOLDER}/{NAME}"  # in the run directory


class StudyFull(Exception):
    """The study has all the trials it may have."""


class Channel:
    """Requests to the agent, one at a time, from any thread. Waits as long as the agent is away."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._client = uuid.uuid4().hex
        self._number = 0
        self._lock = threading.Lock()
        self._stream: Any = None

    def ask(self, **request: Any) -> dict[str, Any]:
        with self._lock:
            self._number += 1
            text = json.dumps({**request, "client": self._client, "request": self._number})
            while True:
                try:
                    return self._asked(text.encode() + b"\n")
                except (OSError, ValueError):
                    self._drop()

    def _asked(self, line: bytes) -> dict[str, Any]:
        if self._stream is None:
            connection, _ = self._listener.accept()
            with connection:
                self._stream = connection.makefile("rwb")
        self._stream.write(line)
        self._stream.flush()
        while True:
            answer: dict[str, Any] = json.loads(self._stream.readline())  # nothing: it was cut off
            if answer.get("request") == self._number:
                return answer

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(OSError):  # it was cut off
                stream.close()


class AgentJournal:
    """What Optuna's ``JournalStorage`` needs of a journal."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.limit: int | None = None  # of trials, as the script says

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        at = log_number_from
        while True:
            answer = self._channel.ask(op="read", start=at)
            for line in answer["lines"]:
                yield json.loads(line)
            at += len(answer["lines"])
            if at >= answer["count"]:
                return

    def append_logs(self, logs: Sequence[dict[str, Any]]) -> None:
        for log in logs:
            answer = self._channel.ask(op="append", log=log, limit=self.limit)
            if answer.get("is_full"):
                raise StudyFull("the study has all its trials")
            if "error" in answer:
                raise RuntimeError(f"UGRO's agent does not take it: {answer['error']}")


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m ugro.features.sweeps.study_worker SCRIPT [ARGS]")
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    if os.environ.get("RANK", "0") == "0" and "UGRO_RUN_DIR" in os.environ:
        _use_agent()
    sys.path[0] = os.path.dirname(os.path.abspath(script))  # as for a script that Python runs itself
    try:
        runpy.run_path(script, run_name="__main__")
    except StudyFull:  # it asked for trials itself
        sys.stderr.write("the study has all its trials\n")


def listen(folder: str) -> socket.socket:
    """In that folder; its path may be longer than a socket's address."""
    os.makedirs(folder, 0o700, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"/proc/self/fd/{handle}/{NAME}")
    finally:
        os.close(handle)
    listener.listen(4)
    return listener


def _use_agent() -> None:
    optuna: Any = importlib.import_module("optuna")
    journal = AgentJournal(Channel(listen(os.path.join(os.environ["UGRO_RUN_DIR"], FOLDER))))
    studies = _Studies(journal, functools.cache(lambda: optuna.storages.JournalStorage(journal)))
    create = studies.replacing(optuna.study.create_study, creates=True)
    load = studies.replacing(optuna.study.load_study, creates=False)
    modules: list[Any] = [optuna, optuna.study, importlib.import_module("optuna.study.study")]
    for module in modules:
        module.create_study, module.load_study = create, load
    made: Any = optuna.study.Study
    made.optimize = studies.optimizing(made.optimize)
    made.enqueue_trial = functools.partialmethod(made.enqueue_trial, skip_if_exists=True)  # all workers enqueue them


class _Studies:
    def __init__(self, journal: AgentJournal, storage: Callable[[], Any]) -> None:
        self._journal = journal
        self._storage = storage
        self._unnamed = 0
        self._wanted: dict[str, int] = {}  # trials of each study, in all calls of optimize so far

    def replacing(self, original: Callable[..., Any], *, creates: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def replaced(*args: Any, **given: Any) -> Any:
            if args:
                raise TypeError("give the storage and the name of a study by their names: storage=…, study_name=…")
            given["storage"] = self._storage()
            if given.get("study_name") is None:
                given["study_name"] = self._name()
            if creates:
                given["load_if_exists"] = True  # another worker may have been first
            study = original(**given)
            if os.environ.get("UGRO_PARAM_WORKER", "1") != "1":
                study.sampler.reseed_rng()  # or all workers would begin with the same points
            return study

        return replaced

    def optimizing(self, original: Callable[..., None]) -> Callable[..., None]:
        """``n_trials`` counts the trials of all workers."""

        @functools.wraps(original)
        def optimize(study: Any, func: Any, n_trials: int | None = None, *args: Any, **given: Any) -> None:
            if n_trials is not None:
                self._wanted[study.study_name] = self._wanted.get(study.study_name, 0) + n_trials
            self._journal.limit = self._wanted.get(study.study_name) if n_trials is not None else None
            with contextlib.suppress(StudyFull):
                original(study, func, None, *args, **given)

        return optimize

    def _name(self) -> str:
        """All workers run the same script: their first study without a name is the same."""
        self._unnamed += 1
        name = os.environ.get("UGRO_STUDY", "study")
        return name if self._unnamed == 1 else f"{name}-{self._unnamed}"


if __name__ == "__main__":
    main()
