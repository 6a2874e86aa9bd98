"""Who takes part in an all-reduce, and what is said when somebody cannot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

from ugro.features.hardware import bench as allreduce
from ugro.features.hardware.model import Mode, Part
from ugro.features.hardware.subject import About, Lines, Subject
from ugro.kernel.links.diagnosis import Apart, Meeting
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import Facts, Gpu, NodeSpec
from ugro.node import wire

MEETING = Meeting("10.0.0.1", ())
ABOUT = About("2026-01-01T00:00:00+00:00", Mode.QUICK, frozenset(Part))
GPU = Gpu(0, "GPU-0", "RTX", temperature_c=60.0, throttle=("power",))


def subject(name: str, *messages: dict[str, Any]) -> Subject:
    lines = Lines()
    for message in messages:
        lines.take(json.dumps(message).encode())
    found = Subject(name, Link(NodeSpec(name)), Facts(0.0, 1.0, (0.0, 0.0, 0.0), 0.1, 100, 50, gpus=(GPU,)))
    found.found.append(lines)
    return found


def test_there_is_a_rank_for_each_gpu_only_if_all_nodes_have_some() -> None:
    async def work() -> None:
        two, one, none = subject("a", {"gpus": 2}), subject("b", {"gpus": 1}), subject("c", {"gpus": 0})
        ranks = [(rank.subject.name, rank.gpu) for rank in allreduce.ranks_of([two, one])]
        assert ranks == [("a", 0), ("a", 1), ("b", 0)]
        assert [rank.gpu for rank in allreduce.ranks_of([two, none])] == [None, None]

    asyncio.run(work())


class _Node:
    """Its link, and the one process that was started there."""

    def __init__(self, name: str, said: dict[str, Any]) -> None:
        self.spec = NodeSpec(name)
        self.calls: list[dict[str, Any]] = []
        self._said = said

    def stream(self, method: str, params: dict[str, Any]) -> _Node:
        self.calls.append(params)
        return self

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        yield wire.OUT, json.dumps(self._said).encode() + b"\n"

    async def result(self) -> dict[str, Any]:
        return {"code": 0}

    def cancel(self) -> None:
        pass


def unmeasured(name: str, said: dict[str, Any], gpus: tuple[Gpu, ...] = (GPU,)) -> tuple[Subject, _Node]:
    """A node whose devices were not measured."""
    node = _Node(name, said)
    return Subject(name, cast(Link, node), Facts(0.0, 1.0, (0.0, 0.0, 0.0), 0.1, 100, 50, gpus=gpus)), node


def parts(node: _Node) -> list[tuple[str, str | None, int | None]]:
    return [(one["part"], one.get("backend"), one.get("gpu")) for one in node.calls]


async def asked(*subjects: Subject) -> list[str]:
    await allreduce.ask(subjects, 5.0)
    _, skipped = await allreduce.measure(subjects, MEETING, 1, allreduce.Times(1.0, 2.0), ABOUT)
    return [one.why for one in skipped]


def test_without_a_measurement_of_the_devices_pytorch_is_asked_for_them() -> None:
    async def work() -> None:
        (one, first), (other, second) = unmeasured("a", {"torch": "2.13.0", "gpus": 1}), unmeasured("b", {"gpus": 2})
        assert await asked(one, other) == []
        assert parts(first) == [("count", None, None), ("allreduce", "nccl", 0)]
        assert parts(second) == [("count", None, None), ("allreduce", "nccl", 0), ("allreduce", "nccl", 1)]
        assert one.figures(ABOUT).torch is None, "of its devices there are no figures"

    asyncio.run(work())


def test_nobody_is_asked_about_gpus_where_a_node_has_none() -> None:
    async def work() -> None:
        (one, first), (other, _) = unmeasured("a", {"gpus": 1}), unmeasured("b", {}, gpus=())
        assert await asked(one, other) == []
        assert parts(first) == [("allreduce", "gloo", None)]

    asyncio.run(work())


def test_where_pytorch_does_not_answer_gloo_does_not_replace_the_figures_of_gpus() -> None:
    async def work() -> None:
        (one, _), (other, silent) = unmeasured("a", {"gpus": 1}), unmeasured("b", {"phase": "importing PyTorch"})
        assert await asked(one, other) == ["how many GPUs PyTorch can use is not known on b"]
        assert parts(silent) == [("count", None, None)]
        missing, _ = unmeasured("c", {"skipped": {"what": "count", "why": "it cannot be imported: no torch"}})
        assert await asked(one, missing) == ["PyTorch is not there on c"]

    asyncio.run(work())


def test_nobody_is_asked_where_pytorch_is_missing_or_nodes_do_not_meet() -> None:
    async def work() -> None:
        missing = {"skipped": {"what": "devices", "why": "it cannot be imported: No module named 'torch'"}}
        times = allreduce.Times(1.0, 2.0)
        both = [subject("a", {"torch": "2.13.0"}), subject("b", missing)]
        found, [skipped] = await allreduce.measure(both, MEETING, 1, times, ABOUT)
        assert (found, skipped.why) == ([], "PyTorch is not there on b")
        found, [skipped] = await allreduce.measure(both, Apart("a cannot connect to b", "", "b"), 1, times, ABOUT)
        assert (found, skipped.why) == ([], "a cannot connect to b")

    asyncio.run(work())


def test_what_was_seen_of_a_gpu_meanwhile_is_kept_with_its_figures() -> None:
    async def work() -> None:
        measured = subject("a", {"device": {"index": 0, "fp32_tflops": 9.0, "pcie_width": 4, "pcie_width_max": 16}})
        measured.note((GPU,))
        measured.note((Gpu(0, "GPU-0", "RTX", temperature_c=91.0, throttle=("heat",)),))
        measured.note((Gpu(0, "GPU-0", "RTX", temperature_c=70.0, throttle=None),))
        [device] = measured.figures(ABOUT).devices
        assert (device.uuid, device.name, device.fp32_tflops) == ("GPU-0", "RTX", 9.0)
        assert (device.seen.temperature_c, device.seen.throttle) == (91.0, ("power", "heat"))
        assert (device.seen.pcie_width, device.seen.pcie_width_max) == (4, 16)
        strange = subject("a", {"device": {"index": 7, "fp32_tflops": 9.0}})
        assert strange.figures(ABOUT).devices == (), "a GPU that the probe does not know has no name"

    asyncio.run(work())
