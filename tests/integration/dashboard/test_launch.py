"""A job is launched again with changes, in a real browser: with its own code, once, and by nobody from elsewhere."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Page, Route, expect

from tests.integration.dashboard.test_access import FOREIGN
from tests.rig.browser import ONE_NODE, Dashboard, dashboards
from tests.rig.web import ask
from ugro.kernel.jobs.model import Job, JobState
from ugro.kernel.jobs.operations import GetJobFile

_SECRET = "hush-hush"
_SCRIPT = "import os, sys\nprint('code', {}, sys.argv[1:], len(os.environ['API_TOKEN']))\n"


@pytest.fixture(scope="module")
def job(dashboard: Dashboard, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """An ended training, whose code has been changed since."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "train.py").write_text(_SCRIPT.format(1))
    fields = {"script": "train.py", "workdir": str(folder), "args": ["--lr", "1"], "name": "first", "cpus": 0}
    env = [f"API_TOKEN={_SECRET}", "RATE=5"]
    found = dashboard.client.jobs.submit(fields={**fields, "env": env})
    assert dashboard.client.jobs.wait(found.id).state is JobState.SUCCEEDED
    (folder / "train.py").write_text(_SCRIPT.format(2))
    return found


def test_a_mistake_is_shown_where_it_is_and_nothing_is_lost(dashboard: Dashboard, page: Page, job: Job) -> None:
    page.goto(f"{dashboard.url}/jobs/{job.id}/again")
    limit, launch = page.get_by_label("Time limit"), page.get_by_role("button", name="Launch as a new job")
    editor = page.get_by_role("textbox", name="Job file")
    text = editor.input_value().replace("name: first", "nmae: first")
    editor.fill(text)
    limit.fill("soon")
    launch.click()
    expect(page.get_by_role("alert").filter(has_text="--time-limit: expected")).to_be_visible()
    expect(limit).to_be_focused()
    limit.fill("10m")
    launch.click()
    expect(page.get_by_role("alert").filter(has_text="Line 1: nmae: unknown key")).to_contain_text("did you mean name?")
    assert page.evaluate("[text.selectionStart, text.selectionEnd]") == [0, len("nmae: first")]
    expect(editor).to_have_value(text)
    expect(page.locator("#again-cli")).to_contain_text("ugro launch -f job.yaml --time-limit 10m")


def test_a_press_before_the_page_is_ready_loses_nothing(dashboard: Dashboard, page: Page, job: Job) -> None:
    held: list[Route] = []
    page.route("**/static/again.js", lambda route: held.append(route))
    with page.expect_request("**/static/again.js"):
        page.goto(f"{dashboard.url}/jobs/{job.id}/again", wait_until="commit")
    launch = page.get_by_role("button", name="Launch as a new job")
    expect(launch).to_be_disabled()
    held.pop().continue_()
    expect(launch).to_be_enabled()


def test_a_job_is_launched_again_with_changes_and_its_own_code(dashboard: Dashboard, page: Page, job: Job) -> None:
    page.goto(f"{dashboard.url}/jobs/{job.id}")
    page.get_by_role("link", name="Launch with changes").click()
    expect(page.get_by_label("Variables")).to_have_value("API_TOKEN\nRATE=5")
    assert _SECRET not in page.content()
    page.get_by_label("Arguments").fill("--lr 2 'two words'")
    editor = page.get_by_role("textbox", name="Job file")
    editor.fill(editor.input_value().replace("name: first", "name: second\ntime_limit: 10m"))
    before = len(dashboard.client.jobs.newest())
    with page.expect_request(lambda request: request.method == "POST") as sent:
        page.get_by_role("button", name="Launch as a new job").dblclick()
    page.wait_for_url(lambda url: "/again" not in url)

    new = dashboard.client.jobs.wait(page.url.rpartition("/")[2])
    own = {"origin": dashboard.url, "content-type": "application/json"}
    assert page.request.post(sent.value.url, data=sent.value.post_data, headers=own).json() == {"id": new.id}
    assert len(dashboard.client.jobs.newest()) == before + 1, "the same request, sent again, submits once"
    assert (new.spec.name, new.spec.snapshot, new.spec.time_limit_s) == ("second", job.spec.snapshot, 600.0)
    assert dict(new.spec.env) == {"API_TOKEN": _SECRET, "RATE": "5"}
    log = b"".join(piece.content for piece in dashboard.client.jobs.logs(new.id))
    assert f"code 1 ['--lr', '2', 'two words'] {len(_SECRET)}" in log.decode(), "not the code of today"
    told = [event.text for event in dashboard.client.jobs.events(job=job.id)]
    assert any(f"launched again with changes as job {new.id}" in text for text in told)


def test_only_the_page_itself_launches_and_only_what_has_the_same_code(
    dashboard: Dashboard, page: Page, job: Job
) -> None:
    where = f"{dashboard.url}/jobs/{job.id}/again"
    text = dashboard.client.ask(GetJobFile(str(job.id))).file
    before = len(dashboard.client.jobs.newest())
    for headers in FOREIGN:
        body = json.dumps({"key": "k" * 20, "text": text, "fields": {}})
        answer = page.request.post(where, data=body, headers={"content-type": "application/json", **headers})
        assert answer.status == 403, headers

    def launched(content: str, **fields: str) -> str:
        body = {"key": "k" * 20, "text": content, "fields": fields}
        answer = page.request.post(where, data=body, headers={"origin": dashboard.url})
        assert answer.status == 400
        return str(answer.json()["error"]["message"])

    assert "workdir: cannot be changed here" in launched(text + "workdir: /etc\n")
    assert "cwd: cannot be changed here" in launched(text + "cwd: /\n")
    assert "script: other.py is not in the code" in launched(text.replace("train.py", "other.py"))
    assert "env.AWS_SECRET: it has no value" in launched(text, env="AWS_SECRET")
    assert "there is no channel" in launched(text + "notify: [nowhere]\n")
    assert len(dashboard.client.jobs.newest()) == before, "nothing was submitted"


@pytest.mark.proof
def test_a_dashboard_that_does_not_launch_says_so() -> None:
    with dashboards(ONE_NODE + "dashboard: {launch: false}\n") as dashboard:
        number = dashboard.submit("one")
        token = (dashboard.home / "dashboard.token").read_text().strip()
        known = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        where = f"/jobs/{number}/again"
        body = json.dumps({"key": "k" * 20, "text": "command: ['true']\n", "fields": {}})
        page, form = (ask(dashboard, "GET", path, known) for path in (f"/jobs/{number}", where))
        refused = ask(dashboard, "POST", where, known, body)
        assert ("/again" in page.text, form.status, refused.status) == (False, 403, 403)
        assert "dashboard.launch" in json.loads(refused.text)["error"]["hint"]
        assert [one.id for one in dashboard.client.jobs.newest()] == [number]
