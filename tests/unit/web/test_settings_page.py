"""What the settings page says of a configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ugro.features.retention.config import RetentionSection
from ugro.kernel.config.schema import Config
from ugro.web.pages.settings import groups


def test_durations_and_sizes_have_units() -> None:
    changed: Any = {"retention": RetentionSection(jobs=7 * 86400.0, kept=None)}
    config = replace(Config(nodes=()), **changed)
    shown = {(group.name, one.key): one for group in groups(config) for one in group.settings}
    assert shown["ssh", "timeout"].value == "10s"
    assert shown["sync", "max_size"].value == "500MB"
    assert shown["retention", "notice"].value == "1d"
    jobs, kept, results = (shown["retention", key] for key in ("jobs", "kept", "results"))
    assert (jobs.value, jobs.default, jobs.is_changed) == ("7d", "90d", True)
    assert (kept.value, kept.default, kept.is_changed) == ("null", "30d", True)
    assert (results.value, results.is_changed) == ("null", False)
