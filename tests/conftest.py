"""What holds for every test: how many examples a property gets."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long something takes says more about the machine than about the code.
settings.register_profile("test", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("proof", settings.get_profile("test"), max_examples=400)
settings.load_profile("test")  # --hypothesis-profile=proof looks longer
