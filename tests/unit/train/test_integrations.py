"""What other libraries log becomes metrics; and what is said where such a library is missing.

Stand-ins take the place of the libraries, which are large; they have what the callbacks use of them, and no more.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ugro.kernel.support.errors import UgroError

_NAMES = {
    "huggingface": ("transformers", "transformers", "TrainerCallback"),
    "lightning": ("lightning", "lightning.pytorch.loggers.logger", "Logger"),
}


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "UGRO_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UGRO_OUTPUT", str(tmp_path))
    return tmp_path


def integration(name: str, monkeypatch: pytest.MonkeyPatch, *, is_installed: bool) -> Any:
    """As if it were imported for the first time."""
    library, module, base = _NAMES[name]
    monkeypatch.delitem(sys.modules, f"ugro.train.integrations.{name}", raising=False)
    stand_in = ModuleType(module)
    setattr(stand_in, base, type(base, (), {}))
    parts = module.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    monkeypatch.setitem(sys.modules, module, stand_in if is_installed else None)
    if not is_installed:
        monkeypatch.setitem(sys.modules, library, None)
        monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    found = importlib.import_module(f"ugro.train.integrations.{name}")
    monkeypatch.delitem(sys.modules, f"ugro.train.integrations.{name}")
    return found


def records(output: Path) -> list[tuple[int, dict[str, Any]]]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["values"]) for record in map(json.loads, lines)]


@pytest.mark.parametrize(("name", "library"), [("huggingface", "transformers"), ("lightning", "lightning")])
def test_a_missing_library_is_named_with_what_to_do(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ImportError, match=f"needs {library}, which is not installed") as caught:
        integration(name, monkeypatch, is_installed=False)
    assert isinstance(caught.value, UgroError)
    assert caught.value.hint == f"pip install {library}"


def test_what_the_trainer_logs_is_written_by_one_rank(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = integration("huggingface", monkeypatch, is_installed=True).UgroCallback()
    for step, is_main in ((4, True), (4, False), (8, True)):
        state = SimpleNamespace(global_step=step, is_world_process_zero=is_main)
        callback.on_log(None, state, None, logs={"loss": 1 / step, "step": 7}, model=None)
    callback.on_log(None, state, None, logs=None)
    callback.on_train_end(None, state, None)
    assert records(output) == [(4, {"loss": 0.25, "logged_step": 7}), (8, {"loss": 0.125, "logged_step": 7})]


def test_a_loss_that_is_logged_and_not_finite_is_said(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UGRO_RUN_DIR", str(output))
    monkeypatch.setenv("UGRO_JOB", "7")
    callback = integration("huggingface", monkeypatch, is_installed=True).UgroCallback()
    for step, loss in ((4, 0.5), (8, float("nan")), (12, float("nan"))):
        state = SimpleNamespace(global_step=step, is_world_process_zero=True)
        callback.on_log(None, state, None, logs={"loss": loss, "grad_norm": float("inf")})
    callback.on_train_end(None, state, None)
    assert json.loads((output / "notices" / "0.json").read_text()) == {
        "run": "7.1",
        "notices": ["loss was NaN in step 8"],
    }


def test_the_trainer_s_number_of_steps_is_written_once(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = integration("huggingface", monkeypatch, is_installed=True).UgroCallback()
    for is_main in (True, False):
        state = SimpleNamespace(global_step=0, max_steps=1000, is_world_process_zero=is_main)
        callback.on_train_begin(None, state, None, model=None)
    callback.on_train_end(None, state, None)
    (record,) = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    assert (record["kind"], record["step"], record["total_steps"]) == ("progress", 0, 1000)


def test_a_run_that_is_given_gets_what_is_logged(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Listener()
    state = SimpleNamespace(global_step=3, is_world_process_zero=True)
    integration("huggingface", monkeypatch, is_installed=True).UgroCallback(run).on_log(None, state, None, {"a": 1})
    integration("lightning", monkeypatch, is_installed=True).UgroLogger(run).log_metrics({"a": 2}, 4)
    assert run.heard == [(3, {"a": 1}), (4, {"a": 2})]
    assert list(output.iterdir()) == []


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[int | None, dict[str, Any]]] = []

    def log(self, *, step: int | None = None, **values: Any) -> None:
        self.heard.append((step, values))


def test_what_a_lightning_module_logs_is_written(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = integration("lightning", monkeypatch, is_installed=True).UgroLogger()
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"loss": 0.5, "epoch": 0}, step=10)
    logger.finalize("success")
    assert records(output) == [(0, {"hyperparameters": {"lr": 0.1}}), (10, {"loss": 0.5, "epoch": 0})]
    assert (logger.name, logger.version) == ("ugro", "")


def test_of_lightnings_ranks_the_first_one_writes(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = integration("lightning", monkeypatch, is_installed=True).UgroLogger()
    logger.log_metrics({"loss": 0.5}, step=10)
    logger.finalize("success")
    assert list(output.iterdir()) == []
