"""Stands still while the state may be older than the world, until someone says how to go on."""

from __future__ import annotations

from ugro.kernel.feature import Feature

FEATURE = Feature("safe_mode", __name__)
