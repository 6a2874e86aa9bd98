"""A model as a row of parts: what comes before its layers, each layer, what comes after them.

A stage of the pipeline is some neighbouring parts. Every tensor of the model has a name, and belongs to the parts that
use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed, nn

from ugro.kernel.support.errors import UsageError
from ugro.train.group import Group
from ugro.train.rules.partition import Device, Layer, Link, Problem

_INTERFACE = (
    'say how it is cut: run.wrap(model, parallel="pipeline", layers="blocks", before="embed", after="logits"), where '
    "before and after are methods or modules of the model, or functions of the model and the tensors"
)


@dataclass(slots=True)
class Part:
    """Takes tensors, and returns a tensor or a tuple of tensors."""

    name: str
    call: Callable[..., Any]
    kind: str = ""  # layers of one kind cost the same
    names: list[str] = field(default_factory=list)  # of the parameters and buffers that it uses
    shared: list[str] = field(default_factory=list)  # parameters that another part has too

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        return as_tuple(self.call(*tensors), self.name)


class Cut:
    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self.model = model
        self.tensors = Tensors(model)
        prefix, layers = _layers(model, options.get("layers"))
        if not layers:
            raise UsageError("a pipeline needs layers, and there are none", hint=_INTERFACE)
        call = options.get("call")
        self.parts = [
            Part(f"{prefix}{number}", _calling(call, layer), repr(layer), self._within(layer))
            for number, layer in layers
        ]
        self._check_layers()
        before, after = _surroundings(model, layers, options)
        self.before = None if before is None else Part("before", before)
        self.after = None if after is None else Part("after", after)
        self.parts = [part for part in (self.before, *self.parts, self.after) if part is not None]

    def _within(self, layer: Any) -> list[str]:
        inside = {id(one) for one in [*layer.parameters(), *layer.buffers()]}
        return [name for name, one in self.tensors.items() if id(one) in inside]

    def _check_layers(self) -> None:
        used: dict[str, str] = {}
        for part in self.parts:
            for name in part.names:
                if name in used:
                    raise UsageError(
                        f"{used[name]} and {part.name} share {name}: they cannot be on different ranks",
                        hint="give every layer parameters of its own, or train it with DDP or FSDP",
                    )
                used[name] = part.name

    def share_rest(self, by_before: set[int], by_after: set[int]) -> None:
        """Gives what is in no layer to the parts around them: ``by_…`` are the ids of what they train.

        What is not trained is small or frozen, and both have it: it may thaw. What nobody uses stays with the first.
        """
        in_layers = {name for part in self.parts for name in part.names}
        for name, one in self.tensors.items():
            if name in in_layers:
                continue
            is_parameter = isinstance(one, nn.Parameter)
            is_trained = is_parameter and one.requires_grad
            users = [
                part
                for part, used in ((self.before, by_before), (self.after, by_after))
                if part is not None and (not is_trained or id(one) in used)
            ] or [self.parts[0]]
            for part in users:
                part.names.append(name)
                if is_parameter and len(users) > 1:
                    part.shared.append(name)

    def is_around(self, part: Part) -> bool:
        return part is self.before or part is self.after

    def stage(self, begin: int, end: int) -> nn.Module:
        return StageModule(self.parts[begin:end])


class StageModule(nn.Module):  # type: ignore[misc]
    """Neighbouring parts, one after the other. It owns no parameters: they stay where they are in the model."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self._row = tuple(parts)

    def forward(self, *tensors: Any) -> Any:
        for part in self._row:
            tensors = part(*tensors)
        return tensors[0] if len(tensors) == 1 else tensors


class Tensors:
    """Parameters and buffers by name; of one with several names, the first."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._paths: dict[str, list[str]] = {}
        first: dict[int, str] = {}
        for name, one in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]:
            self._paths.setdefault(first.setdefault(id(one), name), []).append(name)
        self.keys = list(model.state_dict())  # what a checkpoint has, also under other names
        self.first_name = {path: name for name, paths in self._paths.items() for path in paths}

    def names(self) -> list[str]:
        return list(self._paths)

    def items(self) -> list[tuple[str, Any]]:
        return [(name, self.get(name)) for name in self._paths]

    def get(self, name: str) -> Any:
        holder, leaf = self._holder(name)
        return getattr(holder, leaf)

    def release(self, names: Iterable[str]) -> None:
        """Frees the memory; what is left knows its shape."""
        for name in names:
            one = self.get(name)
            if one.device.type != "meta":
                self._put(name, torch.empty_like(one, device="meta"))

    def fill(self, values: dict[str, Any], device: Any) -> None:
        """Gives values to what was released."""
        for name, value in values.items():
            self._put(name, value.to(device))

    def place(self, names: Iterable[str], device: Any) -> None:
        """Moves them; parameters stay the objects that an optimizer knows."""
        for name in names:
            one = self.get(name)
            if one.device != device:
                one.data = one.data.to(device)

    def _put(self, name: str, value: Any) -> None:
        old = self.get(name)
        if isinstance(old, nn.Parameter):
            value = nn.Parameter(value.detach(), requires_grad=old.requires_grad)
        for path in self._paths[name]:
            holder, leaf = self._holder(path)
            kind = holder._parameters if leaf in holder._parameters else holder._buffers
            kind[leaf] = value

    def _holder(self, path: str) -> tuple[Any, str]:
        prefix, _, leaf = path.rpartition(".")
        return self._model.get_submodule(prefix), leaf


def as_tuple(value: Any, name: str) -> tuple[Any, ...]:
    found = tuple(value) if isinstance(value, list | tuple) else (value,)
    strange = next((one for one in found if not isinstance(one, torch.Tensor)), None)
    if strange is not None or not found:
        raise UsageError(
            f"{name} returns {type(value if not found else strange).__name__}, and stages exchange tensors",
            hint="return a tensor or a tuple of tensors; call=lambda layer, x: … says how a layer is called",
        )
    return found


# --- what the script says ---------------------------------------------------------------------------------------


def _layers(model: Any, wanted: Any) -> tuple[str, list[tuple[int, Any]]]:
    """The name of the list of layers in the model, with a dot, and the layers."""
    if wanted is None and isinstance(model, nn.Sequential):
        return "", list(enumerate(model))
    if wanted is None:
        raise UsageError("a pipeline needs the layers of the model", hint=_INTERFACE)
    if isinstance(wanted, str):
        try:
            wanted = model.get_submodule(wanted)
        except AttributeError:
            raise UsageError(f"the model has no {wanted!r}", hint=_INTERFACE) from None
    names = {id(one): name for name, one in model.named_modules()}
    layers = list(wanted) if isinstance(wanted, nn.ModuleList | nn.Sequential | list | tuple) else []
    if not layers or any(id(one) not in names for one in layers):
        raise UsageError(
            f"layers is {type(wanted).__name__}: not a ModuleList or Sequential with layers of this model",
            hint=_INTERFACE,
        )
    name = names.get(id(wanted), "layers")
    return f"{name}." if name else "", list(enumerate(layers))


def _surroundings(model: Any, layers: list[tuple[int, Any]], options: dict[str, Any]) -> tuple[Any, Any]:
    before, after = options.get("before"), options.get("after")
    if before is None and after is None and isinstance(model, nn.Sequential):
        return _neighbours(model, layers)
    return _function(model, before, "before"), _function(model, after, "after")


def _neighbours(model: Any, layers: list[tuple[int, Any]]) -> tuple[Any, Any]:
    """In a Sequential, what stands before and after the child that holds the layers."""
    inside = {id(layer) for _, layer in layers}
    places = [at for at, child in enumerate(model) if id(child) in inside or _holds(child, inside)]
    if not places:
        raise UsageError("the layers are too deep inside the model to see what is around them", hint=_INTERFACE)
    first, last = list(model)[: places[0]], list(model)[places[-1] + 1 :]
    return (nn.Sequential(*first) if first else None), (nn.Sequential(*last) if last else None)


def _holds(child: Any, inside: set[int]) -> bool:
    return isinstance(child, nn.Sequential) and {id(one) for one in child} == inside


def _function(model: Any, wanted: Any, option: str) -> Callable[..., Any] | None:
    if wanted is None:
        return None
    if isinstance(wanted, str):
        found: Any = model
        for name in wanted.split("."):
            found = getattr(found, name, None)
        wanted = found
    if not callable(wanted):
        raise UsageError(f"{option} is not a method or module of the model", hint=_INTERFACE)
    if isinstance(wanted, nn.Module) or getattr(wanted, "__self__", None) is not None:
        return wanted  # type: ignore[no-any-return]
    return lambda *tensors: wanted(model, *tensors)


def _calling(call: Callable[..., Any] | None, layer: Any) -> Callable[..., Any]:
    if call is None:
        return layer  # type: ignore[no-any-return]
    return lambda *tensors: call(layer, *tensors)


# --- measure ----------------------------------------------------------------------------------------------------------
# What each part of a model costs on this rank's device, and the links between the ranks.


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
