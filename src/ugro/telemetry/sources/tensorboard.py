"""Scalars and hyperparameters of TensorBoard event files."""

from __future__ import annotations

from ugro.core.support.tfevents import Damaged, HParams, parse_all, record_end
from ugro.telemetry.sources.reading import Origin, Piece, Reading

_DAMAGED = "damaged"


def read(piece: Piece) -> Reading:
    if piece.state == _DAMAGED:
        return Reading(end=len(piece.content), state=_DAMAGED)
    reading = Reading()
    try:
        found, reading.end = parse_all(piece.content)
        if not reading.end:
            reading.end = _after_large_record(piece)
    except Damaged:  # nothing tells where the next record begins
        return Reading(end=len(piece.content), state=_DAMAGED)
    for one in found:
        if isinstance(one, HParams):
            reading.add_parameters(one.values.items())
        else:
            reading.add(Origin.TENSORBOARD, one.tag, one.step, one.time_unix, one.value)
    return reading


def _after_large_record(piece: Piece) -> int:
    """An image may be larger than a piece: it is skipped when all of it is here."""
    end = record_end(piece.content)
    return end if end > len(piece.content) and piece.offset + end <= piece.size else 0
