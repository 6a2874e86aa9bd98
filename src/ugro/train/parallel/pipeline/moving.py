"""Layers on the way from one rank to another, with their optimizer's state: point to point, through main memory."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from ugro.train import checkpoint
from ugro.train.group import Group
from ugro.train.parallel.pipeline.cut import Cut
from ugro.train.parallel.pipeline.optimizers import Optimizers, States


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
