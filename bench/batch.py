"""Many small items: ``ugro.Pool`` on Ray against Ray's own Pool at its defaults, joblib on Ray and Ray Data.

Also: what one task per item costs, ``ugro.Pool`` without Ray, and how good the estimates are.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.bars import Bar, Row, print_rows
from ugro.features.batches.estimating import place, sampled, spread
from ugro.features.batches.pool import Pool
from ugro.features.batches.rules import predict

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_TASKS = 2000  # of one item each; the time of more is that of these, times how many


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    function: Callable[[Any], Any]
    items: Sequence[Any]
    share: float | None = None  # of the time of Ray's Pool, at most


def spin(loops: int) -> int:
    total = 0
    for number in range(loops):
        total += number
    return total


def length(item: bytes) -> int:
    return len(item)


def look_up(number: int, table: Sequence[int]) -> int:
    return table[number % len(table)]


def measure(rounds: int) -> list[Bar]:
    import ray

    loops = _loops_of(10e-6)
    ray.init(num_cpus=os.cpu_count(), include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        bars = [bar for case in _cases(loops) for bar in _compared(case, rounds)]
        with Pool(address="auto") as ours:
            ours.start()
            bars += [_cpu(ours, loops), _shared(ours)]
            ours_s = _timed(lambda: list(ours.map(spin, [loops] * 100_000)))
        return [*bars, _one_task_each(ours_s, loops), _estimates(loops)]
    finally:
        ray.shutdown()


def _cases(loops: int) -> list[Case]:
    milli = 100 * loops
    skewed = [milli // 5] * 4950 + [20 * milli] * 50
    return [
        Case("100,000 items of 10 µs", spin, [loops] * 100_000, 0.75),
        Case("1,000 items of 10 ms", spin, [10 * milli] * 1000, 1.0),
        Case("5,000 items of 0.2 ms, the last 1 % take 20 ms", spin, skewed, 0.8),
        Case("1,000 arguments of 1 MB", length, [bytes([number % 256]) * 1_000_000 for number in range(1000)]),
    ]


def _loops_of(seconds: float) -> int:
    """How many loops take so long, on this machine now."""
    best = min(_timed(lambda: spin(100_000)) for _ in range(5))
    return max(1, round(seconds / best * 100_000))


def _compared(case: Case, rounds: int) -> Iterator[Bar]:
    names = ("serial", "ugro.Pool on Ray", "ugro.Pool, local", "ray.util.multiprocessing.Pool")
    rows = {name: Row(name) for name in (*names, "joblib on Ray", "Ray Data")}
    with _ray_pool() as peer, Pool(address="auto") as ours, Pool(engine="local") as local:
        ours.start()
        local.start()
        ways: Sequence[Callable[[], Any]] = (
            lambda: [case.function(item) for item in case.items],
            lambda: list(ours.map(case.function, case.items)),
            lambda: list(local.map(case.function, case.items)),
            lambda: peer.map(case.function, case.items),
        )
        for _ in range(rounds):
            for name, way in zip(names, ways, strict=True):
                rows[name].seconds.append(_timed(way))
    # After the pools are closed: they hold all CPUs, and these start tasks of their own.
    for name, once in (("joblib on Ray", _joblib), ("Ray Data", _ray_data)):
        try:
            rows[name].seconds.append(_timed(partial(once, case)))
        except ImportError as error:
            rows[name].remark = f"not measured: {error}"
    print_rows(case.name, rows.values())
    if case.share is not None:
        peer_row = rows["ray.util.multiprocessing.Pool"]
        yield Bar(case.name, rows["ugro.Pool on Ray"].median_s, peer_row.median_s, "Ray's Pool", case.share)


@contextlib.contextmanager
def _ray_pool() -> Iterator[Any]:
    from ray.util.multiprocessing import Pool as RayPool

    pool = RayPool()
    pool.map(spin, [1] * 100)  # its actors are up
    try:
        yield pool
    finally:
        pool.terminate()


def _joblib(case: Case) -> None:
    import joblib
    from ray.util.joblib import register_ray

    register_ray()
    with joblib.parallel_backend("ray"), contextlib.redirect_stdout(io.StringIO()):
        joblib.Parallel()(joblib.delayed(case.function)(item) for item in case.items)


def _ray_data(case: Case) -> None:
    import logging

    import ray.data  # needs pandas and pyarrow

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.from_items([{"item": item} for item in case.items])
    rows.map(lambda row: {"result": case.function(row["item"])}).take_all()


def _cpu(ours: Pool, loops: int) -> Bar:
    """CPU time of the driver and of all slots, beyond what the work takes in a plain loop.

    With all cores busy the work itself may take longer than alone (hyper-threads): that counts, too, for both.
    """
    items = [loops] * 100_000
    with _ray_pool() as peer:
        extra = {"ours": list[float](), "Ray's Pool": list[float]()}
        runs: dict[str, Callable[..., Any]] = {"ours": lambda *given: list(ours.map(*given)), "Ray's Pool": peer.map}
        pids = {name: set(run(_pid, [0.05] * 20)) for name, run in runs.items()}
        for _ in range(3):
            before = time.process_time()
            for loops_ in items:
                spin(loops_)
            serial_s = time.process_time() - before
            for name, run in runs.items():
                began = time.process_time() + sum(map(_cpu_of, pids[name]))
                run(spin, items)
                took_s = time.process_time() + sum(map(_cpu_of, pids[name])) - began
                extra[name].append((took_s - serial_s) / len(items))
    for name, found in extra.items():
        print(f"CPU time per item beyond serial, µs, {name}: {', '.join(f'{1e6 * one:.2f}' for one in found)}")
    print()
    return Bar("CPU per item beyond serial", max(1e-9, sorted(extra["ours"])[1]), 2e-6, "2 µs", 1.0)


def _pid(pause_s: float) -> int:
    time.sleep(pause_s)
    return os.getpid()


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def _one_task_each(ours_s: float, loops: int) -> Bar:
    import ray

    task = ray.remote(spin)
    ray.get([task.remote(loops) for _ in range(100)])
    tasks_s = _timed(lambda: ray.get([task.remote(loops) for _ in range(_TASKS)])) * 100_000 / _TASKS
    print(f"100,000 items of 10 µs, one Ray task each ({_TASKS:,} were run): {tasks_s:.1f} s, ours {ours_s:.2f} s\n")
    return Bar("100,000 items of 10 µs", ours_s, tasks_s, "one task each", 0.01)


def _shared(ours: Pool) -> Bar:
    """200 MB that all items use: carried once, so a thousand items take little longer than ten."""
    from array import array

    table = array("q", bytes(200_000_000))
    few_s = _timed(lambda: list(ours.map(look_up, range(10), shared={"table": table})))
    many_s = _timed(lambda: list(ours.map(look_up, range(1000), shared={"table": table})))
    print(f"200 MB shared: 10 items {few_s:.2f} s, 1,000 items {many_s:.2f} s\n")
    return Bar("1,000 items with 200 MB shared", many_s, few_s, "10 items with the same", 1.5)


def _estimates(loops: int) -> Bar:
    """Each case, predicted from a sample and then measured, on this machine with and without Ray."""
    milli = 100 * loops
    cases = [
        Case("10 µs", spin, [loops] * 100_000),
        Case("50 µs", spin, [5 * loops] * 40_000),
        Case("1 ms", spin, [milli] * 4000),
        Case("10 ms", spin, [10 * milli] * 400),
        Case("1 % take 100 ×", spin, ([milli // 5] * 99 + [20 * milli]) * 40),
    ]
    print(f"{'estimate of':<32}{'predicted, s':>14}{'measured, s':>14}{'off by':>9}")
    off = [error for case in cases for error in _checked(case)]
    good = sum(error <= 0.3 for error in off)
    print(f"within 30 %: {good} of {len(off)}\n")
    return Bar("estimates off by more than 30 %", len(off) - good + 1e-9, len(off), "all cases", 0.2)


def _checked(case: Case) -> Iterator[float]:
    chosen = spread(case.items)
    alone = sampled(case.function, chosen, len(case.items))
    opens: dict[str, Callable[[], Pool]] = {
        "local": partial(Pool, engine="local"),
        "Ray": partial(Pool, address="auto"),
    }
    for name, open_pool in opens.items():
        predicted_s = predict(alone, place(name, open_pool, case.function, chosen, alone)).seconds
        measured_s = _timed(partial(_whole, open_pool, case))
        error = abs(predicted_s / measured_s - 1)
        print(f"{case.name + ', ' + name:<32}{predicted_s:>14.2f}{measured_s:>14.2f}{100 * error:>7.0f} %")
        yield error


def _whole(open_pool: Callable[[], Pool], case: Case) -> None:
    with open_pool() as pool:
        list(pool.map(case.function, case.items))


def _timed(way: Callable[[], Any]) -> float:
    began = time.perf_counter()
    way()
    return time.perf_counter() - began
