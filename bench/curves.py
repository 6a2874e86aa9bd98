"""Reading a TensorBoard event file against its own loader, and against checking the bytes alone.

    BENCH_PEERS=peers/bin/python python -m bench curves

All in CPU time: what else runs on the machine takes no part in it. The loader is measured where it is installed.
"""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.bars import Bar
from ugro.features.trackers.tfevents import masked, masked_all, parse_all
from ugro.kernel.telemetry.collector import Collector
from ugro.kernel.telemetry.metricstore import MetricStore

_SCALARS = 1_000_000
_TAGS = ("train/loss", "train/lr", "train/grad_norm", "perf/samples_per_s")
_PIECE = 4 << 20
_HEADER, _TAIL = 12, 4
# Run by the peer's own Python.
_LOADER = """
import sys, time
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
begun = time.process_time()
count = sum(1 for event in LegacyEventFileLoader(sys.argv[1]).Load() for _ in event.summary.value)
print(time.process_time() - begun, count)
"""


def measure(scalars: int = _SCALARS) -> list[Bar]:
    with tempfile.TemporaryDirectory(prefix="ugro-bench-") as folder:
        file = Path(folder, "jobs/1/attempt_1/output/runs/events.out.tfevents.1700000000.host.17.0")
        file.parent.mkdir(parents=True)
        with file.open("wb") as events:
            events.writelines(_records(scalars))
        size = file.stat().st_size
        checked_s, read_s = _checked_s(file), _read_s(file, scalars)
        stored_s = asyncio.run(_stored_s(Path(folder), scalars))
        peer_s = _peer_s(file, scalars)
    print(f"{scalars:,} scalars, {size / 1e6:.0f} MB; CPU time")
    for name, seconds in (("checksums alone", checked_s), ("read", read_s), ("read and stored", stored_s)):
        print(f"  {name:<24}{seconds:>8.2f} s{size / 1e6 / seconds:>8.1f} MB/s{scalars / seconds:>14,.0f} scalars/s")
    bars = [Bar("reading an event file", read_s, checked_s, "its checksums alone", 5.0)]
    if peer_s is not None:
        print(f"  {'TensorBoard, read':<24}{peer_s:>8.2f} s{size / 1e6 / peer_s:>8.1f} MB/s")
        bars.append(Bar("reading an event file", read_s, peer_s, "TensorBoard's loader", 0.5))
        bars.append(Bar("an event file until its curves are on the disk", stored_s, peer_s, "the same", 0.75))
    print()
    return bars


def _records(scalars: int) -> Iterator[bytes]:
    """As torch's SummaryWriter writes them."""
    for number in range(scalars):
        step, tag = number // len(_TAGS), _TAGS[number % len(_TAGS)].encode()
        value = b"\x0a" + bytes([len(tag)]) + tag + b"\x15" + struct.pack("<f", 1 / (step + 1))
        summary = b"\x0a" + bytes([len(value)]) + value
        event = b"\x09" + struct.pack("<d", 1.7e9 + step) + b"\x10" + _varint(step)
        yield _framed(event + b"\x2a" + bytes([len(summary)]) + summary)


def _varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


def _framed(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    checks = [struct.pack("<I", masked(part)) for part in (length, event)]
    return length + checks[0] + event + checks[1]


def _checked_s(file: Path) -> float:
    """What any reader must do: compute the checksum of every record."""
    content, place = file.read_bytes(), 0
    records = []
    while place < len(content):
        end = place + _HEADER + int.from_bytes(content[place : place + 8], "little")
        records.append(content[place + _HEADER : end])
        place = end + _TAIL
    begun = time.process_time()
    masked_all(records)
    return time.process_time() - begun


def _read_s(file: Path, scalars: int) -> float:
    begun = time.process_time()
    count = offset = 0
    with file.open("rb") as events:
        while content := os.pread(events.fileno(), _PIECE, offset):
            found, size = parse_all(content)
            count, offset = count + len(found), offset + size
    assert count == scalars
    return time.process_time() - begun


async def _stored_s(folder: Path, scalars: int) -> float:
    store = MetricStore(folder / "metrics.db")
    await store.open()
    begun = time.process_time()
    assert await Collector(folder / "jobs", store).finish(1) == scalars
    taken_s = time.process_time() - begun
    await store.close()
    return taken_s


def _peer_s(file: Path, scalars: int) -> float | None:
    python = os.environ.get("BENCH_PEERS", sys.executable)
    done = subprocess.run([python, "-c", _LOADER, str(file)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print("TensorBoard is not installed: BENCH_PEERS names a Python that has it")
        return None
    seconds, count = done.stdout.split()
    assert int(count) == scalars
    return float(seconds)
