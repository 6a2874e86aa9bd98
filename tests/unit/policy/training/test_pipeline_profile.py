"""The profile of a pipeline says who has which layers, and compares what was predicted with what is."""

from __future__ import annotations

import json
from typing import Any

from ugro.features.training.model import FindingKind
from ugro.features.training.rules_profile import profile
from ugro.kernel.telemetry.records import read


def _lines(steps: int = 6, **pipeline: Any) -> list[bytes]:
    records: list[dict[str, Any]] = [
        {"kind": "run", "nodes": ["gpu0", "gpu1"], "device": "cpu", "mode": "adaptive"},
        {"kind": "pipeline", "ranks": [1, 0], "layers": [8, 4], "micro_batches": 8, "predicted_s": 0.1,
         "measured_s": 0.11, "reason": "gpu1 computes longest", **pipeline},
    ]  # fmt: skip
    for step in range(steps):
        both = {name: [0.0, 0.0] for name in ("data_s", "optimizer_s")}
        records.append(
            {"kind": "profile", "step": step, "epoch": 0, "samples": 16, "loss": 1.0, "step_s": 0.11, "shares": [16, 0],
             "own_s": [0.07, 0.08], "forward_s": [0.02, 0.03], "backward_s": [0.05, 0.05], "waiting_s": [0.01, 0.0],
             "communication_s": [0.03, 0.03], **both}
        )  # fmt: skip
    return [json.dumps({"time": 1.0, **record}).encode() for record in records]


def _found(**pipeline: Any) -> Any:
    found = profile(read(_lines(**pipeline)), 1)
    assert found is not None
    return found


def test_layers_prediction_and_waiting_are_said() -> None:
    found = _found()
    assert [one.kind for one in found.findings] == [FindingKind.PIPELINE]
    assert found.verdict.words == (
        "layers of the pipeline: gpu1 8, gpu0 4; a step was predicted to take 100 ms and takes 110 ms; "
        "stages wait 32 % of the time"
    )
    assert "micro_batches=16" in found.verdict.remedy
    assert found.pipeline is not None
    assert [found.pipeline.layers_of(rank) for rank in (0, 1)] == [4, 8]
    assert found.samples_per_s == 16 / 0.11


def test_a_step_far_from_its_prediction_is_explained() -> None:
    assert "layers move at the next epoch" in _found(measured_s=0.2).verdict.remedy
    assert "takes" not in _found(measured_s=None).verdict.words.split(";")[1].replace("to take", "")


def test_records_that_are_no_pipeline_are_left_out() -> None:
    assert _found(layers=[8]).pipeline is None
    assert _found(ranks="both").pipeline is None
    strange = _found(ranks=[0, 7])
    assert FindingKind.PIPELINE not in {one.kind for one in strange.findings}
