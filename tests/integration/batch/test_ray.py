"""The same maps on a real Ray: one node on this machine, started for this file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

import ugro
from ugro.features.batches.model import FunctionUnusable, ItemFailed
from ugro.kernel.support.errors import Unreachable

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.proof,
    pytest.mark.filterwarnings("ignore"),  # Ray's own, in its threads and sockets
]


@pytest.fixture(scope="module")
def pool() -> Iterator[ugro.Pool]:
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # Ray would write a token into the home, and set this for all tests
        ray.init(num_cpus=3, include_dashboard=False, logging_level="error", log_to_driver=False)
        try:
            with ugro.Pool(address="auto", workers=2) as pool:
                yield pool
        finally:
            ray.shutdown()


def double(number: int) -> int:
    return 2 * number


def test_results_are_in_the_order_of_the_items(pool: ugro.Pool) -> None:
    assert pool.engine == "ray"
    for size in (0, 1, 1000, 50_000):
        assert list(pool.map(double, range(size))) == [2 * number for number in range(size)]
    assert sorted(pool.imap_unordered(double, range(1000))) == [2 * number for number in range(1000)]
    assert list(pool.starmap(pow, [(2, 3), (3, 2)])) == [8, 9]
    assert pool.submit(pow, 2, 10).result() == 1024


def test_shared_inputs_are_put_once(pool: ugro.Pool) -> None:
    table = {number: bytes(100) for number in range(10_000)}

    def look_up(number: int, table: dict[int, bytes]) -> tuple[int, int, int]:
        return len(table[number]), id(table), os.getpid()

    found = list(pool.map(look_up, range(1000), shared={"table": table}))
    assert {size for size, _, _ in found} == {100}
    assert len({(identity, pid) for _, identity, pid in found}) == len({pid for _, _, pid in found})


def bad(number: int) -> int:
    if number == 7:
        raise ValueError("seven")
    if number == 9:
        os._exit(3)
    if number == 11:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_failures_concern_their_item_alone(pool: ugro.Pool) -> None:
    results: list[Any] = list(pool.map(bad, range(40), errors="return"))
    failed = {one.index: one.cause_kind for one in results if isinstance(one, ItemFailed)}
    assert failed == {7: "ValueError", 9: "Died", 11: "Died"}
    assert [one for one in results if not isinstance(one, ItemFailed)] == [n for n in range(40) if n not in failed]


def test_an_item_that_hangs_is_ended_after_its_limit(pool: ugro.Pool) -> None:
    def hangs(number: int) -> int:
        time.sleep(1000 if number == 5 else 0)
        return number

    results: list[Any] = list(pool.map(hangs, range(10), timeout_s=0.5, retries=0, errors="return"))
    assert [one.cause_kind for one in results if isinstance(one, ItemFailed)] == ["TimedOut"]


def test_an_endless_input_with_an_early_stop(pool: ugro.Pool) -> None:
    results = pool.map(double, count())
    assert list(islice(results, 1000)) == [2 * number for number in range(1000)]
    results.close()
    assert list(pool.map(double, range(3))) == [0, 2, 4]


def test_large_results_are_read_without_loss(pool: ugro.Pool) -> None:
    assert [len(one) for one in pool.map(lambda size: bytes(size << 20), [1, 5, 20])] == [1 << 20, 5 << 20, 20 << 20]


def test_what_cannot_be_pickled_is_one_clear_error(pool: ugro.Pool) -> None:
    lock = threading.Lock()
    with pytest.raises(FunctionUnusable, match="cannot be pickled"):
        pool.map(lambda number: lock.locked(), range(3))


def test_the_command_uses_the_cluster_of_its_environment(pool: ugro.Pool, tmp_path: Path) -> None:
    import ray

    (tmp_path / "score.py").write_text("def score(item):\n    print('noise')\n    return 2 * item\n")
    (tmp_path / "items.jsonl").write_text("".join(f"{number}\n" for number in range(100)))
    files = ["--input", "items.jsonl", "--output", "out.jsonl", "--engine", "ray", "--workers", "1", "--json"]
    command = [str(Path(sys.executable).with_name("ugro")), "map", "score.py:score", *files]
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address, "UGRO_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["map"]["items"] == 100
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines == [{"index": number, "result": 2 * number} for number in range(100)]


def test_a_function_that_cannot_be_loaded_says_why_as_often_as_it_is_used(pool: ugro.Pool) -> None:
    class Loads:
        def __reduce__(self) -> Any:
            return __import__, ("no_such_module",)

        def __call__(self, number: int) -> int:
            return number

    function = Loads()
    for _ in range(3):
        with pytest.raises(FunctionUnusable, match=r"cannot be loaded on .*No module named 'no_such_module'"):
            list(pool.map(function, range(3)))


def test_a_cluster_that_is_not_there_is_one_clear_error() -> None:
    code = "from ugro.features.batches.ray_engine import RayEngine; RayEngine('127.0.0.1:1')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip().splitlines()[-1].startswith(f"{Unreachable.__module__}.{Unreachable.__name__}")
