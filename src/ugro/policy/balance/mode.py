"""The balance modes: how a training's batches are divided among its ranks."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    OFF = "off"
    STATIC = "static"
    ADAPTIVE = "adaptive"
