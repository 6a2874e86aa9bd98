"""Layers on the way from one rank to another, with their optimizer's state: point to point, through main memory."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn

from ugro.kernel.support.errors import UsageError
from ugro.train import checkpoint
from ugro.train.group import Group
from ugro.train.parallel.pipeline.cut import Cut, Tensors

# --- model ------------------------------------------------------------------------------------------------------------
# The model as a script of a pipeline uses it: each rank trains its own stage of it.
#
# Until the first step it is whole on every rank, in main memory: optimizers are made and checkpoints loaded as always.


class _CapturedError(Exception):
    """Ends a loss function as soon as the model's inputs are known."""


class Pipelined(nn.Module):  # type: ignore[misc]
    def __init__(self, model: Any, tensors: Tensors, group: Group) -> None:
        super().__init__()
        self.module = model
        self._tensors = tensors
        self._group = group
        self._captured: tuple[Any, ...] | None = None
        self._is_capturing = False
        self._answer: Any = None
        self.is_cut = False
        self.counted: Callable[[str], bool] = lambda name: True  # of what several ranks have, one counts it
        self.passed: Callable[..., Any] | None = None  # a forward through all stages

    # --- what the script calls ----------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._answer is not None:
            return self._answer
        if named and (self._is_capturing or self.is_cut):
            raise UsageError(
                f"the model of a pipeline takes its inputs by position: {', '.join(named)}",
                hint="before=lambda model, ids, mask: … says what becomes of them",
            )
        if self._is_capturing:
            self._captured = inputs
            raise _CapturedError
        if not self.is_cut:
            return self.module(*inputs, **named)
        if torch.is_grad_enabled():
            raise UsageError(
                "no rank has the whole model", hint="train with run.step(loss_fn, batch); evaluate in torch.no_grad()"
            )
        assert self.passed is not None
        return self.passed(*inputs)

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        """Those of this rank's stage; before the first step, all."""
        return ((name, one) for name, one in super().named_parameters(*args, **options) if one.device.type != "meta")

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """This rank's stage, with the names that they have in the model; before the first step, all of it."""
        found = self.module.state_dict(*args, **options)
        return {name: one for name, one in found.items() if one.device.type != "meta"}

    def load_state_dict(self, content: Any, *args: Any, **options: Any) -> Any:
        if self.is_cut:
            raise UsageError("the model is spread over the ranks already", hint="load it before the first step")
        return self.module.load_state_dict(content, *args, **options)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Any:
        """As torch.nn.utils.clip_grad_norm_, of the gradients of all ranks. All ranks call it."""
        own = [one for name, one in self._trained() if self.counted(name)]
        norm = torch.nn.utils.get_total_norm([one.grad for one in own if one.grad is not None], norm_type)
        norms = [found for (found,) in self._group.gather([float(norm)]).wait()]
        total = max(norms) if math.isinf(norm_type) else sum(one**norm_type for one in norms) ** (1 / norm_type)
        everything = [one for _, one in self._trained()]
        device = everything[0].device if everything else "cpu"
        found = torch.tensor(total, device=device, dtype=torch.float64)
        torch.nn.utils.clip_grads_with_norm_(everything, max_norm, found)
        return found

    def _trained(self) -> list[tuple[str, Any]]:
        return [(name, one) for name, one in self._tensors.items() if one.requires_grad and one.device.type != "meta"]

    # --- what a step does with it -------------------------------------------------------------------------------

    def captured(self, loss_fn: Callable[[Any], Any], batch: Any) -> tuple[Any, ...]:
        """What the loss function gives to the model."""
        self._is_capturing, self._captured = True, None
        try:
            with contextlib.suppress(_CapturedError):
                loss_fn(batch)
        finally:
            self._is_capturing = False
        captured = self._inputs()
        if captured is None:
            raise UsageError(
                "the loss function does not call the model", hint="run.step(lambda part: criterion(model(part[0]), …))"
            )
        return captured

    def _inputs(self) -> tuple[Any, ...] | None:
        return self._captured

    def answered(self, loss_fn: Callable[[Any], Any], batch: Any, output: Any) -> Any:
        """The loss, if this is the model's output."""
        self._answer = output
        try:
            return loss_fn(batch)
        finally:
            self._answer = None


# --- optimizers -------------------------------------------------------------------------------------------------------
# The script's optimizers when their parameters move: groups keep their settings, states follow their parameters.


States = dict[str, dict[str, Any]]  # by optimizer, by parameter


class Optimizers:
    def __init__(self, kept: Mapping[str, Any], tensors: Tensors) -> None:
        """All that the run keeps; while the model is whole."""
        self._tensors = tensors
        self._kept = {name: one for name, one in kept.items() if isinstance(one, torch.optim.Optimizer)}
        names = {id(tensor): name for name, tensor in tensors.items()}
        if not self._kept:
            raise UsageError(
                "a pipeline moves layers between ranks, and has to know their optimizer",
                hint="call run.keep(model=model, optimizer=optimizer) before the first step",
            )
        self._groups = {kind: [_named(group, names) for group in one.param_groups] for kind, one in self._kept.items()}

    @property
    def bytes_for_each(self) -> float:
        """Of its state for each byte of a parameter, as far as that is known before a step."""
        return max(_state_part(one.defaults) for one in self._kept.values())

    def kind_of(self, one: Any) -> str | None:
        return next((kind for kind, optimizer in self._kept.items() if optimizer is one), None)

    def states(self, names: Iterable[str]) -> States:
        """In main memory."""
        wanted = set(names)
        found: States = {}
        for kind, optimizer in self._kept.items():
            found[kind] = {
                self._name(parameter): {key: _to(value, "cpu") for key, value in state.items()}
                for parameter, state in optimizer.state.items()
                if self._name(parameter) in wanted
            }
        return found

    def _name(self, parameter: Any) -> str:
        return self._names_now.get(id(parameter), "")

    def _note_groups(self) -> None:
        """Those that the script has added since."""
        for kind, optimizer in self._kept.items():
            for group in optimizer.param_groups[len(self._groups[kind]) :]:
                self._groups[kind].append(_named(group, self._names_now))

    def rebuild(self, arrived: States) -> None:
        """Gives each group its parameters that are on this rank, in the first order, and states of new ones."""
        self._note_groups()
        now = {name: one for name, one in self._tensors.items() if one.device.type != "meta"}
        for kind, optimizer in self._kept.items():
            old = {self._name(parameter): state for parameter, state in optimizer.state.items()}
            old |= arrived.get(kind, {})
            optimizer.state.clear()
            for group, names in zip(optimizer.param_groups, self._groups[kind], strict=True):
                group["params"] = [now[name] for name in names if name in now]
                for name in names:
                    if name in now and name in old:
                        optimizer.state[now[name]] = _placed(old[name], now[name], group)
        self._note_names()

    def whole(self, kind: str, states: dict[str, Any]) -> dict[str, Any]:
        """The state_dict that one process with all parameters would have."""
        self._note_groups()
        own = self._kept[kind].state_dict()
        numbers: dict[str, int] = {}
        groups = []
        for group, names in zip(own["param_groups"], self._groups[kind], strict=True):
            first = len(numbers)
            numbers |= {name: first + at for at, name in enumerate(names)}
            groups.append({**group, "params": [numbers[name] for name in names]})
        state = {numbers[name]: one for name, one in sorted(states.items(), key=lambda item: numbers[item[0]])}
        return {**own, "state": state, "param_groups": groups}

    def _note_names(self) -> None:
        self._names_now = {id(one): name for name, one in self._tensors.items()}

    def begin(self) -> None:
        self._note_names()


def _named(group: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    if any(id(parameter) not in names for parameter in group["params"]):
        raise UsageError(
            "an optimizer has parameters that are not in the model",
            hint="wrap the model first, and give its parameters to the optimizer",
        )
    return [names[id(parameter)] for parameter in group["params"]]


def _state_part(defaults: Mapping[str, Any]) -> float:
    """Two moments with Adam and those like it, one with momentum; of unknown ones, two are assumed."""
    if "betas" in defaults:
        return 2.0
    if "momentum" in defaults:
        return 1.0 if defaults["momentum"] else 0.0
    return 2.0


def _placed(state: Mapping[str, Any], parameter: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Beside their parameter; torch counts steps in main memory, unless they are part of a kernel."""
    is_beside = bool(group.get("capturable") or group.get("fused"))
    return {
        key: value if key == "step" and not is_beside else _to(value, parameter.device) for key, value in state.items()
    }


def _to(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


# --- moving -----------------------------------------------------------------------------------------------------------


class Mover:
    """``owners``: the rank of each part of the model."""

    def __init__(self, cut: Cut, optimizers: Optimizers, group: Group) -> None:
        self._cut, self._optimizers, self._group = cut, optimizers, group

    def settle(self, owners: Sequence[int]) -> None:
        """From a whole model on every rank: each keeps its own parts, on its device."""
        own = self._names(owners, self._group.rank)
        tensors = self._cut.tensors
        self._optimizers.begin()
        tensors.release(name for name in tensors.names() if name not in own)
        tensors.place(own, self._group.device)
        self._optimizers.rebuild({})

    def move(self, old: Sequence[int], new: Sequence[int]) -> int:
        """Returns how many bytes this rank has sent. All ranks call it, and go through the same list."""
        tensors, rank = self._cut.tensors, self._group.rank
        arrived: States = {}
        sent_bytes = 0
        for names, source, target in self._transfers(old, new):
            if rank == source:
                sent_bytes += self.send(self._packed(names), target)
            elif rank == target:
                content = self.receive(source)
                tensors.fill(content["tensors"], self._group.device)
                for kind, states in content["optimizers"].items():
                    arrived.setdefault(kind, {}).update(states)
        own = self._names(new, rank)
        tensors.release(name for name in tensors.names() if name not in own)
        self._optimizers.rebuild(arrived)
        return sent_bytes

    def whole(self, owners: Sequence[int], kept: Mapping[str, Any], is_model: Any) -> dict[str, Any]:
        """The states of all that a run keeps, on the first rank, as one process would have them. All ranks call it."""
        rank, missing = self._group.rank, set(self._cut.tensors.names())
        values: dict[str, Any] = {}
        states: States = {}
        for part, owner in zip(self._cut.parts, owners, strict=True):
            names = [name for name in self._first_users(part) if name in missing]
            missing -= set(names)
            if rank not in (0, owner) or not names:
                continue
            if rank == owner and rank:
                self.send(self._packed(names), 0)
                continue
            content = self._packed(names) if owner == 0 else self.receive(owner)
            values |= content["tensors"]
            for kind, some in content["optimizers"].items():
                states.setdefault(kind, {}).update(some)
        return self._assembled(kept, is_model, values, states) if rank == 0 else {}

    def _assembled(
        self, kept: Mapping[str, Any], is_model: Any, values: dict[str, Any], states: States
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        tensors = self._cut.tensors
        for name, one in kept.items():
            kind = self._optimizers.kind_of(one)
            if is_model(one):
                found[name] = {
                    key: values[tensors.first_name[key]] for key in tensors.keys if key in tensors.first_name
                }
            elif kind is not None:
                found[name] = self._optimizers.whole(kind, states.get(kind, {}))
            else:
                found |= checkpoint.states({name: one})
        return found

    def _first_users(self, part: Any) -> list[str]:
        """Running statistics outside layers: with the part that trains something in the same module, if one does."""
        after, names = self._cut.after, list(part.names)
        if after is None or part is after or part is not self._cut.before:
            return names
        trained = {name.rpartition(".")[0] for name in after.names if name not in names}
        return [name for name in names if name not in after.names or name.rpartition(".")[0] not in trained]

    # --- who has what -------------------------------------------------------------------------------------------

    def _names(self, owners: Sequence[int], rank: int) -> set[str]:
        return {
            name for part, owner in zip(self._cut.parts, owners, strict=True) if owner == rank for name in part.names
        }

    def _transfers(self, old: Sequence[int], new: Sequence[int]) -> list[tuple[list[str], int, int]]:
        """Names, from, to; what a rank has already for another part is not sent again."""
        have = {rank: self._names(old, rank) for rank in range(self._group.ranks)}
        found = []
        for part, source, target in zip(self._cut.parts, old, new, strict=True):
            names = [name for name in part.names if name not in have[target]]
            if names:
                have[target] |= set(names)
                found.append((names, source, target))
        return found

    # --- on the way ---------------------------------------------------------------------------------------------

    def _packed(self, names: Sequence[str]) -> dict[str, Any]:
        values = {name: self._cut.tensors.get(name).detach().cpu() for name in names}
        return {"tensors": values, "optimizers": self._optimizers.states(names)}

    def send(self, content: Any, target: int) -> int:
        file = io.BytesIO()
        torch.save(content, file)
        packed = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
        distributed.send(torch.tensor([len(packed)]), target, group=self._group.small)
        distributed.send(packed, target, group=self._group.small)
        return len(packed)

    def receive(self, source: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        distributed.recv(size, source, group=self._group.small)
        packed = torch.empty(int(size), dtype=torch.uint8)
        distributed.recv(packed, source, group=self._group.small)
        return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)
