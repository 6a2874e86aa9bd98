"""Metrics for other systems: how points are written, and what waits on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rig import disk
from tests.rig.disk import SmallDisk
from tests.unit.config.test_load import config_of
from ugro.features.trackers.delivery import Sample, Spool, as_lines, as_otlp
from ugro.kernel.support.errors import ConfigError

RUN = Sample("job/17", 1, 0, "loss", 1_700_000_000_123, 42, 0.5)
NODE = Sample("node/gpu1", 0, 0, "gpu0 use", 1_700_000_000_123, 1_700_000_000, 0.25)


def test_lines_have_tags_in_order_a_value_and_nanoseconds() -> None:
    assert as_lines([RUN, NODE], "lab").decode() == (
        "ugro_run,cluster=lab,attempt=1,job=17,metric=loss,rank=0 value=0.5,step=42i 1700000000123000042\n"
        "ugro_node,cluster=lab,metric=gpu0\\ use,node=gpu1 value=0.25 1700000000123000000\n"
    )


@given(st.text(max_size=20), st.floats(allow_nan=True))
def test_any_name_and_value_is_one_line_or_none(key: str, value: float) -> None:
    text = as_lines([RUN._replace(key=key, value=value)], "lab").decode()
    assert text.count("\n") == (1 if key and value - value == 0 else 0)
    if text:
        assert "\r" not in text
        head, fields, stamp = text.replace("\\ ", "_").replace("\\,", "_").replace("\\=", "_").rsplit(" ", 2)
        assert head.count(",") == 5, text
        assert fields == f"value={value!r},step=42i"
        assert stamp.strip().isdigit()


def test_otlp_is_the_json_of_its_protocol() -> None:
    document = json.loads(as_otlp([RUN, NODE, RUN._replace(value=float("nan"))], "lab", "1.0"))
    [resource] = document["resourceMetrics"]
    assert {"key": "ugro.cluster", "value": {"stringValue": "lab"}} in resource["resource"]["attributes"]
    [scope] = resource["scopeMetrics"]
    run, node = scope["metrics"]
    assert (run["name"], node["name"]) == ("ugro.run", "ugro.node")
    [point] = run["gauge"]["dataPoints"]
    assert (point["asDouble"], point["timeUnixNano"]) == (0.5, "1700000000123000042")
    assert {"key": "metric", "value": {"stringValue": "loss"}} in point["attributes"]


def many(first: int, count: int) -> list[Sample]:
    return [RUN._replace(step=step) for step in range(first, first + count)]


def test_what_waits_is_there_after_a_crash_in_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.add(many(0, 3), 10**6)
    spool.seal()
    spool.add(many(3, 2), 10**6)
    with (tmp_path / "open").open("a") as file:
        file.write('["job/17", 1, 0, "lo')  # it was killed here
    again = Spool(tmp_path)
    assert again.points == 5
    again.seal()
    seen: list[int] = []
    while (sealed := again.oldest()) is not None:
        seen += [sample.step for sample in again.read(sealed)]
        again.remove(sealed)
    assert seen == [0, 1, 2, 3, 4]
    assert (again.points, again.size, list(tmp_path.iterdir())) == (0, 0, [])


def test_half_a_line_takes_no_good_point_along(tmp_path: Path) -> None:
    (tmp_path / "open").write_text(json.dumps(RUN) + '\n["job/17", 1, 0, "lo')  # it was killed here
    spool = Spool(tmp_path)
    spool.add(many(7, 2), 10**6)
    assert (steps_in(spool), spool.points) == ([42, 7, 8], 0)


@pytest.mark.skipif(disk.available() is not None, reason=str(disk.available()))
def test_points_that_a_full_disk_did_not_take_are_gone_whole(tmp_path: Path) -> None:
    small = SmallDisk(tmp_path / "disk", 1 << 20)
    small.mount()
    try:
        spool = Spool(small.folder / "spool")
        spool.add(many(0, 2), 10**7)
        small.fill()
        with pytest.raises(OSError, match="No space"):
            spool.add(many(100, 1000), 10**7)
        small.free()
        spool.add(many(2, 2), 10**7)
        assert (steps_in(spool), spool.points) == ([0, 1, 2, 3], 0)
    finally:
        small.unmount()


def steps_in(spool: Spool) -> list[int]:
    """Takes them all out."""
    spool.seal()
    seen: list[int] = []
    while (sealed := spool.oldest()) is not None:
        found = [sample.step for sample in spool.read(sealed)]
        assert len(found) == sealed.points
        seen += found
        spool.remove(sealed)
    return seen


def test_above_the_bound_the_oldest_goes_and_is_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    line = len(json.dumps(RUN)) + 1
    limit, dropped = 50 * line, 0
    for number in range(20):
        dropped += spool.add(many(100 + 10 * number, 10), limit)
        spool.seal()
        assert spool.size <= limit
    assert dropped + spool.points == 200, "nothing is lost that is not counted"
    oldest = spool.oldest()
    assert oldest is not None
    assert spool.read(oldest)[0].step == 100 + dropped
    spool.in_use = oldest.number
    spool.add(many(900, 10), limit)
    assert spool.oldest() == oldest, "what is being sent stays"


def test_a_batch_larger_than_the_bound_is_dropped_whole(tmp_path: Path) -> None:
    assert Spool(tmp_path).add(many(0, 100), 200) == 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("influxdb: {url: 'http://x:8086'}", "which version"),
        ("influxdb: {url: 'http://x:8086', org: lab}", "needs an organisation and a bucket"),
        ("influxdb: {url: 'http://x:8086', database: a, bucket: b}", "which version"),
        ("influxdb: {url: 'http://x:8086', database: a, user: b}", "a user needs a password"),
        ("influxdb: {url: 'http://ann:secret@x:8086', database: a}", "without a password"),
        ("influxdb: {database: a}", "it has no address"),
        ("otlp: {endpoint: collector}", "expected an address"),
        ("otlp: {}", "it has no address"),
    ],
)
def test_a_wrong_section_is_one_clear_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config_of(f"nodes: [gpu1]\nexport: {{{text}}}\n")
    assert "cluster.yaml:2" in str(caught.value)
    assert caught.value.hint
