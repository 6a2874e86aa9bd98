from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.policy.serving.places import job, ready, service
from ugro.features.services.cli_show import expect_well
from ugro.features.services.model import ServiceState
from ugro.features.services.rules.report import report_of
from ugro.features.services.rules.steps import DoorSeen, View
from ugro.kernel.support.errors import UgroError


def test_a_service_that_was_stopped_while_somebody_waited_for_it_is_an_error() -> None:
    expect_well(report_of(View(service(1), (ready(1),), DoorSeen(job(0), {}))))
    ended = replace(service(1), state=ServiceState.ENDED, ended_at="now")
    with pytest.raises(UgroError, match="the service chat was stopped"):
        expect_well(report_of(View(ended)))
