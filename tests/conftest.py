"""What holds for every test: how many examples a property gets, and that bytecode is kept."""

from __future__ import annotations

import os
import sys

from hypothesis import HealthCheck, settings

# Tests start agents and commands by the hundred, and none of them should compile UGRO again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long something takes says more about the machine than about the code.
settings.register_profile("test", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("proof", settings.get_profile("test"), max_examples=400)
settings.load_profile("test")  # --hypothesis-profile=proof looks longer
