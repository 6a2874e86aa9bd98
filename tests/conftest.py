"""What holds for every test: how many examples a property gets, who runs what, and that CI skips no program."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.rig import needs

# Tests start agents and commands by the hundred, and none of them should compile UGRO again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts tests in the background lets them ignore Ctrl-C, and the commands that they interrupt with them.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long something takes says more about the machine than about the code. The same examples every time: a change is
# not refused for what it has not touched. Others are looked for in ``make proof``, by ``--hypothesis-profile=proof``.
_BY_CHANCE = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
settings.register_profile("test", max_examples=25, deadline=None, derandomize=True, suppress_health_check=_BY_CHANCE)
settings.register_profile("proof", settings.get_profile("test"), max_examples=400, derandomize=False)
settings.load_profile("test")  # --hypothesis-profile=proof looks longer


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if needs.IN_CI:
        needs.fail_if_absent(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if needs.IN_CI:
        needs.fail_if_absent(report)
    return report


_ALL_OF_THE_PROOF = re.compile(r"^pytestmark = (\[\n\s*|.*)pytest\.mark\.proof\b", re.MULTILINE)

gc.disable()  # until all tests are collected: thousands of them and their modules are no garbage


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was collected stays: nobody looks for garbage in it, at no time of the run."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which nothing would run are not even imported: some import Ray, transformers or OpenAI's client."""
    if config.option.markexpr != "not proof" or collection_path.suffix != ".py":
        return None
    return _ALL_OF_THE_PROOF.search(collection_path.read_text(encoding="utf-8")) is not None or None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts tests in an order that suits work stealing: see ``_in_shares``."""
    workers = int(getattr(config, "workerinput", {}).get("workercount", 1))
    if workers > 1:
        items[:] = _in_shares(items, workers)


def _in_shares(items: list[pytest.Item], workers: int) -> Iterator[pytest.Item]:
    """Each worker begins with as many tests as the others, and loses its last ones to those that are done early.

    So each gets whole files of slow tests first, whose tests share what they start, and unit tests last.
    """
    quick = [item for item in items if item.nodeid.startswith("tests/unit/")]
    slow = [item for item in items if not item.nodeid.startswith("tests/unit/")]
    files = [list(group) for _, group in groupby(slow, key=lambda item: item.path)]
    shares: list[list[list[pytest.Item]]] = [[] for _ in range(workers)]
    for file in sorted(files, key=len, reverse=True):
        min(shares, key=lambda share: sum(map(len, share))).append(file)
    left = len(items)
    for number, share in enumerate(shares):
        begin = [item for file in reversed(share) for item in file]  # a file of few tests has long ones
        room = max(0, left // (workers - number) - len(begin))
        left -= len(begin) + min(room, len(quick))
        yield from begin
        yield from quick[:room]
        del quick[:room]
