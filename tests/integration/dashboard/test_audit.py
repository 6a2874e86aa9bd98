"""The audit log has what was done by commands and in a browser, by whom, and no secret."""

from __future__ import annotations

import getpass
import json
import os
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from tests.rig import inside
from tests.rig.agent import environment
from tests.rig.browser import Dashboard
from ugro.kernel.access.operations import ListAuditEntries
from ugro.kernel.agent.operations import DrainNode, ResumeNode

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_commands_and_browsers_are_recorded_with_who_did_it(dashboard: Dashboard, page: Page) -> None:
    me = getpass.getuser()
    job = dashboard.submit("audited", "sleep", "60", env={"HF_TOKEN": "hush"})
    page.goto(f"{dashboard.url}/jobs/{job}")
    answer = page.evaluate(f"fetch('/v1/jobs/{job}/cancel', {{method: 'POST'}}).then(answer => answer.json())")
    assert answer == {"id": job}, "no variables of the job"
    list(dashboard.client.exec(["here"], ["true", "--api-key", "hush", "https://u:hush@h"]))
    stranger = urllib.request.Request(f"{dashboard.url}/jobs", headers={"Authorization": "Bearer hush"})
    try:
        urllib.request.urlopen(stranger, timeout=20)
    except urllib.error.HTTPError as error:
        error.close()
    dashboard.client.jobs.wait(job)

    def call(*words: str) -> str:
        done = inside.call(["audit", *words], environment(dashboard.home), dashboard.home)
        assert done.returncode == 0, done.stderr
        assert "hush" not in done.stdout
        return done.stdout

    entries = json.loads(call("--json"))["audit"]
    assert list(entries[0]) == ["at", "user", "via", "action", "subject", "outcome"]
    found = {(one["user"], one["action"], one["subject"], one["outcome"]) for one in entries}
    assert {
        (me, "submit", str(job), "done"),
        (me, "sign in", "", "done"),
        (me, "cancel", str(job), "done"),
        (me, "exec", "here true --api-key '***' 'https://u:***@h'", "done"),
        ("", "sign in", "by token", "refused"),
    } <= found
    [cancelled] = [one for one in entries if one["action"] == "cancel" and one["subject"] == str(job)]
    assert cancelled["via"].startswith("browser, 127.0.0.1, session ")
    [ran] = [one for one in entries if one["action"] == "exec"]
    assert ran["via"] == f"pid {os.getpid()}"

    header, *lines = call("--since", "1h", "--user", me).splitlines()
    assert header == "time\tuser\tvia\taction\tsubject\toutcome"
    assert {line.split("\t")[1] for line in lines} == {me}
    assert len(call("-n", "1").splitlines()) == 2
    assert inside.call(["audit", "-n", "0"], environment(dashboard.home), dashboard.home).returncode == 2


@pytest.mark.proof
def test_the_log_outlives_the_agent(dashboard: Dashboard) -> None:
    dashboard.client.ask(DrainNode("here", "for the audit"))
    dashboard.restart()
    entries = dashboard.client.ask(ListAuditEntries()).audit
    assert [one.subject for one in entries if one.action == "drain"] == ["here for the audit"]
    dashboard.client.ask(ResumeNode("here"))
