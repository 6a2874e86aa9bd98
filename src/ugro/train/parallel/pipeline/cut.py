"""A model as a row of parts: what comes before its layers, each layer, what comes after them.

A stage of the pipeline is some neighbouring parts. Every tensor of the model has a name, and belongs to the parts that
use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ugro.core.errors import UsageError

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
