"""OTLP requests, decoded with OpenTelemetry's own message definitions, which refuse what they do not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from tests.integration.conftest import in_loop
from tests.integration.monitoring.test_export import Rig, points
from tests.rig.receivers import http_receiver
from ugro import __version__
from ugro.features.alerts.channels import SendFailure
from ugro.features.trackers.config import OtlpKeys
from ugro.features.trackers.delivery import Otlp, Sample
from ugro.kernel.telemetry.curves import Points, SeriesKey

TIME_MS = 1_700_000_000_123
RUN = Sample("job/17", 2, 3, "loss", TIME_MS, 42, 0.5)
NODE = Sample("node/gpu1", 0, 0, "gpu0 use ü \"\\", TIME_MS, 1_700_000_000, -2.5e-300)


def sent(*samples: Sample) -> Any:
    with http_receiver() as receiver:
        Otlp(OtlpKeys(endpoint=receiver.url)).send(samples, "lab ü")
        [post] = receiver.posted
    assert (post.path, post.headers["Content-Type"]) == ("/v1/metrics", "application/json")
    return json_format.Parse(post.body, ExportMetricsServiceRequest())


def texts(attributes: Any) -> dict[str, str]:
    assert {one.value.WhichOneof("value") for one in attributes} == {"string_value"}
    found = [(one.key, one.value.string_value) for one in attributes]
    assert len(dict(found)) == len(found), "keys are unique"
    return dict(found)


def test_a_request_says_who_sends_it() -> None:
    [of_resource] = sent(RUN, NODE).resource_metrics
    assert texts(of_resource.resource.attributes) == {"service.name": "ugro", "ugro.cluster": "lab ü"}
    [of_scope] = of_resource.scope_metrics
    assert (of_scope.scope.name, of_scope.scope.version) == ("ugro", __version__)
    assert [metric.name for metric in of_scope.metrics] == ["ugro.run", "ugro.node"]


def test_every_metric_is_a_gauge_of_doubles_at_its_time() -> None:
    """There is no sum, so nothing claims to be monotonic or to begin at some time."""
    [of_resource] = sent(RUN, NODE, RUN._replace(key="lr", step=-7, value=1e308)).resource_metrics
    run, node = of_resource.scope_metrics[0].metrics
    assert {metric.WhichOneof("data") for metric in (run, node)} == {"gauge"}
    loss, rate = run.gauge.data_points
    assert texts(loss.attributes) == {"job": "17", "attempt": "2", "rank": "3", "metric": "loss"}
    assert (loss.as_double, loss.time_unix_nano, loss.start_time_unix_nano, loss.flags) == (
        0.5, TIME_MS * 1_000_000 + 42, 0, 0,
    )  # fmt: skip
    assert (rate.as_double, rate.time_unix_nano) == (1e308, TIME_MS * 1_000_000 + 7)
    [use] = node.gauge.data_points
    assert texts(use.attributes) == {"node": "gpu1", "metric": NODE.key}
    assert (use.as_double, use.time_unix_nano) == (-2.5e-300, TIME_MS * 1_000_000)
    assert {point.WhichOneof("value") for point in (loss, rate, use)} == {"as_double"}


@in_loop
async def test_a_point_with_an_impossible_time_does_not_take_the_others_along(tmp_path: Path) -> None:
    with http_receiver() as receiver:
        rig = Rig(tmp_path, f"otlp: {{endpoint: '{receiver.url}'}}")
        for time_ms in (1 << 53, -1):
            await rig.service.take({SeriesKey("job/8", 1, 0, "loss"): Points([1], [time_ms], [2.5])})
        await rig.service.take(points(0, 3))
        await rig.until(lambda: rig.service.figures()["otlp"].sent == 3, "the others")
        request = json_format.Parse(receiver.posted[0].body, ExportMetricsServiceRequest())
    [metric] = request.resource_metrics[0].scope_metrics[0].metrics
    assert [texts(point.attributes)["job"] for point in metric.gauge.data_points] == ["7", "7", "7"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [("", "/v1/metrics"), ("/", "/v1/metrics"), ("/otlp", "/otlp/v1/metrics"), ("/a/v1/metrics", "/a/v1/metrics")],
)
def test_the_path_of_metrics_is_added_to_any_address(path: str, expected: str) -> None:
    with http_receiver() as receiver:
        Otlp(OtlpKeys(endpoint=f"{receiver.url}{path}")).send([RUN], "lab")
        assert receiver.posted[0].path == expected


@pytest.mark.parametrize("status", [429, 502, 503, 504, 400, 401, 404, 408, 500, 501])
def test_only_the_answers_that_the_specification_names_are_tried_again(status: int) -> None:
    with http_receiver() as receiver:
        receiver.answers.append(status)
        otlp = Otlp(OtlpKeys(endpoint=receiver.url))
        with pytest.raises(SendFailure) as caught:
            otlp.send([RUN], "lab")
    assert caught.value.status == status
    assert otlp.will_never_take(status) == (status not in (429, 502, 503, 504))


@in_loop
async def test_points_that_a_receiver_rejects_count_as_dropped(tmp_path: Path) -> None:
    answer = ExportMetricsServiceResponse()
    answer.partial_success.rejected_data_points = 2
    answer.partial_success.error_message = "too old"
    with http_receiver() as receiver:
        receiver.text = json_format.MessageToJson(answer).encode()
        assert json.loads(receiver.text)["partialSuccess"]["rejectedDataPoints"] == "2"
        rig = Rig(tmp_path, f"otlp: {{endpoint: '{receiver.url}'}}")
        figures = rig.service.figures()["otlp"]
        await rig.service.take(points(0, 5))
        await rig.until(lambda: figures.dropped and not figures.waiting, "the answer")
        assert (figures.sent, figures.dropped, figures.waiting, len(receiver.posted)) == (3, 2, 0, 1)
    assert rig.said == ["export to otlp: 2 points were dropped: the server rejected them"]


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"partialSuccess": null}', b"\xff", b"x" * 99_999])
def test_any_other_answer_of_a_receiver_rejects_nothing(text: bytes) -> None:
    with http_receiver() as receiver:
        receiver.text = text
        assert Otlp(OtlpKeys(endpoint=receiver.url)).send([RUN], "lab") == 0
