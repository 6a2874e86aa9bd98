"""The pages of jobs in a real browser: real jobs on this machine, whose logs are nobody's friend."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from tests.rig.browser import Dashboard, accessibility_problems, contexts, dashboards
from tests.rig.ports import free_port
from tests.rig.training import Pretend
from tests.rig.waiting import wait_until
from ugro.kernel.jobs.model import Job, JobState
from ugro.kernel.jobs.operations import CancelJob
from ugro.lab.nodes import SimulatedGpu, build_nvml_stub, write_gpus

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

_RANKS = 64
_JOB_S = 60
_NASTY = (
    r"""printf '\033[31mred\033[0m \033]0;title\007plain\033[2J\033[1;5H\n'; """
    r"""printf ' 10 %%\r 50 %%\r100 %%\n'; """
    r"""echo '<img src=x onerror="document.title=1"><script>document.title="owned"</script>'; """
    r"""printf 'abc \342\200\256gnol'; """
)
# All say something before one of them fails, and with it the others.
_SPEAKING_RANK = """\
import glob, os, sys, time
rank = os.environ["RANK"]
print("I am rank", rank, flush=True)
open(f"{sys.argv[1]}/spoke-{rank}", "w").close()
while rank != "13" or len(glob.glob(f"{sys.argv[1]}/spoke-*")) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.05)
sys.exit("unlucky")
"""

_STEPPING_RANK = """\
import json, os, pathlib, sys, time
rank = int(os.environ["RANK"])
with open(os.environ["UGRO_OUTPUT"] + f"/metrics_{rank}.jsonl", "w", buffering=1) as out:
    for step in (1, 10 * (rank + 1)):
        out.write(json.dumps({"step": step, "time": time.time(), "rank": rank, "values": {"loss": 1.0}}) + "\\n")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """Of a node with many GPUs, and at a port that it has again after a restart."""
    folder = tmp_path_factory.mktemp("gpus")
    env = ""
    if shutil.which("cc") is not None:
        write_gpus(folder / "gpus", [SimulatedGpu()] * _RANKS)
        env = f", env: {{UGRO_NVML_LIBRARY: {build_nvml_stub(folder)}, UGRO_PRETEND_GPUS: {folder}/gpus}}"
    node = f"nodes: {{here: {{transport: local, remote_root: '%(home)s/root'{env}}}}}\n"
    with dashboards(f"{node}dashboard: {{port: {free_port()}}}\n") as found:
        yield found


@pytest.fixture
def run(dashboard: Dashboard, tmp_path: Path) -> Callable[..., Job]:
    """Submits a shell's command; it takes no core, so that many can run here."""

    def submit(script: str, **fields: Any) -> Job:
        given = {"command": ["sh", "-c", script], "cpus": 0, "sync": False, "cwd": str(tmp_path)}
        return dashboard.client.jobs.submit(fields={**given, **fields})

    return submit


def _open(dashboard: Dashboard, page: Page, job: Job, query: str = "") -> None:
    page.goto(f"{dashboard.url}/jobs/{job.id}{query}")


def _ended(dashboard: Dashboard, job: Job) -> Job:
    return dashboard.client.jobs.wait(job.id, timeout_s=_JOB_S)


def _follow_box(page: Page) -> Locator:
    return page.get_by_label("follow", exact=True)


def _lines(page: Page) -> list[str]:
    found: list[str] = page.evaluate("[...document.querySelectorAll('.log-text')].map(one => one.textContent)")
    return found


def _wait_for_line(page: Page, text: str) -> None:
    page.locator(".log-text").get_by_text(text, exact=True).wait_for()


def _wait_for_state(page: Page, state: str) -> None:
    page.locator("#why .status", has_text=state).wait_for()


# --- why ----------------------------------------------------------------------------------------------------------


def test_a_failed_job_says_first_who_failed_and_what_it_said_last(
    dashboard: Dashboard, page: Page, run: Callable[..., Job]
) -> None:
    job = run(f"seq 1 40; {_NASTY} echo; echo 'ValueError: <b>bold</b>'; exit 3", name="bad")
    _ended(dashboard, job)
    _open(dashboard, page, job)

    why = page.locator("#why")
    expect(why).to_contain_text("failed")
    expect(why).to_contain_text("exit code 3")
    expect(why.locator("pre")).to_contain_text("ValueError: <b>bold</b>")
    expect(why.locator("b", has_text="bold"), "what a job writes is text").to_have_count(0)
    expect(page.locator("section").first).to_have_id("why")
    expect(page.locator("#ranks tbody tr")).to_contain_text("exit code 3 failed first")
    _wait_for_line(page, "ValueError: <b>bold</b>")


def test_what_a_log_says_cannot_become_markup_or_escapes(
    dashboard: Dashboard, page: Page, run: Callable[..., Job]
) -> None:
    job = run(_NASTY, name="nasty")
    _ended(dashboard, job)
    _open(dashboard, page, job)

    _wait_for_line(page, "red plain")
    assert _lines(page)[:3] == [
        "red plain",
        "100 %",
        """<img src=x onerror="document.title=1"><script>document.title="owned"</script>""",
    ]
    assert _lines(page)[3] == "abc gnol", "nothing may turn the direction of what follows"
    expect(page.locator(".log-view img, .log-view script")).to_have_count(0)
    expect(page.locator(".ansi-1")).to_have_text("red")
    assert "owned" not in page.title()


@pytest.mark.proof
def test_a_waiting_job_says_for_whom_it_waits_and_starts_before_ones_eyes(
    dashboard: Dashboard, page: Page, run: Callable[..., Job], tmp_path: Path
) -> None:
    holder = run(f"until [ -e {tmp_path}/go ]; do sleep 0.1; done", name="holder")
    job = run("echo it runs now", name="later", after=[str(holder.id)])
    page.goto(f"{dashboard.url}/jobs")
    row = page.locator("[data-part=waiting] tr", has_text="later")
    row.get_by_text(f"job {holder.id}").wait_for()
    _open(dashboard, page, job)

    expect(page.locator("#why")).to_contain_text(f"job {holder.id}")
    page.locator(".log-status", has_text="no output yet").wait_for()
    (tmp_path / "go").touch()
    _wait_for_state(page, "succeeded")
    _wait_for_line(page, "it runs now")


# --- logs ---------------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_log_is_followed_while_it_is_written_and_over_a_restart_of_the_agent(
    dashboard: Dashboard, page: Page, run: Callable[..., Job], tmp_path: Path
) -> None:
    script = "for i in 1 2 3; do echo part $i; until [ -e $i ]; do sleep 0.1; done; done; printf 'at last'; sleep 0.1"
    job = run(script, name="slow")
    _open(dashboard, page, job)
    _wait_for_line(page, "part 1")
    (tmp_path / "1").touch()
    _wait_for_line(page, "part 2")

    dashboard.restart()
    (tmp_path / "2").touch()
    _wait_for_line(page, "part 3")
    (tmp_path / "3").touch()
    _wait_for_line(page, "at last")
    _wait_for_state(page, "succeeded")
    assert _lines(page) == ["part 1", "part 2", "part 3", "at last"]


@pytest.mark.proof
def test_a_second_attempt_is_followed_and_the_first_can_still_be_read(
    dashboard: Dashboard, page: Page, run: Callable[..., Job], tmp_path: Path
) -> None:
    first = "if [ ! -e tried ]; then echo first; until [ -e go ]; do sleep 0.1; done; touch tried; exit 1; fi"
    job = run(f"{first}; echo second", name="twice", retries=1)
    _open(dashboard, page, job)
    _wait_for_line(page, "first")
    (tmp_path / "go").touch()

    _wait_for_line(page, "second")
    _wait_for_state(page, "succeeded")
    assert _lines(page) == ["second"]
    page.locator("[data-part=attempts] li").nth(1).get_by_role("link", name="log").click()
    _wait_for_line(page, "first")
    assert _lines(page) == ["first"]


@pytest.mark.proof
def test_of_a_large_log_a_window_is_in_the_page_and_everything_can_be_reached(
    dashboard: Dashboard, page: Page, run: Callable[..., Job]
) -> None:
    job = run("seq -f 'line %.0f of many, many lines' 1 60000", name="large")
    _ended(dashboard, job)
    sizes: list[int] = []
    page.on("response", lambda answer: sizes.append(len(answer.body())) if "/log?" in answer.url else None)
    _open(dashboard, page, job)
    _wait_for_line(page, "line 60000 of many, many lines")
    assert sum(sizes) < 400_000

    page.locator(".log-view").hover()
    first = _first_number(page)
    for _ in range(3):
        page.mouse.wheel(0, -100_000)
        wait_until(lambda seen=first: _first_number(page) < seen, 20, "an earlier page")  # type: ignore[misc]
        first = _first_number(page)
    expect(_follow_box(page), "who looks back is left where he is").not_to_be_checked()
    numbers = _numbers(page)
    assert numbers == list(range(numbers[0], numbers[-1] + 1)), "between pages nothing is lost or doubled"
    assert len(numbers) <= 8000

    page.get_by_label("Find in the whole log").fill("LINE 1234 of")
    page.get_by_label("Find earlier").click()
    page.locator(".log-hit").get_by_text("line 1234 of many, many lines").wait_for()
    expect(page, "it can be linked to").to_have_url(re.compile("at=0"))
    page.reload()
    page.locator(".log-hit").get_by_text("line 1234 of many, many lines").wait_for()
    page.get_by_label("Find in the whole log").fill("nowhere")
    page.get_by_label("Find later").click()
    page.get_by_text("no later “nowhere”").wait_for()
    _follow_box(page).check()
    _wait_for_line(page, "line 60000 of many, many lines")


@pytest.mark.proof
def test_a_job_of_64_ranks_shows_each_and_all_in_the_order_of_time(
    dashboard: Dashboard, page: Page, tmp_path: Path
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("not installed: a C compiler")
    code = tmp_path / "code"
    code.mkdir()
    (code / "rank.py").write_text(_SPEAKING_RANK)
    fields = {"script": "rank.py", "workdir": str(code), "launcher": "ddp", "gpus_per_node": str(_RANKS), "cpus": 0}
    job = dashboard.client.jobs.submit(fields={**fields, "args": [str(tmp_path)], "name": "many"})
    assert _ended(dashboard, job).state is JobState.FAILED
    _open(dashboard, page, job)

    expect(page.locator("#ranks tbody tr")).to_have_count(_RANKS)
    expect(page.locator("#ranks tbody tr").nth(13)).to_contain_text("exit code 1 failed first")
    expect(page.locator("#ranks tbody tr").nth(40)).to_contain_text(re.compile("ended by SIG(TERM|KILL)"))
    expect(page.locator("#ranks tbody tr").nth(40)).not_to_contain_text("failed")
    _wait_for_line(page, "unlucky")
    assert _lines(page) == ["I am rank 13", "unlucky"], "the culprit's log is the one that is shown"
    page.get_by_role("link", name="show the log of rank 40").click()
    _wait_for_line(page, "I am rank 40")
    page.locator("ugro-log select").first.select_option("all")
    everybody = {f"r{rank}" for rank in range(_RANKS)}
    wait_until(lambda: set(page.locator(".log-rank").all_inner_texts()) == everybody, 30, "the lines of all ranks")


@pytest.mark.proof
def test_each_rank_says_how_it_is_and_how_far_it_has_come(dashboard: Dashboard, page: Page, tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("not installed: a C compiler")
    code = tmp_path / "code"
    code.mkdir()
    (code / "rank.py").write_text(_STEPPING_RANK)
    fields = {"script": "rank.py", "workdir": str(code), "launcher": "ddp", "gpus_per_node": "2", "cpus": 0}
    job = dashboard.client.jobs.submit(fields={**fields, "args": [str(tmp_path / "go")], "name": "stepping"})
    _open(dashboard, page, job)

    states, steps = (page.locator(f"#ranks tbody td:nth-child({column})") for column in (4, 5))
    expect(steps).to_have_text(["10", "20"])
    expect(states).to_have_text(["● started", "● started"])
    (tmp_path / "go").touch()
    expect(states).to_have_text(["✓ exit code 0", "✓ exit code 0"])
    expect(steps).to_have_text(["10", "20"])


# --- acting -------------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_job_is_cancelled_and_tried_again_by_its_buttons(
    dashboard: Dashboard, page: Page, run: Callable[..., Job]
) -> None:
    job = run("echo begun; sleep 600", name="endless")
    _open(dashboard, page, job)
    _wait_for_line(page, "begun")
    page.get_by_role("button", name="Cancel").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"ugro cancel {job.id}")
    dialog.get_by_role("button", name=f"Cancel job {job.id}").click()
    _wait_for_state(page, "cancelled")
    assert _ended(dashboard, job).state is JobState.CANCELLED

    page.get_by_role("button", name="Retry").click()
    page.get_by_role("dialog").get_by_role("button", name=f"Submit job {job.id} again").click()
    page.wait_for_url(re.compile(rf"/jobs/(?!{job.id}$)\d+$"))
    again = dashboard.client.jobs.get(page.url.rpartition("/")[2])
    assert again.spec == job.spec
    dashboard.client.ask(CancelJob(str(again.id)))
    _wait_for_state(page, "cancelled")


# --- the list -----------------------------------------------------------------------------------------------------


def test_thousands_of_jobs_are_gone_through_by_pages_and_filtered(dashboard: Dashboard, page: Page) -> None:
    fields = [{"command": ["true"], "cpus": 0, "sync": False, "name": f"tiny-{number % 2}"} for number in range(120)]
    jobs = dashboard.client.jobs.submit_many(fields)
    for job in jobs:
        _ended(dashboard, job)

    page.goto(f"{dashboard.url}/jobs?q=TINY-1")
    wanted = [str(job.id) for job in reversed(jobs) if job.spec.name == "tiny-1"]
    ids = page.locator("[data-part=found] td:nth-child(2)")
    expect(ids).to_have_text(wanted[:50])
    page.get_by_role("link", name="older").click()
    expect(page).to_have_url(re.compile("before="))
    expect(ids).to_have_text(wanted[50:])
    expect(page.get_by_role("link", name="older")).to_have_count(0)
    page.get_by_role("link", name="newer").click()
    expect(page).to_have_url(re.compile("after="))
    expect(ids).to_have_text(wanted[:50])
    page.goto(f"{dashboard.url}/jobs?state=queued&q=nobody")
    page.get_by_text("No job matches the filter.").wait_for()


# --- where the time goes ------------------------------------------------------------------------------------------


def test_the_balance_of_a_training_names_the_slow_rank_and_its_configuration_hides_secrets(
    dashboard: Dashboard, page: Page, run: Callable[..., Job], tmp_path: Path
) -> None:
    records = tmp_path / "records.jsonl"
    records.write_bytes(b"".join(Pretend([0.001, 0.004], names=("here", "there"), mode="off").run(60)))  # type: ignore[arg-type]
    job = run(f"cp {records} $UGRO_OUTPUT/metrics.jsonl", name="training", env=["API_TOKEN=hush", "RATE=0.5"])
    _ended(dashboard, job)
    _open(dashboard, page, job)

    rows = page.locator("table.balance tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(1)).to_contain_text("there")
    waiting = page.locator("table.balance tbody tr").nth(0).locator("rect.part-waiting")
    assert float(waiting.get_attribute("width") or 0) > 500, "the fast rank waits for most of a step"
    page.locator(".finding.warn").first.wait_for()
    page.locator("#outputs").get_by_text("metrics.jsonl").wait_for()
    expect(page.locator("#configuration")).to_contain_text("RATE: '0.5'")
    assert "hush" not in page.content()


# --- for everybody ------------------------------------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.parametrize(("width", "theme"), [(390, "light"), (1360, "dark")])
def test_the_pages_fit_the_screen_and_axe_finds_nothing(
    dashboard: Dashboard, browser: Browser, run: Callable[..., Job], width: int, theme: Any
) -> None:
    job = run("seq 1 30; echo oh; exit 1", name="a-name-without-any-blank-that-is-rather-long-for-a-telephone")
    _ended(dashboard, job)
    with contexts(browser, viewport={"width": width, "height": 800}, color_scheme=theme) as context:
        page = dashboard.sign_in(context)
        page.goto(f"{dashboard.url}/jobs")
        page.locator(".jobs").first.wait_for()
        assert page.evaluate(_OVERFLOW) <= 0
        assert accessibility_problems(page) == []
        _open(dashboard, page, job)
        _wait_for_line(page, "oh")
        page.locator("#outputs table").wait_for()
        assert page.evaluate(_OVERFLOW) <= 0
        assert accessibility_problems(page) == []


@pytest.mark.proof
def test_a_job_that_is_not_there_and_questions_that_make_no_sense_have_an_answer(
    dashboard: Dashboard, page: Page, run: Callable[..., Job]
) -> None:
    job = run("echo one", name="one")
    _ended(dashboard, job)
    answers = {
        "/jobs/999999": 404,
        "/jobs/nobody": 404,
        f"/jobs/{job.id}/log?rank=7": 404,
        f"/jobs/{job.id}/log?attempt=9": 404,
        f"/jobs/{job.id}/log?after=x": 400,
        f"/jobs/{job.id}/log?at=5:0": 404,
        f"/jobs/{job.id}/log/search?q=": 400,
        f"/jobs/{job.id}/log/raw?rank=-1": 404,
        "/jobs/last": 200,
        f"/jobs/{job.id}/log/raw": 200,
    }
    assert {path: page.request.get(dashboard.url + path).status for path in answers} == answers
    assert page.request.get(f"{dashboard.url}/jobs/{job.id}/log/raw").body() == b"one\n"


_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def _numbers(page: Page) -> list[int]:
    return [int(line.split()[1]) for line in _lines(page)]


def _first_number(page: Page) -> int:
    return _numbers(page)[0]
