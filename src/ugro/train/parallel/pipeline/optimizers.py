"""The script's optimizers when their parameters move: groups keep their settings, states follow their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ugro.core.errors import UsageError
from ugro.train.parallel.pipeline.cut import Tensors

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
