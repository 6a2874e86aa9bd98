"""What users switch on and off: one folder each, with the same floor plan.

The kernel and the frames know none of them.
"""

from __future__ import annotations

# Ours. Taking one away means deleting its folder and its line.
NAMES = (
    "alerts",
    "batches",
    "discovery",
    "environments",
    "exec",
    "experiments",
    "export",
    "hardware",
    "health",
    "hooks",
    "planning",
    "power",
    "quotas",
    "ray",
    "recipes",
    "remote_access",
    "retention",
    "safe_mode",
    "services",
    "sweeps",
    "trackers",
    "training",
)
