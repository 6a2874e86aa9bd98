"""Which ended jobs and results are removed. Removes nothing that is still needed or kept."""

from __future__ import annotations

from ugro.kernel.feature import Feature

FEATURE = Feature(
    "retention",
    __name__,
    settings={"retention": "ugro.features.retention.config:RetentionSection"},
)
