"""Reading the folders of a job before it is submitted: it may take minutes, and says how far it is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ugro.cli.output import Output
from ugro.client import jobs
from ugro.client.client import Client
from ugro.kernel.jobs.operations import FolderReading
from ugro.kernel.support.quantities import Speed, format_size


def read_folders(output: Output, client: Client, file: Path | None, fields: dict[str, Any]) -> None:
    has_work = fields.get("script") or fields.get("command")
    if file is None and not (fields.get("folder") and has_work):
        return
    speed = Speed(time.monotonic())
    for step in jobs.read_folders(client, file, fields):
        if isinstance(step, FolderReading) and step.total:
            speed.note(time.monotonic(), step.bytes)
            rate = speed.at(time.monotonic())
            output.progress(f"reading {step.reading}: {_words(step, rate)}")


def _words(step: FolderReading, rate: float | None) -> str:
    found = f"{format_size(step.bytes)} of {format_size(step.total)}"
    return found if rate is None else f"{found}, {format_size(rate)}/s"
