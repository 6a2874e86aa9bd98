"""``/experiments`` and ``/compare``."""

from __future__ import annotations

from fastapi import FastAPI

from ugro.web.site import Site


def add_experiment_pages(app: FastAPI, site: Site) -> None:
    """To come."""
