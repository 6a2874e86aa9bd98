"""Services for Prometheus and ``ugro top``: the same reports, in their forms."""

from __future__ import annotations

import pytest

from tests.rig.service_reports import service
from ugro.cli.output import Output
from ugro.features.services.cli_show import service_lines
from ugro.features.services.model import Phase
from ugro.features.services.rules.report import of_services
from ugro.kernel.telemetry.prometheus_text import exposition


def test_services_have_their_figures_and_those_of_their_replicas() -> None:
    gone = service("gone", state=Phase.STOPPED, ended_at="2026-01-01T00:00:00Z")
    text = exposition(of_services([service("chat"), gone]))
    for line in (
        'ugro_service_replicas{service="chat",state="ready"} 1',
        'ugro_service_replicas{service="chat",state="starting"} 1',
        'ugro_service_replicas_wanted{service="chat"} 2',
        'ugro_service_requests_total{service="chat"} 100',
        'ugro_service_errors_total{service="chat"} 2',
        'ugro_service_latency_seconds{service="chat",quantile="0.99"} 0.5',
        'ugro_service_queue{service="chat"} 4',
        'ugro_service_replica_requests_total{service="chat",replica="1",node="gpu1"} 100',
        'ugro_service_replica_tokens_total{service="chat",replica="1",node="gpu1",kind="generated"} 34',
        'ugro_service_replica_batch_size{service="chat",replica="1",node="gpu1"} 2.5',
        'ugro_service_replica_weight{service="chat",replica="1",node="gpu1"} 80',
    ):
        assert f"{line}\n" in text
    assert "gone" not in text, "its series end with it"
    assert "ugro_service_errors_total{" in exposition(of_services([service("chat", state=Phase.FAILED)]))
    assert 'replica_weight{service="chat",replica="2"' not in text, "it is not in the door"


@pytest.mark.parametrize(
    ("state", "expected"),
    [(Phase.READY, "●  chat     ready"), (Phase.DEGRADED, "!  chat     degraded"), (Phase.DOWN, "✗  chat     down")],
)
def test_top_has_a_line_for_each_service_and_why_it_is_not_ready(state: Phase, expected: str) -> None:
    header, *lines = service_lines(Output(), [service("chat", state=state, reason="replica 2 is starting")])
    assert header.split() == ["SERVICE", "STATE", "REPLICAS", "REQ/S", "P50", "P99", "WAITING", "ERRORS", "ADDRESS"]
    assert lines[0].startswith(expected)
    assert lines[0].split()[3:9] == ["1/2", "12.3", "50.0", "ms", "500", "ms"]
    assert ("replica 2 is starting" in "".join(lines)) == (state is not Phase.READY)
