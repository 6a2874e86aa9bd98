"""How safe mode is put into words."""

from __future__ import annotations

from ugro.features.safe_mode.model import SafeMode


def test_many_reasons_are_counted_and_not_all_shown() -> None:
    assert SafeMode("", ("one", "two")).brief == "one; two"
    assert SafeMode("", ("one", "two", "three", "four")).brief == "one; two; and 2 more"
