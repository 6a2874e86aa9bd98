"""How soon TensorBoard and MLflow answer with the curves of many runs: what their pages ask their servers for.

Each is asked as its own page asks, for one metric of all runs; what their pages then draw of it is not counted. They
are measured only where they are installed, and each has some minutes for everything: what it cannot do in them is said.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode

from bench.bars import Row

_PEER_S = 150.0  # per peer: writing data, starting, answering
_ROUNDS = 3
_AT_ONCE = 100  # runs in one answer of MLflow
_CURVES = 8  # that runs share: to write a million points one by one takes each of them minutes

# Run by the peer's own Python.
_TENSORBOARD = """
import math, shutil, sys
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
folder, runs, points, curves = sys.argv[1], *map(int, sys.argv[2:])
for run in range(min(runs, curves)):
    writer = EventFileWriter(f"{folder}/{run}", max_queue_size=points + 1, flush_secs=3600)
    for step in range(points):
        value = Summary.Value(tag="loss", simple_value=math.exp(-step / points) + run / curves)
        writer.add_event(Event(wall_time=1.7e9 + step, step=step, summary=Summary(value=[value])))
    writer.close()
for run in range(curves, runs):
    shutil.copytree(f"{folder}/{run % curves}", f"{folder}/{run}")
"""
_MLFLOW = """
import sys
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
store = SqlAlchemyStore(f"sqlite:///{sys.argv[1]}/m.db", f"{sys.argv[1]}/artifacts")
store.create_run("0", "ann", 1700000000000, [], "run")
"""


class PeerFailed(Exception):
    """In words, why there are no figures, or no more of them."""


@dataclass(frozen=True, slots=True)
class _Budget:
    until: float

    @property
    def left_s(self) -> float:
        return max(0.1, self.until - time.monotonic())

    def check(self, problem: str) -> None:
        if time.monotonic() > self.until:
            raise PeerFailed(f"{problem} within {_PEER_S:g} s")


@dataclass(frozen=True, slots=True)
class _Task:
    python: str
    folder: Path
    runs: int
    points: int
    budget: _Budget


def measure(python: str, runs: int, points: int) -> list[Row]:
    rows = []
    for name, module, way in (("TensorBoard", "tensorboard", _tensorboard), ("MLflow", "mlflow", _mlflow)):
        row = Row(name)
        rows.append(row)
        print(f"{name} …", file=sys.stderr, flush=True)
        if subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode:
            row.remark = "not installed"
            continue
        try:
            with tempfile.TemporaryDirectory(prefix="bench", ignore_cleanup_errors=True) as folder:
                _ask_again(row, way, _Task(python, Path(folder), runs, points, _Budget(time.monotonic() + _PEER_S)))
        except PeerFailed as problem:
            row.remark = str(problem)
    return rows


def _ask_again(row: Row, way: Callable[[_Task], AbstractContextManager[Callable[[], int]]], task: _Task) -> None:
    with way(task) as ask:
        while len(row.seconds) < _ROUNDS:
            begun = time.perf_counter()
            seen = ask()
            row.seconds.append(time.perf_counter() - begun)
            if seen != task.runs:
                raise PeerFailed(f"it returned {seen} runs, not {task.runs}")
            if task.budget.left_s < row.seconds[-1]:
                return


@contextmanager
def _tensorboard(task: _Task) -> Iterator[Callable[[], int]]:
    _run(task, _TENSORBOARD, task.folder, task.runs, task.points, _CURVES)
    port = _free_port()
    argv = [task.python, "-m", "tensorboard.main", "--logdir", str(task.folder), "--port", str(port)]
    url = f"http://127.0.0.1:{port}/experiment/defaultExperimentId/data/plugin/timeseries/timeSeries"
    body = json.dumps([{"plugin": "scalars", "tag": "loss"}])

    def ask() -> int:
        form = '--b\r\nContent-Disposition: form-data; name="requests"\r\n\r\n' + body + "\r\n--b--\r\n"
        headers = {"content-type": "multipart/form-data; boundary=b"}
        answer = json.loads(_read(task, urllib.request.Request(url, form.encode(), headers)))
        return len(answer[0].get("runToSeries") or {})

    def known() -> int:
        return len(json.loads(_read(task, urllib.request.Request(f"http://127.0.0.1:{port}/data/plugin/scalars/tags"))))

    # It reads its files gradually: wait until it knows all runs.
    with _served(task, [*argv, "--reload_interval", "5"], lambda: known() == task.runs):
        yield ask


@contextmanager
def _mlflow(task: _Task) -> Iterator[Callable[[], int]]:
    _run(task, _MLFLOW, task.folder)
    names = _write_rows(task.folder / "m.db", task.runs, task.points)
    port = _free_port()
    address = ("--host", "127.0.0.1", "--port", str(port), "--workers", "1")
    serve = [task.python, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{task.folder}/m.db", *address]
    url = f"http://127.0.0.1:{port}/ajax-api/2.0/mlflow/metrics/get-history-bulk-interval"

    def ask() -> int:
        seen: set[str] = set()
        for begin in range(0, task.runs, _AT_ONCE):
            some = [("run_ids", name) for name in names[begin : begin + _AT_ONCE]]
            query = urlencode([*some, ("metric_key", "loss"), ("max_results", "320")])
            try:
                answer = json.loads(_read(task, urllib.request.Request(f"{url}?{query}")))
            except PeerFailed as problem:
                raise PeerFailed(f"{problem}: it had returned {len(seen)} of {task.runs} runs") from problem
            seen |= {metric["run_id"] for metric in answer["metrics"]}
        return len(seen)

    with _served(task, serve, lambda: bool(_read(task, urllib.request.Request(f"http://127.0.0.1:{port}/health")))):
        yield ask


def _write_rows(file: Path, runs: int, points: int) -> list[str]:
    """As create_run and log_metric would, which take minutes for a million points. The names of the runs."""
    with closing(sqlite3.connect(file)) as db, db:
        db.execute("PRAGMA synchronous = OFF")
        [first] = [row[0] for row in db.execute("SELECT run_uuid FROM runs")]
        names = [first, *(uuid.uuid4().hex for _ in range(runs - 1))]
        for table in ("runs", "tags"):
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            values = ",".join("?" if name == "run_uuid" else name for name in columns)
            copy = f"INSERT INTO {table} ({','.join(columns)}) SELECT {values} FROM {table} WHERE run_uuid = ?"
            db.executemany(copy, ((name, first) for name in names[1:]))
        db.execute(
            "WITH RECURSIVE steps(step) AS (SELECT 0 UNION ALL SELECT step + 1 FROM steps WHERE step < ?) "
            "INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) "
            "SELECT 'loss', 1.0 / (step + 1) + runs.rowid, 1700000000000 + step, run_uuid, step, 0 FROM runs, steps",
            (points - 1,),
        )
    return names


def _run(task: _Task, script: str, *arguments: object) -> None:
    argv = [task.python, "-c", script, *map(str, arguments)]
    try:
        subprocess.run(argv, check=True, capture_output=True, timeout=task.budget.left_s)
    except subprocess.TimeoutExpired:
        raise PeerFailed(f"its data were not written within {_PEER_S:g} s") from None
    except subprocess.CalledProcessError as error:
        raise PeerFailed(f"its data could not be written: {_last_line(error.stderr)}") from error


@contextmanager
def _served(task: _Task, argv: Sequence[str], is_ready: Callable[[], bool]) -> Iterator[None]:
    quiet = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    said = task.folder / "said"
    with said.open("wb") as out:
        # A session of its own: MLflow starts more processes, which do not end with it.
        server = subprocess.Popen(argv, stdout=out, stderr=out, env=quiet, start_new_session=True)
    try:
        while not _holds(is_ready):
            if server.poll() is not None:
                raise PeerFailed(f"its server ended: {_last_line(said.read_bytes())}")
            task.budget.check("its server was not ready")
            time.sleep(0.5)
        yield
    finally:
        _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    """Ends the process group: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(10)


def _holds(is_ready: Callable[[], bool]) -> bool:
    try:
        return is_ready()
    except (OSError, ValueError, KeyError, IndexError):
        return False


def _read(task: _Task, request: urllib.request.Request) -> bytes:
    """Raises PeerFailed only after its time limit; before that it may still be starting."""
    try:
        with urllib.request.urlopen(request, timeout=task.budget.left_s) as answer:
            content: bytes = answer.read()
    except TimeoutError:
        raise PeerFailed(f"no answer within {_PEER_S:g} s") from None
    except URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise PeerFailed(f"no answer within {_PEER_S:g} s") from None
        raise
    return content


def _last_line(text: bytes) -> str:
    return (text.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1][:200]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
