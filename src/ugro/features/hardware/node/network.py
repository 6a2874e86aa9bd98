"""One TCP connection between two nodes: how long a byte takes there and back, and how many pass in each direction.

The side that listens is bound to one address, for one connection, for seconds. It serves the one that proves to
know the secret, which does not travel: it is asked for a digest that only the secret gives.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from typing import Any, Callable, Dict, Optional

from ugro.features.hardware.node.meter import median_and_jitter, say, skip, times

_CHALLENGE = 16
_PROOF = 32
_GREETING_S = 2.0
_BLOCK = 1 << 18
_ASK = struct.Struct("!cd")  # what is asked for, and for how many seconds
_SIZE = struct.Struct("!I")
_TOTAL = struct.Struct("!Q")
_MOST_PINGS = 1000


def listen(params: Dict[str, Any]) -> None:
    until = time.monotonic() + float(params["limit_s"])
    with socket.create_server((str(params["address"]), 0), backlog=4) as listener:
        say(port=listener.getsockname()[1])
        peer = _admit(listener, str(params["secret"]).encode(), until)
    if peer is None:
        skip("listen", "nobody connected")
        return
    with peer:
        _serve(peer, until)


def connect(params: Dict[str, Any]) -> None:
    until = time.monotonic() + float(params["limit_s"])
    seconds = float(params["seconds"])
    where = (str(params["address"]), int(params["port"]))
    with socket.create_connection(where, timeout=_left(until)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(_proof(str(params["secret"]).encode(), _exactly(peer, _CHALLENGE)))
        pings = times(lambda: _ping(peer), 0.2 * seconds, _MOST_PINGS)
        latency, jitter = median_and_jitter(pings[1:] or pings)  # the first waits for the other side to be ready
        say(link={"latency_s": latency, "jitter_s": jitter})
        peer.settimeout(_left(until))
        there = _send_for(peer, 0.4 * seconds)
        say(link={"latency_s": latency, "jitter_s": jitter, "bytes_per_s": there})
        peer.settimeout(_left(until))
        back = _fetch_for(peer, 0.4 * seconds)
        say(link={"latency_s": latency, "jitter_s": jitter, "bytes_per_s": there, "back_bytes_per_s": back})


# --- the side that listens ----------------------------------------------------------------------------------------


def _admit(listener: socket.socket, secret: bytes, until: float) -> Optional[socket.socket]:
    """The first that proves to know the secret; others are turned away."""
    while time.monotonic() < until:
        listener.settimeout(_left(until))
        try:
            peer, _ = listener.accept()
        except socket.timeout:
            return None
        peer.settimeout(min(_GREETING_S, _left(until)))
        try:
            challenge = os.urandom(_CHALLENGE)
            peer.sendall(challenge)
            if hmac.compare_digest(_exactly(peer, _PROOF), _proof(secret, challenge)):
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return peer
        except (OSError, EOFError):
            pass
        peer.close()
    return None


def _serve(peer: socket.socket, until: float) -> None:
    actions: Dict[bytes, Callable[[socket.socket, float], None]] = {b"p": _answer, b"t": _take, b"g": _give}
    while True:
        peer.settimeout(_left(until))
        try:
            kind, seconds = _ASK.unpack(_exactly(peer, _ASK.size))
        except EOFError:
            return
        actions[kind](peer, seconds)


def _answer(peer: socket.socket, seconds: float) -> None:
    peer.sendall(b"p")


def _take(peer: socket.socket, seconds: float) -> None:
    peer.sendall(_TOTAL.pack(_receive(peer)))


def _give(peer: socket.socket, seconds: float) -> None:
    _pour(peer, seconds)


# --- the side that connects ---------------------------------------------------------------------------------------


def _ping(peer: socket.socket) -> None:
    peer.sendall(_ASK.pack(b"p", 0.0))
    _exactly(peer, 1)


def _send_for(peer: socket.socket, seconds: float) -> float:
    begun = time.perf_counter()
    peer.sendall(_ASK.pack(b"t", seconds))
    _pour(peer, seconds)
    # Answered when all of it has arrived: what still waits in our kernel is not sent.
    total: int = _TOTAL.unpack(_exactly(peer, _TOTAL.size))[0]
    return total / (time.perf_counter() - begun)


def _fetch_for(peer: socket.socket, seconds: float) -> float:
    begun = time.perf_counter()
    peer.sendall(_ASK.pack(b"g", seconds))
    return _receive(peer) / (time.perf_counter() - begun)


# --- both ---------------------------------------------------------------------------------------------------------


def _proof(secret: bytes, challenge: bytes) -> bytes:
    return hmac.new(secret, challenge, hashlib.sha256).digest()


def _pour(peer: socket.socket, seconds: float) -> None:
    """Blocks for so long, each after its size; a size of zero ends them."""
    block = _SIZE.pack(_BLOCK) + bytes(_BLOCK)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        peer.sendall(block)
    peer.sendall(_SIZE.pack(0))


def _receive(peer: socket.socket) -> int:
    total, room = 0, bytearray(_BLOCK)
    with memoryview(room) as view:
        while True:
            size: int = _SIZE.unpack(_exactly(peer, _SIZE.size))[0]
            if size == 0:
                return total
            if size > _BLOCK:
                raise OSError("the other side does not keep to the protocol")
            got = 0
            while got < size:
                part = peer.recv_into(view[got:size])
                if not part:
                    raise ConnectionResetError("the other side closed the connection")
                got += part
            total += size


def _exactly(peer: socket.socket, size: int) -> bytes:
    """Raises ``EOFError`` at the end of the connection."""
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise EOFError("the other side closed the connection")
        data += part
    return data


def _left(until: float) -> float:
    return max(0.01, until - time.monotonic())
