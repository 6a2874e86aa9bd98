"""Metrics from and to other systems: TensorBoard, W&B, InfluxDB, OTLP. Does not store metrics itself."""

from __future__ import annotations

from ugro.kernel.feature import Feature

FEATURE = Feature(
    "trackers",
    __name__,
    settings={"export": "ugro.features.trackers.config:ExportSection"},
)
