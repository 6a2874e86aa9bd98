"""What a node says of its owner is text and numbers within bounds, or it is refused."""

from __future__ import annotations

import json

import pytest

from ugro.features.power.owners import Presence, parse
from ugro.kernel.support.errors import RemoteFailure


def said(**values: object) -> bytes:
    return json.dumps({"idle_s": 1.5, "sign": "ann", "sources": ["terminals"], "blind": [], **values}).encode()


def test_a_report_is_taken_as_it_is() -> None:
    assert parse(said(), "n1") == Presence(1.5, "ann", ("terminals",), ())
    assert parse(b'{"idle_s": null}', "n1") == Presence(None), "what is missing has a default"


@pytest.mark.parametrize(
    "line",
    [b"", b"[]", b"{}", b"\xff", said(idle_s="x"), said(idle_s=-1), said(idle_s=float("nan")), said(idle_s=1e400)],
)
def test_an_invalid_report_is_refused(line: bytes) -> None:
    with pytest.raises(RemoteFailure, match="n1: invalid report on its owner"):
        parse(line, "n1")


def test_texts_are_bounded_and_can_do_nothing_to_a_terminal() -> None:
    found = parse(said(sign="\x1b]0;gotcha\x07" + "x" * 1000, sources=["s"] * 1000), "n1")
    assert found.sign.startswith("\ufffd]0;gotcha\ufffdxx")
    assert len(found.sign) <= 200
    assert len(found.sources) <= 16
