"""Frames: the protocol between an agent and a node program over one byte stream, in both directions.

A frame is a header (payload length, kind, call id) and a payload. Calls have ids, so many can run at once. The output
of a call is sent beside its answer, and only as much as the receiver has granted (CREDIT). Both sides use this file;
it knows nothing about processes or sockets.
"""

from __future__ import annotations

import json
import math
import struct

# Not imported from typing: that module alone would take longer to load than the rest of the node program.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, Tuple

    Frame = Tuple[int, int, bytes]

CALL = 1  # agent → node: {"method", "params"}
CANCEL = 2  # agent → node: stop this call; it still answers
INPUT = 3  # agent → node: bytes for a call; an empty payload is the end
CREDIT = 4  # receiver → sender: so many more bytes of this call may be sent
RESULT = 5  # node → agent: the call's answer; the last frame of its id
ERROR = 6  # node → agent: {"kind", "message"}; the last frame of its id
OUT = 7  # node → agent: bytes (standard output)
ERR = 8  # node → agent: bytes (standard error)
PING = 9
PONG = 10  # payload: the node's clock

KINDS = frozenset(range(CALL, PONG + 1))
HEADER = struct.Struct(">IBI")
CLOCK = struct.Struct(">d")
AMOUNT = struct.Struct(">I")

MAX_PAYLOAD = 1 << 20
CHUNK = 64 * 1024
WINDOW = 512 * 1024  # bytes of one call that may be in flight


def _finite(text: str) -> float:
    """Rejects 1e999 and NaN, which Python's reader accepts: everything that is read can be written again."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("%s is not a finite number" % text)
    return number


# Created once: json.dumps and json.loads create a new one, or guess an encoding, on every call.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_decode = json.JSONDecoder(parse_float=_finite, parse_constant=_finite).decode


class ProtocolError(Exception):
    """The other side sent something that is not a frame; the rest of the stream cannot be trusted."""


def frame(kind: int, call: int, payload: bytes = b"") -> bytes:
    return HEADER.pack(len(payload), kind, call) + payload


def message(kind: int, call: int, value: Dict[str, Any]) -> bytes:
    try:
        payload = _encode(value).encode()
    except (ValueError, RecursionError) as error:
        raise ProtocolError("cannot be encoded as JSON: %s" % error) from error
    if len(payload) > MAX_PAYLOAD:
        raise ProtocolError("a message of %d bytes is over the limit of %d" % (len(payload), MAX_PAYLOAD))
    return frame(kind, call, payload)


def parse(payload: bytes) -> Dict[str, Any]:
    try:
        value = _decode(payload.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError("not JSON: %r" % payload[:80]) from error
    if not isinstance(value, dict):
        raise ProtocolError("not a JSON object: %r" % payload[:80])
    return value


class Decoder:
    """Cuts a byte stream into frames, in whatever pieces it arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEADER.size:
                length, kind, call = HEADER.unpack_from(buffer, start)
                if kind not in KINDS or length > MAX_PAYLOAD:
                    raise ProtocolError("not a frame: %r" % bytes(buffer[start : start + 40]))
                end = start + HEADER.size + length
                if len(buffer) < end:
                    break
                payload = bytes(buffer[start + HEADER.size : end])
                start = end
                yield kind, call, payload
        finally:
            del buffer[:start]
