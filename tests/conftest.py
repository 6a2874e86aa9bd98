"""What holds for every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long something takes says more about the machine than about the code.
settings.register_profile("anywhere", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("anywhere")
