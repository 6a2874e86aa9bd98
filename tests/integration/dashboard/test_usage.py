"""The page of what users have used: against quotas, with a link to their jobs, as CSV, and on a telephone."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.rig.browser import Dashboard, accessibility_problems, dashboards
from ugro.kernel.jobs.model import JobSpec, JobState, Placement, Share
from ugro.kernel.store.database import Store
from ugro.kernel.support.state_dir import StateDir

CLUSTER = """
nodes:
  here: {transport: local, remote_root: '%(home)s/root'}
quotas:
  default: {gpus: 4, gpu_hours_per_day: 48}
  groups: {students: {members: [ann, bob], gpus: 6}, lab: {unix_group: no-such-group, gpus: 2}}
energy: {price_per_kwh: 0.5, currency: EUR}
fair_share: {weights: {ann: 2}}
"""
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def fill(home: Path) -> None:
    async def work() -> None:
        store = Store(StateDir(home).database)
        await store.open()
        for number, user in enumerate(("ann", "ann", "bob", "=eve"), start=1):
            job = (await store.jobs.submit(JobSpec(f"job{number}", ("true",)), user, str(number))).job
            job = await store.jobs.start(job, Placement((Share("gone", (number,), 1),)), "free")
            job = await store.jobs.move(job, JobState.STOPPING, "ended")
            job = await store.jobs.move(job, JobState.SUCCEEDED, "done", exit_code=0)
            await store.usage.note_energy({job.id: 3.6e6})
        await store.close()

    asyncio.run(work())


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    with dashboards(CLUSTER, before=fill) as found:
        yield found


def test_the_page_shows_users_and_groups_against_their_quotas(dashboard: Dashboard, page: Page) -> None:
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Usage").click()
    ann = page.locator("[data-key='user-ann']")
    expect(ann.locator("td").first).to_have_text("2")
    expect(ann).to_contain_text("2.00 kWh")
    expect(ann).to_contain_text("1.00 EUR")
    expect(ann).to_contain_text("gpus: 0 of 4")
    students = page.locator("[data-key='group-students']")
    expect(students).to_contain_text("ann, bob")
    expect(students.locator("td").first).to_have_text("3")
    expect(page.locator("[data-key='group-lab']")).to_contain_text("there is no Unix group no-such-group")
    expect(page.locator(".foot-cli")).to_contain_text("ugro usage --since 7d")
    assert accessibility_problems(page) == []
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate(WIDE) <= 0, "it fits a telephone"
    page.set_viewport_size({"width": 1200, "height": 900})
    answer = page.request.get(f"{dashboard.url}/usage.csv?days=30")
    rows = list(csv.DictReader(io.StringIO(answer.text())))
    assert {(row["kind"], row["name"], row["jobs"]) for row in rows} == {
        ("user", "ann", "2"), ("user", "bob", "1"), ("user", "'=eve", "1"), ("group", "students", "3"),
        ("group", "lab", "0"),
    }  # fmt: skip
    assert page.request.get(f"{dashboard.url}/usage?days=nonsense").status == 400
    ann.get_by_role("link", name="ann").click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    expect(page.locator("main")).to_contain_text("job1")
