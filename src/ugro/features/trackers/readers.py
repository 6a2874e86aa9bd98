"""Scalars and hyperparameters of TensorBoard event files."""

from __future__ import annotations

from ugro.features.trackers.tfevents import Damaged, HParams, Scalar, parse_all, record_end
from ugro.kernel.telemetry.readers import Origin, Piece, Reading

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
    scalars: dict[str, list[Scalar]] = {}
    for one in found:
        if isinstance(one, HParams):
            reading.add_parameters(one.values.items())
        else:
            scalars.setdefault(one.tag, []).append(one)
    for tag, some in scalars.items():
        reading.add_all(Origin.TENSORBOARD, tag, some)
    return reading


def _after_large_record(piece: Piece) -> int:
    """An image may be larger than a piece: it is skipped when all of it is here."""
    end = record_end(piece.content)
    return end if end > len(piece.content) and piece.offset + end <= piece.size else 0
