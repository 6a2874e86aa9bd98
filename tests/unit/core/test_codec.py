"""Values come back as they went, and what is not what its type says is refused with the field's name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.links.model import (
    Disk,
    Facts,
    Gpu,
    GpuHolder,
    GpuProcess,
    LinkQuality,
    Machine,
    NodeReport,
    Reason,
    Role,
    Status,
)
from ugro.kernel.support.codec import DecodeError, decode, dumps

FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(max_size=10)
COUNT = st.integers(0, 2**63)
PROCESSES = st.builds(GpuProcess, COUNT, TEXT, st.none() | COUNT, st.booleans(), st.none() | TEXT)
GPUS = st.builds(
    Gpu, COUNT, TEXT, TEXT, use_ratio=st.none() | FINITE, processes=st.lists(PROCESSES, max_size=2).map(tuple)
)
FACTS = st.builds(
    Facts,
    time_unix=FINITE,
    uptime_s=FINITE,
    load=st.tuples(FINITE, FINITE, FINITE),
    cpu_use_ratio=st.none() | FINITE,
    memory_total_bytes=COUNT,
    memory_available_bytes=COUNT,
    disks=st.lists(st.builds(Disk, TEXT, COUNT, COUNT), max_size=2).map(tuple),
    gpus=st.lists(GPUS, max_size=2).map(tuple),
)
MACHINES = st.builds(Machine, *[TEXT] * 9, COUNT, TEXT, COUNT)
REPORTS = st.builds(
    NodeReport,
    name=TEXT,
    status=st.sampled_from(Status),
    score=COUNT,
    reasons=st.lists(st.builds(Reason, TEXT, TEXT, FINITE), max_size=2).map(tuple),
    role=st.sampled_from(Role),
    labels=st.lists(TEXT, max_size=2).map(tuple),
    machine=st.none() | MACHINES,
    facts=st.none() | FACTS,
    link=st.builds(LinkQuality, st.none() | FINITE, FINITE, st.none() | FINITE),
)
FACTS_JSON: dict[str, Any] = json.loads(dumps(Facts(1.0, 2.0, (0.1, 0.2, 0.3), None, 5, 6, (Disk("/", 1, 1),))))


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Box:
    size: int
    colour: Colour = Colour.RED
    lid: str | None = None


@given(REPORTS)
def test_a_report_comes_back_as_it_went(report: NodeReport) -> None:
    assert decode(NodeReport, json.loads(dumps(report))) == report


def test_whole_numbers_pass_for_floats_and_nothing_else_passes_for_anything() -> None:
    assert decode(Facts, {**FACTS_JSON, "uptime_s": 3}).uptime_s == 3
    for field, wrong in [
        ("uptime_s", "3"),
        ("uptime_s", True),
        ("uptime_s", None),
        ("memory_total_bytes", 3.0),
        ("memory_total_bytes", False),
        ("load", [1.0, 2.0]),
        ("load", [1.0, 2.0, 3.0, 4.0]),
        ("load", "abc"),
        ("load", {"0": 1.0}),
        ("disks", {}),
        ("disks", [[]]),
        ("gpu_source", 5),
    ]:
        with pytest.raises(DecodeError, match=field):
            decode(Facts, {**FACTS_JSON, field: wrong})


@pytest.mark.parametrize("value", [None, [], "text", 5, True])
def test_what_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(DecodeError, match="expected Facts"):
        decode(Facts, value)


def test_a_missing_field_is_named_and_an_optional_one_is_not_missed() -> None:
    assert decode(Box, {"size": 1}) == Box(1)
    with pytest.raises(DecodeError, match="size"):
        decode(Box, {})


def test_a_field_of_a_newer_version_is_passed_over() -> None:
    assert decode(Box, {"size": 1, "weight": 9}) == Box(1)


def test_an_unknown_word_is_refused_and_named() -> None:
    with pytest.raises(DecodeError, match=r"Box\.colour.*blue"):
        decode(Box, {"size": 1, "colour": "blue"})


@dataclass(frozen=True, slots=True)
class Step:
    step: str


@dataclass(frozen=True, slots=True)
class End:
    step: str
    took_s: float


@dataclass(frozen=True, slots=True)
class Line:
    said: tuple[End | Step, ...]


def test_one_of_several_classes_is_the_first_whose_fields_are_all_there() -> None:
    line = Line((Step("a"), End("b", 1.5)))
    assert decode(Line, json.loads(dumps(line))) == line
    wrong_ones: tuple[object, ...] = ({"took_s": 1.5}, None, [])
    for wrong in wrong_ones:
        with pytest.raises(DecodeError, match="expected End or Step, got"):
            decode(Line, {"said": [wrong]})


def test_a_complaint_about_a_huge_value_stays_short() -> None:
    with pytest.raises(DecodeError) as caught:
        decode(Box, {"size": "x" * 10**6})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("number", [2**64, -(2**64) - 1, 10**400])
def test_a_number_that_nothing_can_hold_is_refused_shortly(number: int) -> None:
    with pytest.raises(DecodeError, match="is too large") as caught:
        decode(Disk, {"mount": "/", "total_bytes": number, "free_bytes": 1})
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize("since", [-1e300, 1e300, float(2**40)])
def test_a_time_that_no_calendar_has_does_not_keep_a_holder_from_being_named(since: float) -> None:
    assert str(GpuHolder("other", "gpu1", "12", 1, "ann", since)).startswith("job 12 of another agent (user ann,")


def test_what_has_no_json_form_is_a_bug_and_says_so() -> None:
    with pytest.raises(TypeError, match="no JSON form"):
        dumps({"value": object()})


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FACTS_JSON]), inner, max_size=4),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*FACTS_JSON]), JSON_VALUES))
def test_wrong_values_anywhere_are_a_decode_error_and_never_a_crash(changes: dict[str, Any]) -> None:
    try:
        facts = decode(Facts, {**FACTS_JSON, **changes})
    except DecodeError:
        return
    assert isinstance(facts, Facts)
