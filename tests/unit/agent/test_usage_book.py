"""What is stored of past use, as the scheduler gets it: windows of a day and a week, and averages that fade."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from tests.rig.stores import in_store
from tests.unit.policy.scheduling.test_scheduler import holds, job, nodes, snapshot, started
from tests.unit.store.test_usage import run
from ugro.features.quotas.model import DAY_S, HOUR_S, WINDOWS_S, Limit
from ugro.features.quotas.rules import Ask, FairShare, Over
from ugro.features.quotas.rules_room import QuotaBook
from ugro.features.quotas.usage_book import UsageBook
from ugro.kernel.jobs import moves as usage
from ugro.kernel.jobs.model import Placement, Share
from ugro.kernel.jobs.scheduling.scheduler import schedule
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.store.database import Store
from ugro.kernel.support.moments import Instant

MIDNIGHT = 20_000 * DAY_S
BOOTED = MIDNIGHT - 30 * DAY_S  # the scheduler's times count from here
HALF_LIFE_S = 2 * DAY_S
_numbers = count()


def at(wall_s: float) -> Instant:
    return Instant(wall_s, "a-boot", wall_s - BOOTED)


async def used(store: Store, user: str, begin_s: float, end_s: float, gpus: int = 1) -> None:
    """An attempt of this user held GPUs from then until then, by the wall clock."""
    number = next(_numbers)
    placement = Placement((Share(f"n{number}", tuple(range(gpus))),))
    attempt = await run(store, user, f"key-{number}", placement)
    begun = attempt.attempt_started
    assert begun is not None
    ended = Instant(end_s, begun.boot_id, begun.boot_s + end_s - begin_s)
    await store._database.run(lambda db: usage.charge(db, attempt, ended))


class Books:
    """Of agents that serve this cluster file, and have just started."""

    def __init__(self, folder: Path, store: Store, text: str) -> None:
        self.store = store
        self._file = folder / "cluster.yaml"
        self._file.write_text(f"nodes: [gpu1]\n{text}\n")

    async def read(self, now_s: float) -> UsageBook:
        book = UsageBook(self.store.usage, Cluster(self._file))
        await book.read(at(now_s))
        return book


def with_books(folder: Path, text: str, work: Callable[[Books], Awaitable[None]]) -> None:
    async def in_books(store: Store) -> None:
        await work(Books(folder, store, text))

    in_store(folder, in_books)


# --- windows -------------------------------------------------------------------------------------------------------


def over(book: UsageBook, now_s: float, hours: float) -> Over | None:
    """What holds up a job of ann's on one GPU that may take so long."""
    now = at(now_s)
    return QuotaBook(book.accounts(now), (), now.boot_s).over("ann", Ask(1, 0, hours * HOUR_S))


@pytest.mark.parametrize(("limit", "expected"), [(Limit.GPU_HOURS_PER_DAY, 4.0), (Limit.GPU_HOURS_PER_WEEK, 10.0)])
def test_each_window_has_the_use_of_its_own_time_and_of_its_user(
    tmp_path: Path, limit: Limit, expected: float
) -> None:
    async def work(books: Books) -> None:
        now = MIDNIGHT + 12 * HOUR_S
        await used(books.store, "ann", now - 8 * DAY_S, now - 8 * DAY_S + HOUR_S, gpus=4)
        await used(books.store, "ann", now - 3 * DAY_S, now - 3 * DAY_S + 3 * HOUR_S, gpus=2)
        await used(books.store, "ann", now - 5 * HOUR_S, now - HOUR_S)
        await used(books.store, "bob", now - 5 * HOUR_S, now - HOUR_S, gpus=8)
        found = over(await books.read(now), now, 9)
        assert found is not None
        assert (found.limit, found.most) == (limit, 10.0)
        assert found.used == pytest.approx(expected)

    with_books(tmp_path, f"quotas: {{default: {{{limit}: 10}}}}", work)


@pytest.mark.parametrize("limit", list(WINDOWS_S))
def test_a_job_that_ran_across_midnight_leaves_the_window_hour_by_hour(tmp_path: Path, limit: Limit) -> None:
    """Two GPUs from half past eleven until half past one: 1, 2 and 1 GPU-hours of three hours of the clock."""
    end = MIDNIGHT + 1.5 * HOUR_S
    full = MIDNIGHT + WINDOWS_S[limit]

    async def work(books: Books) -> None:
        await used(books.store, "ann", MIDNIGHT - 0.5 * HOUR_S, end, gpus=2)
        since_then = await books.read(end)
        for now, expected in ((end, 4), (full - 1, 4), (full, 3), (full + HOUR_S - 1, 3), (full + HOUR_S, 1)):
            for book in (since_then, await books.read(now)):
                found = over(book, now, 4.9)
                assert found is not None
                assert found.used == pytest.approx(expected), (now - full, book is since_then)
                assert found.until == pytest.approx(full + 2 * HOUR_S - BOOTED)
        for book in (since_then, await books.read(full + 2 * HOUR_S)):
            assert over(book, full + 2 * HOUR_S, 4.9) is None

    # What fades fast is no reason to forget what a quota counts.
    with_books(tmp_path, f"quotas: {{default: {{{limit}: 5}}}}\nfair_share: {{half_life: 1h}}", work)


def test_without_a_quota_on_gpu_hours_no_windows_are_made(tmp_path: Path) -> None:
    async def work(books: Books) -> None:
        await used(books.store, "ann", MIDNIGHT, MIDNIGHT + HOUR_S)
        accounts = (await books.read(MIDNIGHT + HOUR_S)).accounts(at(MIDNIGHT + HOUR_S))
        assert accounts.hours == {}
        assert accounts.averages["ann"] > 0

    with_books(tmp_path, "quotas: {default: {gpus: 4}}", work)


def test_hours_that_nothing_counts_any_more_are_not_kept_in_memory(tmp_path: Path) -> None:
    async def work(books: Books) -> None:
        await used(books.store, "ann", MIDNIGHT, MIDNIGHT + 3 * HOUR_S)
        await used(books.store, "bob", MIDNIGHT, MIDNIGHT + HOUR_S)
        kept = await books.read(MIDNIGHT + 3 * HOUR_S)
        assert {user: len(hours) for user, hours in kept._hours.items()} == {"ann": 3, "bob": 1}
        before = kept.averages(at(MIDNIGHT + 8 * DAY_S))["ann"]
        await kept.read(at(MIDNIGHT + 7 * DAY_S + 2 * HOUR_S))
        assert {user: len(hours) for user, hours in kept._hours.items()} == {"ann": 1}
        await kept.read(at(MIDNIGHT + 8 * DAY_S))
        assert kept._hours == {}
        assert kept.averages(at(MIDNIGHT + 8 * DAY_S))["ann"] == pytest.approx(before)

    with_books(tmp_path, "fair_share: {half_life: 12h}", work)


# --- averages ------------------------------------------------------------------------------------------------------

FADING = f"fair_share: {{half_life: {int(HALF_LIFE_S)}s}}"


def test_past_use_counts_half_after_a_half_life_whoever_asks_when(tmp_path: Path) -> None:
    async def work(books: Books) -> None:
        end = MIDNIGHT + 3 * HOUR_S
        await used(books.store, "ann", MIDNIGHT, end, gpus=2)
        kept = await books.read(end)
        # Two devices of which somebody asks as they are given back have the same average as two that are still held.
        first = kept.averages(at(end))["ann"]
        assert first == pytest.approx(FairShare(HALF_LIFE_S).running(2, 3 * HOUR_S), rel=1e-3)
        for half_lives in (0, 1, 2, 5):
            now = end + half_lives * HALF_LIFE_S
            for book in (kept, await books.read(now)):
                assert book.averages(at(now)) == {"ann": pytest.approx(first / 2**half_lives)}
                assert book.accounts(at(now)).averages == book.averages(at(now))

    with_books(tmp_path, FADING, work)


def test_what_was_read_before_counts_once_also_of_an_hour_that_grows(tmp_path: Path) -> None:
    async def work(books: Books) -> None:
        kept = await books.read(MIDNIGHT)
        assert kept.averages(at(MIDNIGHT)) == {}
        for begin, end in ((0, 600), (600, 1200), (1800, 2 * HOUR_S)):
            await used(books.store, "ann", MIDNIGHT + begin, MIDNIGHT + end)
            for _ in range(2):
                await kept.read(at(MIDNIGHT + end))
        now = MIDNIGHT + 2 * HOUR_S
        fresh = await books.read(now)
        assert kept.averages(at(now))["ann"] == pytest.approx(fresh.averages(at(now))["ann"], rel=1e-2)

    with_books(tmp_path, FADING, work)


def test_past_use_decides_between_two_who_hold_the_same_now_until_it_has_faded(tmp_path: Path) -> None:
    async def work(books: Books) -> None:
        end = MIDNIGHT + DAY_S
        await used(books.store, "ann", MIDNIGHT, end, gpus=4)
        book = await books.read(end)

        def first(now_s: float, *, knows_the_past: bool) -> list[int]:
            """One device is free; ann's job has waited a minute longer than bob's."""
            now = at(now_s)
            waiting = [job(1, user="ann", at=now.boot_s - 120), job(2, user="bob", at=now.boot_s - 60)]
            holding = [
                holds(number, where, user=user, submitted_at=now.boot_s - 900, started_at=now.boot_s - 600)
                for number, where, user in ((8, "n1", "ann"), (9, "n2", "bob"))
            ]
            view = snapshot(nodes(3), waiting, holding, now.boot_s)
            return list(started(schedule(replace(view, accounts=book.accounts(now)) if knows_the_past else view)))

        assert first(end, knows_the_past=False) == [1], "by what they hold, the older job is first"
        assert first(end, knows_the_past=True) == [2]
        assert first(end + 2 * HALF_LIFE_S, knows_the_past=True) == [2]
        assert first(end + 6 * HALF_LIFE_S, knows_the_past=True) == [1]

    with_books(tmp_path, FADING, work)
