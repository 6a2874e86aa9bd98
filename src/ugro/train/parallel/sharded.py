"""Checkpoints of sharded models, in the format of torch.distributed.checkpoint: they fit any number of ranks.

Every rank writes its part. A checkpoint is complete in one folder, that of the first rank: ranks that do not see this
folder, because they are on another node, write into one of their own and send their files from there. So the loss of a
node loses nothing, and one node is enough to collect it from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint import state_dict as dicts
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.fsdp import FSDPModule
from torch.serialization import safe_globals

from ugro.kernel.support.errors import UgroError
from ugro.train import checkpoint
from ugro.train.group import Group
from ugro.train.parallel.way import Way
from ugro.train.saving import Target
from ugro.train.stepping import Stepping

_PIECE = 16 << 20  # bytes sent at once
_MARK = ".mark"
_PART = "*.distcp"
_INDEX = "index.pt"


def save(objects: Mapping[str, Any], about: Mapping[str, Any], target: Target, way: Way, group: Group) -> Path | None:
    final = target.folder / f"step_{target.step:09}"
    unfinished = target.folder / f".{final.name}.tmp"
    is_there = _begin(unfinished, group)
    own = unfinished if is_there else target.folder / f".{final.name}.rank_{group.rank}.tmp"
    if not is_there:
        shutil.rmtree(own, ignore_errors=True)
    whole = {name: _whole(one.state_dict()) for name, one in objects.items() if not _has_parts(one)}
    parts = {name: _parts(one, way.model) for name, one in objects.items() if _has_parts(one)}
    with _quiet():
        dcp.save(
            parts, storage_writer=_Writer(own, overwrite=True), process_group=group.small,
            no_dist=group.ranks == 1,
        )  # fmt: skip
    _collect(own, unfinished, is_there, group)
    if group.rank > 0:
        return None
    checkpoint.write_file(unfinished / checkpoint.HEAD, {"objects": whole, "parts": sorted(parts), **about})
    return _finish(unfinished, final, target)


def load(objects: Mapping[str, Any], resumed: Mapping[str, Any], model: Any, group: Group) -> None:
    """Each rank reads what it needs. ``model``: as it is spread now, in whatever way."""
    for name in objects:
        if name not in resumed["objects"] and name not in resumed["parts"]:
            known = ", ".join([*resumed["parts"], *resumed["objects"]])
            raise UgroError(f"the checkpoint has no {name!r}", hint=f"it has: {known or 'nothing'}")
    for name, one in objects.items():
        if name in resumed["parts"]:
            _load_parts(name, one, model, resumed["shards"], group)
        else:
            one.load_state_dict(resumed["objects"][name])


# --- the parts of this rank ---------------------------------------------------------------------------------------


def _has_parts(one: Any) -> bool:
    return isinstance(one, torch.nn.Module | torch.optim.Optimizer)


def _parts(one: Any, model: Any) -> Any:
    """By the names of parameters, which do not depend on how many ranks there are."""
    if isinstance(one, torch.optim.Optimizer):
        return dicts.get_optimizer_state_dict(model, one)
    return dicts.get_model_state_dict(one)


def _load_parts(name: str, one: Any, model: Any, folder: Path, group: Group) -> None:
    parts = {name: _parts(one, model)}
    with _quiet():
        dcp.load(
            parts, storage_reader=_Reader(folder), planner=_Planner(), process_group=group.small,
            no_dist=group.ranks == 1,
        )  # fmt: skip
    if isinstance(one, torch.optim.Optimizer):
        dicts.set_optimizer_state_dict(model, one, parts[name])
    else:
        dicts.set_model_state_dict(one, parts[name])


def _whole(state: Any) -> Any:
    """Of objects that are not the model, tensors are gathered: these are small."""
    if isinstance(state, Mapping):
        return {name: _whole(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_whole(value) for value in state)
    return state.full_tensor().cpu() if hasattr(state, "full_tensor") else state


class _Writer(dcp.FileSystemWriter):  # type: ignore[misc]  # torch's types are skipped
    """Writes the index of a checkpoint a second time, in a form that can be read without running code from it."""

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        with (Path(self.path) / _INDEX).open("wb") as file:
            torch.save(dataclasses.replace(metadata, storage_meta=None), file)
            file.flush()
            os.fsync(file.fileno())


class _Reader(dcp.FileSystemReader):  # type: ignore[misc]  # torch's types are skipped
    def __init__(self, folder: Path) -> None:
        """Reads the index at once: of what fails later, torch would make an error that no program catches."""
        super().__init__(folder)
        with safe_globals(_IN_INDEX):
            self._index = torch.load(folder / _INDEX, weights_only=True)

    def read_metadata(self, *args: Any, **options: Any) -> Any:
        self._index.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return self._index


_IN_INDEX = [
    metadata.Metadata, metadata.MetadataIndex, metadata.TensorStorageMetadata, metadata.ChunkStorageMetadata,
    metadata.BytesStorageMetadata, metadata.TensorProperties, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo,
]  # fmt: skip


class _Planner(DefaultLoadPlanner):  # type: ignore[misc]  # torch's types are skipped
    """Loads numbers and texts, never code."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        found = torch.load(value, weights_only=True)
        value.seek(0)
        value.truncate()
        torch.save(found, value)
        value.seek(0)
        super().load_bytes(read_item, value)


# --- one folder ---------------------------------------------------------------------------------------------------


def _begin(folder: Path, group: Group) -> bool:
    """An empty folder of the first rank. Says whether this rank sees it: by what is in it, since names may agree."""
    mark = secrets.token_hex(8)
    if group.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / _MARK).write_text(mark)
    mark = group.texts(mark)[0]
    try:
        return (folder / _MARK).read_text() == mark
    except OSError:
        return False


def _collect(own: Path, folder: Path, is_there: bool, group: Group) -> None:
    """Sends the files of ranks that do not see the folder of the first one to it, piece by piece."""
    files = [] if is_there else sorted(own.glob(_PART))
    listed = [json.loads(text) for text in group.texts(json.dumps([(one.name, one.stat().st_size) for one in files]))]
    for rank, names in enumerate(listed):
        for name, size in names:
            if group.rank == rank:
                _send(own / name, group)
            elif group.rank == 0:
                _receive(folder / Path(name).name, size, rank, group)
    if not is_there:
        shutil.rmtree(own, ignore_errors=True)


def _send(path: Path, group: Group) -> None:
    with path.open("rb") as file:
        while piece := bytearray(file.read(_PIECE)):
            distributed.send(torch.frombuffer(piece, dtype=torch.uint8), 0, group=group.small)


def _receive(path: Path, size: int, rank: int, group: Group) -> None:
    with path.open("wb") as file:
        for begin in range(0, size, _PIECE):
            piece = torch.empty(min(_PIECE, size - begin), dtype=torch.uint8)
            distributed.recv(piece, rank, group=group.small)
            file.write(bytes(piece.untyped_storage()))
        file.flush()
        os.fsync(file.fileno())


def _finish(unfinished: Path, final: Path, target: Target) -> Path:
    (unfinished / _MARK).unlink()
    checkpoint.sync(unfinished)
    checkpoint.remove(final)
    unfinished.rename(final)
    checkpoint.sync(target.folder)
    checkpoint.prune(target.folder, target.most_kept)
    return final


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says about a single process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- sharded exchange -------------------------------------------------------------------------------------------------
# The exchanges of a sharded model, inside forward and backward: counted, timed, and left out where they were done.
#
# On a CPU an exchange blocks, and its duration is what the rank did not compute. On a GPU exchanges run beside the
# computation, which waits for them at a few places only: what the GPU's own stream spends there is waiting.


# Where the computation waits for an exchange, in torch's own class of a group of parameters.
_STALLS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
_PROCESS_GROUPS = ("shard_process_group", "replicate_process_group", "reduce_scatter_process_group")
# Older versions have other names for them.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


class Exchanges:
    """All ranks do the same exchanges in the same order."""

    def __init__(self, stepping: Stepping, *, block: bool) -> None:
        self.done = 0
        self.to_skip = 0  # a rank that computes again has done these; the others do not take part any more
        self._stepping = stepping
        self._block = block

    def run(self, exchange: Callable[[], Any], output: Tensor) -> Any:
        if self.to_skip:
            self.to_skip -= 1
            output.zero_()
            return None
        since = self._stepping.now() if self._block else None
        work = exchange()
        self.done += 1
        if self._block:
            self._stepping.waited(since)
        return work


class _Exchange:
    """As torch's own, but for what ``Exchanges`` adds."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Exchange):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return self._exchanges.run(
            lambda: _all_gather(output_tensor, input_tensor, group=group, async_op=async_op), output_tensor
        )


class _ReduceScatter(_Exchange):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return self._exchanges.run(
            lambda: _reduce_scatter(output_tensor, input_tensor, op, group=group, async_op=async_op), output_tensor
        )


def watch(model: Any, stepping: Stepping) -> Exchanges | None:
    """None if this version of torch does not allow it."""
    modules = list(_sharded(model))
    if any(not hasattr(module, "set_custom_all_gather") for module in modules):
        return None
    is_cpu = stepping.group.device.type == "cpu"
    exchanges = Exchanges(stepping, block=is_cpu)
    for module in modules:
        module.set_custom_all_gather(_AllGather(exchanges))
        module.set_custom_reduce_scatter(_ReduceScatter(exchanges))
        if is_cpu:
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no means
    return exchanges if is_cpu or time_stalls(model, stepping) else None


def time_stalls(model: Any, stepping: Stepping) -> bool:
    """For exchanges that run beside the computation: on GPUs."""
    groups = [group for module in _sharded(model) for group in _parameter_groups(module)]
    if not groups or any(not callable(getattr(group, name, None)) for group in groups for name in _STALLS):
        return False
    for group in groups:
        for name in _STALLS:
            setattr(group, name, _timed(getattr(group, name), stepping))
    return True


def release(model: Any) -> None:
    """Lets go of the process groups, as far as they can be found."""
    for module in _sharded(model):
        for group in _parameter_groups(module):
            for info in (getattr(group, "mesh_info", None), getattr(group, "post_forward_mesh_info", None)):
                _forget(info)


def _forget(info: Any) -> None:
    for name in _PROCESS_GROUPS:
        if getattr(info, name, None) is not None:
            setattr(info, name, None)
    mesh = getattr(info, "mesh", None)
    for one in (mesh, getattr(mesh, "_root_mesh", None)):
        for known in (one, *getattr(one, "_flatten_mapping", {}).values()):
            getattr(known, "_pg_registry", {}).clear()


def _timed(method: Callable[..., Any], stepping: Stepping) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        since = stepping.now()
        found = method(*args, **options)
        stepping.waited(since)
        return found

    return timed


def _sharded(model: Any) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _parameter_groups(module: Any) -> list[Any]:
    """torch has no public name for them."""
    return list(getattr(module._get_fsdp_state(), "_fsdp_param_groups", []))
