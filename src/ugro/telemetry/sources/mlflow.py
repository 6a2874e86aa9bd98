"""MLflow's file store: a file for each metric (``timestamp value step`` a line), and one for each parameter."""

from __future__ import annotations

from ugro.telemetry.sources.reading import Origin, Piece, Reading, number, whole_lines

_SHORTEST, _LONGEST = 2, 5  # words of a line: old files have no step, newer ones may name a dataset


def read_metric(piece: Piece) -> Reading:
    content = whole_lines(piece)
    reading = Reading(end=len(content))
    for line in content.splitlines():
        words = line.split()
        if not _SHORTEST <= len(words) <= _LONGEST:
            continue
        time_ms, value = number(words[0]), number(words[1])
        step = words[2] if len(words) > _SHORTEST else b"0"
        if time_ms is not None and value is not None and step.removeprefix(b"-").isdigit() and len(step) < 20:
            reading.add(Origin.MLFLOW, piece.name, int(step), time_ms / 1000, value)
    return reading


def read_parameter(piece: Piece) -> Reading:
    reading = Reading(end=len(piece.content))
    if piece.offset == 0:
        reading.add_parameters([(piece.name, piece.content.decode("utf-8", "replace").strip())])
    return reading
