"""How soon TensorBoard and MLflow answer with the curves of many runs: what their pages ask their servers for.

Each is asked as its own page asks, for one metric of all runs; what their pages then draw of it is not counted. They
are measured only where they are installed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode

from bench.bars import Row

_READY_S = 300.0
_ROUNDS = 3
_LONG_S = 30.0  # who takes so long is asked no more
_AT_ONCE = 100  # runs that MLflow tells of in one answer

# Run by the peer's own Python.
_TENSORBOARD = """
import math, sys
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
folder, runs, points = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for run in range(runs):
    writer = EventFileWriter(f"{folder}/{run}", max_queue_size=points + 1, flush_secs=3600)
    for step in range(points):
        value = Summary.Value(tag="loss", simple_value=math.exp(-step / points) + run / runs)
        writer.add_event(Event(wall_time=1.7e9 + step, step=step, summary=Summary(value=[value])))
    writer.close()
"""
_MLFLOW = """
import sys
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
store = SqlAlchemyStore(f"sqlite:///{sys.argv[1]}/m.db", f"{sys.argv[1]}/artifacts")
for run in range(int(sys.argv[2])):
    print(store.create_run("0", "ann", 1700000000000, [], f"run {run}").info.run_id)
"""


def measure(python: str, runs: int, points: int) -> list[Row]:
    rows = []
    for name, module, way in (("TensorBoard", "tensorboard", _tensorboard), ("MLflow", "mlflow", _mlflow)):
        row = Row(name)
        if subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode:
            row.remark = "not installed"
        else:
            with tempfile.TemporaryDirectory(prefix="bench") as folder, way(python, Path(folder), runs, points) as ask:
                while len(row.seconds) < _ROUNDS and sum(row.seconds) < _LONG_S:
                    begun = time.perf_counter()
                    seen = ask()
                    row.seconds.append(time.perf_counter() - begun)
                    assert seen == runs, f"{name} told of {seen} runs, not {runs}"
        rows.append(row)
    return rows


@contextmanager
def _tensorboard(python: str, folder: Path, runs: int, points: int) -> Iterator[Callable[[], int]]:
    subprocess.run([python, "-c", _TENSORBOARD, str(folder), str(runs), str(points)], check=True)
    port = _free_port()
    argv = [python, "-m", "tensorboard.main", "--logdir", str(folder), "--port", str(port), "--reload_interval", "5"]
    url = f"http://127.0.0.1:{port}/experiment/defaultExperimentId/data/plugin/timeseries/timeSeries"
    body = json.dumps([{"plugin": "scalars", "tag": "loss"}])

    def ask() -> int:
        form = "--b\r\nContent-Disposition: form-data; name=\"requests\"\r\n\r\n" + body + "\r\n--b--\r\n"
        headers = {"content-type": "multipart/form-data; boundary=b"}
        answer = json.loads(_read(urllib.request.Request(url, form.encode(), headers)))
        return len(answer[0].get("runToSeries") or {})

    # It reads its files little by little: asked when it knows of all.
    with _served(argv, lambda: ask() == runs):
        yield ask


@contextmanager
def _mlflow(python: str, folder: Path, runs: int, points: int) -> Iterator[Callable[[], int]]:
    argv = [python, "-c", _MLFLOW, str(folder), str(runs)]
    names = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()[-runs:]
    _write_rows(folder / "m.db", names, points)
    port = _free_port()
    address = ("--host", "127.0.0.1", "--port", str(port), "--workers", "1")
    serve = [python, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/m.db", *address]
    url = f"http://127.0.0.1:{port}/ajax-api/2.0/mlflow/metrics/get-history-bulk-interval"

    def ask() -> int:
        seen = set()
        for begin in range(0, runs, _AT_ONCE):
            some = [("run_ids", name) for name in names[begin : begin + _AT_ONCE]]
            query = urlencode([*some, ("metric_key", "loss"), ("max_results", "320")])
            answer = json.loads(_read(urllib.request.Request(f"{url}?{query}")))
            seen |= {metric["run_id"] for metric in answer["metrics"]}
        return len(seen)

    with _served(serve, lambda: bool(_read(urllib.request.Request(f"http://127.0.0.1:{port}/health")))):
        yield ask


def _write_rows(file: Path, names: Sequence[str], points: int) -> None:
    """As log_metric would, which takes minutes for a million points."""
    with closing(sqlite3.connect(file)) as db, db:
        known = {row[1] for row in db.execute("PRAGMA table_info(metrics)")}
        columns = [name for name in ("key", "value", "timestamp", "run_uuid", "step", "is_nan") if name in known]
        marks = ",".join("?" * len(columns))
        for run, name in enumerate(names):
            rows = (("loss", 1 / (step + 1) + run, 1_700_000_000_000 + step, name, step, 0) for step in range(points))
            db.executemany(f"INSERT INTO metrics ({','.join(columns)}) VALUES ({marks})", rows)


@contextmanager
def _served(argv: Sequence[str], is_ready: Callable[[], bool]) -> Iterator[None]:
    quiet = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    # A session of its own: MLflow starts more processes, which do not end with it.
    server = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=quiet, start_new_session=True
    )
    try:
        deadline = time.monotonic() + _READY_S
        while not _holds(is_ready):
            assert server.poll() is None, f"{argv[2]} ended"
            assert time.monotonic() < deadline, f"{argv[2]} is not ready after {_READY_S:g} s"
            time.sleep(0.5)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def _holds(is_ready: Callable[[], bool]) -> bool:
    try:
        return is_ready()
    except (URLError, OSError, ValueError, KeyError, IndexError):
        return False


def _read(request: urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request, timeout=120) as answer:
        content: bytes = answer.read()
    return content


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
