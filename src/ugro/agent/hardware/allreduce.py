"""PyTorch's all-reduce over all nodes that are measured, one rank for each device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ugro.agent.hardware.lines import Lines
from ugro.agent.hardware.process import run
from ugro.agent.hardware.subject import About, Subject
from ugro.agent.support.aio import together
from ugro.core.figures import AllReduceFigures, Skipped
from ugro.policy.hardware.budget import SIZES_BYTES
from ugro.policy.nodes.connectivity import Apart, Meeting
from ugro.remote.bench.main import NO_IMPORT

WHAT = "all-reduce"
_MOST_SKIPPED = 5  # ranks mostly say the same


@dataclass(frozen=True, slots=True)
class Rank:
    subject: Subject
    gpu: int | None


@dataclass(frozen=True, slots=True)
class Times:
    aim_s: float
    limit_s: float


async def ask(subjects: Sequence[Subject], limit_s: float) -> None:
    """How many GPUs PyTorch can use, where that matters and is not known: they may not have been measured."""
    unknown = [one for one in subjects if one.cuda_devices is None]
    if all(one.facts.gpus for one in subjects):
        await together(_ask(one, limit_s) for one in unknown)


async def _ask(subject: Subject, limit_s: float) -> None:
    lines = Lines()
    subject.asked.append(lines)
    await run(subject.link, "count", {"python": subject.python}, limit_s, lines)


async def measure(
    subjects: Sequence[Subject], meeting: Meeting | Apart, port: int, times: Times, about: About
) -> tuple[list[AllReduceFigures], list[Skipped]]:
    """``meeting``: of the first one, where all others reach it."""
    if isinstance(meeting, Apart):
        return [], [Skipped(WHAT, meeting.text)]
    # If devices were measured, it is known who lacks PyTorch; otherwise it turns out now.
    if lacking := [one.name for one in subjects if _lacks_torch(one)]:
        return [], [Skipped(WHAT, f"PyTorch is not there on {', '.join(lacking)}")]
    # With gloo instead, the figure would be far lower than the one of the GPUs, which it would replace.
    if silent := _silent(subjects):
        return [], [Skipped(WHAT, f"how many GPUs PyTorch can use is not known on {', '.join(silent)}")]
    ranks = ranks_of(subjects)
    backend = "gloo" if ranks[0].gpu is None else "nccl"
    interfaces = dict(meeting.interfaces)
    common = {
        "address": meeting.address,
        "port": port,
        "world": len(ranks),
        "backend": backend,
        "sizes": SIZES_BYTES,
        "seconds": times.aim_s,
        "limit_s": times.limit_s,
    }
    heard = [Lines() for _ in ranks]
    await together(
        run(rank.subject.link, "allreduce", _params(common, number, rank, interfaces, about), times.limit_s, lines)
        for number, (rank, lines) in enumerate(zip(ranks, heard, strict=True))
    )
    nodes = tuple(one.name for one in subjects)
    is_busy = any(one.is_busy for one in subjects)
    found = [
        AllReduceFigures(nodes, backend, len(ranks), line.size_bytes, line.seconds, about.measured_at, is_busy)
        for line in heard[0].allreduces
    ]
    skipped = dict.fromkeys(_named(one) for lines in heard for one in lines.skipped)
    return found, list(skipped)[:_MOST_SKIPPED]


def _named(skipped: Skipped) -> Skipped:
    """A size by its name; all else is about all sizes."""
    return skipped if skipped.what.startswith(WHAT) else Skipped(WHAT, skipped.why)


def ranks_of(subjects: Sequence[Subject]) -> list[Rank]:
    """One for each GPU if all nodes have some that PyTorch can use, else one for each node."""
    if all(one.cuda_devices for one in subjects):
        return [Rank(one, gpu) for one in subjects for gpu in one.cuda_devices or ()]
    return [Rank(one, None) for one in subjects]


def _params(
    common: dict[str, Any], number: int, rank: Rank, interfaces: dict[str, str], about: About
) -> dict[str, Any]:
    own = {"rank": number, "gpu": rank.gpu, "python": rank.subject.python}
    lock = rank.subject.lock(about, [] if rank.gpu is None else [rank.gpu])
    return {**common, **own, "lock": lock, "interface": interfaces.get(rank.subject.name)}


def _lacks_torch(subject: Subject) -> bool:
    return any(one.why.startswith(NO_IMPORT) for lines in (*subject.found, *subject.asked) for one in lines.skipped)


def _silent(subjects: Sequence[Subject]) -> list[str]:
    """Nodes with GPUs that nobody knows the number of, if that decides about the backend."""
    found = [one.name for one in subjects if one.cuda_devices is None]
    return found if all(one.cuda_devices is None or one.cuda_devices for one in subjects) else []
