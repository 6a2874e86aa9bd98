"""Pages of services, sweeps and hardware, made from reports of each kind: nothing is missing, and nothing is markup."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.rig.service_reports import service
from tests.unit.policy.sweep.test_page import REPORT, TRIALS
from ugro.features.hardware import pages as hardware
from ugro.features.hardware.model import AllReduceFigures, LinkFigures
from ugro.features.services.model import Phase, ReplicaPhase
from ugro.features.sweeps.rules.page import document, rows
from ugro.kernel.agent.agent import Agent
from ugro.web.site import Site

AGENT = SimpleNamespace(cluster_name="home", state_error=None, config_error=None, safe_mode=None)


def rendered(template: str, **context: Any) -> str:
    base = {"path": "/", "theme": None, "cursor": 0, "agent": AGENT, "may_launch": True, "now": 0.0, "version": "1"}
    return _site()._templates.get_template(template).render({**base, "cli": None, **context})


@cache
def _site() -> Site:
    return Site(cast(Agent, None))  # templates are made without it


def service_page(**changes: Any) -> str:
    return rendered("service.html", service=service("chat", **changes), has_tokens=True)


@pytest.mark.parametrize("state", Phase)
def test_a_service_in_each_state_has_a_page(state: Phase) -> None:
    assert f"</span> {state}</span>" in service_page(state=state)


def test_a_service_page_has_what_its_report_says() -> None:
    text = service_page(reason="<script>x</script>", update="to revision 2", is_canary=True, needs_keys=True, held=2)
    assert "<script>x" not in text
    assert "ugro serve update chat --promote" in text
    assert "ugro serve key create chat" in text
    assert "2 for a replica to start" in text
    assert 'href="/jobs/7"' in text
    assert ">34</td>" in text, "tokens"


def test_each_state_of_a_replica_has_a_sign() -> None:
    first, *_ = service("chat").replicas
    for state in ReplicaPhase:
        text = service_page(replicas=(replace(first, state=state),))
        known = state in (ReplicaPhase.ENDED,) or f'aria-hidden="true">•</span> {state}' not in text
        assert known, state


def test_lists_have_their_rows_or_the_next_command() -> None:
    assert "ugro serve JOB" in rendered("services.html", services=[])
    assert "http://127.0.0.1:8000" in rendered("services.html", services=[service("chat")])


@pytest.mark.parametrize("has_workers", [False, True])
def test_a_sweep_page_has_its_trials_and_its_document(has_workers: bool) -> None:
    found = replace(REPORT, workers=TRIALS[:2] if has_workers else ())
    header, *shown = rows(found)
    text = rendered(
        "sweep.html",
        sweep=found,
        header=header,
        rows=shown,
        left_out=0,
        document=document(found, has_jobs=True),
        best_values={"lr": "0.1"},
        compared=[1, 2],
    )
    assert text.count("data-trial=") == 4
    assert "<b>&lt;b&gt;" not in text
    assert ("Table of workers" in text) == has_workers
    assert ("--launch" in text) != has_workers, "a study's script chooses its parameters itself"


def test_links_that_were_measured_are_shown_though_no_node_was_measured_by_itself() -> None:
    when = "2026-01-01T00:00:00+00:00"
    link = LinkFigures("gpu1", "gpu2", when, 1.1e9, 9e8, 2e-4, 1e-5)
    reduced = AllReduceFigures(("gpu1", "gpu2"), "nccl", 2, 16 * 10**6, 0.02, when)

    def page(links: list[LinkFigures], allreduces: list[AllReduceFigures]) -> str:
        matrix = hardware.matrix(["gpu1", "gpu2"], links)
        more = {"allreduces": allreduces, "allreduce_text": hardware.allreduce_text, "missing": ["gpu1", "gpu2"]}
        return rendered("hardware.html", nodes=[], findings=[], matrix=matrix, **more)

    assert "1.0 GiB/s" in page([link], [])
    assert "16 MB in 20.0 ms" in page([], [reduced])
    assert "No node has been measured yet" in page([], [])
