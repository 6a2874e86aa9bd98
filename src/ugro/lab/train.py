"""A small data-parallel training in plain Python, which ``ugro demo`` launches in place of one with PyTorch.

Each rank computes the gradient of its part of a batch, and an all-reduce over TCP adds the parts up, so that every rank
makes the same step. The script needs nothing of UGRO: it uses the variables that every launcher sets (RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT) and, if set, UGRO_CHECKPOINT_DIR and UGRO_RESUME_DIR.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

EPOCHS, SAMPLES, BATCH = 8, 10_800, 1_800
HIDDEN, RATE, MOMENTUM = 100, 0.2, 0.9
_PATIENCE_S = 60.0  # for a rank that is slow to connect or to answer
_AGAIN_S = 0.05

Vector = list[float]
Sample = tuple[float, float, float]  # a point, and the moon that it belongs to: 0 or 1


@dataclass(slots=True)
class State:
    """The state between two epochs, which a checkpoint holds."""

    epoch: int
    weights: Vector
    speeds: Vector


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    state = resumed() or beginning()
    on_from = f", on from epoch {state.epoch}" if state.epoch else ""
    say(f"pid {os.getpid()}: {BATCH // ranks} of the {BATCH} samples of each step{on_from}")
    samples = two_moons()
    peers = Peers(rank, ranks)
    clock = Clock()
    try:
        while state.epoch < EPOCHS:
            loss, accuracy = train_epoch(state, samples, peers, clock)
            if rank == 0:
                save(state)
                say(f"epoch {state.epoch:2} of {EPOCHS}  loss {loss:.4f}  accuracy {accuracy:.1%}")
    except ConnectionError as error:
        sys.exit(f"lost another rank: {error}")
    say(f"of each step {clock.compute_ms:.1f} ms computing, {clock.wait_ms:.1f} ms waiting for others")


# --- the training ----------------------------------------------------------------------------------------------


def train_epoch(state: State, samples: list[Sample], peers: Peers, clock: Clock) -> tuple[float, float]:
    """Mean loss, and the share of samples that were classified correctly."""
    loss = right = 0.0
    order = random.Random(state.epoch).sample(samples, SAMPLES)  # the same on all ranks
    for first in range(0, SAMPLES, BATCH):
        batch = order[first : first + BATCH]
        clock.begin()
        part = gradient(state.weights, batch[peers.rank :: peers.ranks])
        clock.computed()
        *slopes, batch_loss, batch_right = peers.add(part)
        clock.waited()
        step(state, slopes)
        loss, right = loss + batch_loss, right + batch_right
    state.epoch += 1
    return loss / SAMPLES, right / SAMPLES


def step(state: State, slopes: Vector) -> None:
    state.speeds = [MOMENTUM * speed - RATE * slope / BATCH for speed, slope in zip(state.speeds, slopes, strict=True)]
    state.weights = [weight + speed for weight, speed in zip(state.weights, state.speeds, strict=True)]


def gradient(weights: Vector, samples: Sequence[Sample]) -> Vector:
    """The gradient of a net with one hidden layer, summed over the samples; their loss; how many were correct."""
    units = list(zip(*(weights[first::4] for first in range(4)), strict=True))  # to x, to y, bias, from the unit
    slopes = [0.0] * len(weights)
    loss = right = 0.0
    for x, y, moon in samples:
        lit = [math.tanh(to_x * x + to_y * y + bias) for to_x, to_y, bias, _ in units]
        answer = 1 / (1 + math.exp(-sum(unit[3] * value for unit, value in zip(units, lit, strict=True))))
        loss -= math.log(max(1e-12, answer if moon else 1 - answer))
        right += (answer > 0.5) == bool(moon)
        for number, value in enumerate(lit):
            back = (answer - moon) * units[number][3] * (1 - value * value)
            slopes[4 * number] += back * x
            slopes[4 * number + 1] += back * y
            slopes[4 * number + 2] += back
            slopes[4 * number + 3] += (answer - moon) * value
    return [*slopes, loss, right]


def two_moons() -> list[Sample]:
    """Two interleaved moons; the same on every rank and in every attempt."""
    drawn = random.Random(7)
    return [_sample(drawn) for _ in range(SAMPLES)]


def _sample(drawn: random.Random) -> Sample:
    moon, angle = drawn.randrange(2), drawn.uniform(0, math.pi)
    x = math.cos(angle) if moon else 1 - math.cos(angle)
    y = math.sin(angle) if moon else 0.5 - math.sin(angle)
    return x + drawn.gauss(0, 0.1), y + drawn.gauss(0, 0.1), moon


# --- checkpoints -----------------------------------------------------------------------------------------------


def beginning() -> State:
    drawn = random.Random(1)
    weights = [drawn.gauss(0, HIDDEN**-0.5 if number % 4 == 3 else 1.0) for number in range(4 * HIDDEN)]
    return State(0, weights, [0.0] * len(weights))


def resumed() -> State | None:
    folder = os.environ.get("UGRO_RESUME_DIR")
    if folder is None:
        return None
    (file,) = Path(folder).iterdir()
    return State(**json.loads(file.read_text()))


def save(state: State) -> None:
    """Written under another name until it is complete."""
    if folder := os.environ.get("UGRO_CHECKPOINT_DIR"):
        unfinished = Path(folder, f"epoch_{state.epoch}.json.tmp")
        unfinished.write_text(json.dumps({name: getattr(state, name) for name in State.__slots__}))
        unfinished.rename(unfinished.with_suffix(""))


# --- the other ranks -------------------------------------------------------------------------------------------


class Peers:
    """All ranks. The first adds up what the others send, in rank order, so that every run gives the same sums."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self._sockets = _wait_for_others(place, ranks) if rank == 0 else {0: _connect(place, rank)}

    def add(self, part: Vector) -> Vector:
        if self.rank:
            self._send(0, part)
            return self._receive(0, len(part))
        for other in range(1, self.ranks):
            part = [mine + theirs for mine, theirs in zip(part, self._receive(other, len(part)), strict=True)]
        for other in range(1, self.ranks):
            self._send(other, part)
        return part

    def _send(self, other: int, part: Vector) -> None:
        self._sockets[other].sendall(array("d", part).tobytes())

    def _receive(self, other: int, length: int) -> Vector:
        return array("d", _read(self._sockets[other], 8 * length, other)).tolist()


def _wait_for_others(place: tuple[str, int], ranks: int) -> dict[int, socket.socket]:
    sockets: dict[int, socket.socket] = {}
    with socket.create_server(place) as server:
        server.settimeout(_PATIENCE_S)
        while len(sockets) < ranks - 1:
            other = server.accept()[0]
            other.settimeout(_PATIENCE_S)
            sockets[int(array("d", _read(other, 8, -1))[0])] = _quick(other)
    return sockets


def _connect(place: tuple[str, int], rank: int) -> socket.socket:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            first = socket.create_connection(place, timeout=_PATIENCE_S)
        except ConnectionRefusedError:  # it does not listen yet
            if time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN_S)
            continue
        first.sendall(array("d", [rank]).tobytes())
        return _quick(first)


def _quick(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _read(connection: socket.socket, length: int, other: int) -> bytes:
    content = bytearray()
    while len(content) < length:
        piece = connection.recv(length - len(content))
        if not piece:
            raise ConnectionError(f"connection closed by peer, rank {other}")
        content += piece
    return bytes(content)


# --- where the time goes ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Clock:
    """Times computing and waiting separately, since a common exchange takes all ranks equally long."""

    steps: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    _since: float = field(default_factory=time.perf_counter)

    def begin(self) -> None:
        self._since = time.perf_counter()

    def computed(self) -> None:
        self.compute_s += self._lap()

    def waited(self) -> None:
        self.wait_s += self._lap()
        self.steps += 1

    @property
    def compute_ms(self) -> float:
        return 1000 * self.compute_s / max(1, self.steps)

    @property
    def wait_ms(self) -> float:
        return 1000 * self.wait_s / max(1, self.steps)

    def _lap(self) -> float:
        before, self._since = self._since, time.perf_counter()
        return self._since - before


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
