"""Maps on processes of this machine: order, failures of every kind, bounded memory, and nothing left behind."""

from __future__ import annotations

import os
import re
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
from tests.rig.waiting import wait_until, wait_until_dead
from ugro.features.batches.model import FunctionUnusable, ItemFailed, PoolBroken, PoolClosed
from ugro.kernel.support.errors import TimedOut, UsageError

pytest.importorskip("cloudpickle")


@pytest.fixture(scope="module")
def pool() -> Iterator[ugro.Pool]:
    with ugro.Pool(engine="local", workers=2) as pool:
        yield pool


def double(number: int) -> int:
    return 2 * number


@pytest.mark.parametrize("size", [0, 1, 2, 1000])
def test_results_are_in_the_order_of_the_items(pool: ugro.Pool, size: int) -> None:
    assert list(pool.map(double, range(size))) == [2 * number for number in range(size)]


def test_a_hundred_thousand_items(pool: ugro.Pool) -> None:
    assert sum(pool.map(double, range(100_000))) == 2 * sum(range(100_000))


def test_items_of_very_unequal_cost_stay_in_order(pool: ugro.Pool) -> None:
    def slow_now_and_then(number: int) -> int:
        time.sleep(0.05 if number % 50 == 0 else 0)
        return number

    assert list(pool.map(slow_now_and_then, range(500))) == list(range(500))
    assert sorted(pool.imap_unordered(slow_now_and_then, range(500))) == list(range(500))


def test_the_number_of_processes_is_the_first_argument_as_of_pythons_own_pool() -> None:
    with ugro.Pool(2) as pool:
        assert (pool.engine, pool.start()) == ("local", 2)
        assert list(pool.map(double, range(10))) == [2 * number for number in range(10)]
    with pytest.raises(UsageError, match="expected a whole number, got 'ray'"):
        ugro.Pool("ray")  # type: ignore[arg-type]


def test_starmap_and_submit(pool: ugro.Pool) -> None:
    assert list(pool.starmap(pow, [(2, 3), (3, 2)])) == [8, 9]
    tasks = [pool.submit(divmod, 17, number) for number in (3, 5)]
    assert [task.result() for task in tasks] == [(5, 2), (3, 2)]
    assert tasks[0].result() == (5, 2)
    with pytest.raises(ItemFailed, match="ZeroDivisionError"):
        pool.submit(divmod, 1, 0).result()


def test_a_submitted_call_may_be_waited_for_with_a_limit(pool: ugro.Pool, tmp_path: Path) -> None:
    def wait_for(path: Path) -> None:
        while not path.exists():
            time.sleep(0.01)

    task = pool.submit(wait_for, tmp_path / "go")
    with pytest.raises(TimedOut):
        task.result(timeout_s=0.01)
    (tmp_path / "go").touch()
    assert task.result(timeout_s=30) is None
    assert task.done()


def test_a_call_that_cannot_have_a_result_says_so_as_often_as_it_is_asked() -> None:
    with ugro.Pool(engine="local", workers=1) as pool:
        task = pool.submit(time.sleep, 1000)
    for _ in range(2):
        with pytest.raises(PoolClosed):
            task.result()


def test_a_map_may_be_the_input_of_another(pool: ugro.Pool) -> None:
    assert list(pool.map(double, pool.map(double, range(2000)))) == [4 * number for number in range(2000)]


def test_two_maps_share_the_pool(pool: ugro.Pool) -> None:
    pairs = list(zip(pool.map(double, range(3000)), pool.map(str, range(3000)), strict=True))
    assert pairs == [(2 * number, str(number)) for number in range(3000)]


def test_shared_inputs_are_given_by_name_and_loaded_once(pool: ugro.Pool) -> None:
    table = {number: str(number) for number in range(1000)}

    def look_up(number: int, table: dict[int, str]) -> tuple[str, int, int]:
        return table[number], id(table), os.getpid()

    found = list(pool.map(look_up, range(1000), shared={"table": table}))
    assert [text for text, _, _ in found] == list(table.values())
    assert len({(identity, pid) for _, identity, pid in found}) == len({pid for _, _, pid in found})


def test_a_generator_is_read_only_as_far_as_needed(pool: ugro.Pool) -> None:
    read = []

    def numbers() -> Iterator[int]:
        for number in count():
            read.append(number)
            yield number

    def slow(number: int) -> int:
        time.sleep(0.001)
        return number

    results = pool.map(slow, numbers())
    assert list(islice(results, 100)) == list(range(100))
    results.close()
    assert len(read) < 5000
    assert list(pool.map(double, range(3))) == [0, 2, 4]


def test_an_error_of_the_input_comes_after_the_results_before_it(pool: ugro.Pool) -> None:
    def numbers() -> Iterator[int]:
        yield from range(3)
        raise LookupError("no more")

    results = pool.map(double, numbers())
    assert [next(results) for _ in range(3)] == [0, 2, 4]
    with pytest.raises(LookupError, match="no more"):
        next(results)


def fails_at_seven(number: int) -> int:
    if number == 7:
        raise ValueError(f"no {number}")
    return number


def test_a_failing_item_is_reported_and_the_others_go_on(pool: ugro.Pool) -> None:
    results = pool.map(fails_at_seven, range(20))
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(ItemFailed) as failure:
        next(results)
    assert list(results) == list(range(8, 20))
    error = failure.value
    assert (error.index, error.item, error.cause_kind) == (7, 7, "ValueError")
    assert "fails_at_seven" in error.traceback
    assert str(error) == "item 7: ValueError: no 7 (input: 7)"
    assert isinstance(error.__cause__, ValueError)


def test_failures_can_be_returned_in_place(pool: ugro.Pool) -> None:
    results: list[Any] = list(pool.map(fails_at_seven, range(10), errors="return"))
    assert [type(one).__name__ for one in results] == ["int"] * 7 + ["ItemFailed"] + ["int"] * 2
    unordered: list[Any] = list(pool.imap_unordered(fails_at_seven, range(10), errors="return"))
    assert [one.index for one in unordered if isinstance(one, ItemFailed)] == [7]


def test_an_item_that_fails_now_and_then_is_retried(pool: ugro.Pool, tmp_path: Path) -> None:
    def fails_once(number: int) -> int:
        mark = tmp_path / str(number)
        if number % 10 == 3 and not mark.exists():
            mark.touch()
            raise OSError("not yet")
        return number

    assert list(pool.map(fails_once, range(50))) == list(range(50))


def test_all_items_may_fail(pool: ugro.Pool) -> None:
    def no(number: int) -> None:
        raise RuntimeError

    results: list[Any] = list(pool.map(no, range(3000), errors="return"))
    assert [one.index for one in results if isinstance(one, ItemFailed)] == list(range(3000))


def ends(number: int) -> int:
    if number == 30:
        sys.exit("enough")
    if number == 31:
        os._exit(3)
    if number == 32:
        os.kill(os.getpid(), signal.SIGSEGV)
    return number


def test_an_item_that_ends_its_process_is_named_and_the_others_are_right(pool: ugro.Pool) -> None:
    results: list[Any] = list(pool.map(ends, range(60), errors="return"))
    bad = {one.index: one for one in results if isinstance(one, ItemFailed)}
    assert list(bad) == [30, 31, 32]
    assert bad[30].reason == "SystemExit: enough"
    assert bad[31].reason.endswith("exit code 3")
    assert bad[32].reason.endswith("killed by SIGSEGV")
    assert [one for one in results if not isinstance(one, ItemFailed)] == [*range(30), *range(33, 60)]


def test_an_item_that_hangs_is_ended_after_its_limit(pool: ugro.Pool) -> None:
    def hangs(number: int) -> int:
        while number == 5:
            threading.Event().wait()
        return number

    # With a retry: on a machine that stands still for a moment, another item may be late once.
    results: list[Any] = list(pool.map(hangs, range(10), timeout_s=0.3, retries=1, errors="return"))
    (late,) = (one for one in results if isinstance(one, ItemFailed))
    assert (late.index, late.cause_kind, late.reason) == (5, "TimedOut", "not done within 300 ms")
    assert len(results) == 10


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("I stay here")


class Strange(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("strange")


def test_what_cannot_be_pickled_is_one_clear_error(pool: ugro.Pool) -> None:
    lock = threading.Lock()

    def holds(number: int) -> bool:
        return lock.locked()

    def makes(number: int) -> Any:
        return (item for item in [1]) if number == 2 else number

    def raises(number: int) -> None:
        raise Strange(1, 2)

    with pytest.raises(FunctionUnusable, match="holds cannot be pickled") as failure:
        pool.map(holds, range(3))
    assert "inside the function" in str(failure.value.hint)
    with pytest.raises(FunctionUnusable, match="'table' cannot be pickled: I stay here"):
        pool.map(double, range(3), shared={"table": Unpicklable()})
    results: list[Any] = list(pool.map(makes, range(4), errors="return"))
    assert [one for one in results if not isinstance(one, ItemFailed)] == [0, 1, 3]
    assert "result of type generator cannot be pickled" in str(results[2])
    items: list[Any] = list(pool.map(str, ["a", Unpicklable(), "b"], errors="return"))
    assert "the item cannot be pickled: TypeError: I stay here" in str(items[1])
    assert (items[0], items[2]) == ("a", "b")
    with pytest.raises(ItemFailed, match="Strange: strange") as odd:
        list(pool.map(raises, [1], retries=0))
    assert odd.value.__cause__ is None


class Rotten:
    """Can be pickled, and not loaded."""

    def __reduce__(self) -> Any:
        return __import__, ("no_such_module",)


def test_an_item_that_cannot_be_loaded_there_fails_alone(pool: ugro.Pool) -> None:
    results: list[Any] = list(pool.map(str, [*range(20), Rotten(), *range(21, 40)], errors="return"))
    assert [one for one in results if not isinstance(one, ItemFailed)] == [str(n) for n in range(40) if n != 20]
    assert results[20].reason == (
        "the item cannot be loaded there: ModuleNotFoundError: No module named 'no_such_module'"
    )


class Interrupting:
    """As if Ctrl-C came while it is pickled, or loaded."""

    def __init__(self, where: int) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        if self.where == os.getpid():
            raise KeyboardInterrupt
        return Interrupting, (self.where,)


@pytest.mark.parametrize("function", [str, lambda number: Answers(number)], ids=["items", "results"])
def test_ctrl_c_while_items_or_results_are_carried_is_not_taken_for_their_error(function: Any) -> None:
    with ugro.Pool(engine="local", workers=1) as pool, pytest.raises(KeyboardInterrupt):
        list(pool.map(function, [Interrupting(os.getpid())] if function is str else [os.getpid()], errors="return"))


class Answers:
    def __init__(self, driver: int) -> None:
        self.driver = driver

    def __reduce__(self) -> Any:
        return _interrupted_in, (self.driver,)


def _interrupted_in(driver: int) -> None:
    if os.getpid() == driver:
        raise KeyboardInterrupt


def test_a_function_that_cannot_be_loaded_there_is_one_clear_error(pool: ugro.Pool) -> None:
    class Loads:
        def __reduce__(self) -> Any:
            return __import__, ("no_such_module",)

        def __call__(self, number: int) -> int:
            return number

    with pytest.raises(FunctionUnusable, match=r"cannot be loaded on .*no_such_module"):
        list(pool.map(Loads(), range(3)))


def test_a_function_that_kills_its_process_when_loaded_ends_the_map() -> None:
    class Kills:
        def __reduce__(self) -> Any:
            return os._exit, (9,)

        def __call__(self, number: int) -> int:
            return number

    with ugro.Pool(engine="local", workers=1) as pool, pytest.raises(PoolBroken, match="function: exit code 9"):
        list(pool.map(Kills(), range(3)))


@pytest.mark.parametrize("options", [{"chunk": 3}, {"errors": "ignore"}, {"retries": -1}, {"timeout_s": 0}], ids=str)
def test_a_wrong_option_is_one_clear_error(pool: ugro.Pool, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        pool.map(double, [1], **options)


def test_wrong_pools_are_clear_errors() -> None:
    with pytest.raises(UsageError, match="unknown engine"):
        ugro.Pool(engine="slurm")
    with pytest.raises(UsageError, match="at least one"):
        ugro.Pool(workers=0)
    with pytest.raises(UsageError, match="cannot be called"), ugro.Pool(engine="local", workers=1) as pool:
        pool.map(3, [1])  # type: ignore[arg-type]
    with pytest.raises(PoolClosed):
        pool.map(double, [1])


def test_after_ctrl_c_the_pool_can_be_used_again(pool: ugro.Pool) -> None:
    other = pool.map(double, range(1000))
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))

    def seconds() -> Iterator[int]:
        yield from [1000, 1000]
        interrupt.start()  # only now: nothing but the map may be interrupted
        yield 1000

    with pytest.raises(KeyboardInterrupt):
        list(pool.map(time.sleep, seconds()))
    interrupt.join()
    assert list(other) == [2 * number for number in range(1000)]
    assert list(pool.map(double, range(10))) == [2 * number for number in range(10)]


def test_large_results_wait_where_they_are_made_until_they_are_read(pool: ugro.Pool) -> None:
    def large(number: int) -> bytes:
        return bytes(8 << 20)

    before = _memory_kb("VmRSS")
    highest = 0
    for result in pool.map(large, range(60)):
        assert len(result) == 8 << 20
        time.sleep(0.01)  # a reader that is slower than the slots: this is what is tested
        highest = max(highest, _memory_kb("VmRSS"))
    assert highest - before < 60 * (8 << 10) * 0.6


def test_numbers_are_carried_in_both_directions_whatever_their_size(pool: ugro.Pool) -> None:
    items = [bytes(size) for size in (0, 1, 1 << 10, 1 << 20, 20 << 20)]
    assert [len(one) for one in pool.map(lambda item: item + item, items)] == [2 * len(item) for item in items]


def test_more_processes_than_can_be_started_are_one_clear_error() -> None:
    code = """
import os, resource, ugro
from ugro.kernel.support.errors import Unsatisfiable
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
before = len(os.listdir("/proc/self/fd"))
try:
    ugro.Pool(engine="local", workers=100)
except Unsatisfiable as error:
    print(error, len(os.listdir("/proc/self/fd")) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert re.fullmatch(r"process \d+ of the pool cannot be started: too many open files 0\n", done.stdout), done


_DRIVER = """
import sys, time, ugro
def slow(number):
    import subprocess
    child = subprocess.Popen(["sleep", "1000"])
    print("child", child.pid, flush=True)
    time.sleep(1000)
if __name__ == "__main__":
    with ugro.Pool(engine="local", workers=2) as pool:
        list(pool.map(slow, range(2)))
"""


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL], ids=lambda by: by.name)
def test_nothing_is_left_when_the_driver_ends(by: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(_DRIVER)
    output = tmp_path / "output"
    with output.open("w") as file:
        driver = subprocess.Popen([sys.executable, script], stdout=file, stderr=file)
    try:
        wait_until(lambda: len(output.read_text().splitlines()) == 2, 30, "both items to begin")
        children = [int(line.split()[1]) for line in output.read_text().splitlines()]
        everything = [*children, *map(_parent, children)]
        driver.send_signal(by)
        driver.wait(timeout=30)
    finally:
        driver.kill()
        driver.wait()
    wait_until_dead(everything)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _memory_kb(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))
