"""What others see of a sweep's document."""

from __future__ import annotations

from typing import Any

import pytest

from ugro.features.sweeps.rules.reading import without_values

ADDRESS, SHOWN = "postgres://ann:hush@db/x", "postgres://ann:***@db/x"


def test_variables_keep_their_names_and_addresses_lose_their_passwords() -> None:
    document = {
        "command": ["${env}", "--db", ADDRESS],
        "parameters": {"env": {"values": ["pong", ADDRESS]}, "lr": {"values": [0.1, 1, None, True]}},
        "ugro": {
            "env": {"DATA": "hush", "TAKEN_FROM_THE_SHELL": None, "COUNT": 3},
            "options": {"env": {"pong": {"env": {"A": "hush"}, "args": ["--db", ADDRESS]}, "other": {"nodes": 2}}},
            "nodes": 2,
        },
    }
    assert without_values(document) == {
        "command": ["${env}", "--db", SHOWN],
        "parameters": {"env": {"values": ["pong", SHOWN]}, "lr": {"values": [0.1, 1, None, True]}},
        "ugro": {
            "env": {"DATA": "***", "TAKEN_FROM_THE_SHELL": None, "COUNT": "***"},
            "options": {"env": {"pong": {"env": {"A": "***"}, "args": ["--db", SHOWN]}, "other": {"nodes": 2}}},
            "nodes": 2,
        },
    }
    assert document["ugro"]["env"]["DATA"] == "hush", "a copy"  # type: ignore[index]


@pytest.mark.parametrize(
    ("own", "shown"),
    [
        (None, None),
        ("hush", "hush"),
        ({"env": ["A=hush"]}, {"env": "***"}),
        ({"env": {"A": "hush"}, "options": ["x"]}, {"env": {"A": "***"}, "options": ["x"]}),
        ({"options": {"mode": "x", "size": {"a": "x"}}}, {"options": {"mode": "x", "size": {"a": "x"}}}),
    ],
)
def test_what_has_another_form_is_no_error(own: Any, shown: Any) -> None:
    assert without_values({"ugro": own}) == {"ugro": shown}
