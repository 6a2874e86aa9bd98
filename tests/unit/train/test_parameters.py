"""``ugro.train.params()``: what a trial of a sweep is to use."""

from __future__ import annotations

import pytest

from ugro.features.sweeps.rules.reading import ALL, variables
from ugro.kernel.support.errors import UsageError
from ugro.train import params
from ugro.train.surroundings import VARIABLE


def test_outside_a_sweep_the_defaults_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert params(lr=0.1) == {"lr": 0.1}


def test_a_trial_gets_what_its_sweep_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables((("lr", "0.2"), ("opt.name", '"sgd"'))).items():
        monkeypatch.setenv(name, value)
    assert ALL == VARIABLE
    assert params(lr=0.1, epochs=3) == {"lr": 0.2, "epochs": 3, "opt": {"name": "sgd"}}


@pytest.mark.parametrize("text", ["[1]", "x"])
def test_what_is_no_object_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UsageError, match="not a JSON object"):
        params()
