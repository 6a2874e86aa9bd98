"""What each part of a model costs on this rank's device, and the links between the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from ugro.core.errors import UsageError
from ugro.policy.partition.problem import Device, Layer, Link, Problem
from ugro.train.group import Group
from ugro.train.parallel.pipeline.cut import Cut, Part, as_tuple

_LONG_ENOUGH_S = 1.0
_MOST_ROUNDS, _LEAST_ROUNDS = 12, 2
_FEW, _MANY = 4 << 10, 4 << 20  # bytes of the messages that time a link
_MESSAGES = 3
_USABLE = 0.92  # of a device's memory: allocators leave gaps
_UNLIMITED = 0.0


@dataclass(slots=True)
class Measured:
    part: Part
    inputs: tuple[Any, ...]
    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_bytes: int = 0
    sent_bytes: int = 0
    kind: str = ""  # parts of the same kind cost the same


def check(cut: Cut, inputs: tuple[Any, ...], group: Group) -> None:
    """The parts, one after the other, compute what the model computes. The first rank looks; all ranks call it."""
    if not all(isinstance(one, torch.Tensor) for one in inputs) or not inputs:
        raise UsageError("the model of a pipeline takes tensors", hint="before=lambda model, x: … adds all the rest")
    problem = _problem(cut, inputs, group.device) if group.rank == 0 else ""
    if problem := group.texts(problem)[0]:
        raise UsageError(
            f"before, layers and after do not compute what the model computes: {problem}",
            hint="they are called in this order, each with what the one before returned",
        )


def _problem(cut: Cut, inputs: tuple[Any, ...], device: Any) -> str:
    """In words: the other ranks wait for them."""
    try:
        return _difference(cut, inputs, device)
    except UsageError as error:
        return str(error)
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _difference(cut: Cut, inputs: tuple[Any, ...], device: Any) -> str:
    whole_bytes = sum(one.nbytes for _, one in cut.tensors.items())
    if device.type == "cuda" and whole_bytes > torch.cuda.mem_get_info(device)[0] / 2:
        return ""  # it cannot be called as a whole
    model, was_training = cut.model, cut.model.training
    cut.tensors.place(cut.tensors.names(), device)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            model.eval()
            found = inputs
            for part in cut.parts:
                found = part(*found)
            expected = as_tuple(model(*inputs), "the model")
    finally:
        model.train(was_training)
        cut.tensors.place(cut.tensors.names(), torch.device("cpu"))
    if [one.shape for one in found] != [one.shape for one in expected]:
        return f"{[tuple(one.shape) for one in found]} instead of {[tuple(one.shape) for one in expected]}"
    is_same = all(torch.allclose(one, other, rtol=1e-3, atol=1e-5) for one, other in zip(found, expected, strict=True))
    return "" if is_same else "other values"


class Meter:
    def __init__(self, cut: Cut, group: Group, loss_of: Callable[[Any], Any]) -> None:
        """``loss_of``: the loss if this is the model's output."""
        self._cut, self._group, self._loss_of = cut, group, loss_of

    def measured(self, inputs: tuple[Any, ...]) -> list[Measured]:
        """Every part, on a real micro-batch. One after the other is on the device: the whole model may not fit.

        What parts learn without gradients, such as the statistics of a BatchNorm, is as it was afterwards.
        """
        before = {name: one.clone() for name, one in self._cut.tensors.items() if not isinstance(one, nn.Parameter)}
        try:
            return self._measured(inputs)
        finally:
            for name, value in before.items():
                self._cut.tensors.get(name).copy_(value)

    def _measured(self, inputs: tuple[Any, ...]) -> list[Measured]:
        found = self._walked(inputs)
        begun, rounds = time.perf_counter(), 0
        while rounds < _LEAST_ROUNDS or (rounds < _MOST_ROUNDS and time.perf_counter() - begun < _LONG_ENOUGH_S):
            for one in found:
                with _On(self._cut, one.part, self._group.device):
                    self._time(one)
            rounds += 1
        _pool(found, rounds)
        return found

    def _walked(self, inputs: tuple[Any, ...]) -> list[Measured]:
        """Each part once, with what the one before returned: sizes, and which parameters are used outside layers."""
        found: list[Measured] = []
        used: dict[str, set[int]] = {}
        for part in self._cut.parts:
            one = Measured(part, inputs, kind=_kind(part))
            with _On(self._cut, part, self._group.device):
                outputs, one.saved_bytes = _saved(lambda one=one: self._run(one))  # type: ignore[misc]
                if self._cut.is_around(part):
                    used[part.name] = _used(outputs)
                _backward(outputs)
                self._forget_gradients(one)
            if part is not self._cut.parts[-1]:
                one.sent_bytes = sum(tensor.nbytes for tensor in outputs)
                inputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs)
            found.append(one)
        self._cut.share_rest(used.get("before", set()), used.get("after", set()))
        return found

    def _run(self, one: Measured) -> tuple[Any, ...]:
        outputs = one.part(*one.inputs)
        if one.part is not self._cut.parts[-1]:
            return outputs
        loss = self._loss_of(outputs[0] if len(outputs) == 1 else outputs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError("the loss is not one number", hint="return the mean over the samples")
        return (loss.reshape(()),)

    def _time(self, one: Measured) -> None:
        begun = self._now()
        outputs = self._run(one)
        between = self._now()
        _backward(outputs)
        one.forward_s += between - begun
        one.backward_s += self._now() - between
        self._forget_gradients(one)

    def _forget_gradients(self, one: Measured) -> None:
        for tensor in [*one.inputs, *self._cut.model.parameters()]:
            if isinstance(tensor, torch.Tensor) and tensor.is_leaf:
                tensor.grad = None

    def _now(self) -> float:
        if self._group.device.type == "cuda":
            torch.cuda.synchronize(self._group.device)
        return time.perf_counter()


def _backward(outputs: Sequence[Any]) -> None:
    trained = [tensor for tensor in outputs if tensor.requires_grad]
    if trained:
        torch.autograd.backward(trained, [torch.ones_like(tensor) for tensor in trained])


class _On:
    """A part on the device, for a while; outside layers nobody knows yet what belongs to it, so all comes along."""

    def __init__(self, cut: Cut, part: Part, device: Any) -> None:
        self._names = part.names
        if cut.is_around(part) and not part.names:
            in_layers = {name for one in cut.parts for name in one.names}
            self._names = [name for name in cut.tensors.names() if name not in in_layers]
        self._cut, self._device = cut, device

    def __enter__(self) -> None:
        self._cut.tensors.place(self._names, self._device)

    def __exit__(self, *error: object) -> None:
        self._cut.tensors.place(self._names, torch.device("cpu"))


def _saved(run: Callable[[], tuple[Any, ...]]) -> tuple[tuple[Any, ...], int]:
    """What it returns, and how many bytes it keeps until its backward. Parameters are there anyway."""
    kept: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = run()
    return outputs, sum(kept.values())


def _used(outputs: Sequence[Any]) -> set[int]:
    """The ids of the parameters that these depend on."""
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen: set[Any] = set()
    found: set[int] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [one for one, _ in node.next_functions if one is not None]
    return found


def _kind(part: Part) -> str:
    return part.kind or part.name


def _pool(found: Sequence[Measured], rounds: int) -> None:
    """Layers of one kind get the mean of all of them: a single one takes too short to be timed well."""
    last = found[-1]
    last.kind = f"{last.kind} and the loss"
    for kind in {one.kind for one in found}:
        alike = [one for one in found if one.kind == kind]
        forward_s = sum(one.forward_s for one in alike) / len(alike) / rounds
        backward_s = sum(one.backward_s for one in alike) / len(alike) / rounds
        for one in alike:
            one.forward_s, one.backward_s = forward_s, backward_s


# --- the problem ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    names: tuple[str, ...]  # of the ranks
    optimizer_part: float  # bytes of an optimizer's state for each byte of a parameter
    micro_batches: int
    stages_each: int
    may_reorder: bool


def problem(cut: Cut, found: Sequence[Measured], group: Group, setting: Setting) -> Problem:
    """The same on every rank, from the numbers of all. All ranks call it."""
    largest = max(one.sent_bytes for one in found)
    own = [
        *(one.forward_s for one in found),
        *(one.backward_s for one in found),
        _memory_bytes(group.device),
    ]
    links = _links(group, min(_MANY, max(_FEW, largest)))
    rows = group.gather([*own, *links]).wait()
    count = len(found)
    devices, table = [], []
    for name, row in zip(setting.names, rows, strict=True):
        memory = None if row[2 * count] == _UNLIMITED else int(row[2 * count])
        devices.append(Device(name, tuple(row[:count]), tuple(row[count : 2 * count]), memory))
        rest = row[2 * count + 1 :]
        table.append(tuple(Link(*rest[2 * at : 2 * at + 2]) for at in range(group.ranks)))
    layers = tuple(_layer(cut, one, setting.optimizer_part) for one in found)
    options = (setting.micro_batches, setting.stages_each, setting.may_reorder)
    return Problem(layers, tuple(devices), tuple(table), *options)


def _layer(cut: Cut, one: Measured, optimizer_part: float) -> Layer:
    weights = 0.0
    for name in one.part.names:
        tensor = cut.tensors.get(name)
        weights += tensor.nbytes * (2 + optimizer_part if tensor.requires_grad else 1)
    return Layer(int(weights), one.saved_bytes, one.sent_bytes)


def _memory_bytes(device: Any) -> float:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(int(_USABLE * (free + torch.cuda.memory_reserved(device))))
    return _UNLIMITED  # the whole model is in main memory already


def _links(group: Group, size_bytes: int) -> list[float]:
    """Latency and seconds per byte to each rank, one pair after the other."""
    found = [0.0] * (2 * group.ranks)
    for one in range(group.ranks):
        for other in range(one + 1, group.ranks):
            if group.rank in (one, other):
                peer = other if group.rank == one else one
                is_first = group.rank == one
                short_s = _message_s(group.device, peer, _FEW, is_first=is_first)
                long_s = _message_s(group.device, peer, size_bytes, is_first=is_first)
                per_byte = max(0.0, long_s - short_s) / max(1, size_bytes - _FEW) if size_bytes > _FEW else 0.0
                found[2 * peer : 2 * peer + 2] = [short_s, per_byte]
            group.barrier()
    return found


def _message_s(device: Any, peer: int, size_bytes: int, *, is_first: bool) -> float:
    """Half of the fastest way there and back; the first one connects."""
    message = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    fastest = float("inf")
    for _ in range(_MESSAGES + 1):
        begun = time.perf_counter()
        for is_sending in (is_first, not is_first):
            (distributed.send if is_sending else distributed.recv)(message, peer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - begun)
    return fastest / 2
