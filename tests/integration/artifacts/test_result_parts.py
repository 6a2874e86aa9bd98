"""A run's own files and the checkpoints of its job, which are fetched apart and may have the same names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.conftest import in_loop, until
from tests.rig.results import ResultRig, runs_and_home
from ugro.kernel.files.node_files import Where
from ugro.kernel.files.results.output_store import Arrived
from ugro.kernel.files.results.output_sync import OutputSync, Run
from ugro.kernel.jobs.model import ResultRule

OWN = Run(7, 1, "n1")
CHECKPOINTS = replace(OWN, where=Where(7))


@pytest.fixture
def rig() -> Iterator[ResultRig]:
    with runs_and_home() as rig:
        rig.specify("n1", checkpoint_dir="checkpoints")
        yield rig


def write(folder: Path, **files: str) -> None:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / "checkpoints" / name).write_text(text)


def here(rig: ResultRig) -> dict[str, str]:
    return {path.name: path.read_text() for path in (rig.here() / "output" / "checkpoints").iterdir()}


def left(results: OutputSync, run: Run) -> list[str]:
    known = results.known(run)
    assert isinstance(known, Arrived)
    assert known.left_count == len(known.left)
    return [one.name for one in known.left]


async def fetched(results: OutputSync, run: Run) -> None:
    await results.fetch_left(run, lambda name: True)
    await until(lambda: run.key not in results._fetches, 10, "the files that were left to be fetched")


@in_loop
async def test_what_a_rule_left_of_the_runs_own_checkpoints_is_fetched_when_somebody_asks(rig: ResultRig) -> None:
    write(rig.output("n1"), step_1="1", step_2="2")
    write(rig.run("n1") / "work", step_7="7", step_8="8")
    rule = ResultRule("last 1")
    own, checkpoints = replace(OWN, rule=rule), replace(CHECKPOINTS, rule=rule)
    async with rig.agent("n1") as results:
        await results.fetch_all(own)
        await results.fetch_all(checkpoints)
        assert (left(results, own), left(results, checkpoints)) == (["checkpoints/step_1"], ["checkpoints/step_7"])
        await fetched(results, own)
        assert here(rig) == {"step_1": "1", "step_2": "2", "step_8": "8"}
        await fetched(results, checkpoints)
        assert left(results, own) == left(results, checkpoints) == []
    assert here(rig) == {"step_1": "1", "step_2": "2", "step_7": "7", "step_8": "8"}


@in_loop
@pytest.mark.parametrize("order", [(OWN, CHECKPOINTS), (CHECKPOINTS, OWN)], ids=["own first", "own last"])
async def test_of_two_files_with_one_name_one_comes_and_the_other_stays_on_the_node(
    rig: ResultRig, order: tuple[Run, Run]
) -> None:
    write(rig.output("n1"), best="of the run")
    write(rig.run("n1") / "work", best="of the checkpoints", step_1="1")
    async with rig.agent("n1") as results:
        for run in order:
            await results.fetch_all(run)
        assert (left(results, order[0]), left(results, order[1])) == ([], ["checkpoints/best"])
        await fetched(results, order[1])
        assert left(results, order[1]) == ["checkpoints/best"], "it would replace the other"
    first, last = ("of the run", "of the checkpoints")[:: 1 if order[0] is OWN else -1]
    assert here(rig) == {"best": first, "step_1": "1"}
    assert [path.read_text() for path in rig.kept("n1").rglob("best")] == [last]


@in_loop
async def test_what_is_too_much_of_both_is_kept_apart(rig: ResultRig) -> None:
    write(rig.output("n1"), best="of the run")
    write(rig.run("n1") / "work", best="of the checkpoints")
    rule = ResultRule("none")
    async with rig.agent("n1") as results:
        for run in (OWN, CHECKPOINTS):
            await results.fetch_all(replace(run, rule=rule))
    assert sorted(path.read_text() for path in rig.kept("n1").rglob("best")) == ["of the checkpoints", "of the run"]


@in_loop
async def test_two_who_ask_at_once_for_what_was_left_get_it_once(rig: ResultRig) -> None:
    write(rig.output("n1"), step_1="1")
    run = replace(OWN, rule=ResultRule("none"))
    async with rig.agent("n1") as results:
        await results.fetch_all(run)
        await asyncio.gather(*(results.fetch_left(run, lambda name: True) for _ in range(2)))
        await until(lambda: run.key not in results._fetches, 10, "the files that were left to be fetched")
        assert left(results, run) == []
    assert here(rig) == {"step_1": "1"}


@in_loop
async def test_who_asks_for_other_files_while_some_are_fetched_gets_them_too(rig: ResultRig) -> None:
    write(rig.output("n1"), step_1="1", step_2="2", step_3="3")
    run = replace(OWN, rule=ResultRule("none"))
    async with rig.agent("n1") as results:
        await results.fetch_all(run)
        for name in (b"checkpoints/step_1", b"nothing", b"checkpoints/step_2"):  # each while the one before is at it
            await results.fetch_left(run, name.__eq__)
        assert results.fetching(run) is not None
        await until(lambda: run.key not in results._fetches, 10, "the files that were left to be fetched")
        assert left(results, run) == ["checkpoints/step_3"]
    assert here(rig) == {"step_1": "1", "step_2": "2"}


@in_loop
async def test_a_failed_fetch_is_forgotten_with_the_files_that_it_was_for(rig: ResultRig) -> None:
    write(rig.output("n1"), step_1="1")
    run = replace(OWN, rule=ResultRule("none"))
    async with rig.agent("n1") as results:
        await results.fetch_all(run)
        results._report(run, "the node is away")
        await results.forget_left(run)
        assert results.fetching(run) is None
